"""Orders of calls from ordinary scripts: the run is that of the plain order, or the call is refused and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import Engine, amp
from support.nets import MASTERED

SCALE = 64.0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build(level: str, optimizer: Callable[[Any], Any] = adam, **options: Any) -> Engine:
    model = net()
    return halfpeak.prepare(model, optimizer(model.parameters()), level, loss_scale=SCALE, **options)


def backward(engine: Engine, seed: int = 0, **options: Any) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    with engine.forward():
        loss = engine.model(x).float().square().mean()
    engine.backward(loss, **options)


def train(engine: Engine, seed: int = 0) -> None:
    backward(engine, seed)
    engine.step()


def weights(engine: Engine) -> list[Tensor]:
    return [value.clone() for value in engine.model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# Parameters that come later.

LOOKS: dict[str, Callable[[Engine], object]] = {
    "state_dict": Engine.state_dict,
    "loop_state_dict": Engine.loop_state_dict,
    "abort": Engine.abort,
    "unscale": Engine.unscale,
    "accumulate": Engine.accumulate,
    "memory": Engine.memory,
    "main_params": Engine.main_params,
    "zero_grad": lambda engine: engine.optimizers[0].zero_grad(),
    "nothing": lambda engine: None,
}


def unfreeze(engine: Engine) -> None:
    engine.model[0].requires_grad_(True)  # type: ignore[operator, union-attr]


def add_group(engine: Engine) -> None:
    engine.optimizers[0].add_param_group({"params": list(engine.model[0].parameters())})  # type: ignore[operator]


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("come", [unfreeze, add_group])
def test_looking_between_new_parameters_and_the_next_backward(
    level: str, look: str, come: Callable[[Engine], None]
) -> None:
    def run(act: Callable[[Engine], object]) -> Engine:
        model = net()
        model[0].requires_grad_(come is add_group)
        trained = model[2].parameters() if come is add_group else model.parameters()
        engine = halfpeak.prepare(model, adam(trained), level, loss_scale=SCALE)
        train(engine)
        come(engine)
        model.zero_grad()  # Of what no optimizer has stepped so far.
        act(engine)
        for seed in range(1, 4):
            train(engine, seed)
        return engine

    engine = run(LOOKS[look])
    assert all(
        p.dtype is torch.float32 for group in engine.optimizers[0].param_groups for p in group["params"]
    )
    assert same(weights(engine), weights(run(LOOKS["nothing"])))


@pytest.mark.parametrize("level", [*MASTERED, "O0", "O1"])
def test_a_group_added_inside_a_window_keeps_the_gradients_of_its_passes(level: str) -> None:
    def run(*, late: bool) -> Engine:
        model = net()
        parts: list[Any] = [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())}]
        optimizer = torch.optim.SGD(parts[: 1 if late else 2], lr=0.5)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=SCALE, accumulate=2)
        backward(engine, 0)
        engine.step()
        if late:
            optimizer.add_param_group(parts[1])
        backward(engine, 1)
        engine.step()
        return engine

    for one, other in zip(weights(run(late=True)), weights(run(late=False)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
        assert not torch.equal(one, other * 0)


# Gradients between the passes of a window.


def mask(engine: Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.grad.mul_(torch.arange(parameter.numel()).reshape(parameter.shape) % 2)  # type: ignore[union-attr]


def add(engine: Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)  # type: ignore[union-attr]


def clip(engine: Engine) -> None:
    nn.utils.clip_grad_norm_(engine.model.parameters(), 0.05)


def times_one(engine: Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.grad *= 1  # type: ignore[operator]


def drop_one(engine: Engine) -> None:
    engine.model[0].weight.grad = None  # type: ignore[operator, union-attr]


def zero_one(engine: Engine) -> None:
    engine.model[2].weight.grad.zero_()  # type: ignore[operator, union-attr]


EDITS = (mask, add, clip, times_one, drop_one, zero_one)


def two_passes(engine: Engine, edit: Callable[[Engine], object]) -> list[Tensor]:
    for window in range(2):
        backward(engine, 2 * window)
        engine.step()
        edit(engine)
        backward(engine, 2 * window + 1)
        engine.step()
    return weights(engine)


def plain_passes(edit: Callable[[Any], object]) -> list[Tensor]:
    class Loop:
        model = net()

    optimizer = adam(Loop.model.parameters())
    for seed in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        (Loop.model(x).square().mean() / 2).backward()
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            edit(Loop)
    return [value.clone() for value in Loop.model.state_dict().values()]


@pytest.mark.parametrize("level", ["O0", "O4"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_between_the_passes_of_a_window_at_scale_one_are_those_of_a_plain_loop(
    level: str, edit: Callable[[Any], object]
) -> None:
    model = net()
    engine = halfpeak.prepare(model, adam(model.parameters()), level, accumulate=2)
    for one, other in zip(two_passes(engine, edit), plain_passes(edit), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if level == "O0" else 5e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_after_unscale_between_the_passes_of_a_window_are_those_of_a_plain_loop(
    level: str, edit: Callable[[Any], object]
) -> None:
    engine = build(level, accumulate=2)

    def edit_unscaled(engine: Engine) -> None:
        engine.unscale()
        edit(engine)

    for one, other in zip(two_passes(engine, edit_unscaled), plain_passes(edit), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if level == "O0" else 5e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("edit", [mask, add, clip, times_one])
@pytest.mark.parametrize("go_on", [backward, Engine.unscale])
def test_edits_of_scaled_gradients_between_the_passes_of_a_window_are_refused(
    level: str, edit: Callable[[Engine], object], go_on: Callable[[Engine], object]
) -> None:
    engine = build(level, accumulate=2)
    backward(engine)
    engine.step()
    edit(engine)
    for _ in range(2):  # A refusal does not make them right.
        with pytest.raises(halfpeak.OrderError, match=r"engine\.unscale\(\) before"):
            go_on(engine)
    engine.abort()
    twin = build(level, accumulate=2)
    assert same(two_passes(engine, lambda _: None), two_passes(twin, lambda _: None))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("every", [1, 2])
def test_model_zero_grad_after_a_bad_batch_drops_it(level: str, every: int, set_to_none: bool) -> None:
    def run(*, bad: bool) -> list[Tensor]:
        engine = build(level, accumulate=every)
        for window in range(2):
            if bad:
                backward(engine, 100 + window)
                engine.model.zero_grad(set_to_none=set_to_none)  # type: ignore[operator]
            for seed in range(every):
                backward(engine, 2 * window + seed)
                engine.step()
        return weights(engine)

    assert same(run(bad=True), run(bad=False))


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_model_zero_grad_before_the_step_leaves_nothing_to_step(level: str) -> None:
    engine = build(level)
    train(engine)
    before = weights(engine)
    backward(engine)
    engine.model.zero_grad()  # type: ignore[operator]
    engine.step()
    assert same(weights(engine), before)


@pytest.mark.parametrize("level", MASTERED)
def test_model_zero_grad_between_amps_backward_and_step_drops_the_batch(level: str) -> None:
    def run(*, bad: bool) -> list[Tensor]:
        model = net()
        model, optimizer = amp.initialize(
            model, adam(model.parameters()), opt_level=level, loss_scale=SCALE, verbosity=0
        )
        for seed in [0, 100, 1] if bad else [0, 1]:
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            if seed < 100:
                optimizer.step()
            model.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    assert same(run(bad=True), run(bad=False))
