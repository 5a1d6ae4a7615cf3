"""Copies: a copied or pickled model is independent, an engine is copied whole, an optimizer with masters is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak import amp
from reliability.support import LEVELS, batch, net, state_hash, train
from support.nets import MASTERED
from support.states import same, through_a_file


def prepared(level: str) -> halfpeak.Engine:
    """An engine that has trained for four steps, one of them skipped."""
    model = net(norm="batch")
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), level)
    train(engine, range(4), poison=lambda step: float("inf") if step == 2 else 1.0)
    return engine


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": partial(through_a_file, weights_only=False),
}


@pytest.mark.parametrize("level", LEVELS)
def test_the_state_dict_of_a_copied_model_speaks_of_its_own_masters(level: str) -> None:
    original = prepared(level)
    copied = copy.deepcopy(original)
    train(copied, range(4, 8))
    trained = copied.model.state_dict()
    names = {id(parameter): name for name, parameter in copied.model.named_parameters()}
    assert all(torch.equal(master, trained[names[id(low)]]) for low, master in copied.masters)
    original.model.load_state_dict(trained)
    assert all(torch.equal(value, trained[name]) for name, value in original.model.state_dict().items())


@pytest.mark.parametrize("how", ["copy", "state_dict"])
def test_a_skip_goes_back_to_the_statistics_of_a_forward_pass_without_gradients(how: str) -> None:
    """As after ``update_bn``, whose passes are in training mode."""
    engine = prepared("O2")
    with torch.no_grad():
        engine.model(batch(9))
    if how == "copy":
        other = copy.deepcopy(engine)
    else:
        other = prepared("O2")
        other.load_state_dict(engine.state_dict())
    for one in (engine, other):
        before = [buffer.clone() for buffer in one.model.buffers()]
        train(one, range(4, 5), poison=lambda step: float("inf"))
        assert same(list(one.model.buffers()), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_model_is_independent_and_computes_the_same(level: str, how: str) -> None:
    engine = prepared(level)
    model = engine.model.eval()
    copied = COPIES[how](model)
    with torch.no_grad():
        expected = model(batch(0))
        assert torch.equal(copied(batch(0)), expected)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copied(batch(0)), expected)
        for parameter in copied.parameters():
            parameter.fill_(1)
    assert all(not parameter.any() for parameter in model.parameters())
    assert all(
        value.dtype is torch.float32 for value in copied.state_dict().values() if value.is_floating_point()
    )


@pytest.mark.parametrize("level", LEVELS)
def test_an_ema_of_the_model(level: str) -> None:
    engine = prepared(level)
    low = is_low(engine.model)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="average the float32 values") if low else nullcontext():
        ema = torch.optim.swa_utils.AveragedModel(engine.model)
    before = [parameter.clone() for parameter in ema.parameters()]
    train(engine, range(4, 6))
    assert same(before, ema.parameters())
    ema.update_parameters(engine.model)
    assert not same(before, ema.parameters())
    assert ema(batch(0)).isfinite().all()


def average_values(average: nn.Module, model: nn.Module) -> None:
    """Average in place through ``state_dict``, as timm's ModelEma does: in torch its values are the weights."""
    now = model.state_dict()
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            value.mul_(0.999).add_(now[name], alpha=0.001)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", COPIES)
def test_an_average_in_place_is_that_of_float32_where_it_was_made_before_and_is_never_lost(
    level: str, how: str
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = COPIES[how](model)
    engine = halfpeak.prepare(model, optimizer, level, loss_scale=64.0)
    after, exact = COPIES[how](model), copy.deepcopy(before.state_dict())
    with (
        pytest.raises(halfpeak.OrderError, match="before the model is prepared")
        if is_low(model)
        else nullcontext()
    ):
        for step in range(3):
            train(engine, range(step, step + 1))
            average_values(before, model)
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    exact[name].mul_(0.999).add_(value, alpha=0.001)
            assert all(torch.equal(exact[name], value) for name, value in before.state_dict().items())
            average_values(after, model)
    values = after.state_dict()
    values["0.weight"].fill_(0.5)
    after.load_state_dict(values)  # keeps the value that was written
    assert all(after.state_dict()["0.weight"].flatten() == 0.5)


def is_low(model: nn.Module) -> bool:
    return any(parameter.dtype is not torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_alone_or_jointly(level: str, how: Callable[[Any], Any]) -> None:
    """Without masters as in torch; with masters refused, because a copy without the engine would step no model."""
    engine = prepared(level)
    optimizer = engine.optimizers[0]
    before = state_hash(engine)
    for what in (optimizer, (engine.model, optimizer)):
        if level in MASTERED:
            with pytest.raises(halfpeak.OrderError, match="masters"):
                how(what)
        else:
            how(what)
    assert state_hash(engine) == before
    train(engine, range(4, 6))


def test_the_refusal_of_a_pickle_says_what_to_write() -> None:
    engine = prepared("O2")
    with pytest.raises(halfpeak.OrderError, match=r"engine\.state_dict\(\)"):
        pickle.dumps(engine)
    with pytest.raises(halfpeak.OrderError, match=r"copy\.deepcopy\(engine\)"):
        copy.copy(engine)


def test_an_engine_behind_the_apex_door_is_not_copied_alone() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    run = amp._amp_state.run_of(optimizer)
    assert run is not None
    with pytest.raises(halfpeak.OrderError, match="initialise the copy"):
        copy.deepcopy(run.engine)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_of_the_user_are_copied_and_ours_are_there_once(level: str) -> None:
    engine = prepared(level)
    calls: list[str] = []
    engine.model[0].register_forward_hook(lambda *_: calls.append("called"))
    copied = copy.deepcopy(engine)
    counts = [
        [len(hooks) for name, hooks in sorted(vars(module).items()) if name.endswith("_hooks") and hooks]
        for model in (engine.model, copied.model)
        for module in model.modules()
    ]
    assert counts[: len(counts) // 2] == counts[len(counts) // 2 :]
    copied.model(batch(0))
    assert len(calls) == 1
    copied.remove()
    engine.model(batch(0))
    assert len(calls) == 2


def test_lbfgs_is_copied_with_its_own_attributes() -> None:
    def closure_of(engine: halfpeak.Engine) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            engine.optimizers[0].zero_grad()
            loss = engine.model(batch(0)).float().square().mean()
            engine.backward(loss)
            return loss

        return closure

    model = net()
    original = halfpeak.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), "O5")
    original.step(closure_of(original))
    copied = copy.deepcopy(original)
    for engine in (original, copied):
        engine.step(closure_of(engine))
    assert all(
        torch.equal(a, b) for a, b in zip(original.model.parameters(), copied.model.parameters(), strict=True)
    )
