"""AmpOptimWrapper: dtypes of autocast, loss scales, scalers of user code. ``tests/agreement`` compares it with plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfpeak.optim as ours
from halfpeak.core.errors import ClosureError, ConfigTypeError
from halfpeak.fused import FusedSGD
from halfpeak.optim import AmpOptimWrapper
from halfpeak.shim import cuda_on_cpu
from optim.families import FAMILIES, logged_records, wrap
from optim.families import on_cpu as on_cpu
from optim.test_optim_wrapper import scaler_backward, scaler_step

DTYPES: list[tuple[Any, torch.dtype]] = [
    ("float16", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("float32", torch.float32),
    ("float64", torch.float64),
    (torch.float16, torch.float16),
    (None, torch.bfloat16),
]


@pytest.mark.parametrize(("dtype", "computed"), DTYPES, ids=str)
def test_it_computes_in_its_dtype(dtype: Any, computed: torch.dtype) -> None:
    """None means bfloat16 on a CPU."""
    model = nn.Linear(6, 3)
    wrapper = AmpOptimWrapper(dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with wrapper.optim_context(model):
        output = model(torch.ones(2, 6))
    wrapper.update_params(output.float().mean())
    assert output.dtype is computed
    assert wrapper.stepped()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert wrapper.loss_scaler.is_enabled() == (computed is torch.float16)
    assert wrapper.last_result is not None
    assert wrapper.last_result.scale == (2.0**16 if computed is torch.float16 else 1.0)


def test_an_accelerator_computes_in_float16() -> None:
    """Also where the parameters are on the CPU, as under FSDP's CPU offload; float64 as on a CPU."""
    with cuda_on_cpu.on_cpu():
        for dtype, computed in ((None, torch.float16), ("float64", torch.float64)):
            model = nn.Conv2d(1, 1, 1)
            wrapper = AmpOptimWrapper(dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            with wrapper.optim_context(model):
                assert nn.Conv2d(1, 1, 1).cuda()(torch.randn(1, 1, 1, 1).cuda()).dtype is computed
            assert wrapper.loss_scaler.is_enabled() == (dtype is None)


@pytest.mark.parametrize(
    ("loss_scale", "before", "after"),
    [
        ("dynamic", 2.0**16, 2.0**16),
        (512, 512.0, 512.0),
        (0.5, 0.5, 0.5),
        ({"init_scale": 8, "growth_interval": 1}, 8.0, 16.0),
        ({"init_scale": 8, "growth_interval": 1, "growth_factor": 4.0, "ceiling": 16.0}, 8.0, 16.0),
        ({"init_scale": 2.0**24, "growth_interval": 1}, 2.0**24, 2.0**24),
        ({"enabled": False}, 1.0, 1.0),
        ({}, 2.0**16, 2.0**16),
    ],
    ids=str,
)
def test_loss_scales(loss_scale: Any, before: float, after: float) -> None:
    model, wrapper = wrap(ours, "AmpOptimWrapper", loss_scale=loss_scale, dtype="float16")
    assert wrapper.loss_scaler.get_scale() == before
    wrapper.update_params(model())
    assert (wrapper.loss_scaler.get_scale(), model.weight.item()) == (after, -1.0)


@pytest.mark.parametrize(("floor", "lowest"), [({}, 2.0**-126), ({"floor": 0.25}, 0.25)])
def test_only_a_given_floor_stops_the_scale(floor: dict[str, float], lowest: float) -> None:
    loss_scale = {"init_scale": lowest * 2, **floor}
    model, wrapper = wrap(ours, "AmpOptimWrapper", loss_scale=loss_scale, dtype="float16")
    scales = []
    for _ in range(3):
        wrapper.update_params(model() * float("inf"))
        scales.append(wrapper.loss_scaler.get_scale())
    assert scales == [lowest] * 3


def test_states_cross_over(on_cpu: None) -> None:
    states: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        model, wrapper = wrap(family, "AmpOptimWrapper", dtype="float16", loss_scale={"growth_interval": 2})
        for factor in (1.0, float("inf"), 1.0):
            wrapper.update_params(model() * factor)
        states[name] = wrapper.state_dict()
    assert states["ours"] == states["theirs"]
    assert states["ours"]["loss_scaler"]["_growth_tracker"] == 1
    for name, family in FAMILIES.items():
        model, wrapper = wrap(family, "AmpOptimWrapper", dtype="float16", loss_scale={"growth_interval": 2})
        wrapper.load_state_dict(dict(states["theirs" if name == "ours" else "ours"]))
        wrapper.update_params(model())
        assert wrapper.loss_scaler.get_scale() == 2.0**16


def test_a_loop_without_optim_context_is_told_once() -> None:
    found: list[list[str]] = []
    for enters in (False, True):
        model, wrapper = wrap(ours, "AmpOptimWrapper", dtype="float16")
        with logged_records() as records:
            for _ in range(3):
                with wrapper.optim_context(model) if enters else nullcontext():
                    loss = model()
                wrapper.update_params(loss)
        found.append([record.getMessage() for record in records])
    assert len(found[0]) == 1
    assert "write `with wrapper.optim_context(model)" in found[0][0]
    assert found[1] == []


@pytest.mark.parametrize("inside", [False, True])
def test_backward_runs_without_autocast(inside: bool) -> None:
    """A custom function's backward is not cast; torch's checkpointing enters autocast itself when it recomputes."""
    seen: list[tuple[bool, torch.dtype]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), (torch.eye(2) @ torch.eye(2)).dtype))
            return grad

    model = nn.Linear(6, 3)
    wrapper = AmpOptimWrapper(dtype="bfloat16", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with wrapper.optim_context(model):
        output: Tensor = Probe.apply(checkpoint(model, torch.ones(2, 6), use_reentrant=False))
        if inside:
            wrapper.update_params(output.float().mean())
    if not inside:
        wrapper.update_params(output.float().mean())
    assert seen == [(False, torch.float32)]
    assert wrapper.stepped()


# Scalers, closures and optimizers of user code


def test_a_loss_scaler_of_your_own_decides() -> None:
    weight = nn.Parameter(torch.ones(2))
    wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD([weight], lr=0.5), dtype="float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    wrapper.loss_scaler = scaler
    assert wrapper.loss_scaler is scaler
    wrapper.update_params(weight.sum())
    wrapper.update_params(weight.sum() * float("inf"))
    assert (weight.tolist(), scaler.get_scale()) == ([0.5, 0.5], 16.0)
    state = wrapper.state_dict()
    assert state["loss_scaler"] == scaler.state_dict()
    state["loss_scaler"]["scale"] = 64.0
    wrapper.load_state_dict(state)
    assert scaler.get_scale() == 64.0
    for bad in (512.0, None):
        with pytest.raises(ConfigTypeError, match=r"has no scale\(\)"):
            wrapper.loss_scaler = bad


def test_two_wrappers_share_a_loss_scaler() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (
        AmpOptimWrapper({"init_scale": 32.0}, "float16", optimizer=torch.optim.SGD([weight], lr=0.5))
        for weight in weights
    )
    first.update_params(weights[0].sum())
    second.loss_scaler = first.loss_scaler
    for factor in (1.0, float("inf")):
        second.update_params(weights[1].sum() * factor)
        first.update_params(weights[0].sum())
    assert [weight.tolist() for weight in weights] == [[-0.5, -0.5], [0.5, 0.5]]
    assert first.loss_scaler.get_scale() == 16.0


def test_a_loss_scaler_set_in_an_open_window_drops_its_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    wrapper = AmpOptimWrapper(optimizer=optimizer, dtype="float16", accumulative_counts=2)
    wrapper.update_params(weight.sum())
    wrapper.loss_scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    wrapper.update_params(weight.sum())
    assert weight.tolist() == [0.75, 0.75]


def test_a_step_that_raises_leaves_the_scale_and_the_next_is_taken() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    wrapper = AmpOptimWrapper({"growth_interval": 1}, "float16", optimizer=optimizer)
    hook = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        wrapper.update_params(weight.sum())
    hook.remove()
    wrapper.zero_grad()
    assert wrapper.loss_scaler.get_scale() == 2.0**16
    wrapper.update_params(weight.sum())
    assert (weight.tolist(), wrapper.loss_scaler.get_scale()) == ([0.5, 0.5], 2.0**17)


def test_a_scale_that_an_override_uses_falls_and_grows() -> None:
    weight = nn.Parameter(torch.ones(2))
    scale = {"init_scale": 8.0, "growth_interval": 2}
    own = type("Own", (AmpOptimWrapper,), {"backward": scaler_backward, "step": scaler_step})
    wrapper = own(optimizer=torch.optim.SGD([weight], lr=0.0), loss_scale=scale, dtype="float16")
    assert isinstance(wrapper.loss_scaler, torch.cuda.amp.GradScaler)
    scales = []
    for factor in (float("inf"), 1.0, 1.0):
        wrapper.update_params(weight.sum() * factor)
        scales.append(wrapper.loss_scaler.get_scale())
    assert scales == [4.0, 4.0, 8.0]


@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_an_override_sees_unscaled_gradients_of_a_fused_optimizer(kind: str) -> None:
    weight, norms = nn.Parameter(torch.ones(1)), []
    own = type("Own", (getattr(ours, kind),), {"_clip_grad": lambda self: norms.append(weight.grad.item())})  # type: ignore[union-attr]
    options = {"loss_scale": 8.0, "dtype": "float16"} if kind == "AmpOptimWrapper" else {}
    wrapper = own(optimizer=FusedSGD([weight], lr=1.0), clip_grad={"max_norm": 0.5}, **options)
    wrapper.update_params(weight.sum() * 10)
    assert (norms, weight.item()) == ([10.0], -9.0)


def test_a_loss_scale_takes_no_closure() -> None:
    weight = nn.Parameter(torch.ones(1))
    wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD([weight], lr=1.0), dtype="float16")
    with pytest.raises(ClosureError, match="a loss scale takes no closure"):
        wrapper.step(lambda: weight.sum())
