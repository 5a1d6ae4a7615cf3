"""A skipped step restores batch-norm statistics, including values that user code wrote since the last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import Engine
from support.nets import TYPICAL
from support.states import same


def prepared(level: str, **options: Any) -> Engine:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return halfpeak.prepare(model, optimizer, halfpeak.LEVELS[level].replace(loss_scale=8.0), **options)


def step(engine: Engine, factor: float) -> bool:
    with engine.forward():
        loss = engine.model(torch.randn(6, 4)).float().square().sum() * factor
    engine.backward(loss)
    return engine.step().stepped()


def statistics(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def load_all(model: nn.Module) -> None:
    model.load_state_dict({key: value + 3 for key, value in model.state_dict().items()})


def load_a_part(model: nn.Module) -> None:
    load_all(model.get_submodule("2"))


def estimate_anew(model: nn.Module) -> None:
    torch.optim.swa_utils.update_bn([torch.randn(6, 4) + 7 for _ in range(3)], model)


def forward_and_load(model: nn.Module) -> None:
    model(torch.randn(6, 4))
    load_all(model)


WRITERS = (load_all, load_a_part, estimate_anew, forward_and_load)


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_skip_keeps_what_was_written_since_the_last_step(
    level: str, write: Callable[[nn.Module], None], steps_before: int
) -> None:
    engine = prepared(level)
    for _ in range(steps_before):
        assert step(engine, 1.0)
    write(engine.model)
    written = statistics(engine.model)
    assert not step(engine, torch.inf)
    assert same(statistics(engine.model), written)


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("model_first", [False, True])
def test_a_skip_after_a_load_goes_back_to_before_the_window_that_was_saved(
    level: str, model_first: bool
) -> None:
    saved, engine = prepared(level, accumulate=2), prepared(level, accumulate=2)
    before = statistics(saved.model)
    step(saved, 1.0)
    loads: list[Callable[[], object]] = [
        lambda: engine.load_loop_state_dict(saved.loop_state_dict()),
        lambda: engine.model.load_state_dict(saved.model.state_dict()),
    ]
    for load in reversed(loads) if model_first else loads:
        load()
    assert not step(engine, torch.inf)
    assert same(statistics(engine.model), before)
    # What is loaded inside of a later window is kept.
    step(engine, 1.0)
    load_all(engine.model)
    written = statistics(engine.model)
    assert not step(engine, torch.inf)
    assert same(statistics(engine.model), written)


def test_an_evaluation_between_forward_and_step_changes_nothing() -> None:
    engine = prepared("O0")
    before = statistics(engine.model)
    with engine.forward():
        loss = engine.model(torch.randn(6, 4)).sum() * torch.inf
    engine.model(torch.full((6, 4), torch.inf))
    engine.backward(loss)
    engine.step()
    assert same(statistics(engine.model), before)
