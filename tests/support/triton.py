"""Helpers for tests of the Triton kernels, which run in Triton's interpreter on the CPU, or on a CUDA device."""

from __future__ import annotations

import copy
import importlib
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfpeak
from halfpeak import Engine
from halfpeak.core.schedule import ScaleConfig, ScaleState
from halfpeak.fused import FusedAdamW
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import DecisionInputs
from halfpeak.ops.triton import is_installed
from support.snapshot import raw

NEEDS_TRITON = pytest.mark.skipif(not is_installed(), reason="triton has wheels for Linux alone")
"""Kernels are compiled, interpreted or counted."""

INTERPRETED = pytest.mark.skipif(
    not is_installed() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton's interpreter"
)
"""Kernels run on the CPU, in triton's interpreter."""

INTERPRETER_WARNS = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]
"""The interpreter computes in numpy, which warns of the nonfinite values that tests inject."""

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
"""For ``@pytest.mark.parametrize("device", DEVICES)``."""

BACKENDS = [
    ("eager", "cpu"),
    ("compiled", "cpu"),
    *(pytest.param("triton", *device.values, marks=device.marks) for device in DEVICES),
]
"""For ``@pytest.mark.parametrize(("backend", "device"), BACKENDS)``."""

AGAIN = {"cpu": 3, "cuda": 100}
"""How many runs must give the same bits; few in the interpreter, because it runs nothing in parallel."""

SHAPES = (
    (),
    (0,),
    (1,),
    (7, 5),
    (1023,),
    (1024,),
    (1025,),
    (3, 1024),
    (9, 125),
    (3, 48),
    (2, 3, 32),
    (2, 320),
)
"""None, one, odd, and around the 1024 elements of a chunk."""


def parameters_on(
    device: str, dtype: torch.dtype = torch.float32, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[torch.nn.Parameter]:
    """Parameters of every kind of shape, one transposed, one with gaps; the same on every device."""
    tensors = [torch.randn(shape) for shape in shapes]
    tensors += [torch.randn(6, 4).T, torch.randn(9, 4)[:, :3]]
    return [torch.nn.Parameter(tensor.to(device, dtype)) for tensor in tensors]


def gradients_on(device: str, parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
    """A gradient for each, every third one with gaps."""
    gradients: list[torch.Tensor] = []
    for index, parameter in enumerate(parameters):
        shape = parameter.shape
        wide = torch.randn((*shape, 2)).to(device, dtype)
        gradients.append(wide[..., 0] if index % 3 == 0 else wide[..., 0].clone())
    return gradients


def decision_inputs(device: str, config: ScaleConfig, state: ScaleState, **others: Any) -> DecisionInputs:
    """What a step knows before its gradients are read."""
    zero = torch.zeros((), dtype=torch.int32, device=device)
    known: dict[str, Any] = {"num_steps": zero, "num_skipped": zero, "max_norm": None}
    known["found_inf"] = torch.zeros((), device=device)
    return DecisionInputs(config, state, **{**known, **others})


def everything(optimizer: FusedOptimizer) -> list[torch.Tensor]:
    """Copies of the weights and of the state."""
    found = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    rows = optimizer.state.values()
    return found + [
        value.clone() for row in rows for value in row.values() if isinstance(value, torch.Tensor)
    ]


def bits_of(tensors: Iterable[torch.Tensor]) -> tuple[bytes, ...]:
    """The bytes of each tensor, as a value that a set can hold."""
    return tuple(map(raw, tensors))


def check_a_skip(optimizer: FusedOptimizer, parameters: list[torch.nn.Parameter], found_inf: float) -> None:
    """After two steps, a step with this ``found_inf`` must keep every bit, and the next one change the weights."""
    device = str(parameters[0].device)

    def step(found: float, value: float | None = None) -> tuple[bytes, ...]:
        gradients = gradients_on(device, parameters, parameters[0].dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if value is None else torch.full_like(gradient, value)
        optimizer.found_inf = torch.tensor(found, device=device)
        optimizer.step()
        return bits_of(everything(optimizer))

    first, second = step(0.0), step(0.0)
    assert second[3] != first[3]
    assert step(found_inf, math.inf) == second
    assert step(0.0)[3] != second[3]


_adamw = partial(FusedAdamW, lr=0.01)


class Run:
    """A small net under an engine with a fused optimizer on ``backend``; batch ``i`` is the same in every run."""

    def __init__(
        self,
        device: str,
        level: str = "O2",
        make: Callable[..., FusedOptimizer] = _adamw,
        *,
        backend: str = "triton",
        norm: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(40) if norm else nn.ReLU()
        self.model = nn.Sequential(nn.Linear(8, 40), middle, nn.Linear(40, 3)).to(device)
        self.optimizer = make(self.model.parameters(), backend=backend)
        scale = halfpeak.ScaleConfig(init=1024.0, interval=3) if level in ("O1", "O2") else None
        self.engine: Engine = halfpeak.prepare(
            self.model, self.optimizer, level, **{"scale": scale, **options}
        )
        self.device = device
        self.there = [self.batch(index)[0] for index in range(12)]

    def loss(self, inputs: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
        return self.model(inputs).float().square().mean() * factor

    def batch(self, index: int, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(index))
        return inputs.to(self.device), torch.tensor(factor, device=self.device)

    def step(self, index: int, factor: float = 1.0) -> halfpeak.StepResult:
        with self.engine.forward():
            loss = self.loss(self.there[index], factor)
        self.engine.backward(loss)
        self.last_loss = loss.detach()
        return self.engine.step()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.engine.state_dict())


class ExactRoots(TorchDispatchMode):
    """Rounds square roots as devices and the kernels do. torch's on the CPU are sometimes off by one rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sqrt and args[0].dtype == torch.float32:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


def quicken_the_interpreter() -> None:
    """Make triton's interpreter patch the language once in a launch, not in every call of every function."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    language, replace = importlib.import_module("triton.language"), interpreter._patch_lang

    def patch(function: Any) -> Any:
        is_done = not any(core.is_builtin(module.load) for module in (language, core))
        return interpreter._LangPatchScope() if is_done else replace(function)

    interpreter._patch_lang = patch


def round_as_devices_do() -> None:
    """Make triton's interpreter round to the nearest bfloat16, as devices do. It truncates."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    bfloat16 = importlib.import_module("triton.language").bfloat16
    cut_off = interpreter.InterpreterBuilder.create_fp_trunc

    def rounded(builder: Any, source: Any, target: Any) -> Any:
        if target.scalar != bfloat16:
            return cut_off(builder, source, target)
        nearest = torch.tensor(source.data, dtype=torch.float32).to(torch.bfloat16)
        return interpreter.TensorHandle(nearest.view(torch.uint16).numpy(), bfloat16)

    interpreter.InterpreterBuilder.create_fp_trunc = rounded


if is_installed() and os.environ.get("TRITON_INTERPRET") == "1":
    quicken_the_interpreter()
    round_as_devices_do()
