"""The data order: which samples make which batch, from the seed and the batch's number alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError


class BatchSampler:
    """Batch ``b`` of the run is a slice of a random permutation of all samples; there is a new one for each epoch.

    An epoch has ``samples // batch`` batches, so all batches are of one size; the few samples that are left over differ
    from epoch to epoch. It has no state to save: any batch can be asked for at any time.

    Raises:
        ConfigError: a batch is larger than the data.

    >>> sampler = BatchSampler(samples=5, batch=2, seed=0)
    >>> [sampler.indices(b).tolist() for b in range(3)] == [sampler.indices(b).tolist() for b in range(3)]
    True
    """

    def __init__(self, *, samples: int, batch: int, seed: int) -> None:
        if batch > samples:
            raise ConfigError(f"batch={batch} is more than the {samples} training samples there are")
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
    """One seed from two numbers. torch's generator uses the low 32 bits only, so both must be in them."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "little")
