"""Steps on the Triton backend agree with the eager backend, take three kernel launches and never make the host wait."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak import fused
from halfpeak.engine.step import Step
from halfpeak.fused import FusedSGD
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.triton import kernels
from laws.test_waits import Waits
from support.states import same
from support.triton import DEVICES, INTERPRETER_WARNS, ExactRoots, Run

pytestmark = INTERPRETER_WARNS

CLIPS = {"no clip": None, "loose": 1e3, "tight": 0.01}
CLIPPED = [
    ("O0", "loose"),
    ("O1", "no clip"),
    ("O2", "loose"),
    ("O2", "tight"),
    ("O5", "no clip"),
    ("O5", "tight"),
]


def tensors(run: Run) -> list[torch.Tensor]:
    masters = [p.detach() for group in run.optimizer.param_groups for p in group["params"]]
    return [*masters, *(t.detach() for t in run.model.state_dict().values())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "clip"), CLIPPED)
def test_it_agrees_with_the_eager_backend(level: str, clip: str, device: str) -> None:
    ours, theirs = (
        # Not Adam: it turns the rounding error of a gradient that should be zero into a full step.
        Run(device, level, partial(FusedSGD, lr=0.05, momentum=0.9), backend=backend, clip=CLIPS[clip])
        for backend in ("triton", "eager")
    )
    for step in range(7):
        factor = float("inf") if step == 4 else 1.0
        one, two = ours.step(step, factor), theirs.step(step, factor)
        assert torch.equal(one.found_inf, two.found_inf)
        assert float(one.found_inf) == (step == 4)
        assert torch.equal(one.scale, two.scale)
        assert (one.grad_norm is None) == (two.grad_norm is None)
        if one.grad_norm is not None and step != 4:
            torch.testing.assert_close(one.grad_norm, two.grad_norm, rtol=1e-3, atol=1e-6)
    assert ours.optimizer.backend == "triton"
    assert (int(ours.engine.num_steps), int(ours.engine.num_skipped)) == (6, 1)
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        # In a low-precision forward pass, one bfloat16 ulp in a weight moves a gradient by as much.
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_one_program_decides_what_the_engine_would(
    level: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = Run(device, level, clip=0.1)
    together = Run(device, level, clip=0.1)
    for step in range(7):
        factor = float("nan") if step == 3 else 1.0
        with monkeypatch.context() as patch, ExactRoots():
            patch.setattr(Step, "_plan_on_device", lambda *_: None)
            one = apart.step(step, factor)
        two = together.step(step, factor)
        assert one.grad_norm is not None
        assert two.grad_norm is not None
        assert torch.equal(one.found_inf, two.found_inf)
        assert torch.equal(one.scale, two.scale)
        assert torch.equal(one.grad_norm, two.grad_norm) or step == 3
    assert same(tensors(apart), tensors(together))
    assert apart.engine.train_step.counters.state_dict() == together.engine.train_step.counters.state_dict()
    assert apart.engine.scalers[0].state_dict() == together.engine.scalers[0].state_dict()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    module = kernels()

    def counting(name: str) -> Any:
        launch = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> None:
            found.append(name)
            launch(*args, **kwargs)

        return counted

    for name in ("measure", "control", "update"):
        monkeypatch.setattr(module, name, counting(name))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_three_launches(device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, where found_inf can be read, a skip counts no step, and takes none back."""
    monkeypatch.setattr("halfpeak.engine.step.host_values", lambda *_: None)
    run = Run(device, norm=False, clip=1.0)
    run.step(0)
    launches.clear()
    for step in range(1, 4):
        run.step(step, float("inf") if step == 2 else 1.0)
    assert launches == ["measure", "control", "update"] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_by_itself_it_is_two_launches(device: str, launches: list[str]) -> None:
    weight = nn.Parameter(torch.ones(5, device=device))
    optimizer = FusedSGD([weight], lr=0.1, backend="triton")
    for _ in range(2):
        weight.grad = torch.ones(5, device=device)
        optimizer.step()
    assert launches == ["control", "update"] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "clip"), CLIPPED)
def test_the_host_does_not_wait(level: str, clip: str, device: str) -> None:
    run = Run(device, level, clip=CLIPS[clip])
    for step in range(3):
        run.step(step)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Waits() if device == "cpu" else nullcontext() as waits:
            for step in range(3, 8):
                # No overflow under a static scale: the host would wait in each step until one is finite.
                run.step(step, float("inf") if step == 5 and level in ("O1", "O2") else 1.0)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert waits is None or not waits.places


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", ["FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "FusedAdam"])
def test_no_fused_optimizer_waits_on_a_device(kind: str, backend: Any) -> None:

    parameters = [nn.Parameter(torch.ones(5, device="cuda")), nn.Parameter(torch.ones(7, 3, device="cuda"))]
    lr = torch.tensor(0.1, device="cuda")
    optimizer: FusedOptimizer = getattr(fused, kind)(parameters, lr=lr, backend=backend)
    grads = [torch.ones_like(parameter) for parameter in parameters]
    found_inf = torch.zeros((), device="cuda")
    for step in range(4):
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            optimizer.found_inf = found_inf + (step == 3)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert float(optimizer.state[parameters[0]]["step"]) == 3


@pytest.mark.gpu
def test_a_learning_rate_on_the_device_is_read_there() -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    lr = torch.tensor(0.5, device="cuda")
    optimizer = FusedSGD([weight], lr=lr, backend="triton")
    for wanted in (0.5, 0.25):
        weight.grad = torch.ones(3, device="cuda")
        optimizer.step()
        assert float(weight[0].detach()) == wanted
        lr.fill_(0.25)
