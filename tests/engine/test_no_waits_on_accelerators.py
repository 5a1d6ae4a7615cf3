"""On an accelerator a step makes the host wait only for ``found_inf``, once, if the optimizer cannot take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from halfpeak import fused
from halfpeak.parts.replicas import LossComparison
from support.accelerator import Device, accelerator, on_device
from support.nets import LEVELS
from support.triton import NEEDS_TRITON

NEVER: dict[str, Callable[[Any], Optimizer]] = {
    "torch, fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "torch, fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "torch, capturable Adam": lambda p: torch.optim.Adam(p, fused=True, capturable=True),
    "FusedAdamW": lambda p: fused.FusedAdamW(p),
    "FusedAdam, rate on the device": lambda p: with_rate(fused.FusedAdam(p)),
    "FusedAdamW, eager": lambda p: fused.FusedAdamW(p, backend="eager"),
    "FusedSGD": lambda p: fused.FusedSGD(p, lr=0.1, momentum=0.9),
    "FusedAdagrad": lambda p: fused.FusedAdagrad(p),
    "FusedLAMB": lambda p: fused.FusedLAMB(p),
    "FusedNovoGrad": lambda p: fused.FusedNovoGrad(p),
}
ONCE: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, eps=1e-4, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, eps=1e-4, foreach=True),
}
REMAINDERS: dict[str, Callable[[Any], Optimizer]] = {
    "exact": lambda p: fused.FusedAdamW(p, master="remainder"),
    "8 bits": lambda p: fused.FusedAdamW(p, master="remainder8", moments="int8"),
    "bfloat16 moments": lambda p: fused.FusedAdamW(p, master="remainder", moments=torch.bfloat16),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip by value": {"clip": halfpeak.ClipValue(value=0.5)},
    "accumulation": {"accumulate": 2, "clip": 1.0},
}
START = 2
"""The first steps, in which optimizers create their states and tables."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with accelerator(monkeypatch) as found:
        yield found


class Net(nn.Module):
    """Layers that are cast, layers that are not, and one parameter large enough for a flat buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 600)
        self.norms = nn.Sequential(nn.BatchNorm1d(600), nn.LayerNorm(600))
        self.wide, self.last = nn.Linear(600, 600), nn.Linear(600, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(self.norms(self.first(x)).relu()).softmax(-1))


def waits_of(
    device: Device, build: Callable[[Any], Optimizer], level: str, *, start: int = START, **settings: Any
) -> list[list[str]]:
    """What makes the host wait in each of two steps, after the first ``start`` steps."""
    engine = prepared(device, build, level, **settings)
    waits: list[list[str]] = []
    for _ in range(start + 2):
        device.waits.clear()
        step(engine)
        waits.append(list(device.waits))
    return waits[start:]


def prepared(
    device: Device, build: Callable[[Any], Optimizer], level: Any, **settings: Any
) -> halfpeak.Engine:
    with torch.device("meta"):
        net = Net()
    model = on_device(net)
    device.parameters = list(model.parameters())
    # torch.autocast is off where torch finds no GPU.
    return halfpeak.prepare(model, build(list(model.parameters())), level, op_lists="apex", **settings)


def with_rate(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` with its learning rates in tensors on the device."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full((), 0.1, device="cuda")
    return optimizer


def step(engine: halfpeak.Engine) -> halfpeak.StepResult:
    with engine.forward():
        loss = loss_of(engine, torch.empty(3, 4, device="cuda"))
    engine.backward(loss)
    return engine.step()


def loss_of(engine: halfpeak.Engine, x: Tensor) -> Tensor:
    return engine.model(x).float().square().mean()


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (name, level)
        for name in NEVER
        for level in (LEVELS if name in ("torch, fused AdamW", "FusedAdamW") else ("O2", "O4"))
    ],
)
def test_nobody_waits(device: Device, name: str, level: str) -> None:
    assert waits_of(device, NEVER[name], level, clip=1.0) == [[], []]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["torch, fused AdamW", "FusedAdamW", "FusedAdamW, eager"])
def test_nobody_waits_whatever_was_asked_for(device: Device, name: str, settings: str) -> None:
    assert waits_of(device, NEVER[name], "O2", **SETTINGS[settings]) == [[], []]


@pytest.mark.parametrize("name", ["torch, fused AdamW", "FusedAdamW"])
def test_ranks_compare_their_losses_without_waiting(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    compare, compared = LossComparison.compare, list[Tensor | None]()

    def recording(*args: Any) -> Tensor | None:
        compared.append(compare(*args))
        return compared[-1]

    monkeypatch.setattr(LossComparison, "compare", recording)
    monkeypatch.setattr("halfpeak.parts.scaled_pass.is_multi_rank", lambda: True)
    assert waits_of(device, NEVER[name], "O2", num_losses=2) == [[], []]
    assert len(compared) == START + 2
    assert all(differs is not None and differs.is_cuda for differs in compared)


@pytest.mark.parametrize(
    "has_kernel",
    [False, pytest.param(True, marks=NEEDS_TRITON)],
)
def test_products_that_cannot_overflow_are_not_looked_at_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    """A scale that may fall below 1 can make finite gradients overflow, but neither one of 1 nor float16 in float32.

    So it is by torch's operations. The Triton kernel looks at the products while it writes them.
    """
    unscale, calls = torch._amp_foreach_non_finite_check_and_unscale_, list[int]()
    monkeypatch.setattr(
        torch, "_amp_foreach_non_finite_check_and_unscale_", lambda *args: (calls.append(1), unscale(*args))
    )
    counts: list[int] = []
    scaled = halfpeak.LEVELS["O5"].replace(loss_scale="dynamic")
    monkeypatch.setattr("halfpeak.ops.foreach.is_installed", lambda: has_kernel)
    for level in ("O5", "O2", scaled):
        engine = prepared(device, NEVER["torch, fused AdamW"], level)
        calls.clear()
        step(engine)
        counts.append(len(calls))
    # Gradients of low weights and of float32 weights.
    assert counts == ([1, 0, 0] if has_kernel else [2, 3, 4])


@pytest.mark.parametrize("name", REMAINDERS)
def test_nobody_waits_for_remainders(device: Device, name: str) -> None:
    assert waits_of(device, REMAINDERS[name], "O5", clip=1.0) == [[], []]


@pytest.mark.parametrize("name", ["torch, fused AdamW", "FusedAdamW"])
def test_nobody_waits_for_values(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a write through ``.data`` would have changed."""
    monkeypatch.setattr("halfpeak.parts.checks.COMPARE_EVERY", 2)
    engine = prepared(device, NEVER[name], "O2")
    for number in range(START + 3):
        device.waits.clear()
        step(engine)
        assert number < START or not device.waits
    assert engine._data_writes._differs is not None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ONCE)
def test_found_inf_is_waited_for_once(device: Device, name: str, level: str) -> None:
    first, second = waits_of(device, ONCE[name], level, start=0, clip=1.0)
    assert len(first) == len(second) == 1
    assert first[0].startswith("a value was read: step.py")


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_end_of_a_window_waits(device: Device, level: str) -> None:
    inside, end = waits_of(device, ONCE["AdamW"], level, accumulate=2)
    assert (len(inside), len(end)) == (0, 1)


@pytest.mark.parametrize("name", ["FusedAdamW", "FusedSGD", "FusedAdagrad"])
def test_the_kernels_of_a_step(device: Device, name: str) -> None:
    engine = prepared(device, NEVER[name], "O5", clip=1.0)
    for _ in range(START):
        step(engine)
    device.launches.clear()
    device.transfers.clear()
    step(engine)
    # Normalisation layers stay in float32, so gradients have two dtypes, and each dtype takes a launch.
    assert device.launches == ["measure", "measure", "control", "update", "update"]
    assert "cuda to cpu" in device.transfers


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["FusedAdamW", "FusedSGD"])
def test_a_capture_neither_waits_nor_compiles(
    device: Device, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prepared(device, NEVER[name], level, clip=1.0)
    warm: set[tuple[object, ...]] = set()
    capture = device.capture

    def begin(*args: Any, **kwargs: Any) -> Any:
        warm.update(device.variants)
        device.variants.clear()
        return capture(*args, **kwargs)

    monkeypatch.setattr("torch.cuda.graph", begin)
    replay = engine.capture(lambda x: loss_of(engine, x), torch.empty(3, 4, device="cuda"))
    assert device.variants
    assert device.variants <= warm
    for _ in range(2):
        device.waits.clear()
        device.launches.clear()
        replay(torch.empty(3, 4, device="cuda"))
        assert not device.waits + device.launches


def test_a_look_at_the_results_is_a_wait(device: Device) -> None:
    engine = prepared(device, NEVER["FusedAdamW"], "O2")
    result = step(engine)
    for look in (result.stepped, engine.read_scale, engine.state_dict):
        device.waits.clear()
        look()
        assert device.waits


def test_the_device_notices(device: Device) -> None:
    there = torch.empty(4, device="cuda")
    here = torch.zeros(4)
    for waits in (
        lambda: bool(there.sum() > 0),
        lambda: there.sum().item(),
        lambda: there.index_put_((there > 0,), there[0]),
        lambda: there.cpu(),
        lambda: here.to("cuda:0"),
        lambda: there.copy_(here, non_blocking=True),
        lambda: here.copy_(there, non_blocking=True),
        lambda: torch.tensor(1.0, device="cuda"),
        lambda: torch.tensor([1.0], pin_memory=True).to("cuda:0"),
    ):
        device.waits.clear()
        waits()
        assert len(device.waits) == 1
    device.waits.clear()
    torch.tensor([1.0], pin_memory=True).to("cuda:0", non_blocking=True)
    here.add_(1)
    assert not device.waits
    assert device.transfers == ["cpu to cuda"]
    with pytest.raises(RuntimeError, match="device"):
        there + here
