"""A step waits for the device at most once, also if it skips or clips, and never with torch's fused optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import halfpeak
from halfpeak.core import decide as decide_module
from halfpeak.engine import step as step_module
from laws.test_waits import Waits
from reliability.support import LEVELS, batch, net

WAITING: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, eps=1e-4, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, eps=1e-4, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, eps=1e-4, foreach=True),
}
FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, fused=True),
}
CLIPS = {"no clip": None, "norm": 1.0, "value": halfpeak.ClipValue(value=0.5)}
CLIPPED, CLIPPED_FUSED = (
    [
        (level, name, list(CLIPS)[(i + j) % 3])
        for i, level in enumerate(LEVELS)
        for j, name in enumerate(optimizers)
    ]
    for optimizers in (WAITING, FUSED)
)


def waits_per_step(build: Callable[[Any], Optimizer], level: str, clip: Any, poisoned: set[int]) -> list[int]:
    """Waits per iteration, minus the optimizer's own: foreach optimizers read step counts, which lie on the host."""
    model = net(norm="batch")
    optimizer = build(model.parameters())
    scale = halfpeak.ScaleConfig(init=256.0)
    engine = halfpeak.prepare(model, optimizer, level, clip=clip, scale=scale)
    counts: list[int] = []
    for step in range(8):
        factor = float("inf") if step in poisoned else 1.0
        with Waits() as waits:
            with engine.forward():
                loss = model(batch(step)).float().square().mean() * factor
            engine.backward(loss)
            result = engine.step()
        counts.append(len(waits.places) - (own_waits(build) if result.stepped() else 0))
    return counts


def own_waits(build: Callable[[Any], Optimizer]) -> int:
    """Waits in the second step of the optimizer without an engine."""
    parameters = list(net(norm="batch").parameters())
    optimizer = build(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Waits() as waits:
        optimizer.step()
    return len(waits.places)


@pytest.mark.parametrize(("level", "name", "clip"), CLIPPED)
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "as on a device"])
def test_an_ordinary_optimizer_waits_once(
    on_host: bool, name: str, clip: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host there is nothing to wait for."""
    if not on_host:
        monkeypatch.setattr(decide_module, "host_values", lambda *_: None)
    assert waits_per_step(WAITING[name], level, CLIPS[clip], {2, 3}) == [int(not on_host)] * 8


@pytest.mark.parametrize(("level", "name", "clip"), CLIPPED_FUSED)
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "as on a device"])
def test_a_fused_optimizer_never_waits(
    on_host: bool, name: str, clip: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:
        monkeypatch.setattr(step_module, "host_values", lambda *_: None)
        monkeypatch.setattr(decide_module, "host_values", lambda *_: None)
    # No overflow under a static scale: the host would wait in each step until one is finite.
    dynamic = level in ("O1", "O2")
    counts = waits_per_step(FUSED[name], level, CLIPS[clip], {3} if dynamic else set())
    # The first step of SGD with momentum creates its buffers.
    start = 1 if name == "SGD" else 0
    assert counts[start:] == [0] * (8 - start)
