"""The inputs of a low model: which are cast, what a float32 module gets, and the warning of one that loses much."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from support.nets import LOW
from zoo.measure import relative
from zoo.nets import Diffusion

ROUNDS = tuple(level for level in LOW if halfpeak.LEVELS[level].policy().param is not None)
"""The levels that cast inputs to a low dtype."""

STEPS = torch.tensor([951.3, 12.7, 333.1, 777.9])


class Time(nn.Module):
    """A layer that records what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.seen: list[Tensor] = []

    def forward(self, t: Tensor) -> Tensor:
        self.seen.append(t.clone())
        return self.layer(t)


class Net(nn.Module):
    """A layer for ``x``, and one for ``t``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.time = nn.Linear(8, 8), Time()
        self.before: Callable[[Tensor], Any] = lambda t: t

    def forward(self, x: Tensor, times: dict[str, Tensor]) -> Tensor:
        self.before(times["t"])
        return self.body(x) + self.time(times["t"])


def prepared(model: nn.Module, level: str, **options: Any) -> halfpeak.Engine:
    return halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level, **options)


@pytest.mark.parametrize("level", ROUNDS)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_kept_module_gets_what_the_model_was_given(
    level: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    model = Net()
    prepared(model, level, keep_fp32=["time"])
    with mode():
        model(torch.ones(8), times={"t": STEPS})
    assert model.time.seen[0].dtype is torch.float32
    assert torch.equal(model.time.seen[0], STEPS)


@pytest.mark.parametrize("level", ROUNDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_gets_what_the_model_has_written_since(
    level: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    model = Net()
    model.before = lambda t: t.mul_(2)
    prepared(model, level, keep_fp32=["time"])
    with mode():
        model(torch.ones(8), {"t": STEPS})
    assert torch.equal(model.time.seen[0], 2 * STEPS.to(LOW[level]).float())


@pytest.mark.parametrize("level", ROUNDS)
def test_its_gradient_reaches_the_input(level: str) -> None:
    model, t = Net(), STEPS.clone().requires_grad_()
    engine = prepared(model, level, keep_fp32=["time"], scale=halfpeak.ScaleConfig(init=1.0))
    with engine.forward():
        loss = model(torch.ones(8), {"t": t})[0]
    engine.backward(loss)
    assert t.grad is not None
    assert torch.equal(t.grad, model.time.layer.weight[0].detach())


@pytest.mark.parametrize("level", ROUNDS)
def test_a_compiled_model_rounds_it(level: str, fresh_compiler: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepared(model, level, keep_fp32=["0"])
    x = torch.tensor([1 / 3, 2 / 3, 0.1, 0.7])
    output = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(output, model[0].float()(x.to(LOW[level]).float()).to(LOW[level]).float())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_kept_module_of_a_sharded_model_gets_it_too(level: str) -> None:
    """Where FSDP2 leaves the inputs to ``prepare``."""
    model = Net()
    halfpeak.distributed.fully_shard(model, level, keep_fp32=["time"], cast_forward_inputs=False)
    prepared(model, level, keep_fp32=["time"])
    model(torch.ones(8), {"t": STEPS})
    assert torch.equal(model.time.seen[0], STEPS)


@pytest.mark.usefixtures("one_rank")
def test_inputs_that_fsdp2_would_cast_are_not_said_to_be_left_alone() -> None:
    model = halfpeak.distributed.fully_shard(Net(), "O2")
    with pytest.raises(halfpeak.ConfigError, match=r"fully_shard\(model, level, cast_forward_inputs=False\)"):
        prepared(model, "O2", cast_forward_inputs=False)


@pytest.mark.parametrize("level", ROUNDS)
def test_inputs_that_are_not_cast(level: str) -> None:
    """A diffusion model that casts its embedding itself is as near to float32 as under autocast."""
    torch.manual_seed(0)
    model, x, dtype = Diffusion(), torch.randn(4, 8), LOW[level]
    want = model(x, STEPS).detach()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        autocast = relative(model(x, STEPS), want)
    exact = copy.deepcopy(model)
    prepared(exact, level, cast_forward_inputs=False)
    prepared(model, level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rounded = relative(model(x, STEPS).detach(), want)
    assert relative(exact(x.to(dtype), STEPS).detach(), want) < 1.5 * autocast
    assert rounded > 8 * autocast, "the comparison shows something"


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_level_that_casts_no_input_refuses_the_option(level: str) -> None:
    with pytest.raises(halfpeak.ConfigError, match=f"levels that cast inputs, and {level} does not"):
        prepared(nn.Linear(2, 2), level, cast_forward_inputs=False)


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(halfpeak.ConfigTypeError, match="cast_forward_inputs='x' must be True or False"):
        prepared(nn.Linear(2, 2), "O2", cast_forward_inputs="x")


# The warning.


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        return self.body(x)


LOST = {"O2": "951.3 becomes 951.5", "O3": "951.3 becomes 951.5", "O5": "951.3 becomes 952"}


@pytest.mark.parametrize("level", ROUNDS)
@pytest.mark.parametrize("by_name", [False, True])
def test_one_warning_of_an_input_that_loses_much(level: str, by_name: bool) -> None:
    model = Plain()
    prepared(model, level)
    x, t = torch.ones(2, 4), torch.tensor([0.5, 951.3])
    with pytest.warns(UserWarning, match=f"Plain rounds its input t: {LOST[level]} in {LOW[level]}"):
        model(x, t=t) if by_name else model(x, t)
    model(x, t)  # the test fails on a second one


QUIET = {
    "none": None,
    "whole numbers": torch.tensor([950, 3]),
    "what the dtype holds": torch.tensor([512.0, 0.25]),
    "small numbers": torch.tensor([0.3, 0.7, -1.1, 9.9]),
    "nothing": torch.zeros(0),
    "NaN": torch.tensor([torch.nan]),
    "more dimensions": torch.full((2, 2), 951.3),
}


@pytest.mark.parametrize("level", ROUNDS)
@pytest.mark.parametrize("t", QUIET.values(), ids=QUIET)
def test_no_warning_of_others(level: str, t: Tensor | None) -> None:
    model = Plain()
    prepared(model, level)
    model(torch.ones(2, 4), t)


@pytest.mark.parametrize("level", ROUNDS)
def test_no_warning_if_a_kept_module_has_taken_what_was_given(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepared(model, level, keep_fp32=["0"])
    model(STEPS)


@pytest.mark.parametrize("level", ROUNDS)
def test_no_warning_without_casts(level: str) -> None:
    model = Plain()
    prepared(model, level, cast_forward_inputs=False)
    model(torch.ones(2, 4, dtype=LOW[level]), STEPS)


def test_the_hook_is_gone_after_a_pass() -> None:
    model = Plain()
    engine = prepared(model, "O5")
    before = len(model._forward_hooks)
    for one in (model, pickle.loads(pickle.dumps(model))):
        with pytest.warns(UserWarning, match="rounds its input t"):
            one(torch.ones(2, 4), STEPS)
        assert len(one._forward_hooks) == before - 1
        assert not one._forward_hooks_with_kwargs
    engine.remove()
    assert not model._forward_hooks


def test_compiled_code_does_not_warn(fresh_compiler: None) -> None:
    model = Plain()
    prepared(model, "O5")
    torch.compile(lambda x: model(x, STEPS), backend="eager", fullgraph=True)(torch.ones(2, 4))
