"""The reference for every backend: the rule of a fused optimizer, run on each tensor by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.fused import FusedAdagrad, FusedAdam, FusedAdamW, FusedLAMB, FusedNovoGrad, FusedSGD
from halfpeak.fused.backends.eager_device import EagerDeviceBackend
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.flat.buffers import MIN_STANDALONE

CASES: dict[str, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    "SGD": (FusedSGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD momentum": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "SGD nesterov": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (FusedAdam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "Adam amsgrad": (FusedAdam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (FusedAdamW, {"lr": 0.01}),
    "Adagrad": (
        FusedAdagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "LAMB": (FusedLAMB, {"lr": 0.01}),
    "LAMB inside": (
        FusedLAMB,
        {"lr": 0.01, "adam_w_mode": False, "grad_averaging": False, "use_nvlamb": True},
    ),
    "NovoGrad": (FusedNovoGrad, {"lr": 0.01, "weight_decay": 0.1}),
    "NovoGrad inf": (
        FusedNovoGrad,
        {"lr": 0.01, "norm_type": float("inf"), "init_zero": True, "reg_inside_moment": True},
    ),
}
"""One row per formula: the class, and the options that select the formula."""

LAYERWISE = [name for name in CASES if name.startswith(("LAMB", "NovoGrad"))]

SHAPES = ((), (0,), (1,), (7, 5), (3,), (2, 3, 4, 5), (64, 33), (3, 48), (2, 3, 32), (2, 320), (3, 256))

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def parameters_of(dtype: torch.dtype = torch.float32, *, large: bool = False) -> list[torch.nn.Parameter]:
    """Parameters of many shapes; two are not in row-major order, and one has gaps between its rows."""
    tensors = [torch.randn(shape) for shape in SHAPES]
    tensors += [
        torch.randn(6, 4).T,
        torch.randn(9, 4)[:, :3],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    if large:
        tensors.append(torch.randn(MIN_STANDALONE + 3))
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def gradients_for(parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    return [torch.randn(parameter.shape).to(parameter.dtype) for parameter in parameters]


def give(parameters: list[torch.nn.Parameter], gradients: list[Tensor | None] | list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


class Wanted(NamedTuple):
    """The weight and the state of one parameter after a step, and the largest number in the computation of each."""

    values: list[Tensor]
    sizes: list[float]


def step_as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Use the eager backend for devices everywhere; there the host does not know ``found_inf``."""
    patch.setattr("halfpeak.fused.base.choose", lambda *_: EagerDeviceBackend())
    patch.setattr("halfpeak.fused.base.still_fits", lambda *_: True)


@dataclass
class Reference:
    """Counts the steps of each parameter, and computes the expected result of the next step.

    Attributes:
        optimizer: its present values are the start of each step, so rounding errors do not add up.
        steps: the number of steps of each parameter.
    """

    optimizer: FusedOptimizer
    steps: dict[Tensor, int] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> dict[Tensor, Wanted]:
        """Return the expected weight and state of each parameter with a gradient after the coming step."""
        groups = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        factor *= self._clip([p.grad for _, p in groups if p.grad is not None], factor)
        wanted: dict[Tensor, Wanted] = {}
        for group, parameter in groups:
            if parameter.grad is None or not parameter.numel():
                continue
            self.steps[parameter] = self.steps.get(parameter, 0) + 1
            wanted[parameter] = self._moved(group, parameter, factor)
        return wanted

    def _moved(self, group: dict[str, Any], parameter: Tensor, factor: float) -> Wanted:
        rule = self.optimizer.rule(group)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        row = self.optimizer.state.get(parameter, {})
        slots: list[Tensor] = []
        for i, (name, start) in enumerate(zip(rule.state_names, rule.initial(group), strict=True)):
            shape = () if i >= len(rule.state_names) - rule.per_param_scalars else parameter.shape
            known = row.get(name)
            slots.append(
                torch.full(shape, start, dtype=wide, device=parameter.device)
                if known is None
                else known.to(wide).clone()
            )
        numbers = rule.constants(group, float(self.steps[parameter]))
        constants = [torch.tensor(float(number), dtype=wide) for number in numbers]
        sign = -1.0 if group.get("maximize") else 1.0
        assert parameter.grad is not None
        gradient = parameter.grad.to(wide) * torch.tensor(sign * factor, dtype=wide)
        moved = rule(parameter.to(wide), gradient, slots, constants)
        # A sum is only as exact as its largest term, which may have cancelled.
        sizes = [max(largest(old), largest(new)) for old, new in zip([parameter, *slots], moved, strict=True)]
        if len(sizes) > 1 and rule.state_names[0] != "sum":
            sizes[1] = max(sizes[1], largest(gradient))
        return Wanted([one.clone() for one in moved], sizes)

    def _clip(self, gradients: list[Tensor], factor: float) -> float:
        limit = self.optimizer.defaults.get("max_grad_norm")
        if not limit:
            return 1.0
        norm = sum(float(gradient.double().mul(factor).square().sum()) for gradient in gradients) ** 0.5
        return min(1.0, limit / norm)


def agree(optimizer: Optimizer, wanted: dict[Tensor, Wanted], *, ulps: float) -> None:
    """Assert that weights and states differ by at most ``ulps`` roundings of the largest number computed."""
    for parameter, (values, sizes) in wanted.items():
        row = optimizer.state.get(parameter, {})
        found = {"weight": parameter.detach(), **{name: row[name] for name in row if name != "step"}}
        for (name, actual), expected, size in zip(found.items(), values, sizes, strict=True):
            assert actual.dtype == (parameter.dtype if name == "weight" else expected.dtype), name
            assert_close(actual, expected, size, ulps, name)


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def assert_close(actual: Tensor, expected: Tensor, size: float, ulps: float, what: str) -> None:
    said = f"{what} of the backend and of the rule: {actual} and {expected}"
    if ulps == 0:
        assert torch.equal(actual, expected.to(actual.dtype)), said
        return
    bound = ulps * EPS[actual.dtype] * size
    assert float((actual.to(expected.dtype) - expected).abs().max()) <= bound, said
