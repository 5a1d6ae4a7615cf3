"""The precision plugin for Lightning's Fabric, in both of its packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from integrations.plain_loop import SCALE, adamw, assert_same, batches, plain_run, weights
from support.nets import LEVELS, make_net

PACKAGES = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@pytest.fixture(params=["lightning"])
def lightning(request: pytest.FixtureRequest) -> SimpleNamespace:
    """One package, because both share the plugin's class; tests of differences are marked ``EITHER``."""
    package = pytest.importorskip(PACKAGES[request.param])
    ours = importlib.import_module(f"halfpeak.integrations.{request.param}")
    return SimpleNamespace(package=package, precision=ours.HalfpeakFabricPrecision)


EITHER = pytest.mark.parametrize("lightning", PACKAGES, indirect=True)


def setup(lightning: SimpleNamespace, level: str, build: Any = adamw) -> SimpleNamespace:
    precision = lightning.precision(level, {"scale": SCALE})
    fabric = lightning.package.Fabric(accelerator="cpu", devices=1, plugins=precision)
    fabric.launch()
    net = make_net()
    model, optimizer = fabric.setup(net, build(net.parameters()))
    precision.connect(model, optimizer)
    return SimpleNamespace(precision=precision, fabric=fabric, net=net, model=model, optimizer=optimizer)


def train(run: SimpleNamespace, start: int = 0, stop: int = 8, clip: float | None = None) -> list[bool]:
    stepped: list[bool] = []
    for x, y in batches()[start:stop]:
        loss = nn.functional.mse_loss(run.model(x).float(), y)
        run.fabric.backward(loss)
        if clip is not None:
            run.fabric.clip_gradients(run.model, run.optimizer, max_norm=clip, error_if_nonfinite=False)
        stepped.append(run.optimizer.step().stepped())
        run.optimizer.zero_grad()
    return stepped


@pytest.mark.parametrize("clip", [None, 0.01], ids=["plain", "clip"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_the_engines_bit_for_bit(lightning: SimpleNamespace, level: str, clip: float | None) -> None:
    run = setup(lightning, level)
    stepped = train(run, clip=clip)
    assert [number for number, moved in enumerate(stepped) if not moved] == [0, 4]
    by_hand = None if clip is None else (lambda params: nn.utils.clip_grad_norm_(list(params), clip))
    assert_same(weights(run.net), plain_run(level, clip=by_hand)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_goes_on_bit_for_bit(lightning: SimpleNamespace, level: str, tmp_path: Path) -> None:
    whole = setup(lightning, level)
    train(whole)
    half = setup(lightning, level)
    train(half, stop=5)
    names = ("model", "optimizer", "precision")
    half.fabric.save(tmp_path / "half.ckpt", {name: getattr(half, name) for name in names})
    resumed = setup(lightning, level)
    with torch.no_grad():
        resumed.net[0].weight.zero_()
    resumed.fabric.load(tmp_path / "half.ckpt", {name: getattr(resumed, name) for name in names})
    train(resumed, start=5)
    assert_same(weights(resumed.net), weights(whole.net))
    assert resumed.precision.state_dict() == whole.precision.state_dict()


@EITHER
def test_a_closure(lightning: SimpleNamespace) -> None:
    run = setup(lightning, "O2", lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    x, y = batches()[1]
    losses: list[float] = []

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = nn.functional.mse_loss(run.model(x).float(), y)
        run.fabric.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(3):
        assert run.optimizer.step(closure).stepped()
    assert losses[-1] < losses[0]


@EITHER
def test_backward_before_connect_says_what_to_write(lightning: SimpleNamespace) -> None:
    precision = lightning.precision("O2")
    fabric = lightning.package.Fabric(accelerator="cpu", devices=1, plugins=precision)
    net = make_net()
    model, optimizer = fabric.setup(net, adamw(net.parameters()))
    loss = model(batches()[1][0]).sum()
    with pytest.raises(halfpeak.OrderError, match=r"precision\.connect\(model, optimizer\)"):
        fabric.backward(loss)
    with pytest.raises(halfpeak.OrderError, match=r"precision\.connect\(model, optimizer\)"):
        optimizer.step()
