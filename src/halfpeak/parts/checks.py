"""Cheap checks that turn a silent mistake into a message. None is needed for a right program to be right."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import is_capturing
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.foreach import as_vector
from halfpeak.parts.pairs import Pairs

COMPARE_EVERY: Final = 16
"""Steps from one comparison of values to the next."""

MANY: Final = 10
"""Iterations of a loop that trains nothing, after which it is told."""


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

    def is_due(self) -> bool:
        """Whether the coming step is the first, or a multiple of :data:`COMPARE_EVERY` after it."""
        return self._calls % COMPARE_EVERY == 0

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


class LoopCalls:
    """Warns, once each, of a training loop whose calls do not mean what they seem to mean.

    ::

        accumulate=4, zero_grad() at the top of each pass       a step on the gradients of the last pass alone
        accumulate=4, engine.step() at each fourth pass         a step after 16 passes, on four times the gradient
        no engine.step(), or zero_grad() between backward and step   nothing is trained
        scheduler.step() after steps that were skipped          the rate has run ahead of the training

    Gradients that are zeroed and not dropped are not seen, because reading them would wait for the device. A loop without
    ``engine.step()`` is told all the same, after 256 passes, or 10 windows.

    Args:
        every: backward passes per step.
        num_losses: losses of the engine, each of which may have passes of its own.
    """

    def __init__(self, every: int, num_losses: int) -> None:
        self._every, self._num_losses = every, num_losses
        # Passes since the last call of step(), and in the open window; calls of step(), and steps in a row without gradients.
        self._passes = self._in_window = self._calls = self._empty = 0
        # Passes of the open window that found no gradients of earlier ones, and windows in a row of such passes alone.
        self._dropped = self._windows = 0
        # The learning rates at the last call, if it skipped, and how often they have moved since such a call.
        self._rates: list[object] | None = None
        self._moved = 0
        self._told: set[str] = set()

    def end_pass(self, *, was_first: bool) -> None:
        """After a pass; ``was_first``: there were no gradients of earlier ones."""
        self._dropped += was_first and self._in_window > 0
        self._passes += 1
        self._in_window += 1
        # With accumulate=1 a loop may add up passes by itself.
        most = (256 if self._every == 1 else MANY * self._every) * self._num_losses
        if not self._calls and (self._passes == most or self._dropped >= MANY * self._num_losses):
            self._warn(
                "no step",
                f"{self._passes} backward passes, and engine.step() was never called, so nothing is trained; call it after "
                "each engine.backward(loss)",
            )

    def begin_step(self) -> None:
        """Before a call of ``engine.step()``."""
        self._calls += 1
        if self._every > 1 and self._passes >= self._every * self._num_losses:
            self._warn(
                "few steps",
                f"{self._passes} backward passes since the last engine.step(), which with accumulate={self._every} is called "
                "after each of them: it counts them, and steps at the end of a window",
            )
        self._passes = 0

    def end_step(self, result: StepResult, optimizers: Sequence[Optimizer]) -> None:
        """After a call of ``engine.step()`` that has not raised."""
        if not result.boundary:
            return
        is_lost = self._every > 1 and 0 < self._dropped >= self._in_window - 1
        self._windows = self._windows + 1 if is_lost else 0
        self._in_window = self._dropped = 0
        if self._windows == 2:
            self._warn(
                "dropped",
                f"the gradients of each pass inside a window of accumulate={self._every} were dropped, so a step has only "
                "the last pass; leave zero_grad() out, because engine.step() drops gradients at the end of a window",
            )
        self._empty = 0 if result.has_gradients else self._empty + 1
        if self._empty == MANY:
            self._warn(
                "empty",
                f"{MANY} calls of engine.step() without gradients, so nothing is trained; call engine.backward(loss) before, "
                "and zero_grad() not between the two: engine.step() drops gradients by itself",
            )
        if result.grads is None:
            self._rates = None
            return
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        rates: list[object] = [rate for one in groups if isinstance(rate := one.get("lr"), (int, float))]
        self._moved = self._moved + 1 if self._rates is not None and self._rates != rates else 0
        self._rates = rates
        if self._moved == 2:
            self._warn(
                "schedule",
                "the learning rate has moved over three skipped steps, so its schedule runs ahead of the training; write "
                "`result = engine.step()`, and `if result.stepped(): scheduler.step()`",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message, stacklevel=5)


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
