"""What a backend is: an implementation of the two kernels of a step, measure and update, over slices of buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfpeak.fused.backends.kernels import clip_coef_without_eps
from halfpeak.fused.decision import DecisionInputs, StepDecision
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.fused.flat.pack_gradients import GradPacker
from halfpeak.fused.flat.step_counts import StepCount
from halfpeak.fused.rules.base import Rule


class GradStats(NamedTuple):
    """What one read of the gradients gives.

    Attributes:
        sum_squares: the sum of squares of the unscaled gradients.  # f32[]
        found_inf: 1 if one of them is not finite.                  # f32[]
    """

    sum_squares: Tensor
    found_inf: Tensor


class UpdateArgs(NamedTuple):
    """The update of one slice.

    Attributes:
        slice_: what is updated.
        rule: the formula.
        group: hyper-parameters.
        numbers: what gradients are multiplied by, then the rule's constants.  # f32[1 + k]
    """

    slice_: BufferSlice
    rule: Rule
    group: dict[str, object]
    numbers: Tensor


class BackendStep(NamedTuple):
    """What a backend reads to take a step.

    Attributes:
        slices: what is updated.
        groups: hyper-parameters.
        grads: of all parameters.
        multiplier: what gradients are multiplied by.                       # f32[]
        found_inf: any value but zero skips the step; None is zero.  # f32[]
        max_norm: the largest norm of all gradients times ``multiplier``; they are clipped to it. None does not clip.
    """

    slices: Sequence[BufferSlice]
    groups: Sequence[dict[str, Any]]
    grads: Sequence[Tensor | None]
    multiplier: Tensor
    found_inf: Tensor | None
    max_norm: float | None = None


class Backend(ABC):
    """The kernels of a step. Only a :class:`HostBackend` knows step counts and skips: elsewhere they are data on the device."""

    name: str

    @abstractmethod
    def measure(
        self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> GradStats:
        """Read all gradients once."""

    @abstractmethod
    def prepare(self, step: BackendStep) -> Callable[[], None] | None:
        """What updates all weights once and counts the step, or does neither; None where the host knows that it is skipped."""

    def decide(self, step: BackendStep, inputs: DecisionInputs) -> StepDecision | None:
        """Read all gradients once and decide about the step; None if there is no kernel for that."""
        return None

    @abstractmethod
    def invalidate_grads(self) -> None:
        """Forget what was computed from gradients: they change from here on."""

    @abstractmethod
    def invalidate_layout(self) -> None:
        """Forget what was made for the buffers: they change from here on."""

    def clipped(self, step: BackendStep) -> BackendStep:
        """``step`` with gradients clipped to its ``max_norm`` by what they are multiplied by."""
        if step.max_norm is None:
            return step
        norm = self.measure(step.slices, step.grads, step.multiplier).sum_squares.sqrt()
        return step._replace(multiplier=step.multiplier * clip_coef_without_eps(norm, step.max_norm))


class HostBackend(Backend):
    """A backend whose step is decided by the host."""

    def __init__(self) -> None:
        self._packer = GradPacker()
        self._updates: UpdateList | None = None

    @abstractmethod
    def update(self, updates: Sequence[UpdateArgs], grads: Sequence[Tensor | None]) -> None:
        """Update all weights once."""

    def prepare(self, step: BackendStep) -> Callable[[], None] | None:
        if step.found_inf is not None and bool(step.found_inf):
            return None
        if self._updates is None or not self._updates.matches(step.slices, step.groups):
            self._updates = UpdateList(step.slices, step.groups)
        # Everything that may raise comes first: a bad learning rate must not have counted a step.
        updates = self._updates.for_step(self.clipped(step).multiplier)
        return partial(self._run, self._updates.step_counts, updates, step.grads)

    def _run(
        self, counts: Iterable[StepCount], updates: Sequence[UpdateArgs], grads: Sequence[Tensor | None]
    ) -> None:
        for count in counts:
            count.increment()
        self.update(updates, grads)

    def invalidate_grads(self) -> None:
        self._packer.invalidate_grads()

    def invalidate_layout(self) -> None:
        self._packer.invalidate_layout()
        self._updates = None


class UpdateList:
    """The arguments for updating some slices, which are the same in every step but for their numbers.

    Args:
        slices: what is updated.
        groups: hyper-parameters, read anew in every step.

    Attributes:
        step_counts: those of the slices, each once.
    """

    def __init__(self, slices: Sequence[BufferSlice], groups: Sequence[dict[str, Any]]) -> None:
        self._slices = slices
        self._groups = list(groups)
        sources: dict[tuple[Rule, int, int, torch.dtype], _Source] = {}
        self._updates: list[UpdateArgs] = []
        for slice_ in slices:
            rule, group, weight = slice_.rule, self._groups[slice_.group], slice_.buffer.weight
            wide = torch.promote_types(weight.dtype, torch.float32)
            key = (rule, slice_.group, id(slice_.step_count), wide)
            if key not in sources:
                length = 1 + len(rule.constants(group, 1.0))
                room = torch.empty(length, dtype=wide, device=weight.device)
                sources[key] = _Source(rule, group, slice_.step_count, room)
            self._updates.append(UpdateArgs(slice_, rule, group, sources[key].numbers))
        self._sources = list(sources.values())
        self.step_counts = {id(one.step_count): one.step_count for one in slices}.values()

    def matches(self, slices: Sequence[BufferSlice], groups: Sequence[dict[str, Any]]) -> bool:
        """Whether this list was made for these very slices and groups."""
        return (
            self._slices is slices
            and len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
        )

    def for_step(self, multiplier: Tensor) -> list[UpdateArgs]:
        """The arguments of the coming step. They share memory with those of the step before.

        Args:
            multiplier: what gradients are multiplied by.  # f32[]
        """
        number = float(multiplier)
        # Everything that may raise comes first: a bad learning rate must not have changed some of the numbers.
        values = [source.values(number) for source in self._sources]
        for source, one in zip(self._sources, values, strict=True):
            source.numbers.copy_(torch.tensor(one, dtype=source.numbers.dtype, device="cpu"))
        return self._updates


class _Source(NamedTuple):
    """What numbers are computed from, and the tensor that holds them."""

    rule: Rule
    group: dict[str, Any]
    step_count: StepCount
    numbers: Tensor

    def values(self, multiplier: float) -> list[float]:
        sign = -1.0 if self.group.get("maximize") else 1.0
        constants = self.rule.constants(self.group, float(self.step_count.step) + 1)
        return [sign * multiplier, *map(float, constants)]
