"""Edge cases of an accumulating wrapper: halfpeak's result, and mmengine 0.10.7's.

The table in ``docs/compat/mmengine.md`` has the rows that differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from laws.source import ROOT
from optim.families import FAMILIES, MessageHub, logged, moves, new_hub, ours, outcome, theirs, wrap
from optim.families import on_cpu as on_cpu

Run = Callable[[ModuleType], Any]


@dataclass(frozen=True)
class Case:
    """One row: the case, halfpeak's result in words, mmengine's where it differs, and a function that shows both."""

    case: str
    here: str
    original: str
    run: Run
    ours: Any
    theirs: Any


CASES: list[Case] = []


def case(text: str, here: str, ours: Any, theirs: Any = None, original: str = "") -> Callable[[Run], Run]:
    """Add a row. Without ``original``, mmengine's result must equal halfpeak's."""

    def add(run: Run) -> Run:
        CASES.append(Case(text, here, original, run, ours, theirs if original else ours))
        return run

    return add


def counted(family: ModuleType, every: int, start: int, total: int, calls: int) -> list[float | str]:
    model, wrapper = wrap(family, accumulative_counts=every)
    wrapper.initialize_count_status(model, start, total)
    return moves(model, wrapper, calls)


@case("a run of no iterations, and one is made", "windows of the full length follow", [0.0, 0.0, 1.0],
      ["AssertionError"], "raises an `AssertionError`")  # fmt: skip
def _(family: ModuleType) -> Any:
    return counted(family, 3, 0, 0, 3)


@case("more backward passes than announced", "each window is divided by its own length, also after the end",
      ([0.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0]),
      ([0.0, 0.0, 1.0, "AssertionError"], [0.0, 1.0, 0.5], [1.0, 1.0]),
      "raises an `AssertionError`, or divides by another length")  # fmt: skip
def _(family: ModuleType) -> Any:
    return counted(family, 3, 0, 3, 6), counted(family, 3, 0, 2, 3), counted(family, 1, 0, 1, 2)


@case("resumed inside a window, its gradients not saved", "a warning; what is left of it is divided by its full "
      "length. A state saved by halfpeak holds the gradients, and then the step is exact",
      [0.3333, 0.0, 0.0, 1.0, 1.0])  # fmt: skip
def _(family: ModuleType) -> Any:
    return counted(family, 3, 2, 7, 5)


@case("two backward passes in one iteration", "count two", (4, [False, True], -2.0))
def _(family: ModuleType) -> Any:
    model, wrapper = wrap(family, accumulative_counts=4)
    due: list[bool] = []
    for _ in range(2):
        for _ in range(2):
            wrapper.backward(wrapper.scale_loss(model() * 2))
        due.append(wrapper.should_update())
    wrapper.step()
    return wrapper.inner_count, due, model.weight.item()


@case("a step with clipping, and no parameter has a gradient", "nothing is clipped, logged or moved",
      ("fine", "fine", []), ("fine", "AssertionError", []), "`AmpOptimWrapper` raises an `AssertionError`")  # fmt: skip
def _(family: ModuleType) -> Any:
    with new_hub() as hub:
        plain = wrap(family, clip_grad={"max_norm": 1.0})[1]
        amp = wrap(family, "AmpOptimWrapper", clip_grad={"max_norm": 1.0}, dtype="float16")[1]
        return outcome(plain.step), outcome(amp.step), logged(hub)


def grouped(family: ModuleType, groups: int, kind: str = "OptimWrapper", **options: Any) -> Any:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.5 + i} for i, p in enumerate(parameters)], lr=0.1)
    return getattr(family, kind)(optimizer=optimizer, **options)


def settings(wrapper: Any) -> Any:
    return wrapper.get_lr(), len(wrapper.param_groups), "base_param_settings" in wrapper.state_dict()


@case("the state of an AmpOptimWrapper for an OptimWrapper", "loads; the scale is left out", ("fine", False))
def _(family: ModuleType) -> Any:
    saved = wrap(family, "AmpOptimWrapper", dtype="float16")[1].state_dict()
    wrapper = wrap(family)[1]
    return outcome(lambda: wrapper.load_state_dict(saved)), "loss_scaler" in wrapper.state_dict()


@case("the state of an OptimWrapper for an AmpOptimWrapper", "loads; the scale stays", 2.0**16)
def _(family: ModuleType) -> Any:
    wrapper = wrap(family, "AmpOptimWrapper", dtype="float16")[1]
    wrapper.load_state_dict(wrap(family)[1].state_dict())
    return wrapper.loss_scaler.get_scale()


@case("a state with `base_param_settings` for a wrapper with one group", "they appear",
      ({"base_lr": [7.0], "lr": [0.5]}, 2, True))  # fmt: skip
def _(family: ModuleType) -> Any:
    wrapper = grouped(family, 1)
    wrapper.load_state_dict({**wrapper.state_dict(), "base_param_settings": {"lr": 7.0}})
    return settings(wrapper)


def overflowed(family: ModuleType, loss_scale: Any, every: int) -> Any:
    model, wrapper = wrap(
        family, "AmpOptimWrapper", dtype="float16", loss_scale=loss_scale, accumulative_counts=every
    )
    for i in range(2 * every):
        wrapper.update_params(model() * (float("inf") if i == 0 else 1.0))
    return round(model.weight.item(), 4), wrapper.inner_count, wrapper.loss_scaler.get_scale()


@case("an overflow inside a window (AMP)", "the whole window is lost, and the count goes on",
      (-1.0, 6, 2.0**15))  # fmt: skip
def _(family: ModuleType) -> Any:
    return overflowed(family, "dynamic", 3)


@case("an overflow under a static scale", "the step is skipped, the scale stays", (-1.0, 2, 512.0))
def _(family: ModuleType) -> Any:
    return overflowed(family, 512.0, 1)


@case("a state saved with `enabled=False` for a wrapper that scales", "loads; the scale stays",
      ("fine", 2.0**16), ("RuntimeError", 2.0**16),
      "raises a `RuntimeError`")  # fmt: skip
def _(family: ModuleType) -> Any:
    saved = wrap(family, "AmpOptimWrapper", dtype="float16", loss_scale={"enabled": False})[1].state_dict()
    wrapper = wrap(family, "AmpOptimWrapper", dtype="float16")[1]
    return outcome(lambda: wrapper.load_state_dict(saved)), wrapper.loss_scaler.get_scale()


class Reduced(nn.Module):
    """Has ``no_sync``, as DistributedDataParallel has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.entered = 0

    def forward(self) -> torch.Tensor:
        return self.weight * 1.0

    def no_sync(self) -> Any:
        self.entered += 1
        return torch.enable_grad()


def synced(family: ModuleType, model: Any, every: int, total: int) -> list[bool]:
    wrapper = family.OptimWrapper(torch.optim.SGD(model.parameters(), lr=1.0), accumulative_counts=every)
    wrapper.initialize_count_status(model, 0, total)
    found: list[bool] = []
    for _ in range(total):
        found.append(wrapper.should_sync())
        with wrapper.optim_context(model):
            loss = model()
        wrapper.update_params(loss)
    return found


@case("a model without `no_sync`", "the context has nothing to enter", [False, False, True])
def _(family: ModuleType) -> Any:
    return synced(family, wrap(family)[0], 3, 3)


@case("no accumulation, and a model with `no_sync`", "it is never entered", ([True, True], 0))
def _(family: ModuleType) -> Any:
    model = Reduced()
    return synced(family, model, 1, 2), model.entered


@case("the last iteration of a run that ends inside a window", "gradients are reduced",
      ([False, False, True, True], 2, -2.0))  # fmt: skip
def _(family: ModuleType) -> Any:
    model = Reduced()
    return synced(family, model, 3, 4), model.entered, model.weight.item()


@case("a wrapper made before the message hub of its run", "logs to the hub of the run", ([], [3.0]), ([3.0], []),
      "logs to the hub of its construction")  # fmt: skip
def _(family: ModuleType) -> Any:
    with new_hub() as before:
        model, wrapper = wrap(family, clip_grad={"max_norm": 1.0})
        with new_hub() as hub:
            assert MessageHub.get_current_instance() is hub
            wrapper.update_params(model() * 3)
            return logged(before), logged(hub)


@case("`wrapper.optimizer = other`", "used from then on; the loss scale goes on, the base settings stay",
      (-1.0, -3.0, 2.0**15, {"lr": [3.0]}))  # fmt: skip
def _(family: ModuleType) -> Any:
    model, wrapper = wrap(family, "AmpOptimWrapper", dtype="float16")
    moves(model, wrapper, 1)
    before = model.weight.item()
    wrapper.update_params(model() * float("inf"))
    wrapper.optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    moves(model, wrapper, 1)
    return before, model.weight.item() - before, wrapper.loss_scaler.get_scale(), wrapper.get_lr()


@case("a scheduler that is stepped in every iteration, and accumulation", "torch's schedulers give no warning", 0, 1,
      "warns that no step was taken")  # fmt: skip
def _(family: ModuleType) -> Any:
    model, wrapper = wrap(family, accumulative_counts=3)
    schedule = (
        torch.optim.lr_scheduler.StepLR(wrapper, 1)
        if family is ours
        else theirs.StepLR(wrapper, 1, by_epoch=False)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            wrapper.update_params(model())
            schedule.step()
    return len(caught)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", CASES, ids=lambda row: row.case)
def test_answer(row: Case, family: str, on_cpu: None) -> None:
    assert row.run(FAMILIES[family]) == getattr(row, family)


def test_answers_differ_exactly_where_the_originals_is_given() -> None:
    assert [row.case for row in CASES if row.ours != row.theirs] == [
        row.case for row in CASES if row.original
    ]


def test_the_page_has_the_rows_that_differ() -> None:
    text = (ROOT / "docs" / "compat" / "mmengine.md").read_text()
    rows = [f"| {row.case} | {row.original} | {row.here} |" for row in CASES if row.original]
    assert "\n".join(rows) in text
