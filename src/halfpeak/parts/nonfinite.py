"""NonfiniteReport: names the gradients that are not finite, and ends a run whose loss scale cannot fall any further."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from halfpeak.core.errors import LossScaleCollapse
from halfpeak.core.schedule import NONFINITE_LOSS, ScaleState
from halfpeak.core.short_repr import name_list
from halfpeak.core.step_result import NonfiniteGrads
from halfpeak.ops import foreach
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.parts import Parts
from halfpeak.parts.window import Window

PATIENCE: Final = 100
"""Skipped steps in a row that end a run without a loss scale that could fall."""

WITHOUT_A_SCALE: Final = "Look for bad data, a too large learning rate, or a division by zero"
_DIAGNOSE: Final = "halfpeak.diagnose(engine, closure) names the layer"
"""The advice to such a run."""


def nonfinite_names(named: Iterable[tuple[str, Tensor | None]]) -> tuple[str, ...]:
    """The names of those gradients that are not finite. Waits for the device."""
    return tuple(name for name, grad in named if grad is not None and not foreach.all_finite([grad]))


def collapse(reason: str, names: tuple[str, ...], advice: str) -> LossScaleCollapse:
    """The error that ends a run whose gradients stay non-finite, those of the parameters ``names`` in the last step."""
    known = name_list(names) or "no gradient that is still there"
    return LossScaleCollapse(f"{reason}. Not finite: {known}. {advice}", names)


def exhausted(scale: float, names: tuple[str, ...], advice: str) -> LossScaleCollapse:
    """:func:`collapse` at a loss scale that cannot fall."""
    reason = f"gradients stay non-finite at a loss scale of {scale:g}, which cannot fall any further"
    return collapse(reason, names, advice)


class NonfiniteReport:
    """Names gradients that are not finite, and counts overflows in a row that could not lower a loss scale.

    Args:
        parts: gives the names of parameters; its policy chooses the advice in the message.
        scalers: those to count; None for all of ``parts``.
    """

    def __init__(self, parts: Parts, scalers: Sequence[LossScaler] | None = None) -> None:
        self._parts, self._scalers = parts, parts.scalers if scalers is None else scalers
        # Read without waiting, so on an accelerator a step or two late.
        self._stuck = AsyncScalar(parts.device)
        self._patience = min(
            (s.config.patience for s in self._scalers if s.config.patience is not None), default=math.inf
        )

    @property
    def num_stuck(self) -> float:
        """Overflows in a row that could not lower a loss scale, as far as the host knows."""
        return self._stuck.value

    @property
    def is_near(self) -> bool:
        """Whether one more overflow could exhaust a loss scale's patience."""
        return self._stuck.value + 1 >= self._patience

    @property
    def is_exhausted(self) -> bool:
        """Whether the patience of a loss scale is exhausted, as far as the host knows."""
        return self._stuck.value >= self._patience

    def poll(self) -> None:
        """Start to read the counts."""
        counts = [scaler.state.stuck for scaler in self._scalers]
        self._stuck.push(counts[0] if len(counts) == 1 else torch.stack(counts).max())

    def error_if_exhausted(
        self, states: Sequence[tuple[LossScaler, ScaleState]], stepped: Sequence[Window]
    ) -> LossScaleCollapse | None:
        """The error of a skipped step after which the scales would be in ``states``, or None. Waits for the device."""
        is_over = any(
            scaler.config.patience is not None and int(state.stuck) >= scaler.config.patience
            for scaler, state in states
        )
        return self.error(stepped) if is_over else None

    def error(self, stepped: Sequence[Window]) -> LossScaleCollapse:
        """The error that names the parameters whose gradients are not finite. Waits for the device."""
        scale, names = (
            min(scaler.read_scale() for scaler in self._scalers),
            nonfinite_names(self._named(stepped)[::-1]),
        )
        found = [float(noted.found) for window in stepped for noted in window.losses.values()]
        if found and max(found) == NONFINITE_LOSS:
            return collapse(
                "the loss itself stays non-finite, which no loss scale changes", names, self._advice_on_loss()
            )
        return exhausted(scale, names, self._advice())

    def nonfinite_grads(self, stepped: Sequence[Window]) -> NonfiniteGrads | None:
        """The names of all gradients and a flag for each that is not finite; None without gradients. Does not wait."""
        named = self._named(stepped)[::-1]
        if not named:
            return None
        flags = [torch.zeros((), dtype=torch.float32, device=grad.device) for _, grad in named]
        for (_, grad), flag in zip(named, flags, strict=True):
            foreach.check_([grad], flag)
        return NonfiniteGrads(
            tuple(name for name, _ in named), torch.stack([flag.to(flags[0].device) for flag in flags])
        )

    def _named(self, stepped: Sequence[Window]) -> list[tuple[str, Tensor]]:
        """The gradients of a step, with the names of their parameters."""
        known = self._parts.names("model ") if stepped else {}
        named: list[tuple[str, Tensor]] = []
        for index, window in enumerate(stepped):
            for number, (weight, grad) in enumerate(
                zip(window.weights, map(attrgetter("grad"), window.weights), strict=True)
            ):
                if grad is not None:
                    named.append((known.get(id(weight), f"parameter {number} of optimizer {index}"), grad))
        return named

    def _advice(self) -> str:
        """The remedies at this level."""
        if not self._is_float16():
            return f"No loss scale helps here: {WITHOUT_A_SCALE[0].lower()}{WITHOUT_A_SCALE[1:]}; {_DIAGNOSE}"
        return f"Lower the learning rate, clip, {self._more_range()}; {_DIAGNOSE}"

    def _advice_on_loss(self) -> str:
        """The remedies at this level for a loss that is not finite."""
        if not self._is_float16():
            return f"{WITHOUT_A_SCALE}; {_DIAGNOSE}"
        return (
            f"If a value is beyond what float16 holds, {self._more_range()}. {WITHOUT_A_SCALE}; {_DIAGNOSE}"
        )

    def _more_range(self) -> str:
        level = "O4" if self._parts.policy.per_op else "O5"
        return f"keep layers in float32 (keep_fp32=[...]), or use bfloat16 ({level})"

    def _is_float16(self) -> bool:
        return torch.float16 in (self._parts.policy.param, self._parts.policy.compute)
