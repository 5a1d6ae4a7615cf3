"""Loops whose calls do not mean what they seem to mean are told so, once."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import halfpeak


def prepared(
    level: str = "O2", **options: object
) -> tuple[nn.Module, torch.optim.Optimizer, halfpeak.Engine]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, halfpeak.prepare(model, optimizer, level, on_skip=None, **options)  # type: ignore[arg-type]


def one_pass(model: nn.Module, engine: halfpeak.Engine, factor: float = 1.0) -> None:
    with engine.forward():
        loss: Tensor = model(torch.ones(3, 4)).float().square().mean() * factor
    engine.backward(loss)


@contextmanager
def told(text: str, times: int = 1) -> Generator[None]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [text in str(one.message) for one in seen] == [True] * times, [str(one.message) for one in seen]


def test_zero_grad_inside_a_window() -> None:
    model, optimizer, engine = prepared(accumulate=4)
    with told("leave zero_grad() out"):
        for _ in range(8):
            optimizer.zero_grad()
            one_pass(model, engine)
            engine.step()


def test_a_step_at_the_end_of_each_window_alone() -> None:
    model, _, engine = prepared(accumulate=4)
    with told("is called after each of them"):
        for number in range(32):
            one_pass(model, engine)
            if number % 4 == 3:
                engine.step()


def test_no_step_at_all() -> None:
    model, _, engine = prepared(accumulate=2)
    with told("engine.step() was never called"):
        for _ in range(50):
            one_pass(model, engine)


def test_no_step_at_all_where_each_pass_drops_the_one_before() -> None:
    model, optimizer, engine = prepared()
    with told("engine.step() was never called"):
        for _ in range(12):
            optimizer.zero_grad()
            one_pass(model, engine)


def test_zero_grad_between_backward_and_step() -> None:
    model, optimizer, engine = prepared()
    with told("calls of engine.step() without gradients"):
        for _ in range(30):
            one_pass(model, engine)
            optimizer.zero_grad()
            engine.step()


def test_a_schedule_that_runs_ahead() -> None:
    model, optimizer, engine = prepared()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with told("its schedule runs ahead"):
        for _ in range(6):
            one_pass(model, engine, 1e30)
            engine.step()
            scheduler.step()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_right_loop_is_told_nothing(accumulate: int) -> None:
    model, optimizer, engine = prepared(accumulate=accumulate, num_losses=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with told("", 0):
        for number in range(24):
            one_pass(model, engine, 1e30 if number in (3, 4, 5) else 1.0)
            if engine.step().stepped():
                scheduler.step()


@pytest.mark.parametrize(
    ("factor", "text"),
    [(float("nan"), "the loss itself stays non-finite"), (1e30, "cannot fall any further")],
)
def test_the_error_at_the_end_says_what_the_log_has_said(factor: float, text: str) -> None:
    rule = halfpeak.ScaleConfig(init=1.0, floor=1.0, patience=5, recovers=True)
    model, _, engine = prepared(scale=rule)

    def train() -> None:
        for _ in range(20):
            one_pass(model, engine, factor)
            engine.step()

    with pytest.raises(halfpeak.LossScaleCollapse, match=rf"{text}.* halfpeak\.diagnose"):
        train()
