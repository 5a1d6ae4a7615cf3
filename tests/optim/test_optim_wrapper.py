"""OptimWrapper in the order of mmengine's page: counts and divisors, groups, logs, schedules, overrides, closures."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

import halfpeak.optim as ours
from halfpeak.core.errors import LossScaleCollapse
from halfpeak.fused import FusedSGD
from halfpeak.optim import OptimWrapper, ScalarHistory
from optim.families import FAMILIES, Unit, logged, logged_records, new_hub, theirs, wrap
from optim.families import on_cpu as on_cpu
from support.nets import make_batch, make_net, overflowing

# Counters and divisors


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


WARNINGS = {
    "whole": (3, 6, False, []),
    "inside": (3, 7, False, ["Resumed iteration number"]),
    "both": (3, 7, True, ["Resumed iteration number", "Gradient accumulative"]),
    "batch norm alone": (1, 6, True, []),
}


@pytest.mark.parametrize("row", WARNINGS)
def test_warnings_of_initialize_count_status_go_to_its_logger(row: str) -> None:
    every, start, has_norm, begins = WARNINGS[row]
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if has_norm else nn.InstanceNorm1d(2))
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=every)
    with logged_records() as records:
        wrapper.initialize_count_status(model, start, 100)
    assert [record.levelname for record in records] == ["WARNING"] * len(begins)
    assert all(r.getMessage().startswith(b) for r, b in zip(records, begins, strict=True))


def test_zero_grad_leaves_what_it_was_asked_to() -> None:
    model, wrapper = wrap(ours)
    wrapper.update_params(model(), zero_kwargs={"set_to_none": False})
    assert model.weight.grad == 0.0
    wrapper.update_params(model())
    assert (model.weight.grad, model.weight.item()) == (None, -2.0)


def test_a_failed_backward_is_not_counted() -> None:
    model, wrapper = wrap(ours, accumulative_counts=2)
    wrapper.update_params(model())
    grad = model.weight.grad.clone()
    with pytest.raises(RuntimeError, match="scalar"):
        wrapper.update_params(model() * torch.ones(2))
    assert wrapper.inner_count == 1
    assert torch.equal(model.weight.grad, grad)
    wrapper.update_params(model())
    assert model.weight.item() == -1.0


# Groups, rates, logs

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
    mine.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(mine.optimizer.param_groups) == len(other.optimizer.param_groups) + 1


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


@pytest.mark.parametrize(
    "kind", [ScalarHistory, type("Scalars", (dict,), {"update_scalar": dict.__setitem__})]
)
def test_a_sink_gets_the_norms_before_clipping(kind: Any) -> None:
    """Also one that is false while it is empty."""
    with new_hub() as hub:
        model, wrapper = wrap(ours, clip_grad={"max_norm": 0.5}, sink=kind(), accumulative_counts=2)
        for factor in (1.0, 3.0, 8.0, 8.0):
            wrapper.update_params(model() * factor)
        assert not hub.log_scalars
    sink = wrapper.message_hub
    if kind is ScalarHistory:
        assert (sink.read("train/grad_norm"), sink.read("other")) == ([2.0, 8.0], [])
    else:
        assert sink == {"train/grad_norm": torch.tensor(8.0)}
    assert model.weight.item() == pytest.approx(-1.0)


def test_own_history_without_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wrapper = wrap(ours, clip_grad={"max_norm": 0.5})
    monkeypatch.delitem(sys.modules, "mmengine.logging")
    wrapper.update_params(model() * 4)
    assert wrapper.history.read("train/grad_norm") == [4.0]


def test_a_history_keeps_the_newest() -> None:
    history = ScalarHistory(limit=2)
    for value in range(4):
        history.update_scalar("a", torch.tensor(float(value)))
    assert history.read("a") == [2.0, 3.0]


def test_an_error_is_raised_where_a_norm_that_is_not_finite_is_said_to_be_one() -> None:
    model, wrapper = wrap(ours, clip_grad={"max_norm": 1.0, "error_if_nonfinite": True})
    wrapper.update_params(model() * 4)
    with pytest.raises(RuntimeError, match="norm is inf and clip_grad has error_if_nonfinite=True"):
        wrapper.update_params(model() * torch.inf)
    assert model.weight.item() == pytest.approx(-1.0)


# Schedules

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda wrapper: theirs.StepLR(wrapper, 2, gamma=0.5, by_epoch=False),
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


torch_schedules = torch.optim.lr_scheduler
TORCH_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: torch_schedules.OneCycleLR(o, max_lr=1.0, total_steps=9),
    "plateau": lambda o: torch_schedules.ReduceLROnPlateau(o, patience=0),
    "chained": lambda o: torch_schedules.SequentialLR(
        o, [torch_schedules.LinearLR(o, 0.1, 1.0, 2), torch_schedules.ExponentialLR(o, 0.9)], milestones=[2]
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
            scheduler.step(*([1.0] if schedule == "plateau" else []))
            rows.append((wrapper.get_lr()["lr"], wrapper.get_momentum()))
        found.append(rows)
    assert found[0] == found[1]
    assert found[0][0] != found[0][-1]


def test_a_schedule_over_real_steps_sees_skipped_ones() -> None:
    model, wrapper = wrap(ours, accumulative_counts=2, skip_nonfinite=True)
    schedule = torch_schedules.StepLR(wrapper, 1, gamma=0.5)
    rates: list[float] = []
    for factor in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0):
        wrapper.update_params(model() * factor)
        if wrapper.stepped():
            schedule.step()
        rates += wrapper.get_lr()["lr"]
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


# Models, subclasses and optimizers of user code


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
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapper = FAMILIES[family].OptimWrapper(optimizer, accumulative_counts=2)
    logs = [model.train_step({"inputs": torch.ones(1)}, optim_wrapper=wrapper) for _ in range(2)]
    assert model.unit.weight.item() == -3.0
    assert set(logs[0]) == {"loss", "loss_a", "loss_b", "accuracy"}


Methods = dict[str, Callable[..., Any]]


def own_step(self: Any, **kwargs: Any) -> None:
    if self.clip_grad_kwargs:
        self._clip_grad()
    self.optimizer.step(**kwargs)


def scaler_step(self: Any, **kwargs: Any) -> None:
    self.loss_scaler.unscale_(self.optimizer)
    self._clip_grad()
    scaler_step_alone(self, **kwargs)


def scaler_step_alone(self: Any, **kwargs: Any) -> None:
    self.loss_scaler.step(self.optimizer, **kwargs)
    self.loss_scaler.update(self._scale_update_param)


def own_backward(self: Any, loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)
    self._inner_count += 1


def scaler_backward(self: Any, loss: Tensor, **kwargs: Any) -> None:
    own_backward(self, self.loss_scaler.scale(loss), **kwargs)


def own_clip(self: Any) -> None:
    for group in self.optimizer.param_groups:
        assert self.clip_func(group["params"], **self.clip_grad_kwargs) > 0
    self.message_hub.update_scalar("train/own_norm", 1.0)


def own_counts(self: Any, model: nn.Module, init_counts: int, max_counts: int) -> None:
    self._inner_count, self._max_counts = init_counts, max_counts
    self._remainder_counts = max_counts % self._accumulative_counts


def own_update(self: Any) -> bool:
    return self._inner_count % 3 == 0


def own_zero(self: Any, **kwargs: Any) -> None:
    self.optimizer.zero_grad(set_to_none=False, **kwargs)


OVERRIDES: dict[str, tuple[str, Methods]] = {
    "nothing": ("OptimWrapper", {}),
    "step": ("OptimWrapper", {"step": own_step}),
    "backward": ("OptimWrapper", {"backward": own_backward}),
    "backward and step": ("OptimWrapper", {"backward": own_backward, "step": own_step}),
    "_clip_grad": ("OptimWrapper", {"_clip_grad": own_clip}),
    "_clip_grad and step": ("OptimWrapper", {"_clip_grad": own_clip, "step": own_step}),
    "initialize_count_status": ("OptimWrapper", {"initialize_count_status": own_counts}),
    "should_update": ("OptimWrapper", {"should_update": own_update}),
    "zero_grad": ("OptimWrapper", {"zero_grad": own_zero}),
    "amp": ("AmpOptimWrapper", {}),
    "amp step": ("AmpOptimWrapper", {"step": scaler_step}),
    "amp backward": ("AmpOptimWrapper", {"backward": scaler_backward}),
    "amp backward and step": ("AmpOptimWrapper", {"backward": scaler_backward, "step": scaler_step}),
    "amp step without clip": ("AmpOptimWrapper", {"backward": scaler_backward, "step": scaler_step_alone}),
    "amp _clip_grad": ("AmpOptimWrapper", {"_clip_grad": own_clip}),
}


class Noting(torch.optim.SGD):
    """An SGD whose ``step`` and ``zero_grad`` take an extra argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def step(self, closure: Any = None, *, note: Any = None) -> Any:
        self.seen.append(note)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True, note: Any = None) -> None:
        self.seen.append(note)
        super().zero_grad(set_to_none)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", OVERRIDES)
@pytest.mark.parametrize("updates", [{}, {"step_kwargs": {"note": 1}}], ids=["", "kwargs"])
def test_an_override_trains_as_in_the_original(case: str, updates: dict[str, Any]) -> None:
    kind, methods = OVERRIDES[case]
    found: list[Any] = []
    for family in FAMILIES.values():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = Noting(model.parameters(), lr=0.1, momentum=0.9)
        cls = types.new_class("Own", (getattr(family, kind),), exec_body=lambda body: body.update(methods))
        options = {"loss_scale": 8.0} if kind == "AmpOptimWrapper" else {}
        with new_hub() as hub:
            wrapper = cls(optimizer=optimizer, accumulative_counts=2, clip_grad={"max_norm": 0.5}, **options)
            wrapper.initialize_count_status(model, 0, 6)
            for _ in range(6):
                wrapper.update_params(model(torch.randn(8, 4)).square().mean(), **updates)
            norms = [logged(hub, f"train/{name}_norm") for name in ("grad", "own")]
        found.append((list(model.parameters()), norms, optimizer.seen))
    (mine, my_norms, my_notes), (original, norms, notes) = found
    torch.testing.assert_close(mine, original)
    for one, other in zip(my_norms, norms, strict=True):
        assert one == pytest.approx(other)
    assert my_notes == notes


def test_a_step_of_an_override_counts_as_taken() -> None:
    weight = nn.Parameter(torch.ones(2))
    own = type("Own", (OptimWrapper,), {"step": own_step})
    wrapper = own(torch.optim.SGD([weight], lr=0.5), accumulative_counts=2)
    moved = []
    for _ in range(4):
        wrapper.update_params(weight.sum())
        moved.append(wrapper.stepped())
    assert moved == [False, True, False, True]


def test_a_step_with_arguments_is_told_by_stepped() -> None:
    weight = nn.Parameter(torch.ones(1))
    wrapper = OptimWrapper(Noting([weight], lr=0.5), skip_nonfinite=True)
    told: list[bool] = []
    for factor in (1.0, float("inf")):
        wrapper.backward(weight.sum() * factor)
        wrapper.step(note="this one")
        told.append(wrapper.stepped())
        wrapper.zero_grad()
    assert (told, weight.item()) == ([True, False], 0.5)


class Foreign:
    """An optimizer that is no ``torch.optim.Optimizer``."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [weight], "lr": 0.5}]
        self.defaults = {"lr": 0.5}
        self.saved: Any = None

    def step(self, factor: float = 1.0) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= factor * 0.5 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: Any) -> None:
        self.saved = state


@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_a_foreign_optimizer_trains(kind: str) -> None:
    weight = nn.Parameter(torch.full((1,), 3.0))
    optimizer: Any = Foreign(weight)
    options = {} if kind == "OptimWrapper" else {"loss_scale": 4.0, "dtype": "float16"}
    options |= {"accumulative_counts": 2, "clip_grad": {"max_norm": 1.0}, "sink": ScalarHistory()}
    wrapper = getattr(ours, kind)(optimizer=optimizer, **options)
    for _ in range(2):
        with wrapper.optim_context(nn.Identity()):
            loss = weight.sum() * 2
        wrapper.update_params(loss, step_kwargs={"factor": 2.0})
    torch.testing.assert_close(weight.detach(), torch.full((1,), 2.0))
    assert wrapper.message_hub.read("train/grad_norm") == [2.0]
    assert (wrapper.get_lr(), wrapper.inner_count) == ({"lr": [0.5]}, 2)
    wrapper.load_state_dict(wrapper.state_dict())
    assert optimizer.saved["mine"] == 1


def test_frozen_parameters_do_not_count_in_the_norm() -> None:
    weight, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    frozen.grad = torch.full((1,), 100.0)
    history = ScalarHistory()
    optimizer = torch.optim.SGD([weight, frozen], lr=0.5)
    OptimWrapper(optimizer, clip_grad={"max_norm": 1.0}, sink=history).update_params(weight.sum() * 2)
    assert (weight.item(), history.read("train/grad_norm")) == (pytest.approx(0.5), [2.0])


def test_a_mock_is_called_as_the_original_calls_it() -> None:
    optimizer, scaler, loss = MagicMock(spec=torch.optim.Optimizer), MagicMock(), MagicMock()
    optimizer.defaults, optimizer.param_groups = {}, [{}]
    for plain in (OptimWrapper(optimizer), ours.ApexOptimWrapper(optimizer=optimizer)):
        plain.step()
        optimizer.step.assert_called_once_with()
        plain.zero_grad()
        optimizer.zero_grad.assert_called_once_with()
        optimizer.reset_mock()
    apex, model = ours.ApexOptimWrapper(optimizer=optimizer, verbosity=0), nn.Linear(2, 1)
    with apex.optim_context(model):
        apex.backward(model(torch.ones(1, 2)).mean())
        apex.step()
    optimizer.step.assert_called_once_with()
    OptimWrapper(optimizer).backward(loss, retain_graph=True)
    loss.backward.assert_called_once_with(retain_graph=True)
    amp = ours.AmpOptimWrapper(loss_scale=2.0, optimizer=optimizer)
    amp.loss_scaler = scaler
    amp.backward(1)  # type: ignore[arg-type]
    scaler.scale.assert_called_once_with(1)
    scaler.scale.return_value.backward.assert_called_once_with()
    amp.step()
    scaler.step.assert_called_once_with(optimizer)
    scaler.update.assert_called_once_with(2.0)


def super_clip(self: Any) -> None:
    super(type(self), self)._clip_grad()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("clip", [None, own_clip, super_clip])
def test_the_gradients_of_a_closure_are_clipped(
    clip: Callable[..., Any] | None, optimizer: type[Any]
) -> None:
    weight = nn.Parameter(torch.ones(1))
    own: Any = type("Own", (OptimWrapper,), {} if clip is None else {"_clip_grad": clip})
    wrapper = own(optimizer([weight], lr=1.0), clip_grad={"max_norm": 0.5}, skip_nonfinite=True)

    def closure(factor: float = 10.0) -> Tensor:
        wrapper.zero_grad()
        loss = weight.sum() * factor
        wrapper.backward(loss)
        return loss

    wrapper.step(closure)
    assert weight.item() == pytest.approx(0.5)
    with pytest.raises(LossScaleCollapse, match="the gradients of the closure are not finite"):
        wrapper.step(lambda: closure(float("inf")))
    assert weight.item() == pytest.approx(0.5)
    wrapper.skip_nonfinite = False
    wrapper.step(lambda: closure(float("inf")))
    assert not weight.isfinite()


CLIPS: list[dict[str, Any] | None] = [
    None,
    {"max_norm": 0.25},
    {"max_norm": 0.25, "norm_type": float("inf")},
    {"type": "value", "clip_value": 0.1},
]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_a_gradient_that_is_not_finite_is_stepped_as_in_mmengine(clip: dict[str, Any] | None) -> None:
    found = []
    for family in FAMILIES.values():
        with new_hub() as hub:
            net = make_net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            wrapper = family.OptimWrapper(optimizer, clip_grad=clip and dict(clip), accumulative_counts=2)
            for number in range(6):
                x, y = make_batch(number)
                with overflowing(net[4].weight) if number == 2 else nullcontext():
                    with wrapper.optim_context(net):
                        loss = torch.nn.functional.mse_loss(net(x), y)
                    wrapper.update_params(loss)
            found.append([*net.state_dict().values(), torch.tensor(logged(hub))])
            assert family is not ours or wrapper.stepped()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    finite = all(value.isfinite().all() for value in found[0])
    assert finite == (clip is not None and clip.get("type") == "value")


@pytest.mark.parametrize("kind", ["AmpOptimWrapper", "ApexOptimWrapper"])
def test_wrappers_with_a_loss_scale_always_skip(kind: str) -> None:
    assert wrap(ours, kind, skip_nonfinite=True)[1].skip_nonfinite
    assert wrap(ours, kind)[1].skip_nonfinite
    with pytest.raises(ValueError, match=f"skip_nonfinite=False: {kind} always skips"):
        wrap(ours, kind, skip_nonfinite=False)
    with pytest.raises(TypeError, match="skip_nonfinite=1 must be True or False"):
        wrap(ours, skip_nonfinite=1)
