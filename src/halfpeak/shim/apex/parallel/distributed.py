"""``apex.parallel.distributed``."""

from torch.distributed import ReduceOp

from halfpeak.shim.emulated.collectives import Reducer, flat_dist_call
from halfpeak.shim.emulated.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel", "ReduceOp", "Reducer", "flat_dist_call"]
