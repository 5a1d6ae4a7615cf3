"""Refusing to copy an optimizer apart from the model whose masters it steps."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

from torch.optim import Optimizer

from halfpeak.core.errors import OrderError


class NoCopyDefaults(dict[str, Any]):
    """The ``defaults`` of an optimizer that steps masters: a plain dict that can be neither deep-copied nor pickled.

    An optimizer that is copied or pickled takes its groups along, but no model: the copy would step masters that
    no model reads. Its ``defaults`` are the one part that every copy of an optimizer takes along and that no state dict
    contains; masters themselves stay plain tensors, which scripts save and clone.

    >>> dict(NoCopyDefaults(lr=0.1))
    {'lr': 0.1}
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise OrderError(
            "this optimizer steps float32 masters of a model, so a copy of it alone would train nothing; write "
            "copy.deepcopy(engine) to copy model, optimizer and masters together, or use optimizer.state_dict()"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OrderError(
            "this optimizer steps float32 masters of a model and cannot be pickled alone; save engine.state_dict(), or "
            "optimizer.state_dict() with model.state_dict()"
        )


def forbid_copy(optimizer: Optimizer) -> None:
    """Refuse copies of the optimizer alone."""
    if not isinstance(optimizer.defaults, NoCopyDefaults):
        optimizer.defaults = NoCopyDefaults(optimizer.defaults)


def allow_copy(optimizer: Optimizer) -> None:
    """Undo :func:`forbid_copy`."""
    if isinstance(optimizer.defaults, NoCopyDefaults):
        optimizer.defaults = dict(optimizer.defaults)
