"""GradScaler agrees with torch.amp.GradScaler where torch's is right: scales, parameters, state, signatures."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

import halfpeak
from support.nets import OPTIMIZERS, make_batch, make_net, poison
from support.snapshot import values

Make = Callable[..., Any]
TINY = torch.finfo(torch.float32).tiny


def torchs(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def ours(**options: Any) -> halfpeak.GradScaler:
    return halfpeak.GradScaler("cpu", **options)


FUSED: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "adam-fused": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
}


def train(make: Make, name: str, *, clip: bool, every: int = 1) -> list[Any]:
    """Twelve passes, with overflows in the first and in later ones; the scale grows and falls."""
    # With torch's scaler, an overflow in the first step leaves uninitialised memory as momentum in torch's fused SGD.
    overflows = (5, 6) if name == "sgd-fused" else (0, 5, 6)
    build = FUSED[name]
    model = make_net()
    optimizer = build(model.parameters())
    scaler = make(init_scale=2.0**10, growth_interval=2)
    seen: list[Any] = []
    for number in range(12):
        x, y = make_batch(number)
        loss = nn.functional.mse_loss(model(x), y) / every
        scaler.scale(loss).backward()
        if number in overflows:
            poison(model[0].weight)
        if (number + 1) % every:
            continue
        if clip:
            scaler.unscale_(optimizer)
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [scaler.get_scale(), scaler.state_dict(), *values(model, optimizer)]
    return seen


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("name", FUSED)
def test_parameters_and_state_are_torchs_bit_for_bit(name: str, clip: bool, every: int) -> None:
    assert repr(train(ours, name, clip=clip, every=every)) == repr(
        train(torchs, name, clip=clip, every=every)
    )


short = st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0, 10.0])
"""Factors that float32 holds exactly: torch multiplies in float64 and rounds once, so the results are equal."""


@settings(max_examples=60, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=60),
    exponent=st.integers(-20, 120),
    growth=short.filter(lambda factor: factor > 1),
    backoff=st.sampled_from([0.0625, 0.25, 0.5, 0.75]),
    interval=st.integers(1, 5),
)
def test_the_scale_moves_as_torchs(
    overflows: list[bool], exponent: int, growth: float, backoff: float, interval: int
) -> None:
    options: dict[str, Any] = {
        "init_scale": 2.0**exponent,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    scalers = [ours(**options, floor=TINY, patience=None), torchs(**options)]
    histories: list[list[Any]] = []
    for scaler in scalers:
        weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        history: list[Any] = []
        for overflow in overflows:
            scaler.scale(weight.sum()).backward()
            assert weight.grad is not None
            weight.grad[0] = torch.inf if overflow else 1.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            state = scaler.state_dict()
            if state["scale"] < TINY:
                break  # torch goes on to subnormal scales and to zero
            history.append(state)
        histories.append(history)
    length = min(map(len, histories))
    assert histories[0][:length] == histories[1][:length]


def test_the_default_rule_is_torchs_down_to_the_floor() -> None:
    for one in (halfpeak.GradScaler("cpu"), halfpeak.GradScaler()):
        assert one.state_dict() == torchs().state_dict()
    scaler, reference = ours(), torchs()
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(30):
        for each in (scaler, reference):
            each.scale(weight.sum()).backward()
            poison(weight)
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
    assert (scaler.get_scale(), reference.get_scale()) == (2.0**-14, 2.0**-14)
    assert scaler.state_dict() == reference.state_dict()


def test_it_is_a_grad_scaler_with_torchs_signatures() -> None:
    assert issubclass(halfpeak.GradScaler, torch.amp.GradScaler)
    names = [name for name in vars(torch.amp.GradScaler) if not name.startswith("_")]
    for name in (*names, "__init__"):
        theirs = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
        mine = inspect.signature(getattr(halfpeak.GradScaler, name)).parameters
        assert list(mine)[: len(theirs)] == list(theirs)
        assert all(mine[p].default == theirs[p].default for p in theirs)


def test_getters_and_setters() -> None:
    scaler = ours(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 4.0, 0.25)
    assert (scaler.get_growth_interval(), scaler.is_enabled(), scaler._get_growth_tracker()) == (7, True, 0)
    scaler.set_growth_factor(2.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(3)
    assert scaler.state_dict() == {
        "scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 0,
    }
    with pytest.raises(halfpeak.ConfigError, match="interval=0"):
        scaler.set_growth_interval(0)
    assert scaler.get_growth_interval() == 3


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_states_load_both_ways(interval: int) -> None:
    sources = [ours(init_scale=64.0, growth_interval=4), torchs(init_scale=64.0, growth_interval=4)]
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for source in sources:
        for _ in range(interval):
            source.scale(weight.sum()).backward()
            source.step(optimizer)
            source.update()
            optimizer.zero_grad()
    states = [source.state_dict() for source in sources]
    assert states[0] == states[1]
    for make in (ours, torchs):
        fresh = make()
        kept = dict(states[0])
        fresh.load_state_dict(states[0])
        assert fresh.state_dict() == states[0] == kept


@pytest.mark.parametrize(
    "state",
    [
        {"scale": 1.0},
        {**torchs().state_dict(), "scale": float("nan")},
        {**torchs().state_dict(), "_growth_tracker": -1},
        {**torchs().state_dict(), "growth_interval": 0},
        {**torchs().state_dict(), "more": 1},
        None,
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(state: Any) -> None:
    scaler = ours(init_scale=32.0)
    with pytest.raises(halfpeak.StateError):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 32.0


def test_the_state_of_a_disabled_scaler_leaves_the_scale() -> None:
    scaler = ours(init_scale=32.0)
    with pytest.warns(UserWarning, match="disabled"):
        scaler.load_state_dict(torchs(enabled=False).state_dict())
    assert scaler.get_scale() == 32.0


def test_a_disabled_scaler_passes_everything_through() -> None:
    scaler = ours(enabled=False)
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    assert scaler.scale([loss])[0] is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({"anything": 1})
    assert weight.tolist() == [0.5, 0.5]
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})


Pair = namedtuple("Pair", "x y")


def test_scale_takes_what_torchs_takes_and_keeps_containers() -> None:
    scaler = ours(init_scale=4.0)
    one, two = torch.ones(1), torch.full((2,), 2.0)
    assert torch.equal(scaler.scale(one), torchs(init_scale=4.0).scale(one))
    nested = scaler.scale([one, (two, [one])])
    assert isinstance(nested, list)
    assert isinstance(nested[1], tuple)
    assert [nested[0].item(), nested[1][0].tolist(), nested[1][1][0].item()] == [4.0, [8.0, 8.0], 4.0]
    assert [t.item() for t in scaler.scale(t for t in (one, one))] == [4.0, 4.0]
    assert scaler.scale(Pair(one, two)).y.tolist() == [8.0, 8.0]
    kept = scaler.scale(OrderedDict(a=one, b=[two]))
    assert isinstance(kept, OrderedDict)
    assert kept["b"][0].tolist() == [8.0, 8.0]
    for wrong in (3.0, None, "loss", [one, None], object()):
        with pytest.raises(ValueError, match="must be a Tensor or an iterable of Tensors"):
            scaler.scale(wrong)


def test_a_low_loss_is_scaled_in_float32() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaled = ours().scale(weight * 2)
    assert (scaled.dtype, scaled.tolist()) == (torch.float32, [2.0**17] * 2)
    assert torchs().scale(weight * 2).isinf().all()


def test_update_sets_the_scale() -> None:
    scaler = ours()
    for value in (8.0, torch.tensor(16.0), torch.tensor([32.0], dtype=torch.float64)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)
    for wrong in (
        0.0,
        float("nan"),
        torch.ones(2),
        torch.ones((), requires_grad=True),
        torch.tensor(torch.inf),
    ):
        with pytest.raises(halfpeak.ConfigError):
            scaler.update(wrong)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_stand_where_the_scaler_stands(duplicate: Callable[[Any], Any]) -> None:
    scaler = ours(init_scale=16.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)  # torch's scaler cannot be copied at this point
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    optimizer.zero_grad()
    twin.scale(weight.sum()).backward()
    twin.step(optimizer)
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (32.0, 16.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": float("inf")}, "init_scale=inf"),
        ({"growth_factor": 0.5}, "growth=0.5"),
        ({"backoff_factor": 2.0}, "backoff=2.0"),
        ({"growth_interval": 0}, "interval=0"),
        ({"floor": 8.0, "ceiling": 4.0}, "floor=8.0 is above ceiling=4.0"),
        ({"patience": 0}, "patience=0"),
        ({"device": 65536.0}, "device=65536.0"),
        ({"group": "world"}, "init_process_group"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(halfpeak.ConfigError, match=words):
        halfpeak.GradScaler(**options)
