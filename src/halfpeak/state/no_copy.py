"""Refuses to copy or pickle an optimizer without the model whose masters it steps."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

from torch.optim import Optimizer

from halfpeak.core.errors import OrderError


class NoCopyDefaults(dict[str, Any]):
    """The ``defaults`` of an optimizer that steps masters: a plain dict that can be neither deep-copied nor pickled.

    A copy of an optimizer contains its groups and no model, so it would step masters that no model reads. Every copy also
    contains ``defaults``, and no state dict does. Masters themselves stay plain tensors, because scripts save and clone them.

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
