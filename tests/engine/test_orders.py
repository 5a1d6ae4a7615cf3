"""Orders of calls in scripts: the run equals that of the plain order, or the call is refused and nothing is lost."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import Engine, amp
from halfpeak.fused import FusedAdamW, FusedLAMB
from halfpeak.ops import foreach
from support.nets import LEVELS, MASTERED
from support.states import same, through_a_file

SCALE = 64.0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def build(level: str, optimizer: Callable[[Any], Any] = adam, **options: Any) -> Engine:
    model = net()
    return halfpeak.prepare(model, optimizer(model.parameters()), level, loss_scale=SCALE, **options)


def batch(seed: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def backward(engine: Engine, seed: int = 0) -> None:
    with engine.forward():
        loss = engine.model(batch(seed)).float().square().mean()
    engine.backward(loss)


def train(engine: Engine, seed: int = 0) -> None:
    backward(engine, seed)
    engine.step()


def weights(engine: Engine) -> list[Tensor]:
    return [value.clone() for value in engine.model.state_dict().values()]


# Calls that create tensors: created under torch.inference_mode(), no later step could write them.

MAKERS: dict[str, Callable[[Engine], object]] = {
    "prepare": lambda _: build("O2"),
    "step": Engine.step,
    "optimizer.step": lambda engine: engine.optimizers[0].step(),
    "load_state_dict": lambda engine: engine.load_state_dict(engine.state_dict()),
    "load_loop_state_dict": lambda engine: engine.load_loop_state_dict(engine.loop_state_dict()),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", MAKERS)
def test_inference_mode_is_refused_and_the_run_goes_on(call: str, level: str) -> None:
    engine, plain = build(level, momentum), build(level, momentum)
    for one in (engine, plain):
        train(one, 0)
        backward(one, 1)
    with torch.inference_mode(), pytest.raises(halfpeak.OrderError, match="inference_mode"):
        MAKERS[call](engine)
    for one in (engine, plain):
        one.step()
        train(one, 2)
    assert same(weights(engine), weights(plain))


# Parameters that are unfrozen or join the optimizer after ``prepare``.

LOOKS: dict[str, Callable[[Engine], object]] = {
    "state_dict": Engine.state_dict,
    "loop_state_dict": Engine.loop_state_dict,
    "abort": Engine.abort,
    "unscale": Engine.unscale,
    "unscale_pending": Engine.unscale_pending,
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
        model.zero_grad()  # Drops gradients of parameters that no optimizer has stepped yet.
        act(engine)
        for seed in range(1, 4):
            train(engine, seed)
        return engine

    engine = run(LOOKS[look])
    assert all(
        p.dtype is torch.float32 for group in engine.optimizers[0].param_groups for p in group["params"]
    )
    assert same(weights(engine), weights(run(LOOKS["nothing"])))


@pytest.mark.parametrize("level", [*MASTERED, "O0"])
def test_a_layer_unfrozen_before_a_pass_through_its_parts_is_trained(level: str) -> None:
    engine = build(level)
    train(engine)
    engine.model[0].requires_grad_(False)  # type: ignore[operator, union-attr]
    train(engine)
    before = weights(engine)
    unfreeze(engine)
    x = batch(1).to(next(engine.model.parameters()).dtype)
    for layer in engine.model.children():  # the engine sees no forward pass of the model
        x = layer(x)
    engine.backward(x.float().square().mean())
    engine.step()
    assert all(not torch.equal(now, old) for now, old in zip(weights(engine), before, strict=True))


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

    start = net().state_dict().values()
    for one, other, old in zip(weights(run(late=True)), weights(run(late=False)), start, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
        assert (one - old).abs().max() > 1e-2


@pytest.mark.parametrize("level", [*MASTERED, "O0", "O1"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
def test_a_group_added_before_a_step_is_stepped_by_the_gradients_that_it_has(level: str, kind: Any) -> None:
    def run(*, late: bool) -> Engine:
        model = net()
        parts: list[Any] = [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())}]
        optimizer = kind(parts[: 1 if late else 2], lr=0.01)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=SCALE)
        backward(engine)
        if late:
            optimizer.add_param_group(parts[1])
        engine.step()
        return engine

    for one, other in zip(weights(run(late=True)), weights(run(late=False)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def copied(engine: Engine) -> Engine:
    return copy.deepcopy(engine)


def resumed(engine: Engine) -> Engine:
    fresh = net()
    parts = [{"params": list(fresh[number].parameters())} for number in (2, 0)]
    again = halfpeak.prepare(
        fresh,
        torch.optim.SGD(parts, lr=0.5),
        engine.config.properties.opt_level,
        loss_scale=SCALE,
        accumulate=engine.config.accumulation.every,
    )
    again.load_state_dict(through_a_file(engine.state_dict()))
    return again


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("go_on", [copied, resumed])
def test_a_copy_and_a_resume_have_the_gradients_of_a_group_that_joined_inside_the_window(
    level: str, every: int, go_on: Callable[[Engine], Engine]
) -> None:
    def run(go_on: Callable[[Engine], Engine]) -> Engine:
        model = net()
        engine = halfpeak.prepare(
            model, torch.optim.SGD(model[2].parameters(), lr=0.5), level, loss_scale=SCALE, accumulate=every
        )
        backward(engine)
        add_group(engine)
        engine = go_on(engine)
        engine.step()
        if every == 2:
            backward(engine, 1)
            engine.step()
        return engine

    stayed = weights(run(lambda engine: engine))
    assert not same(stayed[:2], weights(build(level, momentum))[:2])
    assert same(stayed, weights(run(go_on)))


# Edits of gradients between the passes of a window.


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
        (Loop.model(batch(seed)).square().mean() / 2).backward()
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            edit(Loop)
    return [value.clone() for value in Loop.model.state_dict().values()]


@pytest.mark.parametrize(
    ("level", "scale", "tolerance"),
    [("O0", None, 0.0), ("O4", None, 5e-3), ("O0", SCALE, 1e-6), ("O1", SCALE, 5e-3), ("O4", SCALE, 5e-3)],
)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_between_the_passes_of_a_window_are_those_of_a_plain_loop(
    level: str, scale: float | None, tolerance: float, edit: Callable[[Any], object]
) -> None:
    """Allowed at a scale of 1, and at any scale after ``unscale``."""
    model = net()
    engine = halfpeak.prepare(model, adam(model.parameters()), level, loss_scale=scale, accumulate=2)

    def edit_unscaled(engine: Engine) -> None:
        if scale is not None:
            engine.unscale()
        edit(engine)

    for one, other in zip(two_passes(engine, edit_unscaled), plain_passes(edit), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


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
    for _ in range(2):  # The second call is refused, too, because the gradients are still edited.
        with pytest.raises(halfpeak.OrderError, match=r"engine\.unscale\(\) before"):
            go_on(engine)
    engine.abort()
    twin = build(level, accumulate=2)
    assert same(two_passes(engine, lambda _: None), two_passes(twin, lambda _: None))


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("delay", [True, False])
def test_masters_clipped_while_their_gradients_wait_scaled_are_refused(level: str, delay: bool) -> None:
    """With ``delay`` a later pass adds to the gradients; without, the step of a fused optimizer reads them."""
    engine = build(level, adam if delay else lambda parameters: FusedAdamW(parameters, lr=0.01))
    with engine.forward():
        loss = engine.model(batch(0)).float().square().mean()  # type: ignore[operator]
    with engine.scaled(loss, delay=delay) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(engine.main_params(), 0.05)
    with pytest.raises(halfpeak.OrderError, match=r"engine\.unscale\(\) before"):
        backward(engine, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", [adam, lambda parameters: FusedAdamW(parameters, lr=0.01)])
def test_an_edit_that_is_not_finite_skips_and_leaves_the_scale(
    level: str, optimizer: Callable[[Any], Any]
) -> None:
    """The loss scale follows the backward passes. A fused optimizer's first step is decided by other code."""
    model = net()
    scale = halfpeak.ScaleConfig(init=1024.0)
    engine = halfpeak.prepare(model, optimizer(model.parameters()), level, scale=scale)
    train(engine)
    backward(engine, 1)
    engine.unscale()
    engine.main_grads()[0].fill_(float("inf"))
    assert not engine.step().stepped()
    assert engine.read_scale() == 1024.0


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_kept_of_a_pass_that_overflowed_and_written_through_data_are_not_stepped(
    level: str, fused: bool, set_to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEM and CAGrad write their sums so, which changes no version counter. After finite passes nothing is read twice."""
    engine = build(level, lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=fused))
    for overflows in (False, True, False):
        with engine.forward():
            loss = engine.model(batch(0)).float().square().mean()  # type: ignore[operator]
        engine.backward(loss * (1e38 if overflows else 1))
        kept = [grad.clone() for grad in engine.main_grads()]
        engine.optimizers[0].zero_grad(set_to_none)
        backward(engine, 1)
        for grad, other in zip(engine.main_grads(), kept, strict=True):
            grad.data.add_(other)
        with monkeypatch.context() as patch:
            if not overflows:
                patch.setattr(foreach, "check_", None)
            assert engine.step().stepped() is not overflows
    assert all(bool(weight.isfinite().all()) for weight in weights(engine))


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_main_grads_inside_a_window_are_unscaled(level: str) -> None:
    engine, plain = build(level, accumulate=2), net()
    backward(engine)
    (plain(batch(0)).square().mean() / 2).backward()
    for ours, theirs in zip(engine.main_grads(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=0, atol=5e-3)


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


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_model_zero_grad_leaves_no_main_gradients(level: str, set_to_none: bool) -> None:
    engine = build(level)
    backward(engine)
    assert engine.main_grads()
    engine.model.zero_grad(set_to_none)
    assert not engine.main_grads()


@pytest.mark.parametrize("level", MASTERED)
def test_model_zero_grad_between_amps_backward_and_step_drops_the_batch(level: str) -> None:
    def run(*, bad: bool) -> list[Tensor]:
        model = net()
        model, optimizer = amp.initialize(
            model, adam(model.parameters()), opt_level=level, loss_scale=SCALE, verbosity=0
        )
        for seed in [0, 100, 1] if bad else [0, 1]:
            with amp.scale_loss(model(batch(seed)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            if seed < 100:
                optimizer.step()
            model.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    assert same(run(bad=True), run(bad=False))


# Freezing and writing either side of a pair: the model parameter or its master.


def set_trainable(engine: Engine, wanted: bool, layer: int) -> None:
    engine.model[layer].requires_grad_(wanted)  # type: ignore[operator, union-attr]


def set_trainable_in_groups(engine: Engine, wanted: bool, layer: int) -> None:
    for parameter in engine.optimizers[0].param_groups[layer // 2]["params"]:
        parameter.requires_grad_(wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("freeze", [set_trainable, set_trainable_in_groups])
@pytest.mark.parametrize("thaw", [set_trainable, set_trainable_in_groups])
def test_freezing_through_either_side_freezes_both(
    level: str, freeze: Callable[..., None], thaw: Callable[..., None]
) -> None:
    model = net()
    optimizer = momentum([{"params": list(layer.parameters())} for layer in (model[0], model[2])])
    engine = halfpeak.prepare(model, optimizer, level, loss_scale=SCALE)
    train(engine)
    freeze(engine, False, 0)
    before = weights(engine)
    train(engine, 1)
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    assert same(weights(engine)[:2], before[:2])
    assert not any(map(torch.equal, weights(engine)[2:], before[2:]))
    thaw(engine, True, 0)
    before = weights(engine)
    train(engine, 2)
    assert not any(map(torch.equal, weights(engine), before))


@pytest.mark.parametrize("level", ["O0", *MASTERED])
@pytest.mark.parametrize("freeze", [set_trainable, set_trainable_in_groups])
@pytest.mark.parametrize("moment", ["before forward", "before backward"])
@pytest.mark.parametrize("calls", ["model", "its parts"])
def test_a_layer_frozen_before_either_pass_gets_no_gradient_from_it(
    level: str, freeze: Callable[..., None], moment: str, calls: str
) -> None:
    """As in a GAN whose networks are parts of one module: the loss of one network freezes the other."""

    def run(freeze: Callable[..., None], moment: str, calls: str) -> list[Tensor]:
        model = net()
        optimizer = momentum([{"params": list(layer.parameters())} for layer in (model[0], model[2])])
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=SCALE)
        for seed, layer in enumerate((None, 0, 0, 2, None)):

            def toggle(now: str, wanted: bool, layer: int | None = layer) -> None:
                if layer is not None and now == moment:
                    freeze(engine, wanted, layer)

            toggle("before forward", False)
            with engine.forward():
                inputs = batch(seed).to(model[0].weight.dtype)
                output = model(inputs) if calls == "model" else model[2](model[1](model[0](inputs)))
                loss = output.float().square().mean()
            toggle("before backward", False)
            engine.backward(loss)
            engine.step()
            toggle(moment, True)
        return weights(engine)

    assert same(run(freeze, moment, calls), run(set_trainable, "before forward", "model"))


@pytest.mark.parametrize("level", ["O0", "O1", *MASTERED])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("parts", ["engine", "model first", "optimizer first"])
@pytest.mark.parametrize(
    "come",
    ["unfrozen after the load", "group added before the load", "group added and frozen before the load"],
)
def test_parameters_that_come_around_a_load_are_those_of_the_run_that_was_saved(
    level: str, optimizer: str, parts: str, come: str
) -> None:
    is_frozen = come.startswith("unfrozen")

    def prepared() -> Engine:
        model = net()
        model[0].requires_grad_(not is_frozen)
        parameters = model.parameters() if is_frozen else model[2].parameters()
        made = adam(parameters) if optimizer == "adam" else torch.optim.SGD(parameters, lr=0.3)
        return halfpeak.prepare(model, made, level, loss_scale=SCALE)

    first, second = prepared(), prepared()
    train(first)
    if is_frozen:
        unfreeze(first)
    else:
        add_group(first)
        add_group(second)
    for seed in range(1, 4):
        train(first, seed)
    if come.endswith("and frozen before the load"):
        is_frozen = True
        for engine in (first, second):
            engine.model[0].requires_grad_(False)  # type: ignore[operator, union-attr]
    optimizers = [one.state_dict() for one in first.optimizers]
    whole, of_model, of_optimizers, of_loop = through_a_file(
        (first.state_dict(), first.model.state_dict(), optimizers, first.loop_state_dict())
    )
    if parts == "engine":
        second.load_state_dict(whole)
    else:
        loads: list[Callable[[], object]] = [lambda: second.model.load_state_dict(of_model)]
        loads.insert(parts == "model first", lambda: second.optimizers[0].load_state_dict(of_optimizers[0]))
        for load in loads:
            load()
        second.load_loop_state_dict(of_loop)
    assert same(weights(second), weights(first))
    for engine in (first, second):
        unfreeze(engine)
        for seed in range(4, 6):
            train(engine, seed)
    assert same(weights(second), weights(first))


Value = Callable[[Tensor], Tensor]


def through_data(parameter: Tensor, value: Value) -> None:
    parameter.data.copy_(value(parameter.data))


def in_place(parameter: Tensor, value: Value) -> None:
    with torch.no_grad():
        parameter.copy_(value(parameter))


def assigned(parameter: Tensor, value: Value) -> None:
    parameter.data = value(parameter.data)


WRITERS = (through_data, in_place, assigned)


def loaded_in_part(model: nn.Module, value: Value) -> None:
    part = next(model.children())
    part.load_state_dict({name: value(tensor) for name, tensor in part.state_dict().items()})


def written_in_part(model: nn.Module, value: Value) -> None:
    """The largest parameter, whose values are sampled, is in another part."""
    *_, part = model.children()
    for parameter in part.parameters():
        in_place(parameter, value)


def clamp(engine: Engine, write: Callable[[Any, Value], None]) -> None:
    in_part = write in (loaded_in_part, written_in_part)
    for each in [engine.model] if in_part else engine.model.parameters():
        write(each, lambda weight: weight.clamp(-0.125, 0.125))


class AssigningSGD(torch.optim.SGD):
    """Assigns new memory to parameters in every step, as SAM does when it restores weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter - group["lr"] * parameter.grad


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": adam,
    "assigning": lambda p: AssigningSGD(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "FusedAdamW": lambda p: FusedAdamW(p, lr=0.01),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=0.01),
}


@pytest.mark.parametrize("level", ["O0", *MASTERED])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("write", [*WRITERS, loaded_in_part, written_in_part])
@pytest.mark.parametrize("moment", ["before forward", "before step", "after a skip"])
def test_weights_written_between_steps_are_those_that_train_on(
    level: str, optimizer: str, write: Callable[..., None], moment: str
) -> None:
    engine = build(level, OPTIMIZERS[optimizer])
    for group in engine.optimizers[0].param_groups:
        group["lr"] = 1e-3
    train(engine)
    train(engine)

    def write_now() -> list[Tensor]:
        clamp(engine, write)
        return [parameter.detach().float().clone() for parameter in engine.model.parameters()]

    if moment == "after a skip":
        written = write_now()
        with engine.forward():
            loss = engine.model(torch.ones(3, 4)).float().sum() * torch.inf
        engine.backward(loss)
        assert not engine.step().stepped()
        assert same([p.float() for p in engine.model.parameters()], written)
    else:
        if moment == "before step":
            backward(engine, 1)
        written = write_now()
    low = {p.dtype for p in engine.model.parameters()}
    assert all(
        torch.equal(a.to(b.dtype), b) for a, b in zip(weights(engine), engine.model.parameters(), strict=True)
    )
    if moment != "before step":
        backward(engine, 1)
    engine.step()
    for now, before in zip(weights(engine), written, strict=True):
        torch.testing.assert_close(now, before, rtol=0.05, atol=0.02)
    assert low == {p.dtype for p in engine.model.parameters()}
    assert all(torch.equal(master.to(weight.dtype), weight) for weight, master in engine.masters)


@pytest.mark.parametrize("level", MASTERED)
def test_clamped_weights_of_two_optimizers_are_followed_without_a_write(level: str) -> None:
    model = net()
    halves = [list(part.parameters()) for part in (model[0], model[1:])]
    engine = halfpeak.prepare(model, [adam(half) for half in halves], level, loss_scale=SCALE)
    train(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)
    train(engine, 1)  # autograd would raise if a weight were written between forward and backward
    assert all(weight.abs().max() < 0.06 for weight in weights(engine))


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_swapped_out_and_in_again_through_data_leave_no_trace(level: str, optimizer: str) -> None:
    def run(*, swap: bool) -> list[Tensor]:
        engine = build(level, OPTIMIZERS[optimizer])
        for seed in range(4):
            train(engine, seed)
            if swap:
                held = [parameter.data.clone() for parameter in engine.model.parameters()]
                for parameter in engine.model.parameters():
                    through_data(parameter, lambda weight: weight * 0.5)
                with torch.no_grad():
                    engine.model(torch.ones(3, 4))
                assert not same(weights(engine), [value.float() for value in held])
                for parameter, value in zip(engine.model.parameters(), held, strict=True):
                    parameter.data.copy_(value)
        return weights(engine)

    assert same(run(swap=True), run(swap=False))


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("write", [None, *WRITERS])
def test_where_values_cannot_be_looked_at_a_write_without_a_trace_warns(
    level: str, optimizer: str, write: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where the host would wait for values."""
    monkeypatch.setattr("halfpeak.state.samples._is_on_host", lambda tensor: False)
    monkeypatch.setattr("halfpeak.state.samples.COMPARE_EVERY", 2)
    engine = build(level, OPTIMIZERS[optimizer])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(7):
            train(engine, seed)
            if write is not None and seed >= 3:
                clamp(engine, write)
    assert bool(told) == (write is through_data)
    assert all("under torch.no_grad()" in str(one.message) for one in told)


@pytest.mark.parametrize("level", ["O0", "O1", *MASTERED])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("moment", ["before forward", "before step", "before a step of the first layer"])
def test_parameters_that_an_optimizer_writes_outside_of_its_step_reach_the_model(
    level: str, optimizer: str, write: Callable[[Tensor, Value], None], moment: str
) -> None:
    engine = build(level, OPTIMIZERS[optimizer])
    train(engine)
    before = weights(engine)
    if moment == "before step":
        backward(engine, 1)
    elif moment != "before forward":
        first = engine.model[0]  # type: ignore[operator]
        with engine.forward():
            loss = first(batch(1).to(first.weight.dtype)).float().square().mean()
        engine.backward(loss)
    for parameter in engine.main_params():
        write(parameter, lambda weight: weight + 0.25)
    expected = [value + 0.25 for value in before]
    assert all(map(torch.allclose, weights(engine), expected))
    if moment == "before forward":
        with engine.forward():
            engine.model(torch.ones(1, 4))
        low = [value.to(p.dtype) for value, p in zip(expected, engine.model.parameters(), strict=True)]
        assert all(map(torch.allclose, engine.model.parameters(), low))
        backward(engine, 1)
    engine.step()
    for now, value in zip(weights(engine), expected, strict=True):
        torch.testing.assert_close(now, value, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("level", ["O0", "O1", *MASTERED])
@pytest.mark.parametrize("write", [in_place, assigned])
def test_weights_written_before_a_pass_are_those_that_sam_perturbs(
    level: str, write: Callable[[Tensor, Value], None]
) -> None:
    engine = build(level)
    train(engine)
    for parameter in engine.model.parameters():
        write(parameter, lambda weight: weight.clamp(-0.125, 0.125))
    written = weights(engine)
    for sign in (1, -1):  # to the neighbour, whose gradients are stepped, and back
        backward(engine, 1)
        if sign == 1:
            engine.optimizers[0].zero_grad()
        with torch.no_grad():
            for parameter in engine.main_params():
                parameter += sign * 0.25
    engine.step()
    for now, value in zip(weights(engine), written, strict=True):
        torch.testing.assert_close(now, value, rtol=0.05, atol=0.02)


class Sam(torch.optim.Optimizer):
    """Steps by another optimizer over its own groups, as the SAM of many repositories does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.3)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


def sam(level: str) -> tuple[nn.Module, Sam, Callable[[int, float], None]]:
    """A model, its optimizer, and a function that steps one batch by the optimizer inside, its loss times a factor."""
    model = net()
    optimizer = Sam(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)

    def train_inner(seed: int, factor: float = 1.0) -> None:
        with amp.scale_loss(model(batch(seed)).float().square().mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.base_optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, train_inner


@pytest.mark.parametrize("level", MASTERED)
def test_a_step_of_the_optimizer_inside_another_reaches_the_model(level: str) -> None:
    model, optimizer, train_inner = sam(level)
    for seed in range(2):
        before = [weight.clone() for weight in model.parameters()]
        train_inner(seed)
        assert not any(map(torch.equal, model.parameters(), before))
        for weight, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(weight, master.to(weight.dtype))
        for parameter in model.parameters():  # what is written now is not overwritten by the step before
            in_place(parameter, lambda weight: weight.clamp(-0.125, 0.125))
    with torch.no_grad():
        model(batch(0))
    assert all(float(weight.detach().abs().max()) <= 0.125 for weight in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_of_the_optimizer_inside_another_is_skipped_after_an_overflow(level: str) -> None:
    model, optimizer, train_inner = sam(level)
    scales, weights = [], []
    for seed, factor in enumerate((1.0, math.inf, 1.0)):
        train_inner(seed, factor)
        assert amp.last_step(optimizer).stepped() is (factor == 1)
        scales.append(float(amp.state_dict()["loss_scaler0"]["loss_scale"]))
        weights.append([weight.clone() for weight in model.parameters()])
    assert same(weights[1], weights[0])
    assert scales[1:] == [scales[0] / 2] * 2

    plain, _, train_inner = sam(level)
    train_inner(0)
    train_inner(2)
    for weight, expected in zip(weights[2], plain.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)


def test_a_step_of_the_optimizer_inside_one_that_an_engine_steps_is_refused() -> None:
    engine = build("O1", Sam)
    backward(engine)
    before = weights(engine)
    with pytest.raises(halfpeak.OrderError, match=r"engine\.step\(closure\)"):
        engine.optimizers[0].base_optimizer.step()
    assert same(weights(engine), before)
    engine.step()  # the window is as it was


class SamWithClosure(torch.optim.SGD):
    """Perturbs the weights by the gradients that are there, steps by those of the closure, as SAM's ``step`` does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3)

    def step(self, closure: Any = None) -> Any:
        perturbed = [(p, p.grad * 0.1) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for parameter, added in perturbed:
                parameter += added
        self.zero_grad()
        loss = closure()
        with torch.no_grad():
            for parameter, added in perturbed:
                parameter -= added
        super().step()
        return loss


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_is_not_called_after_a_pass_that_overflowed(level: str) -> None:
    def backward_of(engine: Engine, seed: int, factor: float = 1.0) -> Tensor:
        with engine.forward():
            loss = engine.model(batch(seed)).float().square().mean() * factor
        engine.backward(loss)
        return loss

    def run(engine: Engine, factors: dict[int, float]) -> tuple[list[bool], list[int]]:
        taken, called = [], []
        for seed, factor in factors.items():
            backward_of(engine, seed, factor)

            def closure(seed: int = seed) -> Tensor:
                called.append(seed)
                return backward_of(engine, seed)

            taken.append(engine.step(closure).stepped())
        return taken, called

    engine, expected = build(level, SamWithClosure), build(level, SamWithClosure)
    assert run(engine, {0: 1.0, 1: math.inf, 2: 1.0}) == ([True, False, True], [0, 2])
    assert (int(engine.num_steps), int(engine.num_skipped)) == (2, 1)
    run(expected, {0: 1.0, 2: 1.0})
    assert same(weights(engine), weights(expected))


# Steps inside a backward pass: its gradients are scaled, and earlier ones are stashed.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_step_inside_the_block_of_a_loss_is_refused_and_the_pass_not_begun(level: str, which: int) -> None:
    def run(*, bad: bool) -> list[Tensor]:
        models = [net(), net()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
        amp.initialize(models, optimizers, opt_level=level, loss_scale=SCALE, verbosity=0)

        def loss_of(number: int) -> Tensor:
            return models[number](batch(number)).float().square().mean()

        def scaled_backward(number: int, act: Callable[[], object] = list) -> None:
            with amp.scale_loss(loss_of(number), optimizers[number]) as scaled:
                scaled.backward()
                act()

        scaled_backward(1)
        if bad:
            with pytest.raises(halfpeak.OrderError, match=r"after the `with amp\.scale_loss` block"):
                scaled_backward(0, optimizers[which].step)
        scaled_backward(0)
        for optimizer in optimizers:
            optimizer.step()
        return [value.clone() for model in models for value in model.state_dict().values()]

    assert same(run(bad=True), run(bad=False))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("prepared", [True, False])
def test_an_optimizer_that_steps_in_the_backward_pass_is_refused_where_gradients_are_scaled(
    level: str, prepared: bool
) -> None:
    model = net()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    engine = halfpeak.prepare(model, optimizers[: 1 + prepared], level, loss_scale=SCALE)
    before = weights(engine)
    model[2].bias.register_post_accumulate_grad_hook(lambda _: optimizers[1].step())
    with pytest.raises(halfpeak.OrderError, match="not in a hook of a parameter"):
        backward(engine)
    assert same(weights(engine), before)
    assert not engine.is_open


def test_an_optimizer_that_was_not_prepared_steps_in_a_backward_pass_that_is_not_scaled() -> None:
    def run(*, hooked: bool) -> list[Tensor]:
        model = net()
        optimizer, other = adam(model[0].parameters()), torch.optim.SGD([model[2].bias], lr=0.1)
        engine = halfpeak.prepare(model, optimizer, "O4")

        def step(_: object = None) -> None:
            other.step()
            other.zero_grad()

        if hooked:
            model[2].bias.register_post_accumulate_grad_hook(step)
        for seed in range(3):
            backward(engine, seed)
            engine.step()
            if not hooked:
                step()
        return weights(engine)

    assert same(run(hooked=True), run(hooked=False))


@pytest.mark.parametrize("optimizer", [adam, FusedAdamW])
def test_an_evaluation_in_another_thread_does_not_write_the_weights_of_a_pass_here(optimizer: Any) -> None:
    ends = []
    for evaluates in (False, True):
        engine = build("O2", optimizer)
        train(engine)
        with engine.forward():
            loss = engine.model(batch(1)).float().square().mean()
        with torch.no_grad():
            # Looks like a step that is running in another thread.
            engine.main_params()[0].mul_(1.5)
        if evaluates:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(torch.no_grad()(engine.model), batch(2)).result()
        engine.backward(loss)
        engine.step()
        train(engine, seed=3)
        ends.append(weights(engine))
    assert same(*ends)


@pytest.mark.parametrize("optimizer", [adam, FusedAdamW])
def test_an_evaluation_after_the_thread_that_trained_follows_the_masters(optimizer: Any) -> None:
    engine = build("O2", optimizer)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train, engine).result()
    with torch.no_grad():
        for master in engine.main_params():
            master.zero_()
        assert not engine.model(batch(2)).any()


@pytest.mark.parametrize("level", MASTERED)
def test_masters_that_a_later_hook_writes_reach_the_model_before_a_forward_pass(level: str) -> None:
    """A compiled forward pass does not look for writes."""
    engine = build(level)

    @torch.no_grad()
    def halve(*_: Any) -> None:
        for master in engine.main_params():
            master.mul_(0.5)

    engine.optimizers[0].register_step_post_hook(halve)
    train(engine)
    assert all(torch.equal(master.to(weight.dtype), weight) for weight, master in engine.masters)


@pytest.mark.parametrize("level", MASTERED)
def test_a_forward_pass_in_a_hook_after_a_skipped_step_ends_it_once(level: str) -> None:
    """Weights that the hook writes stay: the step was skipped, so no master is published over them."""
    model = net()
    optimizer = adam(model.parameters())

    def look_and_write(*_: Any) -> None:
        model(batch(0))
        with torch.no_grad():
            model[0].weight.fill_(0.5)

    optimizer.register_step_post_hook(look_and_write)
    engine = halfpeak.prepare(model, optimizer, level, loss_scale=SCALE)
    with engine.forward():
        loss = model(batch(0)).float().square().mean() * torch.inf
    engine.backward(loss)
    assert not engine.step().stepped()
    assert bool((model.state_dict()["0.weight"] == 0.5).all())
