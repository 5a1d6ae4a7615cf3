"""Pending gradients, which wait scaled for a fused step: a run equals its twin that has none, or the step is refused.

The twin clips with a Python function of the caller, so its gradients are unscaled in the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from halfpeak import Engine, OrderError
from halfpeak.engine.gradients.window import Empty, Pending, Unscaled
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedSGD
from reliability.support import LEVELS, batch, net, state_hash
from support.nets import TYPICAL
from support.states import same

INF, NAN = float("inf"), float("nan")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: FusedAdamW(p, lr=0.01, eps=1e-4),
    "SGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "LAMB": lambda p: FusedLAMB(p, lr=0.01, max_grad_norm=0.0),
}


def build(
    level: str, optimizer: str = "AdamW", *, defers: bool = True, norm: str = "batch", **options: Any
) -> Engine:
    model = net(norm=norm)
    clip = options.pop("clip", None)
    if not defers:
        known = halfpeak.ClipNorm(max_norm=clip) if isinstance(clip, float) else clip
        clip = (lambda grads: None) if known is None else (lambda grads: known(grads))
    # Low enough that nothing overflows by itself.
    scale = halfpeak.ScaleConfig(init=1024.0)
    return halfpeak.prepare(
        model, OPTIMIZERS[optimizer](model.parameters()), level, clip=clip, scale=scale, **options
    )


def backward(engine: Engine, step: int, factor: float = 1.0, **options: Any) -> None:
    with engine.forward():
        loss = engine.model(batch(step)).float().square().mean()
    engine.backward(loss * factor, **options)


def train(engine: Engine, steps: range, factors: dict[int, float] | None = None) -> None:
    for step in steps:
        backward(engine, step, (factors or {}).get(step, 1.0))
        engine.step()


def weights(engine: Engine) -> list[Tensor]:
    return [p.detach().float().clone() for p in parameters(engine)]


def parameters(engine: Engine) -> list[Tensor]:
    """The parameters in the optimizer's groups: masters where a level has them."""
    return [p for group in engine.optimizers[0].param_groups for p in group["params"]]


def progress(engine: Engine) -> tuple[int, int, float]:
    return int(engine.num_steps), int(engine.num_skipped), engine.read_scale()


def both(level: str, optimizer: str = "AdamW", **options: Any) -> tuple[Engine, Engine]:
    return tuple(build(level, optimizer, defers=defers, **options) for defers in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_wait_where_autograd_left_them(level: str) -> None:
    waiting, plain = both(level)
    for engine, state in ((waiting, Pending), (plain, Unscaled)):
        backward(engine, 0)
        assert isinstance(engine.context.prepared[0].window, state)
        engine.step()
        assert isinstance(engine.context.prepared[0].window, Empty)
        assert all(p.grad is None for p in (*engine.model.parameters(), *parameters(engine)))


OVERFLOWS: dict[str, dict[int, float]] = {
    "none": {},
    "first": {0: INF},
    "two in a row": {0: NAN, 1: INF},
    "later": {2: INF, 4: NAN},
    "all but one": {0: INF, 1: NAN, 3: INF, 4: NAN, 5: INF},
}


@pytest.mark.parametrize(
    ("level", "optimizer", "overflows", "accumulate"),
    [
        (level, list(OPTIMIZERS)[(i + j) % 3], overflows, (1, 3)[(i + j) % 2])
        for i, level in enumerate(LEVELS)
        for j, overflows in enumerate(OVERFLOWS)
    ],
)
def test_a_run_is_the_run_without_waiting_to_the_bit(
    level: str, optimizer: str, overflows: str, accumulate: int
) -> None:
    waiting, plain = both(level, optimizer, accumulate=accumulate)
    for engine in (waiting, plain):
        train(engine, range(7), OVERFLOWS[overflows])
    assert progress(waiting) == progress(plain)
    assert same(weights(waiting), weights(plain))
    assert state_hash(waiting.model) == state_hash(plain.model)


CLIPS: dict[str, Any] = {
    "norm": 0.5,
    "wide norm": 1e6,
    "value": halfpeak.ClipValue(value=0.01),
    "largest": halfpeak.ClipNorm(max_norm=0.1, norm_type=INF),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_clipped_it_agrees_to_a_few_roundings(level: str, optimizer: str, clip: str) -> None:
    # Not a batch norm: the gradient of a bias before one is only rounding error.
    waiting, plain = both(level, optimizer, clip=CLIPS[clip], norm="layer")
    norms: list[list[Tensor]] = []
    for engine in (waiting, plain):
        backward(engine, 0, INF)
        engine.step()
        results = []
        for step in range(1, 5):
            backward(engine, step)
            results.append(engine.step())
        norms.append([result.grad_norm for result in results if result.grad_norm is not None])
    assert progress(waiting) == progress(plain)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
    # The norm is summed in another order, which rounds the clip coefficient differently; a step is at most 0.05.
    torch.testing.assert_close(weights(waiting), weights(plain), rtol=0, atol=1e-5)


# Other code uses pending gradients.


def edit_masters(engine: Engine) -> None:
    nn.utils.clip_grad_norm_(parameters(engine), 0.1)


def edit_parameters(engine: Engine) -> None:
    nn.utils.clip_grad_norm_(engine.model.parameters(), 0.1)


def replace_low(engine: Engine) -> None:
    first = next(engine.model.parameters())
    first.grad = torch.ones_like(first)


def replace_master(engine: Engine) -> None:
    parameters(engine)[0].grad = torch.ones_like(parameters(engine)[0])


def backward_past_the_engine(engine: Engine) -> None:
    with engine.forward():
        loss = engine.model(batch(9)).float().square().mean()
    loss.backward()


EDITS = [edit_masters, edit_parameters, replace_low, replace_master, backward_past_the_engine]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_written_while_they_wait_are_refused(level: str, edit: Callable[[Engine], object]) -> None:
    # Not a batch norm: its statistics keep the forward passes of an aborted window.
    engine = build(level, norm="layer")
    train(engine, range(2))
    before = weights(engine)
    for look in (Engine.step, Engine.state_dict, copy.deepcopy, Engine.unscale, lambda e: backward(e, 3)):
        backward(engine, 2)
        edit(engine)
        with pytest.raises(OrderError, match=r"engine\.unscale\(\) before"):
            look(engine)  # type: ignore[operator]
        engine.abort()
    assert same(before, weights(engine))
    twin = build(level, norm="layer")
    train(twin, range(2))
    for each in (engine, twin):
        train(each, range(5, 7))
    assert state_hash(engine) == state_hash(twin)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_low_gradients_zeroed_are_refused(level: str) -> None:
    """A clip by an infinite norm also writes zeros."""
    engine = build(level)
    backward(engine, 0)
    engine.model.zero_grad(set_to_none=False)
    with pytest.raises(OrderError, match="changed while they were still scaled"):
        engine.step()


def unscale_and_edit(engine: Engine) -> None:
    assert not bool(engine.unscale())
    for parameter in parameters(engine):
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.001, 0.001)


def user_hook(engine: Engine) -> None:
    def limit(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.001, 0.001)

    engine.optimizers[0].register_step_pre_hook(limit)
    backward(engine, 2)


class EditsAroundStep(FusedAdamW):
    """Edits gradients before the step and parameters after it, as subclasses in recipes do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_clamp_min_([p.grad for p in group["params"] if p.grad is not None], -0.001)
        loss = super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)
        return loss


def hooked(parameters: Any) -> Optimizer:
    """An optimizer with a step post-hook that is registered before the engine's."""
    optimizer = FusedAdamW(parameters, lr=0.01, eps=1e-4)
    optimizer.register_step_post_hook(
        lambda *_: [p.data.mul_(0.5) for group in optimizer.param_groups for p in group["params"]]
    )
    return optimizer


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("make", [lambda p: EditsAroundStep(p, lr=0.01, eps=1e-4), hooked])
def test_who_looks_into_a_step_sees_gradients_and_moves_the_model(
    level: str, make: Callable[[Any], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "own", make)
    engines = both(level, "own")
    for engine in engines:
        train(engine, range(4))
    engine = engines[0]
    values = engine.model.state_dict()
    assert all(torch.equal(p, values[name].to(p.dtype)) for name, p in engine.model.named_parameters())
    assert state_hash(engine) == state_hash(engines[1])


def zero_optimizer(engine: Engine) -> None:
    engine.optimizers[0].zero_grad()


def zero_optimizer_in_place(engine: Engine) -> None:
    engine.optimizers[0].zero_grad(set_to_none=False)


def load_model(engine: Engine) -> None:
    engine.model.load_state_dict(
        {
            key: value * 0.5 if value.is_floating_point() else value
            for key, value in engine.model.state_dict().items()
        }
    )


def load_optimizer(engine: Engine) -> None:
    optimizer = engine.optimizers[0]
    state = copy.deepcopy(optimizer.state_dict())
    for row in state["state"].values():
        row["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(state)


def write_weights(engine: Engine) -> None:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.clamp_(-0.1, 0.1)


def swap_data(engine: Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clone() * 0.5


def add_group(engine: Engine) -> None:
    engine.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def freeze(engine: Engine) -> None:
    next(engine.model.parameters()).requires_grad_(False)


def freeze_all_but_one_for_a_step(engine: Engine) -> None:
    engine.step()
    rest = list(engine.model.parameters())[1:]
    for parameter in rest:
        parameter.requires_grad_(False)
    backward(engine, 8)
    engine.step()
    for parameter in rest:
        parameter.requires_grad_(True)
    backward(engine, 9)


def second_backward(engine: Engine) -> None:
    backward(engine, 9)


def overflow_and_write(engine: Engine) -> None:
    engine.abort()
    backward(engine, 2, INF)
    write_weights(engine)


def overflow_and_swap(engine: Engine) -> None:
    engine.abort()
    backward(engine, 2, INF)
    swap_data(engine)


def create_graph(engine: Engine) -> None:
    engine.abort()
    parameter = next(engine.model.parameters())
    with engine.forward():
        loss = engine.model(batch(2)).float().square().mean()
        (slope,) = torch.autograd.grad(loss, [parameter], create_graph=True)
    engine.backward(loss + slope.float().square().sum())


def closure(engine: Engine, factor: float = 1.0) -> None:
    engine.abort()
    factors = [factor, 1.0]

    def evaluate() -> Tensor:
        engine.optimizers[0].zero_grad()
        with engine.forward():
            loss = engine.model(batch(2)).float().square().mean()
        engine.backward(loss * factors.pop(0))
        return loss

    engine.step(evaluate)
    backward(engine, 3)


ACTS = [
    user_hook,
    zero_optimizer,
    zero_optimizer_in_place,
    load_model,
    load_optimizer,
    write_weights,
    swap_data,
    add_group,
    freeze,
    freeze_all_but_one_for_a_step,
    second_backward,
    overflow_and_write,
    overflow_and_swap,
    create_graph,
    closure,
    Engine.unscale,
    unscale_and_edit,
    Engine.state_dict,
    copy.deepcopy,
]


@pytest.mark.parametrize(("level", "act"), [*product(TYPICAL, ACTS), *product(("O0", "O4"), EDITS)])
def test_what_others_do_in_the_window_ends_the_same(level: str, act: Callable[[Engine], object]) -> None:
    engines = both(level)
    for engine in engines:
        train(engine, range(2))
        backward(engine, 2)
        act(engine)
        engine.step()
        train(engine, range(5, 7))
    assert progress(engines[0]) == progress(engines[1])
    assert state_hash(engines[0]) == state_hash(engines[1])


@pytest.mark.parametrize("level", TYPICAL)
def test_one_gradient_taken_away(level: str) -> None:
    """As in torch: the optimizer does not step that parameter, and steps the others as ever."""
    engine, twin = build(level), build(level)
    for each in (engine, twin):
        train(each, range(2))
        backward(each, 2)
    first = parameters(engine)[0].detach().clone()
    next(engine.model.parameters()).grad = None
    engine.step()
    twin.step()
    ours, theirs = parameters(engine), parameters(twin)
    assert torch.equal(ours[0], first)
    assert not torch.equal(theirs[0], first)
    # torch's kernel rounds the last elements of a piece differently, and the pieces of the two runs differ.
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=1e-7)


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_that_are_kept_are_true_sized_and_clipped(level: str, keep: bool) -> None:
    engines = both(level, clip=0.01)
    kept: list[list[Tensor | None]] = []
    for engine in engines:
        backward(engine, 0)
        engine.step(keep_gradients=keep)
        kept.append([p.grad for p in (*engine.model.parameters(), *parameters(engine))])
    for mine, other in zip(*kept, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
    assert any(grad is not None for grad in kept[0]) is keep
    for engine in engines:
        train(engine, range(1, 3))
    torch.testing.assert_close(weights(engines[0])[2:], weights(engines[1])[2:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("level", TYPICAL)
def test_an_engine_removed_in_its_window_leaves_no_scaled_gradient(level: str) -> None:
    engine = build(level)
    model = engine.model
    backward(engine, 0)
    engine.remove()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("level", TYPICAL)
def test_several_losses_and_several_optimizers_do_not_wait_for_long(level: str) -> None:
    engine = build(level, num_losses=2)
    backward(engine, 0, loss_id=1)
    assert isinstance(engine.context.prepared[0].window, Pending)
    backward(engine, 1, loss_id=0)
    assert isinstance(engine.context.prepared[0].window, Unscaled)
    assert engine.step().stepped()
    model = net()
    parts = [OPTIMIZERS["AdamW"](model[0].parameters()), OPTIMIZERS["SGD"](model[2:].parameters())]
    two = halfpeak.prepare(model, parts, level, scale=halfpeak.ScaleConfig(init=1024.0))
    backward(two, 0)
    assert all(isinstance(one.window, Unscaled) for one in two.context.prepared)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])  # at O1 the graph saves casts, which no step writes
def test_an_old_graph_is_refused_after_the_step(level: str) -> None:
    engine = build(level)
    with engine.forward():
        loss = engine.model(batch(0)).float().square().mean()
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Resume and copies.


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_an_open_window_goes_on_with_torchs_optimizer_and_back(level: str) -> None:
    def plain() -> Engine:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        return halfpeak.prepare(model, optimizer, level, scale=halfpeak.ScaleConfig(init=1024.0))

    fused = build(level, norm="layer")
    train(fused, range(3))
    backward(fused, 3)
    other = plain()
    other.load_state_dict(copy.deepcopy(fused.state_dict()))
    for engine in (fused, other):
        engine.step()
        train(engine, range(4, 6))
    torch.testing.assert_close(weights(fused), weights(other), rtol=0, atol=1e-5)
    backward(other, 6)
    fused.load_state_dict(copy.deepcopy(other.state_dict()))
    for engine in (fused, other):
        engine.step()
        train(engine, range(7, 9))
    torch.testing.assert_close(weights(fused), weights(other), rtol=0, atol=1e-5)
