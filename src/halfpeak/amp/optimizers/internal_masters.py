"""State and masters of apex's optimizers: a step count per group, and float32 masters inside the optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from halfpeak.core.optimizer_state import params_of
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.ops.foreach import merge_
from halfpeak.ops.versions import TensorVersions


class ApexOptimizer(FusedOptimizer):
    """A fused optimizer with the state of apex's: ``step`` in the group, not in the state of each parameter.

    Attributes:
        set_grad_none: whether :meth:`zero_grad` drops gradients instead of zeroing them.
    """

    copied = ("set_grad_none",)

    set_grad_none = True
    capturable = False
    """Whether the count of steps is a tensor on the device, for a captured graph, and not an ``int``."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them if the optimizer was built with ``set_grad_none=False``.

        Args:
            set_to_none: overrides ``set_grad_none``; apex takes no argument.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _update(self, inputs: StepInputs, found_inf: Tensor | None = None) -> None:
        super()._update(inputs, found_inf)
        if self._layout is not None and not self.capturable:
            self._layout.number_group_steps(self.param_groups, found_inf)

    def state_dict(self) -> dict[str, Any]:
        """The state in apex's layout."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if "step" in group:
                group["step"] = int(group["step"])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from apex, or from torch's optimizer of the same rule, which counts steps per parameter."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            steps = [self.state[p].pop("step") for p in group["params"] if "step" in self.state.get(p, {})]
            if steps:
                group.setdefault("step", max(int(step) for step in steps))


class InternalMasters(ApexOptimizer):
    """Steps float32 masters of low-precision parameters, and rounds the parameters from the masters.

    The masters are made at the first step and are in no ``state_dict``, as in apex. After an in-place write to a
    parameter, or an assignment to its ``.data``, its master takes the new value. Elements of the master that still
    round to the parameter keep their extra precision.
    """

    copied = ("_masters",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._masters = {}
        super().__init__(*args, **kwargs)

    @abstractmethod
    def has_master(self, parameter: Tensor) -> bool:
        """Whether a parameter gets a master."""

    def step(self, closure: Callable[[], Any] | None = None, **others: Any) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
            others: ``grad_scaler``, whose scale divides the gradients; a step with a non-finite gradient is skipped. No
                named argument, because torch's GradScaler warns of optimizers whose ``step`` names it.
        """
        given = _given_by(self, **others)
        vars(self).update(given)
        try:
            return super().step(closure)
        finally:
            for name in given:
                vars(self).pop(name, None)

    def _reset(self) -> None:
        super()._reset()
        self._versions = TensorVersions()
        """The versions at which the low parameters last agreed with their masters."""

    def _slices(self, inputs: StepInputs) -> list[BufferSlice]:
        low = self._low()
        if not self._versions.unchanged(low):
            values = [parameter.detach() for parameter in low]
            masters = [self._masters.get(p, v.float()) for p, v in zip(low, values, strict=True)]
            merge_(masters, values)
            self._masters = dict(zip(low, masters, strict=True))
        return super()._slices(inputs)

    def _update(self, inputs: StepInputs, found_inf: Tensor | None = None) -> None:
        super()._update(inputs, found_inf)
        self._versions.record(self._low())

    def _low(self) -> list[Tensor]:
        return list(filter(self.has_master, params_of(self)))


def _given_by(optimizer: FusedOptimizer, grad_scaler: Any = None) -> dict[str, Any]:
    """Return the attributes that a step reads, taken from torch's GradScaler."""
    if grad_scaler is None:
        return {}
    found: dict[Any, Tensor] = grad_scaler._check_inf_per_device(optimizer)
    values = list(found.values())
    return {"grad_scale": grad_scaler._get_scale_async(), "found_inf": sum(values[1:], values[0])}
