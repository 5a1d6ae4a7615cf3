"""``on_skip`` reports skips that are not the usual search for a scale, and with ``"diagnose"`` names the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak.diagnosis.skips import SkipEvent
from support.states import same


def make(level: str = "O2", **options: Any) -> halfpeak.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[0].weight, 0.5)
    return halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), level, **options)


def run(engine: halfpeak.Engine, steps: int, *, loss: float = 0.0, grad: float = 0.0) -> None:
    for _ in range(steps):
        with engine.forward():
            out = engine.model(torch.full((2, 4), 0.1))
            out.register_hook(lambda found: found + grad)
            value = out.float().square().mean() * (1 + loss)
        engine.backward(value)
        engine.step()


def test_the_search_for_a_scale_and_one_overflow_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    run(engine, 3, grad=torch.inf)
    run(engine, 30)
    run(engine, 1, grad=torch.inf)
    assert engine.read_scale() == 2.0**12
    assert not caplog.messages


def test_a_loss_that_is_not_finite_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    for _ in range(5):
        run(engine, 30)
        run(engine, 1, loss=torch.nan)
    (line,) = caplog.messages
    assert line.startswith("step 31 was skipped, and no loss scale would help. Not finite: 2.bias, 2.weight")
    assert "halfpeak.diagnose(engine, closure)" in line


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_without_a_loss_scale_any_skip_is_told(level: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(level)
    run(engine, 2)
    run(engine, 1, grad=torch.nan)
    assert [line.split(",")[0] for line in caplog.messages] == ["step 3 was skipped"]


def test_a_scale_that_falls_far_and_nears_its_floor() -> None:
    told: list[SkipEvent] = []
    engine = make(on_skip=lambda engine, event: told.append(event))
    run(engine, 1)
    run(engine, 30, grad=torch.inf)
    assert [event.kind for event in told] == ["skip", "floor"]
    assert "fallen from 65536 to 2048" in told[0].message
    assert "down to 0.000976562" in told[1].message


@pytest.mark.parametrize(("good", "shares"), [(19, []), (17, ["11 of the last 200 steps were skipped"])])
def test_the_share_of_skips_in_a_window(good: int, shares: list[str]) -> None:
    told: list[SkipEvent] = []
    engine = make(on_skip=lambda engine, event: told.append(event), level="O5")
    while int(engine.num_steps + engine.num_skipped) < 200:
        run(engine, good)
        run(engine, 1, loss=torch.nan)
    assert [event.message for event in told if event.kind == "share"] == shares


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_diagnose_writes_what_was_wrong_with_the_step(
    level: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make(level, on_skip="diagnose", accumulate=accumulate)
    run(engine, 2 * accumulate)
    before = [parameter.clone() for parameter in engine.model.parameters()]
    with engine.forward():
        loss = engine.model(torch.full((2, 4), 6e4)).float().mean()
    engine.backward(loss)
    engine.step()
    run(engine, accumulate - 1)
    found = json.loads((tmp_path / "diagnosis-3.json").read_text())
    assert (found["where"], found["module"], found["reason"]) == ("forward", "0", "overflow")
    assert (tmp_path / "diagnosis-3.html").is_file()
    assert same(before, engine.model.parameters())


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_finite_gradients_whose_sum_overflows_are_not_stepped(passes: int, scale: float) -> None:
    """At O3 gradients are summed in float16."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)
    engine = halfpeak.prepare(model, optimizer, halfpeak.LEVELS["O3"].replace(loss_scale=scale))
    before = model.weight.detach().clone()
    for _ in range(passes):
        with engine.forward():
            loss = model(torch.full((1, 1), 40000.0)).sum()
        engine.backward(loss)
    result = engine.step()
    assert result.stepped() == (passes == 1)
    assert torch.equal(model.weight, before) == (passes > 1)
    assert model.weight.isfinite().all()
