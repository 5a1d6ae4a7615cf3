"""Backend: an implementation of the two kernels of a step, measure and update, over slices of buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfpeak.fused.backends.kernels import clip_coef_without_eps
from halfpeak.fused.backends.triton_tables import AddressTables
from halfpeak.fused.decision import DecisionInputs, StepDecision
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.fused.flat.pack_gradients import GradPacker
from halfpeak.fused.flat.step_counts import StepCount
from halfpeak.fused.rules.base import Rule, gradient_sign


class GradStats(NamedTuple):
    """The result of reading all gradients once.

    Attributes:
        sum_squares: the sum of squares of the unscaled gradients.  # f32[]
        found_inf: 1 if a gradient is not finite.                   # f32[]
    """

    sum_squares: Tensor
    found_inf: Tensor


class UpdateArgs(NamedTuple):
    """The arguments for updating one slice.

    Attributes:
        group: hyper-parameters.
        numbers: the factor of the gradients, then the rule's constants.  # f32[1 + k], f64 for a float64 weight
    """

    slice_: BufferSlice
    group: dict[str, object]
    numbers: Tensor


class BackendStep(NamedTuple):
    """The inputs of a backend's step.

    Attributes:
        groups: hyper-parameters, one dict per parameter group.
        grads: the gradients of all parameters.
        multiplier: the factor that unscales and clips the gradients.  # f32[]
        found_inf: a value other than zero skips the step; None means zero.  # f32[]
        max_norm: the norm to which all gradients, times ``multiplier``, are clipped together. None does not clip.
    """

    slices: Sequence[BufferSlice]
    groups: Sequence[dict[str, Any]]
    grads: Sequence[Tensor | None]
    multiplier: Tensor
    found_inf: Tensor | None
    max_norm: float | None = None


class Backend(ABC):
    """The kernels of a step. Only a :class:`HostBackend` reads step counts and found_inf on the host."""

    name: str

    @abstractmethod
    def measure(
        self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> GradStats:
        """Read all gradients once."""

    @abstractmethod
    def prepare(self, step: BackendStep) -> Callable[[], None] | None:
        """Return a function that takes and counts the step, or skips both; None if the host knows of the skip."""

    def decide(self, step: BackendStep, inputs: DecisionInputs) -> StepDecision | None:
        """Read all gradients once and decide whether to step; None if the backend has no kernel that decides."""
        return None

    @abstractmethod
    def invalidate_grads(self) -> None:
        """Forget results computed from the gradients, because the gradients are about to change."""

    @abstractmethod
    def invalidate_layout(self) -> None:
        """Forget objects made for the buffers, because the buffers are about to change."""

    def detach_tables(self) -> AddressTables | None:
        """Hand address tables to a captured graph that reads them; None if the backend has none."""
        return None

    def clipped(self, step: BackendStep) -> BackendStep:
        """``step`` with the clip coefficient for its ``max_norm`` multiplied into its ``multiplier``."""
        if step.max_norm is None:
            return step
        norm = self.measure(step.slices, step.grads, step.multiplier).sum_squares.sqrt()
        return step._replace(multiplier=step.multiplier * clip_coef_without_eps(norm, step.max_norm))


class PackingBackend(Backend):
    """A backend whose kernels read gradients as vectors."""

    def __init__(self) -> None:
        self._packer = GradPacker()

    def invalidate_grads(self) -> None:
        self._packer.invalidate_grads()

    def invalidate_layout(self) -> None:
        self._packer.invalidate_layout()


class HostBackend(PackingBackend):
    """A backend where the host decides whether to step."""

    def __init__(self) -> None:
        super().__init__()
        self._updates: UpdateList | None = None

    @abstractmethod
    def update(self, updates: Sequence[UpdateArgs], grads: Sequence[Tensor | None]) -> None:
        """Update all weights once."""

    def prepare(self, step: BackendStep) -> Callable[[], None] | None:
        if step.found_inf is not None and bool(step.found_inf):
            return None
        if self._updates is None or not self._updates.matches(step.slices, step.groups):
            self._updates = UpdateList(step.slices, step.groups)
        # Before counting, because this may raise: a bad learning rate must not count a step.
        updates = self._updates.for_step(self.clipped(step).multiplier)
        return partial(self._run, self._updates.step_counts, updates, step.grads)

    def _run(
        self, counts: Iterable[StepCount], updates: Sequence[UpdateArgs], grads: Sequence[Tensor | None]
    ) -> None:
        for count in counts:
            count.increment()
        self.update(updates, grads)

    def invalidate_layout(self) -> None:
        super().invalidate_layout()
        self._updates = None


class UpdateList:
    """The arguments for updating some slices. Between steps only their ``numbers`` change.

    Args:
        groups: hyper-parameters, read again in every step.

    Attributes:
        step_counts: the step counts of the slices, each once.
    """

    def __init__(self, slices: Sequence[BufferSlice], groups: Sequence[dict[str, Any]]) -> None:
        self._slices = slices
        self._groups = list(groups)
        sources: dict[tuple[Rule, int, torch.dtype], _Source] = {}
        self._updates: list[UpdateArgs] = []
        for slice_ in slices:
            rule, group, weight = slice_.rule, self._groups[slice_.group], slice_.buffer.weight
            wide = torch.promote_types(weight.dtype, torch.float32)
            key = (rule, id(slice_.step_count), wide)
            if key not in sources:
                length = 1 + len(rule.constants(group, 1.0))
                numbers = torch.empty(length, dtype=wide, device=weight.device)
                sources[key] = _Source(rule, group, slice_.step_count, numbers)
            self._updates.append(UpdateArgs(slice_, group, sources[key].numbers))
        self._sources = list(sources.values())
        self.step_counts = {id(one.step_count): one.step_count for one in slices}.values()

    def matches(self, slices: Sequence[BufferSlice], groups: Sequence[dict[str, Any]]) -> bool:
        """Whether this list was made for these slices and groups, compared by identity."""
        return (
            self._slices is slices
            and len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
        )

    def for_step(self, multiplier: Tensor) -> list[UpdateArgs]:
        """The arguments of the next step, which overwrite the arguments of the previous step.

        Args:
            multiplier: the factor of the gradients.  # f32[]
        """
        number = float(multiplier)
        # Before any write, because this may raise: a bad learning rate must not change some of the numbers.
        values = [source.values(number) for source in self._sources]
        for source, one in zip(self._sources, values, strict=True):
            kind = "f" if source.numbers.dtype is torch.float32 else "d"
            source.numbers.copy_(torch.frombuffer(array(kind, one), dtype=source.numbers.dtype))
        return self._updates


class _Source(NamedTuple):
    """The inputs of the numbers that slices share, and the tensor that holds these numbers."""

    rule: Rule
    group: dict[str, Any]
    step_count: StepCount
    numbers: Tensor

    def values(self, multiplier: float) -> list[float]:
        constants = self.rule.constants(self.group, float(self.step_count.step) + 1)
        return [gradient_sign(self.group) * multiplier, *map(float, constants)]
