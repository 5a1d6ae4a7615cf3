"""NonfiniteReport: names the gradients that are not finite, for the result of a skipped step and LossScaleCollapse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from halfpeak.core.errors import LossScaleCollapse
from halfpeak.core.policy import Policy
from halfpeak.core.step_result import NonfiniteGrads, StepResult
from halfpeak.engine.gradients.window import Pending
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.ops import foreach
from halfpeak.state.loss_scaler import LossScaler


class NonfiniteReport:
    """Names the gradients that are not finite, and makes the error of a loss scale that cannot fall any further.

    Args:
        models: searched for names each time, because parameters may be added.
        scalers: the message gives their smallest scale.
        policy: chooses the advice in the message.
    """

    def __init__(self, models: Sequence[nn.Module], scalers: Sequence[LossScaler], policy: Policy) -> None:
        self._models = list(models)
        self._scalers = scalers
        self._policy = policy
        self._nonfinite: tuple[str, ...] = ()

    def add_model(self, model: nn.Module) -> None:
        """Search one more model for names."""
        self._models.append(model)

    def note_nonfinite(self, prepared: Iterable[PreparedOptimizer]) -> None:
        """Note which gradients are not finite, before clipping spreads one NaN to all. Waits for the device."""
        self._nonfinite = self._names_of_nonfinite(prepared)

    def collapse_error(self, prepared: Iterable[PreparedOptimizer]) -> LossScaleCollapse:
        """The error that names the parameters whose gradients are not finite. Waits for the device."""
        names = self._nonfinite or self._names_of_nonfinite(prepared)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        scale = min(scaler.read_scale() for scaler in self._scalers)
        return LossScaleCollapse(
            f"gradients stay non-finite at a loss scale of {scale:g}, which cannot fall any further. "
            f"Not finite: {shown or 'no parameter of this step'}. {self._advice()}",
            names,
        )

    def nonfinite_grads(self, prepared: Sequence[PreparedOptimizer]) -> NonfiniteGrads | None:
        """The names of all gradients and a flag for each that is not finite; None without gradients. Does not wait."""
        named = self._grads(prepared)[::-1]
        if not named:
            return None
        flags = [torch.zeros((), dtype=torch.float32, device=grad.device) for _, grad in named]
        for (_, grad), flag in zip(named, flags, strict=True):
            foreach.check_([grad], flag)
        return NonfiniteGrads(
            tuple(name for name, _ in named), torch.stack([flag.to(flags[0].device) for flag in flags])
        )

    def _names_of_nonfinite(self, prepared: Iterable[PreparedOptimizer]) -> tuple[str, ...]:
        """The names of gradients that are not finite, in the order of the parameters. Waits for the device."""
        found = self.nonfinite_grads(list(prepared))
        return () if found is None else StepResult(found.flags, found.flags, grads=found).nonfinite()[::-1]

    def _grads(self, prepared: Sequence[PreparedOptimizer]) -> list[tuple[str, Tensor]]:
        """The gradients of the window, with the names of their parameters."""
        found: list[tuple[str, Tensor]] = []
        known = self._names() if prepared else {}
        for index, one in enumerate(prepared):
            for number, pair in enumerate(one.pairs_to_step()):
                grads = (pair.main.grad, pair.model.grad)
                # While gradients are pending, the gradient of a master may be the sentinel.
                grad = grads[1] if isinstance(one.window, Pending) or grads[0] is None else grads[0]
                if grad is not None:
                    found.append(
                        (known.get(id(pair.model), f"parameter {number} of optimizer {index}"), grad)
                    )
        return found

    def _advice(self) -> str:
        """The remedies at this level."""
        diagnose = "halfpeak.diagnose(engine, closure) names the layer that is to blame"
        if torch.float16 not in (self._policy.param, self._policy.compute):
            return f"No loss scale helps here: look for bad data, a too large learning rate, or a division by zero; {diagnose}"
        level = "O4" if self._policy.per_op else "O5"
        return f"Lower the learning rate, clip, keep layers in float32 (keep_fp32=[...]), or use bfloat16 ({level}); {diagnose}"

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for number, model in enumerate(self._models):
            prefix = "" if len(self._models) == 1 else f"model {number}: "
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names
