"""``apex.parallel.optimized_sync_batchnorm``."""

from halfpeak.shim.emulated.syncbn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
