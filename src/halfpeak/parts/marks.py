"""Marks: what tensors looked like at some moment, to notice who has written to them or given them other memory since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfpeak.core.tracing import untraced


class Marks:
    """Versions and places of a growing list of tensors, which is named in the same order each time.

    An address does not tell one memory from another: ``p.data = f(p.data)`` twice in a row may lead back to the first one,
    and counts no version. So it is noticed, too, when the memory that was there is gone.

    Example:
        >>> import torch
        >>> marks, tensors = Marks(), [torch.ones(2)]
        >>> marks.add(tensors[0])
        >>> marks.note(tensors)
        >>> before = marks.agree(tensors)
        >>> _ = tensors[0].mul_(2)
        >>> before, marks.agree(tensors)
        (True, False)
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._places: list[int] = []
        self._memories: list[StorageWeakRef] = []
        self._cells: list[int] = []

    def add(self, tensor: Tensor) -> None:
        """One more tensor, which agrees with nothing."""
        self._versions.append(_UNSEEN)
        self._places.append(0)
        memory = StorageWeakRef(tensor.untyped_storage())
        self._memories.append(memory)
        self._cells.append(memory.cdata)

    def is_seen(self, index: int) -> bool:
        """Whether it was noted what a tensor looks like."""
        return self._versions[index] != _UNSEEN

    @untraced
    def note(self, tensors: Sequence[Tensor]) -> None:
        """What all look like now."""
        before = self._places
        self._versions, self._places = _look(tensors)
        if self._places != before or any(map(_EXPIRED, self._cells)):
            for index, cell in enumerate(self._cells):
                if self._places[index] != before[index] or _EXPIRED(cell):
                    self._find(index, tensors[index])

    @untraced
    def note_one(self, index: int, tensor: Tensor) -> None:
        """What one looks like now."""
        self._versions[index], self._places[index] = tensor._version, tensor.data_ptr()
        self._find(index, tensor)

    @untraced
    def agree(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all look as they did."""
        return _look(tensors) == (self._versions, self._places) and not any(map(_EXPIRED, self._cells))

    @untraced
    def agrees(self, index: int, tensor: Tensor) -> bool:
        """Whether one looks as it did."""
        return (
            tensor._version == self._versions[index]
            and tensor.data_ptr() == self._places[index]
            and not _EXPIRED(self._cells[index])
        )

    def _find(self, index: int, tensor: Tensor) -> None:
        memory = self._memories[index] = StorageWeakRef(tensor.untyped_storage())
        self._cells[index] = memory.cdata


def _look(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return list(map(_VERSION, tensors)), list(map(Tensor.data_ptr, tensors))


_UNSEEN: Final = -1
"""No tensor's version."""

_VERSION: Final = attrgetter("_version")
_EXPIRED: Final[Callable[[int], Any]] = torch.UntypedStorage._expired
