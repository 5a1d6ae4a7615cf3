"""Step counts: how many steps each parameter has taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfpeak.core.errors import StateError
from halfpeak.fused.rules.base import Rule


@dataclass(eq=False, slots=True)
class StepCount:
    """The number of steps of parameters that have always stepped together.

    Attributes:
        step: the number. The rows of these parameters, or their group, refer to this tensor.  # f32[]
    """

    step: Tensor
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._version = _version_of(self.step)

    def increment(self, by: Tensor | int = 1) -> None:
        """Add one, or the value of a tensor."""
        self.step += by
        self._version = _version_of(self.step)

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse an in-place write to a count that several parameters share, because it may be meant for one of them.

        Args:
            rows: the state rows of all parameters.

        Raises:
            StateError: the count was written in place.
        """
        if _version_of(self.step) == self._version:
            return
        if (n := sum(row.get("step") is self.step for row in rows)) > 1:
            raise StateError(
                f'optimizer.state[p]["step"] was written in place, and {n} parameters that step together share it; assign '
                f'another tensor: optimizer.state[p]["step"] = torch.tensor({float(self.step)})'
            )


def step_counts_of(
    targets: Mapping[int, tuple[Tensor, int]],
    rows: Mapping[Tensor, Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
    rules: Sequence[Rule],
    before: Iterable[tuple[Any, StepCount]],
) -> dict[int, StepCount]:
    """A step count for each parameter. Parameters of one group and device with the same number of steps share a count.

    Args:
        targets: by index, each parameter and the index of its group.
        rows: the state row of each parameter.
        groups: the optimizer's groups. A group whose rule counts by group gets its ``step``.
        rules: one per group.
        before: the state rows of the previous layout, each with its step count.
    """
    past = {id(row): counter for row, counter in before}
    counters: dict[tuple[Any, ...], StepCount] = {}
    found: dict[int, StepCount] = {}
    for index, (target, group) in targets.items():
        row, where = rows[target], rules[group].step_scope
        if where == "nowhere":
            # A parameter with state has taken at least one step, except if its state was created for a step that was skipped.
            empty = all(value is None for value in row.values())
            num_steps = 0.0 if empty or (id(row) in past and not past[id(row)].step) else 1.0
        else:
            num_steps = float((groups[group] if where == "group" else row).get("step", 0.0))
        key = (group, target.device, num_steps)
        if key not in counters:
            counters[key] = StepCount(torch.full((), num_steps, dtype=torch.float32, device=target.device))
        found[index] = counters[key]
        if where == "group":
            groups[group]["step"] = counters[key].step
    return found


def _version_of(step: Tensor) -> int:
    # Tensors made under inference_mode have no version counter.
    return 0 if step.is_inference() else step._version
