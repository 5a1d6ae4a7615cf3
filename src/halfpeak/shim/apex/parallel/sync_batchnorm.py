"""``apex.parallel.sync_batchnorm``."""

from halfpeak.shim.emulated.collectives import create_syncbn_process_group
from halfpeak.shim.emulated.syncbn import SyncBatchNorm, convert_syncbn_model

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]
