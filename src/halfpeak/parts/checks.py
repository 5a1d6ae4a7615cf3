"""Cheap checks that turn a silent mistake into a message. None is needed for a right program to be right."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Final, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.torch_compat import is_capturing
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.foreach import as_vector
from halfpeak.parts.pairs import Pairs

COMPARE_EVERY: Final = 16
"""Steps from one comparison of values to the next."""


class DataWrites:
    """Warns of weights written through ``parameter.data`` during training, which their masters do not follow.

    Such a write changes no version counter. So once in :data:`COMPARE_EVERY` steps some values of the largest weight are
    kept after a step and compared before the next one. Nothing waits for the device: the warning comes when the result
    has arrived.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._calls = 0
        self._kept: tuple[Tensor, int, Tensor] | None = None
        self._differs: AsyncScalar | None = None

    def sample(self) -> None:
        """After a step: keep values, if the next comparison is due."""
        self._calls += 1
        if self._calls % COMPARE_EVERY == 1 and self._pairs.weights:
            weight = max(self._pairs.weights, key=Tensor.numel)
            values = None if is_capturing(weight.device) else _some_values(weight)
            if values is not None:
                self._kept = weight, weight._version, values.clone()

    def compare(self) -> None:
        """Before a step: compare the values that were kept, and warn if an earlier comparison has found a write."""
        if self._differs is not None and self._differs.value:
            self._differs = None
            warnings.warn(
                "weights were written in place through parameter.data, which their float32 masters do not follow, so the step "
                "overwrites them; write under torch.no_grad() instead: p.clamp_(...), p.copy_(...)",
                stacklevel=4,
            )
        if self._kept is None:
            return
        weight, version, before = self._kept
        now, self._kept = _some_values(weight), None
        if now is not None and weight._version == version and now.shape == before.shape:
            self._differs = AsyncScalar(now.device)
            self._differs.push((now.view(torch.int16) != before.view(torch.int16)).any().float())


def _some_values(weight: Tensor) -> Tensor | None:
    """About 64 values of a plain dense tensor; None for any other tensor."""
    vector = as_vector(weight)
    return None if vector is None or not len(vector) else vector[:: max(1, len(vector) // 64)]


class DefaultsWithoutCopies(dict[str, Any]):
    """The ``defaults`` of an optimizer that steps masters: a dict that can be neither deep-copied nor pickled.

    A copy of such an optimizer alone would step masters that no model reads. Every copy also contains ``defaults``, and no
    state dict does.

    >>> dict(DefaultsWithoutCopies(lr=0.1))
    {'lr': 0.1}
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise OrderError(
            "this optimizer steps float32 masters of a model, so a copy of it alone would train nothing; build a second model, "
            "optimizer and engine, and load engine.state_dict()"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OrderError(
            "this optimizer steps float32 masters of a model and cannot be pickled alone; save engine.state_dict(), or "
            "optimizer.state_dict() with model.state_dict()"
        )


def refuse_copies(optimizers: Iterable[Optimizer]) -> None:
    """Refuse deep copies and pickles of optimizers that step masters."""
    for optimizer in optimizers:
        optimizer.defaults = DefaultsWithoutCopies(optimizer.defaults)


def allow_copies(optimizers: Iterable[Optimizer]) -> None:
    """Undo :func:`refuse_copies`."""
    for optimizer in optimizers:
        optimizer.defaults = dict(optimizer.defaults)
