"""The data order: computes the samples of a batch from the seed and the batch's number alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError


class BatchSampler:
    """Gives batch ``b`` of the run, a slice of a random permutation of all samples. Each epoch has another permutation.

    An epoch has ``samples // batch`` batches of one size. It leaves out the few remaining samples, other ones in each
    epoch. The sampler has no state to save: any batch can be computed at any time.

    Raises:
        ConfigError: a batch is larger than the data.

    >>> sampler = BatchSampler(samples=5, batch=2, seed=0)
    >>> [sampler.indices(b).tolist() for b in range(3)] == [sampler.indices(b).tolist() for b in range(3)]
    True
    """

    def __init__(self, *, samples: int, batch: int, seed: int) -> None:
        if batch > samples:
            raise ConfigError(
                f"batch={batch} is more than the {samples} training samples; write batch={samples} or less"
            )
        self.batches = samples // batch
        self._samples, self._batch, self._seed = samples, batch, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, number: int) -> Tensor:
        """The samples of batch ``number``, counted from 0 over the whole run.  # i64[batch]"""
        epoch, place = divmod(number, self.batches)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(_mix(self._seed, epoch))
            self._permutation = torch.randperm(self._samples, generator=generator)
            self._epoch = epoch
        return self._permutation[place * self._batch : (place + 1) * self._batch]


def _mix(seed: int, epoch: int) -> int:
    """Mix two numbers into one seed of 32 bits, because torch's generator uses only the low 32 bits of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "little")
