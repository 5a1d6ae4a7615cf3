"""The laws of :class:`halfpeak.parts.window.Window`: what gradients are between two steps, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak import Engine, OrderError, fused
from halfpeak.distributed import fully_shard


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-6)


def fused_sgd(params: Any) -> torch.optim.Optimizer:
    return fused.FusedSGD(params, lr=2**-6)


def prepared(level: str, optimizer: Callable[[Any], Any] = sgd, **options: Any) -> Engine:
    """An engine of two linear layers; at a level with a dynamic scale it is 2**8."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scale = halfpeak.ScaleConfig(init=2.0**8, recovers=True)
    return halfpeak.prepare(net, optimizer(net.parameters()), level, scale=scale, on_skip=None, **options)


def loss_of(engine: Engine, factor: float = 1.0) -> Tensor:
    with engine.forward():
        return engine.model(torch.ones(2, 4)).float().square().mean() * factor


def gradients(engine: Engine) -> list[Tensor | None]:
    return [weight.grad for weight in engine.model.parameters()]


def copies(engine: Engine) -> list[Tensor]:
    return [grad.clone() for grad in gradients(engine) if grad is not None]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


class Boom(RuntimeError):
    """Raised in a backward pass."""


def raising_pass(engine: Engine) -> pytest.ExceptionInfo[Boom]:
    """A pass that raises when it has reached the last layer, and not the first."""

    def fire(grad: Tensor) -> None:
        raise Boom

    handle = engine.model[0].bias.register_hook(fire)
    with pytest.raises(Boom) as raised:
        engine.backward(loss_of(engine))
    handle.remove()
    return raised


# True gradients.


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_after_a_pass_gradients_are_those_of_the_loss_on_both_sides(level: str) -> None:
    engine = prepared(level)
    engine.backward(loss_of(engine))
    plain = torch.autograd.grad(loss_of(engine), list(engine.model.parameters()))
    for weight, wanted in zip(engine.model.parameters(), plain, strict=True):
        main = engine.pairs.main_of(weight)
        assert weight.grad is main.grad
        assert weight.grad is not None
        assert weight.grad.dtype is main.dtype
        torch.testing.assert_close(weight.grad.float(), wanted.float(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_at_a_scale_of_1_gradients_are_added_in_place(level: str) -> None:
    engine = prepared(level, accumulate=3)
    engine.backward(loss_of(engine))
    before, values = gradients(engine), copies(engine)
    engine.backward(loss_of(engine))
    assert all(now is old for now, old in zip(gradients(engine), before, strict=True))
    assert same(copies(engine), [value * 2 for value in values])


# Gradients held for a fused step.


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_write_to_gradients_that_a_fused_step_will_read_is_refused(level: str) -> None:
    engine = prepared(level, fused_sgd)
    engine.backward(loss_of(engine))
    engine.model[0].weight.grad.mul_(0.5)
    for call in (engine.step, engine.unscale, engine.state_dict):
        with pytest.raises(OrderError, match=r"write engine\.unscale\(\) before"):
            call()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_unscale_makes_them_true(level: str) -> None:
    engine, other = prepared(level, fused_sgd), prepared(level, sgd)
    for one in (engine, other):
        one.backward(loss_of(one))
        one.unscale()
    assert same(copies(engine), copies(other))
    engine.model[0].weight.grad.mul_(0.5)
    assert not engine.step().found_inf


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_float32_gradients_at_a_scale_of_1_are_never_held(level: str) -> None:
    engine = prepared(level, fused_sgd)
    engine.backward(loss_of(engine))
    for grad in gradients(engine):
        assert grad is not None
        grad.zero_()
    before = [weight.clone() for weight in engine.model.parameters()]
    assert not engine.step().found_inf
    assert same([weight.detach() for weight in engine.model.parameters()], before)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_zero_grad_drops_held_gradients_also_with_what_another_pass_has_added(
    level: str, set_to_none: bool
) -> None:
    engine = prepared(level, fused_sgd)
    engine.backward(loss_of(engine))
    loss_of(engine).backward()  # for the gradient of an input
    engine.optimizers[0].zero_grad(set_to_none=set_to_none)
    assert engine.unscale() == 0
    assert not engine.is_open


# Groups that join.


def first_layer_alone(level: str, optimizer: Callable[[Any], Any] = sgd) -> Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scale = halfpeak.ScaleConfig(init=2.0**8)
    return halfpeak.prepare(net, optimizer(net[0].parameters()), level, scale=scale, on_skip=None)


def join(engine: Engine) -> None:
    engine.optimizers[0].add_param_group({"params": list(engine.model[1].parameters())})


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
def test_the_gradients_of_a_group_that_joins_between_backward_and_step_are_true(
    level: str, optimizer: Callable[[Any], Any]
) -> None:
    plain, engine = first_layer_alone(level), first_layer_alone(level, optimizer)
    for one in (plain, engine):  # in this order: a pass makes the gradients of every engine true
        one.backward(loss_of(one))
    wanted = [grad.float() for grad in copies(plain)]
    join(engine)
    engine.unscale()
    assert same(copies(engine), wanted)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_group_that_joins_with_infinite_gradients_is_not_stepped(level: str) -> None:
    engine = first_layer_alone(level)
    engine.backward(loss_of(engine))
    engine.model[1].bias.grad.fill_(float("inf"))
    join(engine)
    assert engine.step().found_inf


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_an_edit_before_a_group_joins_is_seen(level: str) -> None:
    engine = first_layer_alone(level)
    engine.backward(loss_of(engine))
    engine.model[0].bias.grad.fill_(float("inf"))
    join(engine)
    assert engine.step().found_inf


# A pass that raises.


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
def test_a_pass_that_raises_has_not_happened(level: str, optimizer: Callable[[Any], Any]) -> None:
    engine = prepared(level, optimizer, accumulate=2)
    engine.backward(loss_of(engine))
    engine.step()
    before = copies(engine)
    raising_pass(engine)
    assert same(copies(engine), before)
    assert engine.micro_step == 1


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_at_a_scale_of_1_a_pass_that_raises_before_any_other_has_not_happened(level: str) -> None:
    engine = prepared(level)
    raising_pass(engine)
    assert not engine.is_open


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_at_a_scale_of_1_it_drops_gradients_to_which_it_has_added_and_says_so(level: str) -> None:
    engine = prepared(level, accumulate=2)
    engine.backward(loss_of(engine))
    engine.step()
    raised = raising_pass(engine)
    assert "so the window begins again" in raised.value.__notes__[0]
    assert not engine.is_open
    assert engine.micro_step == 0


# What passes have found.


def test_what_a_pass_has_found_holds_although_the_gradients_are_made_finite() -> None:
    engine = prepared("O2")
    engine.backward(loss_of(engine, 1e9))
    for grad in gradients(engine):
        assert grad is not None
        grad.nan_to_num_(0.5, 0.5, 0.5)
    result = engine.step()
    assert (bool(result.found_inf), float(result.scale)) == (True, 2.0**7)


@pytest.mark.parametrize("by", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_zeros_end_a_window_as_none_does(level: str, set_to_none: bool, by: str) -> None:
    engine = prepared(level)
    engine.backward(loss_of(engine, float("inf")))
    owner = engine.model if by == "model" else engine.optimizers[0]
    owner.zero_grad(set_to_none=set_to_none)
    scale = engine.read_scale()
    engine.backward(loss_of(engine))
    result = engine.step()
    assert (bool(result.found_inf), float(result.scale)) == (False, scale)


def test_a_loss_that_is_not_finite_lowers_no_scale_but_an_overflow_of_another_pass_does() -> None:
    alone, both = prepared("O2", accumulate=2), prepared("O2", accumulate=2)
    for engine, second in ((alone, 1.0), (both, 1e9)):
        for factor in (float("inf"), second):
            engine.backward(loss_of(engine, factor))
            engine.step()
    assert [alone.read_scale(), both.read_scale()] == [2.0**8, 2.0**7]


def test_an_overflow_lowers_the_scale_of_its_own_loss() -> None:
    engine = prepared("O2", num_losses=2)
    engine.backward(loss_of(engine, 1e9), loss_id=1)
    engine.backward(loss_of(engine))
    engine.step()
    assert [engine.read_scale(0), engine.read_scale(1)] == [2.0**8, 2.0**7]


def test_what_no_pass_explains_lowers_the_scales_of_all_losses_in_the_window() -> None:
    engine = prepared("O2", num_losses=3)
    for loss_id in (0, 2):
        engine.backward(loss_of(engine), loss_id=loss_id)
    engine.model[0].bias.grad[0] = float("inf")
    engine.step()
    assert [engine.read_scale(loss_id) for loss_id in range(3)] == [2.0**7, 2.0**8, 2.0**7]


def two_optimizers(level: str = "O2") -> Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return halfpeak.prepare(
        net, [sgd(layer.parameters()) for layer in net], level, num_losses=2, on_skip=None
    )


def clean(engine: Engine) -> list[int]:
    return [scaler.state_dict()["clean"] for scaler in engine.scalers]


def test_a_loss_counts_once_in_the_first_step_that_its_passes_have_reached() -> None:
    engine = two_optimizers()
    first, second = engine.optimizers
    engine.backward(loss_of(engine), loss_id=0)
    engine.backward(loss_of(engine), loss_id=1, optimizers=second)
    counts = []
    for optimizer in (first, second):
        engine.step(optimizers=optimizer)
        counts.append(clean(engine))
    assert counts == [[1, 0], [1, 1]]


def test_an_overflow_lowers_its_scale_once_for_two_steps() -> None:
    engine = two_optimizers()
    start = engine.read_scale()
    engine.backward(loss_of(engine, 1e9))
    skips = [bool(engine.step(optimizers=optimizer).found_inf) for optimizer in engine.optimizers]
    assert skips == [True, True]
    assert engine.read_scale() == start / 2


def test_gradients_of_an_optimizer_that_a_pass_leaves_out_stay() -> None:
    engine = two_optimizers()
    first, second = engine.optimizers
    engine.backward(loss_of(engine))
    kept = [grad.clone() for grad in gradients(engine)[:2] if grad is not None]
    engine.backward(loss_of(engine, 1e9), optimizers=second)
    assert same(copies(engine)[:2], kept)
    assert [bool(engine.step(optimizers=one).found_inf) for one in (first, second)] == [False, True]


def test_a_sum_of_finite_low_gradients_may_be_infinite_and_is_not_stepped() -> None:
    model = nn.Linear(1, 1, bias=False)
    engine = halfpeak.prepare(
        model, sgd(model.parameters()), halfpeak.LEVELS["O3"].replace(loss_scale=2.0), on_skip=None
    )
    for _ in range(3):
        with engine.forward():
            loss = engine.model(torch.full((1, 1), 32000.0)).float().sum()
        engine.backward(loss)
        assert model.weight.grad is not None
        is_finite = bool(model.weight.grad.isfinite().all())
    assert not is_finite
    assert not engine.step().stepped()


# Gradients that ranks have not reduced.


def ddp_pass(engine: Engine, wrapped: DistributedDataParallel, *, local: bool, factor: float = 1.0) -> None:
    with wrapped.no_sync() if local else nullcontext(), engine.forward():
        loss = wrapped(torch.ones(2, 4)).float().square().mean()
    engine.backward(loss * factor)


def after_no_sync(level: str, **options: Any) -> tuple[Engine, DistributedDataParallel]:
    """An engine after a pass under ``no_sync``."""
    engine = prepared(level, **options)
    wrapped = DistributedDataParallel(engine.model)
    ddp_pass(engine, wrapped, local=True)
    return engine, wrapped


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_under_no_sync_gradients_stay_scaled_until_a_pass_reduces_them(level: str) -> None:
    engine, wrapped = after_no_sync(level)
    scale, scaled = engine.read_scale(), copies(engine)
    ddp_pass(engine, wrapped, local=False)
    true = copies(engine)
    plain = prepared(level)
    plain.backward(loss_of(plain))
    once = copies(plain)
    assert same([grad.float() for grad in scaled], [grad.float() * scale for grad in once])
    assert same(true, [grad * 2 for grad in once])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_pass_under_no_sync_that_reaches_no_parameter_leaves_true_gradients_true(level: str) -> None:
    engine = prepared(level)
    wrapped = DistributedDataParallel(engine.model)
    ddp_pass(engine, wrapped, local=False)
    true = copies(engine)
    with wrapped.no_sync():
        loss_of(engine)  # a forward pass of the module that DDP wraps
        wrapped(torch.ones(2, 4))
        engine.backward(torch.ones((), requires_grad=True) * 2)
    assert same(copies(engine), true)
    assert engine.step().stepped()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_nobody_reads_or_steps_unreduced_gradients(level: str) -> None:
    engine, _ = after_no_sync(level)
    for call in (engine.step, engine.unscale, engine.state_dict):
        with pytest.raises(OrderError, match="no_sync"):
            call()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_write_to_unreduced_gradients_is_refused(level: str) -> None:
    engine, wrapped = after_no_sync(level)
    engine.model[0].weight.grad.mul_(0.5)
    with pytest.raises(OrderError, match="changed while they were still scaled"):
        ddp_pass(engine, wrapped, local=False)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("by", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_zeros_drop_unreduced_gradients(level: str, set_to_none: bool, by: str) -> None:
    engine, _ = after_no_sync(level)
    (engine.model if by == "model" else engine.optimizers[0]).zero_grad(set_to_none=set_to_none)
    assert engine.unscale() == 0
    assert not engine.is_open


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("low_shards", [False, True])
def test_a_pass_over_shards_whose_gradients_were_dropped_is_forgotten(low_shards: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(net, "O2", low_shards=low_shards)
    form: Any = {"master": "remainder"} if low_shards else {}
    optimizer = fused.FusedAdamW(net.parameters(), **form)
    scale = halfpeak.ScaleConfig(init=2.0**8, interval=1)
    engine = halfpeak.prepare(net, optimizer, "O2", scale=scale, on_skip=None)
    with engine.forward():
        loss = engine.model(torch.ones(2, 16)).float().square().mean()
    engine.backward(loss)
    optimizer.zero_grad()
    assert not engine.step().has_gradients
    assert engine.read_scale() == 2.0**8


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_pass_that_raises_under_no_sync_drops_what_it_has_added_to(level: str) -> None:
    engine, wrapped = after_no_sync(level, accumulate=2)
    engine.step()

    def fire(grad: Tensor) -> None:
        raise Boom

    engine.model[0].bias.register_hook(fire)
    with pytest.raises(Boom):
        ddp_pass(engine, wrapped, local=True)
    assert not engine.is_open
    assert engine.micro_step == 0


@pytest.mark.usefixtures("one_rank")
def test_an_overflow_under_no_sync_is_found_when_it_is_reduced() -> None:
    engine = prepared("O2")
    wrapped = DistributedDataParallel(engine.model)
    ddp_pass(engine, wrapped, local=True, factor=1e9)
    ddp_pass(engine, wrapped, local=False)
    result = engine.step()
    assert (bool(result.found_inf), float(result.scale)) == (True, 2.0**7)


def passes_under_ddp(level: str, *passes: tuple[bool, int | None]) -> list[Tensor]:
    """The gradients after some passes.

    Args:
        level: of the engine.
        passes: whether each runs under ``no_sync``, and the optimizer whose parameters get gradients, or None for both.
    """
    engine = two_optimizers(level)
    wrapped = DistributedDataParallel(engine.model, gradient_as_bucket_view=True)
    for local, only in passes:
        with wrapped.no_sync() if local else nullcontext(), engine.forward():
            loss = wrapped(torch.ones(2, 4)).float().square().mean()
        engine.backward(loss, optimizers=None if only is None else engine.optimizers[only])
    engine.unscale()
    return copies(engine)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_unreduced_gradients_stay_in_a_pass_that_leaves_them_out(level: str) -> None:
    """DDP fills the memory in which they were before the pass."""
    around = passes_under_ddp(level, (False, None), (True, None), (False, 0), (False, 1))
    without = passes_under_ddp(level, (False, None), (True, None), (False, 1), (False, 0))
    assert same(around, without)


# Saving.


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
@pytest.mark.parametrize("factor", [1.0, 1e9])
def test_a_window_is_saved_with_what_its_passes_have_found(
    factor: float, optimizer: Callable[[Any], Any]
) -> None:
    engine, other = prepared("O2", optimizer), prepared("O2", optimizer)
    engine.backward(loss_of(engine, factor))
    other.load_state_dict(engine.state_dict())
    assert same(copies(other), copies(engine)) or factor > 1
    results = [(bool(result.found_inf), float(result.scale)) for result in (engine.step(), other.step())]
    assert results[0] == results[1] == (factor > 1, 2.0**8 if factor == 1 else 2.0**7)
