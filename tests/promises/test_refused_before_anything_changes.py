"""Promise 7: bad configuration, and a call that cannot be right, is refused before anything is changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import halfpeak
from halfpeak import (
    ClosureError,
    ConfigError,
    ConfigTypeError,
    Engine,
    LossIdError,
    OrderError,
    ParameterError,
)
from halfpeak.fused import FusedAdamW
from promises.cases import Around, batch
from reliability.support import net, state_hash
from support.nets import LEVELS, LOW, MASTERED
from support.snapshot import snapshot
from support.states import differences, same


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)


Arguments = tuple[Any, Any, str, dict[str, Any]]
"""Models, optimizers, level and keywords of ``halfpeak.prepare``."""


def plain(level: str = "O2", **options: Any) -> Callable[[], Arguments]:
    def make() -> Arguments:
        model = net(norm="batch")
        return model, sgd(model), level, options

    return make


def of(model: Callable[[], Any], level: str = "O2") -> Callable[[], Arguments]:
    def make() -> Arguments:
        made = model()
        return made, torch.optim.SGD(made.parameters(), lr=0.1), level, {}

    return make


def with_optimizers(make: Callable[[nn.Module], Any], level: str = "O2") -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        model = net()
        return model, make(model), level, {}

    return arguments


def shares_a_weight() -> nn.Module:
    model = net()
    model.add_module("tied", nn.Linear(4, 6))
    model.tied.weight = model[0].weight
    return model


def keeps_half_of_a_weight() -> Arguments:
    model = shares_a_weight()
    return model, sgd(model), "O2", {"keep_fp32": ["tied"]}


def shares_a_prepared_part() -> Arguments:
    model = net()
    model.engine = halfpeak.prepare(model[0], [], "O2")  # type: ignore[assignment]
    return model, sgd(model), "O2", {}


def outlives_its_engine() -> Arguments:
    model = net()
    halfpeak.prepare(model, [], "O2")
    return model, sgd(model), "O2", {}


def keeps_a_module() -> Arguments:
    model = net()
    return model, sgd(model), "O2", {"keep_fp32": [model[0]]}


def prepared_optimizer(model: nn.Module) -> Optimizer:
    other = nn.Linear(1, 1)
    optimizer = sgd(other, model)
    optimizer.engine = halfpeak.prepare(other, optimizer, "O0")  # type: ignore[attr-defined]
    return optimizer


def not_leaves(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.param_groups[0]["params"].append(torch.ones(3, requires_grad=True) * 2)
    return optimizer


def lazy() -> Arguments:
    model = nn.LazyLinear(2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", {}


def twice(model: nn.Module) -> list[Optimizer]:
    return [sgd(model)] * 2


def remainder(model: nn.Module) -> Optimizer:
    return FusedAdamW(model.parameters(), master="remainder")


PREPARE: dict[str, tuple[Callable[[], Arguments], type[Exception], str]] = {
    "an unknown level": (plain("O9"), ConfigError, "O9"),
    "an override of the level": (
        plain(loss_scale=8.0),
        ConfigTypeError,
        r"LEVELS\['O2'\].replace\(loss_scale=",
    ),
    "accelerate's keyword for a level": (plain(mixed_precision="fp16"), ConfigTypeError, "write level='O2'"),
    "accelerate's keyword for windows": (
        plain(gradient_accumulation_steps=2),
        ConfigTypeError,
        "write accumulate=",
    ),
    "transformers' keyword for a clip": (plain(max_grad_norm=1.0), ConfigTypeError, "write clip="),
    "a scale that is no config": (plain(scale=3), ConfigTypeError, "ScaleConfig"),
    "windows of nothing": (plain(accumulate=0), ConfigError, "accumulate=0|every=0"),
    "windows of half a pass": (plain(accumulate=1.5), ConfigError, r"1\.5"),
    "no loss": (plain(num_losses=0), ConfigError, "num_losses=0"),
    "a clip below zero": (plain(clip=-1.0), ConfigError, "clip=-1.0"),
    "a clip that is a word": (plain(clip="1.0"), ConfigTypeError, "ClipNorm"),
    "unknown op lists": (plain("O1", op_lists="mine"), ConfigError, "op_lists='mine'"),
    "a kept layer itself": (keeps_a_module, ConfigTypeError, r"write keep_fp32=\['3'\] for model\[3\]"),
    "kept layers that there are not": (plain(keep_fp32=["head"]), ConfigError, "'head'"),
    "half of a shared weight kept": (keeps_half_of_a_weight, ConfigError, "shares a weight"),
    "float8 in a float16 model": (plain(float8="rowwise"), halfpeak.HalfpeakError, "float8|torchao"),
    "ranks without a process group": (plain(group="world"), ConfigError, "init_process_group"),
    "comparisons of ranks without one": (plain(check_ranks=10), ConfigError, "init_process_group"),
    "an unknown reaction to skips": (plain(on_skip="shout"), ConfigError, "on_skip='shout'"),
    "an unknown keyword": (plain(accumulates=2), ConfigTypeError, "did you mean 'accumulate'"),
    "the optimizer first": (
        lambda: (sgd(net()), net(), "O2", {}),
        ConfigTypeError,
        "^SGD is .*the model first$",
    ),
    "no model": (lambda: (None, sgd(net()), "O2", {}), ConfigTypeError, "^NoneType is .*the model first$"),
    "no optimizer": (lambda: (net(), 3, "O2", {}), ConfigTypeError, "^int is .*the model first$"),
    "a list of what is no model": (
        lambda: ([net(), 3], sgd(net()), "O2", {}),
        ConfigTypeError,
        "^int is .*the model first$",
    ),
    "parameters in the place of the optimizer": (
        lambda: ((model := net()), model.parameters(), "O2", {}),
        ConfigTypeError,
        "^Parameter is .*the model first$",
    ),
    "a model in a wrapper": (of(lambda: nn.DataParallel(net())), ParameterError, "DataParallel"),
    "a model on no device": (of(lambda: nn.Linear(4, 2, device="meta"), "O0"), ParameterError, "meta"),
    "a lazy model": (lazy, ParameterError, "forward pass before preparing"),
    "a part that was prepared before": (shares_a_prepared_part, OrderError, "in one call"),
    "a model whose engine is gone": (outlives_its_engine, OrderError, r"new.load_state_dict\(model.state"),
    "a model twice": (
        lambda: ([model := net(), model], sgd(model), "O2", {}),
        ParameterError,
        "model .* twice",
    ),
    "an optimizer twice": (with_optimizers(twice), ParameterError, "optimizer .* twice"),
    "an optimizer that was prepared before": (
        with_optimizers(prepared_optimizer),
        OrderError,
        "engine.remove",
    ),
    "an optimizer of another model": (
        with_optimizers(lambda model: sgd(net())),
        ParameterError,
        "no parameter",
    ),
    "a parameter that is no leaf": (with_optimizers(not_leaves), ParameterError, "not a leaf"),
    "remainders where no masters are wanted": (with_optimizers(remainder, "O3"), ConfigError, "no master"),
    "remainders where two optimizers step": (
        with_optimizers(lambda model: [remainder(model), sgd(model)], "O5"),
        ParameterError,
        "another optimizer",
    ),
}


def listed(given: Any, kind: type[Any]) -> list[Any]:
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, kind)]


@pytest.mark.parametrize("case", PREPARE)
def test_prepare(case: str) -> None:
    make, error, message = PREPARE[case]
    models, optimizers, level, options = make()
    objects = [*listed(models, nn.Module), *listed(optimizers, Optimizer)]
    has_values = case not in ("a lazy model", "a model on no device")
    before = snapshot(*objects) if has_values else []
    with pytest.raises(error, match=message):
        halfpeak.prepare(models, optimizers, level, **options)
    assert not has_values or snapshot(*objects) == before


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (halfpeak.ScaleConfig, "interval"),
        (halfpeak.Accumulation, "every"),
        (halfpeak.ClipNorm, "max_norm"),
        (halfpeak.ClipValue, "value"),
    ],
)
def test_an_unknown_keyword_is_told_what_is_near(call: Any, near: str) -> None:
    with pytest.raises(ConfigTypeError, match=f"takes no '{near}s'; did you mean '{near}'"):
        call(**{f"{near}s": 1})


# Calls of an engine in the middle of a run.


def engine_in_a_run(level: str, *, two: bool = False, **options: Any) -> Engine:
    models = [net(seed=seed) for seed in range(1 + two)]
    engine = halfpeak.prepare(
        models,
        [sgd(model) for model in models],
        halfpeak.LEVELS[level].replace(loss_scale=64.0),
        num_losses=2,
        **options,
    )
    for _ in range(2):
        passes(engine)
        engine.step()
    passes(engine)
    return engine


def loss_of(engine: Engine) -> torch.Tensor:
    with engine.forward():
        return sum(model(batch(0)).float().square().mean() for model in engine.models)  # type: ignore[return-value]


def passes(engine: Engine) -> None:
    engine.backward(loss_of(engine))


def stranger() -> Optimizer:
    return sgd(nn.Linear(1, 1))


def in_replay(call: Callable[[Engine], object]) -> Callable[[Engine], object]:
    def act(engine: Engine) -> None:
        loss = loss_of(engine)
        with engine.parts.replay():
            call(engine) if call is Engine.step else engine.backward(loss)

    return act


def in_inference_mode(call: Callable[[Engine], object]) -> Callable[[Engine], object]:
    return torch.inference_mode()(call)


CALLS: dict[str, tuple[Callable[[Engine], object], type[Exception], str]] = {
    "a loss that there is not": (lambda e: e.backward(loss_of(e), loss_id=2), LossIdError, "num_losses=2"),
    "a loss that there is not, from the end": (
        lambda e: e.backward(loss_of(e), loss_id=-3),
        LossIdError,
        "num_losses=2",
    ),
    "a number as a loss": (lambda e: e.backward(3.0), ConfigTypeError, "a tensor"),  # type: ignore[arg-type]
    "a vector as a loss": (
        lambda e: e.backward(torch.ones(2, requires_grad=True) * loss_of(e)),
        ConfigError,
        r"loss\.mean",
    ),
    "a pass for a strange optimizer": (
        lambda e: e.backward(loss_of(e), optimizers=[stranger()]),
        OrderError,
        "not prepared by this engine",
    ),
    "a step of a strange optimizer": (lambda e: e.step(optimizers=stranger()), OrderError, "not prepared"),
    "an abort of a strange optimizer": (lambda e: e.abort(stranger()), OrderError, "not prepared"),
    "a step of the optimizer's own": (lambda e: e.optimizers[0].step(), OrderError, r"engine\.step\(\)"),
    "a closure in a window": (lambda e: e.step(lambda: None), ClosureError, "accumulate=2"),
    "a step in a replay": (in_replay(Engine.step), OrderError, "only computes the loss"),
    "a pass in a replay": (in_replay(passes), OrderError, "only computes the loss"),
    "a step in inference mode": (in_inference_mode(Engine.step), OrderError, "inference_mode"),
    "an optimizer's step in inference mode": (
        in_inference_mode(lambda e: e.optimizers[0].step()),
        OrderError,
        r"engine\.step\(\)|inference_mode",
    ),
    "a load in inference mode": (
        in_inference_mode(lambda e: e.load_state_dict(e.state_dict())),
        OrderError,
        "inference_mode",
    ),
    "a load of a loop in inference mode": (
        in_inference_mode(lambda e: e.load_loop_state_dict(e.loop_state_dict())),
        OrderError,
        "inference_mode",
    ),
    "prepare in inference mode": (
        in_inference_mode(lambda e: halfpeak.prepare(net(), [], "O2")),
        OrderError,
        "^preparing a model is not possible in torch.inference_mode",  # every front end prepares
    ),
    "a copy": (copy.deepcopy, OrderError, r"load_state_dict\(engine\.state_dict\(\)\)"),
    "a shallow copy": (copy.copy, OrderError, r"load_state_dict\(engine\.state_dict\(\)\)"),
    "a pickle": (pickle.dumps, OrderError, r"load_state_dict\(engine\.state_dict\(\)\)"),
    "the state of the engine for an optimizer": (
        lambda e: e.optimizers[0].load_state_dict(e.state_dict()),
        halfpeak.StateError,
        r"write engine\.load_state_dict\(state\)",
    ),
    "the state of the engine for a model": (
        lambda e: e.model.load_state_dict(e.state_dict()),
        halfpeak.StateError,
        r"write engine\.load_state_dict\(state\)",
    ),
    "the state of the engine for some of a model": (
        lambda e: e.model.load_state_dict(e.state_dict(), strict=False),
        halfpeak.StateError,
        r"write engine\.load_state_dict\(state\)",
    ),
    "an engine as a tuple": (tuple, ConfigTypeError, r"write `engine = halfpeak\.prepare"),
    "an engine as a model": (
        lambda e: halfpeak.prepare(e, e.optimizers[0]),
        ConfigTypeError,
        "Engine is neither a torch Module",
    ),
    "no state": (lambda e: e.load_state_dict({}), halfpeak.StateError, "version"),
    "the state of a model": (
        lambda e: e.load_state_dict(e.models[0].state_dict()),
        halfpeak.StateError,
        r"no state of an engine.*engine\.state_dict\(\)",
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CALLS)
def test_a_call_in_the_middle_of_a_run(case: str, level: str) -> None:
    call, error, message = CALLS[case]
    engine, calm = (engine_in_a_run(level, accumulate=2) for _ in range(2))
    with pytest.raises(error, match=message):
        call(engine)
    assert not differences(engine.state_dict(), calm.state_dict())
    for one in (engine, calm):
        one.step()
        passes(one)
        one.step()
    assert not differences(engine.state_dict(), calm.state_dict())


@pytest.mark.filterwarnings("ignore:a copy of a prepared model")
@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_optimizer_that_steps_masters(level: str, how: Callable[[Any], object]) -> None:
    """A copy alone would train nothing."""
    engine = engine_in_a_run(level)
    before = state_hash(engine)
    for what in (engine.optimizers[0], (engine.model, engine.optimizers[0])):
        with pytest.raises(OrderError, match="float32 masters"):
            how(what)
    assert state_hash(engine) == before
    optimizer = engine.optimizers[0]
    engine.remove()
    how(optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_of_the_optimizers_inside_a_window(level: str) -> None:
    engine = engine_in_a_run(level, two=True, accumulate=2)
    with pytest.raises(OrderError, match="accumulate=2, all 2 optimizers must be stepped together"):
        engine.step(optimizers=engine.optimizers[1])
    assert engine.micro_step == 2
    with pytest.raises(OrderError, match=r"engine\.models"):
        _ = engine.model
    assert not engine.step(optimizers=engine.optimizers[::-1]).boundary


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_without_optimizer(level: str) -> None:
    engine = halfpeak.prepare(net(), [], level)
    with pytest.raises(OrderError, match=r"without an optimizer; pass one to halfpeak\.prepare"):
        engine.step()


# Steps of a loss that did not go through the engine: it was neither scaled nor divided.


@pytest.mark.parametrize("level", LOW)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("step", [Engine.step, lambda engine: engine.optimizers[0].step()])
def test_a_step_of_a_plain_backward_pass(level: str, before: int, step: Callable[[Engine], object]) -> None:
    """Also where the loop was not changed at all, and the optimizer steps itself."""
    model = net()
    engine = halfpeak.prepare(model, sgd(model), halfpeak.LEVELS[level].replace(loss_scale=64.0))
    for _ in range(before):
        passes(engine)
        engine.step()
    values = [value.clone() for value in model.state_dict().values()]
    loss_of(engine).backward()
    with pytest.raises(OrderError, match=r"engine\.backward\(loss\)|engine\.step\(\)"):
        step(engine)
    assert same(model.state_dict().values(), values)
    model.zero_grad()
    passes(engine)
    assert engine.step().stepped()


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_of_the_optimizer_inside_one_that_an_engine_steps(level: str) -> None:
    model = net()
    optimizer = Around(model.parameters())
    engine = halfpeak.prepare(model, optimizer, halfpeak.LEVELS[level].replace(loss_scale=64.0))
    passes(engine)
    before = state_hash(engine)
    with pytest.raises(OrderError, match=r"engine\.step\(closure\)"):
        optimizer.base_optimizer.step()
    assert state_hash(engine) == before
    assert engine.step().stepped()  # the window is as it was
    assert state_hash(engine) != before


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_pass_whose_forward_pass_was_outside_of_the_casts(level: str) -> None:
    model = net()
    engine = halfpeak.prepare(model, sgd(model), halfpeak.LEVELS[level].replace(loss_scale=8.0))
    for _ in range(2):
        with pytest.raises(OrderError, match=r"outside engine\.forward\(\)"):
            engine.backward(model(batch(0)).square().mean())
        assert not engine.is_open
        model(batch(0))  # a probe without a backward pass
        loss = loss_of(engine)
        model(batch(0))
        engine.backward(loss)
        assert engine.step().stepped()
        with torch.no_grad():
            model(batch(0))
        for casts in (torch.autocast("cpu"), engine.parts.casting):
            with casts:
                loss = model(batch(0)).float().square().mean()
            engine.backward(loss)
            assert engine.step().stepped()
        with torch.no_grad(), engine.forward():
            model(batch(0))
        loss = model(batch(0)).square().mean()
        with torch.no_grad(), engine.forward():
            model(batch(0))
        with pytest.raises(OrderError, match=r"outside engine\.forward\(\)"):
            engine.backward(loss)
