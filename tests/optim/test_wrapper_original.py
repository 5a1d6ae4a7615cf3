"""OptimWrapper against mmengine's: counters, divisors, groups, learning rates, states, logs, schedules."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak.optim as ours
from optim.families import FAMILIES, Unit, logged, logged_records, moves, new_hub, outcome, theirs, wrap
from optim.families import on_cpu as on_cpu
from support.states import same


def history(family: ModuleType, every: int, start: int, total: int, calls: int) -> list[Any]:
    """All counters and divisors of accumulation, before and after each backward pass."""
    model, wrapper = wrap(family, accumulative_counts=every)
    wrapper.initialize_count_status(model, start, total)
    found: list[Any] = [wrapper._accumulative_counts, wrapper._max_counts, wrapper._remainder_counts]
    for _ in range(calls):
        found += [wrapper.inner_count, wrapper._inner_count, wrapper.should_sync()]
        loss = wrapper.scale_loss(model())
        found.append(torch.autograd.grad(loss, model.weight, retain_graph=True)[0].item())
        wrapper.backward(loss)
        found.append(wrapper.should_update())
    return found


def test_counting_over_random_runs() -> None:
    generator = random.Random(0)
    for _ in range(150):
        every, start = generator.randint(1, 6), generator.randint(0, 7)
        total = generator.choice([-1, start + generator.randint(1, 15)])
        calls = 12 if total == -1 else total - start
        one, other = (history(family, every, start, total, calls) for family in FAMILIES.values())
        assert one == other, (every, start, total)


GROUPINGS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.8),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, betas=(0.7, 0.9)),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "groups": lambda m: torch.optim.SGD(
        [{"params": [p], "lr": 0.1 * (i + 1), "momentum": i / 10} for i, p in enumerate(m.parameters())],
        lr=0.5,
    ),
    "tensor lr": lambda m: torch.optim.AdamW(
        [{"params": [p]} for p in m.parameters()], lr=torch.tensor(0.25), foreach=False
    ),
}


def trained(family: ModuleType, grouping: str, steps: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapper = family.OptimWrapper(GROUPINGS[grouping](model), **options)
    for i in range(steps):
        wrapper.update_params(model(torch.full((2, 3), i + 1.0)).square().mean())
    return model, wrapper


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_rates_and_state(grouping: str) -> None:
    (_, mine), (_, other) = (trained(family, grouping) for family in FAMILIES.values())
    assert (mine.get_lr(), mine.get_momentum()) == (other.get_lr(), other.get_momentum())
    assert mine.defaults == other.defaults
    assert [group.keys() for group in mine.param_groups] == [group.keys() for group in other.param_groups]
    assert (mine.param_groups is mine.optimizer.param_groups) == (len(mine.optimizer.param_groups) == 1)
    assert repr(mine.state_dict()) == repr(other.state_dict())
    assert repr(mine) == repr(other)
    assert mine.add_param_group({"params": [nn.Parameter(torch.ones(1))]}) is None
    assert len(mine.optimizer.param_groups) == len(other.optimizer.param_groups) + 1


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(("source", "target"), [("ours", "theirs"), ("theirs", "ours")])
def test_each_continues_from_the_state_of_the_other(grouping: str, source: str, target: str) -> None:
    model, wrapper = trained(FAMILIES[source], grouping)
    saved = wrapper.state_dict()
    assert "halfpeak" not in saved
    text = repr(saved)
    twin, other = trained(FAMILIES[target], grouping, steps=0)
    twin.load_state_dict(model.state_dict())
    # halfpeak copies a loaded state; torch's optimizers keep its tensors and step them in place.
    other.load_state_dict(saved if target == "ours" else copy.deepcopy(saved))
    assert repr(other.state_dict()) == text
    for one, module in ((wrapper, model), (other, twin)):
        one.update_params(module(torch.ones(2, 3)).square().mean())
    assert same(model.parameters(), twin.parameters())


@pytest.mark.parametrize(
    "clip", [{"max_norm": 0.1}, {"max_norm": 9.0}, {"type": "value", "clip_value": 0.1}], ids=str
)
def test_logged_values(clip: dict[str, Any]) -> None:
    found: list[Any] = []
    for family in FAMILIES.values():
        with new_hub() as hub:
            _, wrapper = trained(family, "sgd", 7, clip_grad=dict(clip), accumulative_counts=3)
            found.append(([*hub.log_scalars], logged(hub)))
        found[-1] += (dict(wrapper.clip_grad_kwargs), wrapper.grad_name)
    assert found[0] == found[1]
    assert len(found[0][1]) == (2 if "max_norm" in clip else 0)


WARNINGS = {
    "whole": (3, 6, False, []),
    "inside": (3, 7, False, ["Resumed iteration number"]),
    "batch norm": (3, 6, True, ["Gradient accumulative"]),
    "both": (3, 7, True, ["Resumed iteration number", "Gradient accumulative"]),
    "batch norm alone": (1, 6, True, []),
}


@pytest.mark.parametrize("row", WARNINGS)
def test_warnings_of_initialize_count_status_go_to_its_logger(row: str) -> None:
    every, start, has_norm, begins = WARNINGS[row]
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if has_norm else nn.InstanceNorm1d(2))
    wrapper = ours.OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=every)
    with logged_records() as records:
        wrapper.initialize_count_status(model, start, 100)
    assert [record.levelname for record in records] == ["WARNING"] * len(begins)
    assert all(r.getMessage().startswith(b) for r, b in zip(records, begins, strict=True))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda wrapper: theirs.StepLR(wrapper, 2, gamma=0.5, by_epoch=False),
    "cosine": lambda wrapper: theirs.CosineAnnealingLR(wrapper, T_max=5, by_epoch=False),
    "one cycle": lambda wrapper: theirs.OneCycleLR(wrapper, eta_max=1.0, total_steps=9, by_epoch=False),
    "momentum": lambda wrapper: theirs.LinearMomentum(wrapper, end=4, by_epoch=False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grouping", ["sgd", "adam", "groups"])
def test_schedules_of_mmengine(schedule: str, grouping: str) -> None:
    found: list[Any] = []
    for family in FAMILIES.values():
        model, wrapper = trained(family, grouping, 0)
        scheduler = SCHEDULES[schedule](wrapper)
        rows: list[Any] = []
        for _ in range(6):
            wrapper.update_params(model(torch.ones(2, 3)).square().mean())
            scheduler.step()
            rows.append((wrapper.get_lr(), wrapper.get_momentum()))
        found.append([rows, [p.tolist() for p in model.parameters()]])
    assert found[0] == found[1]


TORCH_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
@pytest.mark.parametrize("grouping", ["sgd", "adam", "groups"])
def test_schedules_of_torch_move_a_wrapper_as_they_move_its_optimizer(schedule: str, grouping: str) -> None:
    found: list[Any] = []
    for on_wrapper in (True, False):
        model, wrapper = trained(ours, grouping, 0)
        scheduler = TORCH_SCHEDULES[schedule](wrapper if on_wrapper else wrapper.optimizer)
        rows: list[Any] = []
        for _ in range(6):
            wrapper.update_params(model(torch.ones(2, 3)).square().mean())
            scheduler.step()
            rows.append((wrapper.get_lr()["lr"], wrapper.get_momentum()))
        found.append(rows)
    assert found[0] == found[1]


def test_a_schedule_over_real_steps_sees_skipped_ones() -> None:
    model, wrapper = wrap(ours, accumulative_counts=2)
    schedule = torch.optim.lr_scheduler.StepLR(wrapper, 1, gamma=0.5)
    rates: list[float] = []
    for factor in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0):
        wrapper.update_params(model() * factor)
        if wrapper.stepped():
            schedule.step()
        rates += wrapper.get_lr()["lr"]
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_reduce_on_plateau_and_isinstance() -> None:
    model, wrapper = wrap(ours)
    assert isinstance(wrapper, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(wrapper, patience=0)
    for _ in range(3):
        moves(model, wrapper, 1)
        schedule.step(1.0)
    assert wrapper.get_lr()["lr"][0] < 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_base_model_trains_through_a_wrapper(family: str) -> None:
    """mmengine's own model class calls nothing but optim_context and update_params."""
    from mmengine.model import BaseModel

    class Toy(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.unit = Unit()

        def forward(self, inputs: Any, mode: str = "loss") -> Any:
            return {
                "loss_a": self.unit(),
                "loss_b": [self.unit(), self.unit()],
                "accuracy": torch.tensor(0.5),
            }

    model = Toy()
    wrapper = FAMILIES[family].OptimWrapper(
        torch.optim.SGD(model.parameters(), lr=1.0), accumulative_counts=2
    )
    logs = [model.train_step({"inputs": torch.ones(1)}, optim_wrapper=wrapper) for _ in range(2)]
    assert model.unit.weight.item() == -3.0
    assert set(logs[0]) == {"loss", "loss_a", "loss_b", "accuracy"}


def test_amp_states_cross_over(on_cpu: None) -> None:
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
        assert outcome(wrapper.loss_scaler.state_dict) == "fine"
