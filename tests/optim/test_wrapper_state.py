"""Checkpoints, resumes and copies of wrappers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from halfpeak import checkpoint
from halfpeak.core.errors import HalfpeakError, StateError
from halfpeak.optim import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    BaseOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
)
from optim.families import FAMILIES
from support.nets import LEVELS, OPTIMIZERS, make_batch, make_net
from support.snapshot import snapshot, values
from support.states import same

Make = Callable[..., OptimWrapper]

KINDS: dict[str, Make] = {
    "plain": lambda optimizer, **o: OptimWrapper(optimizer, skip_nonfinite=True, **o),
    "amp": lambda optimizer, **o: AmpOptimWrapper(dtype="float16", optimizer=optimizer, **o),
    "amp-grows": lambda optimizer, **o: AmpOptimWrapper(
        {"growth_interval": 2, "backoff_factor": 0.25}, "float16", optimizer=optimizer, **o
    ),
    "amp-bf16": lambda optimizer, **o: AmpOptimWrapper(dtype="bfloat16", optimizer=optimizer, **o),
    **{
        level: lambda optimizer, level=level, **o: ApexOptimWrapper(level, optimizer=optimizer, **o)
        for level in LEVELS
    },
}


def batch(i: int) -> tuple[Tensor, Tensor]:
    """Batches 4 and 10 overflow, in the first pass of a window and in the middle of one.

    Targets are small enough that no other batch overflows in float16 at a scale of 2**16.
    """
    x, y = make_batch(i)
    y = y / 64
    return (x * 1e38, y) if i in (4, 10) else (x, y)


def train(wrapper: OptimWrapper, model: nn.Module, numbers: range) -> None:
    for i in numbers:
        x, y = batch(i)
        with wrapper.optim_context(model):
            loss = mse_loss(model(x).float(), y)
        wrapper.update_params(loss)


def make(kind: str, every: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, OptimWrapper]:
    model = make_net(seed)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, KINDS[kind](optimizer, accumulative_counts=every, clip_grad={"max_norm": 0.05})


def seen(model: nn.Module, optimizer: torch.optim.Optimizer, wrapper: OptimWrapper) -> list[Any]:
    return [values(model, optimizer), extra(wrapper.state_dict())]


def extra(state: dict[str, Any]) -> str:
    """The entries of a wrapper's state that are not the optimizer's."""
    return repr({key: state[key] for key in sorted(state) if key not in ("state", "param_groups")})


@pytest.mark.parametrize(("total", "stop"), [(14, 11), (14, 13), (None, 11)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_inside_a_window_is_bitwise(
    kind: str, total: int | None, stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is loaded into new objects before their first forward pass.

    The last window is shorter where the total is known. A user's own loop, unlike a Runner, does not tell the wrapper where
    it is.
    """

    def tell(model: nn.Module, wrapper: OptimWrapper, count: int) -> None:
        if total is not None:
            wrapper.initialize_count_status(model, count, total)

    straight = make(kind, 4)
    tell(straight[0], straight[2], 0)
    train(straight[2], straight[0], range(14))

    model, _, wrapper = make(kind, 4)
    tell(model, wrapper, 0)
    train(wrapper, model, range(stop))
    checkpoint.save(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": wrapper.state_dict()})

    saved = checkpoint.load(tmp_path / "c.pt")
    model, optimizer, wrapper = make(kind, 4, seed=1)
    model.load_state_dict(saved["model"])
    wrapper.load_state_dict(saved["optimizer"])
    assert extra(wrapper.state_dict()) == extra(saved["optimizer"])
    caplog.clear()
    tell(model, wrapper, stop)
    assert not [r for r in caplog.records if "Resumed" in r.getMessage()]
    train(wrapper, model, range(stop, 14))
    assert wrapper.inner_count == 14
    assert seen(model, optimizer, wrapper) == seen(*straight)


def test_the_keys_of_the_original() -> None:
    found = {kind: make(kind, 1)[2].state_dict().keys() - {"state", "param_groups"} for kind in KINDS}
    assert {kind: keys for kind, keys in found.items() if not kind.startswith("O")} == {
        "plain": set(),
        "amp": {"loss_scaler"},
        "amp-grows": {"loss_scaler"},
        "amp-bf16": {"loss_scaler"},
    }
    assert all(found[level] == {"apex_amp"} for level in LEVELS)
    model, _, wrapper = make("O2", 1)
    assert wrapper.state_dict()["apex_amp"] == {}
    train(wrapper, model, range(2))
    assert wrapper.state_dict()["apex_amp"] == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 2}}


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize(("source", "target"), [("ours", "theirs"), ("theirs", "ours")])
def test_each_continues_from_the_state_of_the_other(name: str, source: str, target: str) -> None:
    build = OPTIMIZERS.get(name, lambda params: torch.optim.Adagrad(params, lr=0.1))
    (model, wrapper), (twin, other) = (
        (net, FAMILIES[family].OptimWrapper(build(net.parameters())))
        for net, family in ((make_net(), source), (make_net(1), target))
    )
    train(wrapper, model, range(2))
    saved = wrapper.state_dict()
    assert "halfpeak" not in saved
    text = repr(saved)
    twin.load_state_dict(model.state_dict())
    # halfpeak copies a loaded state; torch's optimizers keep its tensors and step them in place.
    other.load_state_dict(saved if target == "ours" else copy.deepcopy(saved))
    assert repr(other.state_dict()) == text
    for one, net in ((wrapper, model), (other, twin)):
        train(one, net, range(2, 3))
    assert same(model.parameters(), twin.parameters())


def with_window(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**state, "halfpeak": {**state["halfpeak"], **changes}}


BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "not a dict": lambda state: [],  # type: ignore[dict-item,return-value]
    "no groups": lambda state: {"state": {}},
    "other groups": lambda state: {**state, "param_groups": []},
    "scaler keys": lambda state: {**state, "loss_scaler": {"scale": 1.0}, "apex_amp": {"loss_scaler0": {}}},
    "scale of zero": lambda state: {
        **state,
        "loss_scaler": {**state.get("loss_scaler", {}), "scale": 0.0},
        "apex_amp": {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}},
    },
    "no window": lambda state: {**state, "halfpeak": 5},
    "keys of the window": lambda state: {**state, "halfpeak": {"version": 3}},
    "version": lambda state: with_window(state, version=2),
    "version in a tensor": lambda state: with_window(state, version=torch.ones(3)),
    "count": lambda state: with_window(state, inner_count=-1),
    "scale of the gradients": lambda state: with_window(state, scale=0.0),
    "number of a gradient": lambda state: with_window(state, gradients={99: torch.ones(1)}),
    "shape of a gradient": lambda state: with_window(state, gradients={0: torch.ones(1)}),
    "statistics": lambda state: with_window(state, buffers=[None]),
}


# OptimWrapper has no scale and ignores the entries of one.
@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (kind, bad)
        for kind in ("plain", "amp", "O2")
        for bad in BAD
        if kind != "plain" or bad not in ("scaler keys", "scale of zero")
    ],
)
def test_a_refused_state_changes_nothing(kind: str, bad: str) -> None:
    model, optimizer, wrapper = make(kind, 4)
    train(wrapper, model, range(6))
    other_model, _, other = make(kind, 4, seed=1)
    train(other, other_model, range(7))
    state = BAD[bad](other.state_dict())
    before = [snapshot(model, optimizer), repr(wrapper.state_dict()), wrapper.base_param_settings]
    with pytest.raises(StateError):
        wrapper.load_state_dict(state)
    assert [snapshot(model, optimizer), repr(wrapper.state_dict()), wrapper.base_param_settings] == before


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["amp", "O2"])
def test_a_static_scale_stays_in_a_load(kind: str, every: int) -> None:
    model, _, wrapper = make(kind, every)
    train(wrapper, model, range(1))
    other_model, optimizer, _ = make(kind, every)
    other = (
        AmpOptimWrapper(8.0, "float16", optimizer=optimizer, accumulative_counts=every)
        if kind == "amp"
        else ApexOptimWrapper("O2", 8.0, optimizer=optimizer, accumulative_counts=every)
    )
    other.load_state_dict(wrapper.state_dict())
    train(other, other_model, range(1))
    assert other.last_result is not None
    assert other.last_result.scale == 8.0
    if kind == "amp":
        with pytest.raises(StateError):
            other.loss_scaler.load_state_dict({"scale": "large"})


def test_gradients_of_a_window_are_loaded_under_the_scale_of_the_wrapper() -> None:
    """A window that was saved under a loss scale goes on under another, or under none."""
    found: list[list[Tensor]] = []
    for loss_scale in (1024.0, 8.0, {"enabled": False}):
        model, optimizer, _ = make("plain", 2)
        wrapper, other = (
            AmpOptimWrapper(scale, "float16", optimizer=optimizer, accumulative_counts=2)
            for scale in (1024.0, loss_scale)
        )
        train(wrapper, model, range(1))
        other.load_state_dict(copy.deepcopy(wrapper.state_dict()))
        found.append(
            [p.grad.clone() / other.loss_scaler.get_scale() for p in model.parameters() if p.grad is not None]
        )
    assert len(found[0]) == len(list(model.parameters()))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_loading_a_dict_of_states_is_all_or_nothing() -> None:
    first, second = make("plain", 1), make("amp", 1)
    wrappers = OptimWrapperDict(first=first[2], second=second[2])
    train(first[2], first[0], range(2))
    before = repr(wrappers.state_dict())
    good = make("plain", 1, seed=1)[2].state_dict()
    for bad in ({"first": good, "second": {}}, {"first": good, "third": good}):
        with pytest.raises(StateError):
            wrappers.load_state_dict(bad)
        assert repr(wrappers.state_dict()) == before
    wrappers.load_state_dict({"first": good})
    assert repr(first[2].state_dict()) == repr(good)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_wrappers_are_copied_with_their_networks(duplicate: Callable[[Any], Any]) -> None:
    first, second = make("plain", 4), make("amp-grows", 1)
    train(first[2], first[0], range(8))
    train(second[2], second[0], range(3))
    models, wrappers = duplicate(([first[0], second[0]], OptimWrapperDict(first=first[2], second=second[2])))
    for one, model, name in ((first, models[0], "first"), (second, models[1], "second")):
        train(wrappers[name], model, range(8, 16))
        train(one[2], one[0], range(8, 16))
        assert seen(model, wrappers[name].optimizer, wrappers[name]) == seen(*one)


def test_a_wrapper_that_has_made_masters_is_not_copied() -> None:
    model, _, wrapper = make("O2", 1)
    train(wrapper, model, range(2))
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(HalfpeakError, match="state_dict"):
            copies(wrapper)


def test_a_converted_model_outlives_its_wrapper() -> None:
    model, _, wrapper = make("O2", 1)
    train(wrapper, model, range(2))
    state = repr(model.state_dict())
    del wrapper
    assert repr(model.state_dict()) == state
    assert model(make_batch(0)[0]).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("same_run", [True, False])
def test_a_load_of_gradients_that_are_not_reduced_yet(one_rank: None, level: str, same_run: bool) -> None:
    """Those of passes under ``no_sync``: into a run that was just made, and into one that has others itself."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, OptimWrapper]:
        model, optimizer, wrapper = make(level, 3, seed)
        return DistributedDataParallel(model), optimizer, wrapper

    straight = made(0)
    train(straight[2], straight[0], range(20, 29))
    model, optimizer, wrapper = made(0)
    train(wrapper, model, range(20, 25))
    saved = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    if same_run:
        train(wrapper, model, range(25, 28))
    else:
        model, optimizer, wrapper = made(1)
    model.load_state_dict(saved[0])
    wrapper.load_state_dict(saved[1])
    train(wrapper, model, range(25, 29))
    assert seen(model, optimizer, wrapper) == seen(*straight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_forgets_an_overflow_of_the_window_before_it(kind: str) -> None:
    model, _, wrapper = make(kind, 2)
    saved = copy.deepcopy(wrapper.state_dict())
    train(wrapper, model, range(4, 5))
    wrapper.load_state_dict(saved)
    wrapper.initialize_count_status(model, 0, -1)
    train(wrapper, model, range(2))
    assert wrapper.stepped()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_loaded_after_a_resume_keep_their_statistics_in_a_skipped_step(kind: str) -> None:
    """The best weights are loaded after a skipped step, in a run that was saved there and in one that went on."""

    def skip(model: nn.Module, wrapper: OptimWrapper) -> None:
        with wrapper.optim_context(model):
            loss = mse_loss(model(make_batch(9)[0]).float(), make_batch(9)[1]) * float("inf")
        wrapper.update_params(loss)
        assert not wrapper.stepped()

    model, _, wrapper = straight = make(kind, 1)
    best = copy.deepcopy(model.state_dict())
    train(wrapper, model, range(3))
    skip(model, wrapper)
    resumed = make(kind, 1, seed=1)
    resumed[0].load_state_dict(model.state_dict())
    resumed[2].load_state_dict(copy.deepcopy(wrapper.state_dict()))
    for model, _, wrapper in (straight, resumed):
        model.load_state_dict(best)
        skip(model, wrapper)
        assert torch.equal(model.state_dict()["1.running_mean"], best["1.running_mean"])


@pytest.mark.parametrize(("every", "stop"), [(1, 4), (7, 4), (4, 6)])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_that_is_frozen_where_the_run_goes_on_keeps_its_masters(
    level: str, every: int, stop: int
) -> None:
    """The model is converted after the load, which must not round a frozen layer that has momenta or only gradients."""

    def run(run: tuple[nn.Module, torch.optim.Optimizer, OptimWrapper], numbers: range) -> None:
        for i in numbers:
            run[0][0].requires_grad_(i % 5 != 4 and i % 7 != 6)
            train(run[2], run[0], range(20 + i, 21 + i))

    straight = make(level, every)
    run(straight, range(14))

    saved = make(level, every)
    run(saved, range(stop))
    going_on = make(level, every, seed=1)
    going_on[0].load_state_dict(saved[0].state_dict())
    going_on[2].load_state_dict(saved[2].state_dict())
    run(going_on, range(stop, 14))
    assert seen(*going_on) == seen(*straight)


@pytest.mark.parametrize("kind", ["amp", "O2"])
def test_zero_grad_forgets_an_overflow_of_the_open_window(kind: str) -> None:
    """But for amp's verdict, which skips the next step of the optimizer, as in apex."""
    model, _, wrapper = make(kind, 2)
    train(wrapper, model, range(4, 5))
    wrapper.zero_grad()
    train(wrapper, model, range(5, 6))
    assert wrapper.stepped() is (kind == "amp")
    entries = wrapper.state_dict()
    scale = (
        entries["loss_scaler"]["scale"]
        if kind == "amp"
        else entries["apex_amp"]["loss_scaler0"]["loss_scale"]
    )
    # amp lowers a scale at the end of the pass, torch's scaler in a step.
    assert scale == (2.0**16 if kind == "amp" else 2.0**15)


def test_the_base_learning_rate_is_the_wrappers_own() -> None:
    lr = torch.tensor(0.1)
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.2, 0.3)]
    wrapper = OptimWrapper(torch.optim.SGD(groups, lr=lr))
    saved = copy.deepcopy(wrapper.state_dict())
    for _ in range(2):
        wrapper.param_groups[-1]["lr"].fill_(0.05)
        assert lr == saved["base_param_settings"]["lr"] == 0.1
        wrapper.load_state_dict(saved)


class Own(BaseOptimWrapper):
    """A wrapper of user code."""

    def update_params(self, loss: Tensor) -> None:
        self.backward(loss)
        self.step()

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize("bad", [{"param_groups": []}, {"base_param_settings": {"lr": "0.1"}}])
def test_a_wrapper_of_ones_own_refuses_a_state_that_does_not_fit(bad: dict[str, Any]) -> None:
    wrapper = Own(make("plain", 1)[1])
    state = copy.deepcopy(wrapper.state_dict())
    with pytest.raises(StateError):
        wrapper.load_state_dict({**state, **bad})
    assert wrapper.state_dict() == state
