"""Names of parameters, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from halfpeak.engine.lane import Lane
from halfpeak.ops import foreach


class ParameterNames:
    """Finds the name of a parameter in the models, or its place in an optimizer.

    Args:
        models: searched anew each time, since parameters may be added.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = list(models)

    def watch(self, model: nn.Module) -> None:
        """Search one more model."""
        self._models.append(model)

    def nonfinite(self, lanes: Iterable[Lane]) -> tuple[str, ...]:
        """The parameters whose gradients are not finite. Waits for the device, once per parameter."""
        found: list[str] = []
        lanes = list(lanes)
        known = self._names() if lanes else {}
        for lane_number, lane in enumerate(lanes):
            for number, slot in enumerate(lane.slots()):
                grad = slot.target.grad if slot.target.grad is not None else slot.source.grad
                if grad is not None:
                    flag = torch.zeros((), device=grad.device)
                    foreach.check_([grad], flag)
                    if bool(flag):
                        found.append(
                            known.get(id(slot.source), f"parameter {number} of optimizer {lane_number}")
                        )
        return tuple(found)

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for number, model in enumerate(self._models):
            prefix = "" if len(self._models) == 1 else f"model {number}: "
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names
