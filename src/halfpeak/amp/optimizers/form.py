"""What all optimizers of apex have in common: the step count of a group, and ``set_grad_none``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.core.errors import ConfigError
from halfpeak.fused.optimizer import FusedOptimizer


class ApexForm(FusedOptimizer):
    """A fused optimizer whose state is apex's: ``step`` in the group, none in the state of a parameter.

    Attributes:
        set_grad_none: whether :meth:`zero_grad` drops gradients instead of zeroing them.
    """

    kept: tuple[str, ...] = ("set_grad_none",)
    """Attributes that go into a copy."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them if the optimizer was built with ``set_grad_none=False``.

        Args:
            set_to_none: instead of what the optimizer was built with; apex takes no argument.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state in apex's layout."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if "step" in group:
                group["step"] = int(group["step"])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of apex's, or of torch's optimizer of the same rule, which counts steps per parameter."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            steps = [self.state[p].pop("step") for p in group["params"] if "step" in self.state.get(p, {})]
            if steps:
                group.setdefault("step", max(int(step) for step in steps))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.kept}}


def no_amsgrad(amsgrad: bool) -> None:
    """Raise ConfigError, as apex raises RuntimeError, if ``amsgrad`` is true."""
    if amsgrad:
        raise ConfigError(
            "amsgrad=True is not in apex's optimizers; use halfpeak.fused.FusedAdam(amsgrad=True)"
        )
