"""LossScaleCollapse, with the names of the parameters whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from halfpeak.core.errors import LossScaleCollapse
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.ops import foreach
from halfpeak.state.loss_scaler import LossScaler


class CollapseReport:
    """Builds the error for a loss scale that cannot fall any further.

    Args:
        models: searched for names anew each time, since parameters may be added.
        scalers: whose smallest scale the message names.
    """

    def __init__(self, models: Sequence[nn.Module], scalers: Sequence[LossScaler]) -> None:
        self._models = list(models)
        self._scalers = scalers
        self._nonfinite: tuple[str, ...] = ()

    def add_model(self, model: nn.Module) -> None:
        """Search one more model for names."""
        self._models.append(model)

    def note_nonfinite(self, prepared: Iterable[PreparedOptimizer]) -> None:
        """Note which gradients are not finite, before clipping spreads one nan over all. Waits for the device."""
        self._nonfinite = self._names_of_nonfinite(prepared)

    def error(self, prepared: Iterable[PreparedOptimizer]) -> LossScaleCollapse:
        """The error that names the parameters whose gradients are not finite. Waits for the device."""
        names = self._nonfinite or self._names_of_nonfinite(prepared)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        scale = min(scaler.read_scale() for scaler in self._scalers)
        return LossScaleCollapse(
            f"gradients stay non-finite at a loss scale of {scale:g}, which cannot fall any further. "
            f"Not finite: {shown or 'no parameter of this step'}. Lower the learning rate, clip, keep these layers in "
            "float32, or use bfloat16 (O4, O5)",
            names,
        )

    def _names_of_nonfinite(self, prepared: Iterable[PreparedOptimizer]) -> tuple[str, ...]:
        """Waits for the device, once per parameter."""
        found: list[str] = []
        prepared = list(prepared)
        known = self._names() if prepared else {}
        for index, one in enumerate(prepared):
            for number, pair in enumerate(one.pairs()):
                grad = pair.main.grad if pair.main.grad is not None else pair.model.grad
                if grad is not None:
                    flag = torch.zeros((), device=grad.device)
                    foreach.check_([grad], flag)
                    if bool(flag):
                        found.append(known.get(id(pair.model), f"parameter {number} of optimizer {index}"))
        return tuple(found)

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for number, model in enumerate(self._models):
            prefix = "" if len(self._models) == 1 else f"model {number}: "
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names
