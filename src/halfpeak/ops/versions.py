"""Snapshots of version counters and addresses, which tell whether tensors were written or got other memory since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfpeak.core.torch_compat import untraced
from halfpeak.ops.shards import has_shards, is_shard, local_of


class TensorVersions:
    """A snapshot of the version counter, address and storage of each tensor of a list.

    Callers pass the list in the same order each time. An address does not identify memory: after ``p.data = f(p.data)`` twice
    in a row it may be the first address again, and the assignment leaves the version counter as it is. A weak reference to
    the storage tells whether the old memory was freed. An in-place write through ``tensor.data`` changes none of the three
    and is not noticed. Snapshots are compared in every step, so the loops run in C (``map``).

    Example:
        >>> import torch
        >>> versions, tensors = TensorVersions(), [torch.ones(2)]
        >>> versions.record(tensors)
        >>> before = versions.unchanged(tensors)
        >>> _ = tensors[0].mul_(2)
        >>> before, versions.unchanged(tensors)
        (True, False)
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._storages: list[StorageWeakRef] = []
        # The distinct ``cdata`` of ``_storages``: the tensors of a flat buffer share one. None until it is needed.
        self._pointers: set[int] | None = None

    def add(self, tensor: Tensor) -> None:
        """Append a tensor, which counts as changed until it is recorded."""
        self._versions.append(_NEVER_RECORDED)
        self._addresses.append(_memory_of(tensor).data_ptr())
        self._storages.append(StorageWeakRef(_memory_of(tensor).untyped_storage()))
        self._pointers = None

    @untraced
    def record(self, tensors: Sequence[Tensor]) -> None:
        """Take the snapshot of all tensors; their number may differ from before."""
        before = self._addresses
        self._versions, self._addresses = _versions_and_addresses(tensors)
        if self._addresses != before or self._is_any_gone():
            self._storages = [StorageWeakRef(_memory_of(tensor).untyped_storage()) for tensor in tensors]
            self._pointers = None

    @untraced
    def record_one(self, index: int, tensor: Tensor) -> None:
        """Take the snapshot of the tensor at ``index``."""
        self._versions[index], self._addresses[index] = tensor._version, _memory_of(tensor).data_ptr()
        self._record_storage(index, tensor)

    def record_next_write(self, index: int, tensor: Tensor) -> None:
        """Take the snapshot of the tensor at ``index`` as it will be after its next in-place write."""
        self.record_one(index, tensor)
        self._versions[index] += 1

    @untraced
    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all tensors match the snapshot."""
        return (
            _versions_and_addresses(tensors) == (self._versions, self._addresses) and not self._is_any_gone()
        )

    @untraced
    def unchanged_one(self, index: int, tensor: Tensor) -> bool:
        """Whether the tensor at ``index`` matches the snapshot."""
        return (
            tensor._version == self._versions[index]
            and _memory_of(tensor).data_ptr() == self._addresses[index]
            and not _EXPIRED(self._storages[index].cdata)
        )

    def _record_storage(self, index: int, tensor: Tensor) -> None:
        self._storages[index] = StorageWeakRef(_memory_of(tensor).untyped_storage())
        self._pointers = None

    def _is_any_gone(self) -> bool:
        """Whether a storage of the snapshot was freed."""
        if self._pointers is None:
            self._pointers = {storage.cdata for storage in self._storages}
        return any(map(_EXPIRED, self._pointers))


def _versions_and_addresses(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    memory = local_of(tensors) if has_shards(tensors) else tensors
    return list(map(_VERSION, tensors)), list(map(Tensor.data_ptr, memory))


def _memory_of(tensor: Tensor) -> Tensor:
    """This rank's part of a shard. The version counter is that of the whole, which writes through it raise."""
    return local_of([tensor])[0] if is_shard(tensor) else tensor


_NEVER_RECORDED: Final = -1
"""A version that no tensor has."""

_VERSION: Final = attrgetter("_version")
_EXPIRED: Final[Callable[[int], Any]] = torch.UntypedStorage._expired
