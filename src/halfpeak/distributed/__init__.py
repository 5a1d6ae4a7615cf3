"""Training over several ranks with torch's FSDP2 and ``DistributedDataParallel``.

>>> from halfpeak.distributed import fully_shard
"""

from halfpeak.distributed.fsdp import fully_shard

__all__ = ["fully_shard"]
