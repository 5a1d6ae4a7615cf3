"""An optimizer that is not prepared, over a model that is: its step is refused, and others are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

import halfpeak
from halfpeak import amp
from halfpeak.parts.step_hooks import _refuse_stranger
from support.states import same

X = torch.ones(4, 3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: nn.Module) -> Tensor:
    return model(X).float().square().mean()


class Prepared:
    """A model prepared by ``halfpeak.prepare`` or ``amp.initialize``, with one way to call both."""

    def __init__(self, front_end: str, level: str) -> None:
        self.model = network()
        self.optimizer = sgd(self.model)
        self.engine: Any = None
        if front_end == "amp":
            amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)
        else:
            self.engine = halfpeak.prepare(self.model, self.optimizer, level)

    def backward(self) -> None:
        if self.engine is None:
            with amp.scale_loss(loss(self.model), self.optimizer) as scaled:
                scaled.backward()
        else:
            with self.engine.forward():
                value = loss(self.model)
            self.engine.backward(value)

    def step(self) -> None:
        (self.optimizer if self.engine is None else self.engine).step()


CASES = [("prepare", level) for level in ("O0", "O1", "O2", "O4", "O5")] + [("amp", "O1"), ("amp", "O2")]


@pytest.fixture(params=CASES, ids="-".join)
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return Prepared(*request.param)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_a_stranger_is_refused_and_changes_nothing(
    prepared: Prepared, make: Callable[..., Optimizer]
) -> None:
    stranger = make(prepared.model.parameters(), lr=0.1)
    prepared.backward()
    before = copy.deepcopy([*prepared.model.parameters()])
    with pytest.raises(
        halfpeak.OrderError, match=rf"this {make.__name__} steps parameters of a prepared model"
    ):
        stranger.step()
    assert same(before, prepared.model.parameters())
    prepared.step()
    assert not same(before, prepared.model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("front_end", ["prepare", "amp"])
def test_a_plain_loop_over_low_weights_is_refused(front_end: str, level: str) -> None:
    prepared = Prepared(front_end, level)
    head = torch.optim.SGD(prepared.model[2].parameters(), lr=0.1)
    loss(prepared.model).backward()
    with pytest.raises(halfpeak.OrderError, match="low-precision weights"):
        head.step()


def test_a_layer_that_no_optimizer_of_the_engine_steps_is_low_all_the_same() -> None:
    model = network()
    engine = halfpeak.prepare(model, sgd(model[0]), "O5")
    head = sgd(model[2])
    engine.backward(loss(model))
    with pytest.raises(halfpeak.OrderError, match="low-precision weights"):
        head.step()


# Who may step.


def moves(model: nn.Module, step: Callable[[], object]) -> bool:
    before = copy.deepcopy([*model.parameters()])
    step()
    return not same(before, model.parameters())


def test_other_parameters(prepared: Prepared) -> None:
    other = network()
    stranger = sgd(other)
    for _ in range(2):
        prepared.backward()
        loss(other).backward()
        assert moves(other, stranger.step)
        assert moves(prepared.model, prepared.step)
        prepared.optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_plain_loop_over_float32_parameters(level: str) -> None:
    prepared = Prepared("prepare", level)
    prepared.backward()
    prepared.step()
    stranger = sgd(prepared.model)
    loss(prepared.model).backward()
    assert moves(prepared.model, stranger.step)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_after_remove(level: str) -> None:
    prepared = Prepared("prepare", level)
    prepared.engine.remove()
    stranger = sgd(prepared.model.float())
    loss(prepared.model).backward()
    assert moves(prepared.model, stranger.step)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_two_engines_over_one_model(level: str) -> None:
    model = network()
    engines = [halfpeak.prepare(model, sgd(model), level) for _ in range(2)]
    for engine in engines:
        with engine.forward():
            value = loss(model)
        engine.backward(value)
        assert moves(model, engine.step)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_two_networks_of_a_gan(level: str) -> None:
    generator, discriminator = nn.Linear(3, 3), network()
    engines = [
        halfpeak.prepare(generator, sgd(generator), level), halfpeak.prepare(discriminator, sgd(discriminator), level)
    ]  # fmt: skip
    for _ in range(3):
        for engine in engines:
            with engine.forward():
                value = discriminator(generator(X)).float().square().mean()
            engine.backward(value)
            engine.step()
            for each in engines:
                each.abort()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_average_and_a_copy(level: str) -> None:
    prepared = Prepared("prepare", level)
    average = halfpeak.AveragedModel(prepared.model)
    prepared.backward()
    student = network()
    stranger = torch.optim.SGD([*average.parameters(), *student.parameters()], lr=0.1)
    (loss(average) + loss(student)).backward()
    assert moves(student, stranger.step)


class Around(Optimizer):
    """An optimizer around another, over the same groups."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Sharding(Optimizer):
    """An optimizer that keeps another over some of its parameters, in groups of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"][:1], lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.inner.param_groups[0]["params"] = self.param_groups[0]["params"][:1]
        return self.inner.step(closure)


def test_an_optimizer_around_a_prepared_one() -> None:
    prepared = Prepared("amp", "O1")
    around = Around(prepared.optimizer)
    prepared.backward()
    assert moves(prepared.model, around.step)


@pytest.mark.parametrize(("front_end", "level"), CASES)
def test_an_optimizer_inside_a_prepared_one(
    front_end: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "sgd", lambda model: Sharding(model.parameters()))
    prepared = Prepared(front_end, level)
    prepared.backward()
    assert moves(prepared.model, prepared.step)


def test_the_compiler_traces_the_hook() -> None:
    Prepared("prepare", "O1")
    model = network()
    stranger = sgd(model)
    loss(model).backward()
    torch.compile(lambda: _refuse_stranger(stranger, (), {}), backend="eager", fullgraph=True)()


def test_one_hook_for_the_process() -> None:
    Prepared("prepare", "O1")
    Prepared("amp", "O2")
    names = [getattr(hook, "__name__", "") for hook in _global_optimizer_pre_hooks.values()]
    assert names.count("_refuse_stranger") == 1
