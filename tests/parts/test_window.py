"""Laws of :class:`halfpeak.parts.window.Window` that ``tests/promises`` and the programs of ``tests/fuzz`` do not reach."""

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
from support.states import same


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


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_at_a_scale_of_1_gradients_are_added_in_place(level: str) -> None:
    engine = prepared(level, accumulate=3)
    engine.backward(loss_of(engine))
    before, values = gradients(engine), copies(engine)
    engine.backward(loss_of(engine))
    assert all(now is old for now, old in zip(gradients(engine), before, strict=True))
    assert same(copies(engine), [value * 2 for value in values])


# Gradients held for a fused step.


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


# Groups that join.


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_an_edit_before_a_group_joins_is_seen(level: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = halfpeak.prepare(net, sgd(net[0].parameters()), level, on_skip=None)
    engine.backward(loss_of(engine))
    net[0].bias.grad.fill_(float("inf"))
    engine.optimizers[0].add_param_group({"params": list(net[1].parameters())})
    assert engine.step().found_inf


# A pass that raises.


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


def test_a_loss_that_is_not_finite_lowers_no_scale_but_an_overflow_of_another_pass_does() -> None:
    alone, both = prepared("O2", accumulate=2), prepared("O2", accumulate=2)
    for engine, second in ((alone, 1.0), (both, 1e9)):
        for factor in (float("inf"), second):
            engine.backward(loss_of(engine, factor))
            engine.step()
    assert [alone.read_scale(), both.read_scale()] == [2.0**8, 2.0**7]


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


# Gradients that ranks have not reduced.


def ddp_pass(
    engine: Engine, wrapped: DistributedDataParallel, *, local: bool, optimizers: Any = None
) -> None:
    with wrapped.no_sync() if local else nullcontext(), engine.forward():
        loss = wrapped(torch.ones(2, 4)).float().square().mean()
    engine.backward(loss, optimizers=optimizers)


def after_no_sync(level: str) -> tuple[Engine, DistributedDataParallel]:
    """An engine after a pass under ``no_sync``."""
    engine = prepared(level)
    wrapped = DistributedDataParallel(engine.model)
    ddp_pass(engine, wrapped, local=True)
    return engine, wrapped


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_passes_under_no_sync_add_up_in_float32(level: str) -> None:
    engine, wrapped = after_no_sync(level)
    once = copies(engine)
    for _ in range(2):
        ddp_pass(engine, wrapped, local=True)
    assert same(copies(engine), [grad.float() * 3 for grad in once])


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


def passes_under_ddp(level: str, *passes: tuple[bool, int | None]) -> list[Tensor]:
    """The gradients after some passes.

    Args:
        level: of the engine.
        passes: whether each runs under ``no_sync``, and the optimizer whose parameters get gradients, or None for both.
    """
    engine = two_optimizers(level)
    wrapped = DistributedDataParallel(engine.model, gradient_as_bucket_view=True)
    for local, only in passes:
        ddp_pass(engine, wrapped, local=local, optimizers=None if only is None else engine.optimizers[only])
    engine.unscale()
    return copies(engine)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_unreduced_gradients_stay_in_a_pass_that_leaves_them_out(level: str) -> None:
    """DDP fills the memory in which they were before the pass."""
    around = passes_under_ddp(level, (False, None), (True, None), (False, 0), (False, 1))
    without = passes_under_ddp(level, (False, None), (True, None), (False, 1), (False, 0))
    assert same(around, without)


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_two_optimizers_in_one_bucket_stay_true_in_a_local_pass_that_leaves_them_out() -> None:
    """As of a critic that is frozen in a pass of its generator. All gradients in a bucket have one version."""
    engine, other = two_optimizers("O0"), prepared("O2")
    wrapped = DistributedDataParallel(engine.model, gradient_as_bucket_view=True)
    ddp_pass(engine, wrapped, local=False)
    true = copies(engine)
    engine.model.requires_grad_(False)
    with wrapped.no_sync(), other.forward(), engine.forward():
        loss = other.model(torch.ones(2, 4)).float().square().mean() + wrapped(torch.ones(2, 4)).mean()
    other.backward(loss)
    engine.model.requires_grad_(True)
    assert same(copies(engine), true)
    assert engine.step().stepped()
