"""scale_loss: after a block, gradients are unscaled and summed, in every form of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfpeak import amp
from support.nets import LEVELS, MASTERED
from support.snapshot import snapshot

ZERO: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer, to None": lambda net, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda net, optimizer: net.zero_grad(),
    "by hand": lambda net, optimizer: [setattr(p, "grad", None) for p in net.parameters()],  # type: ignore[func-returns-value]
}


class Weight(nn.Module):
    """The smallest net: its gradient is exactly the sum of its inputs, whatever the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def setup(level: str, **options: Any) -> tuple[Weight, torch.optim.Optimizer]:
    """A dynamic scale starts at 256, where float16 gradients of about 1 do not overflow."""
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    options.setdefault("max_loss_scale", 256.0)
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)


def backward(net: nn.Module, optimizers: Any, value: float, **options: Any) -> None:
    with amp.scale_loss(net(torch.full((3,), value)), optimizers, **options) as scaled:
        scaled.backward()


def grad(optimizer: torch.optim.Optimizer) -> list[float] | None:
    weight = next(iter(amp.master_params(optimizer)))
    return None if weight.grad is None else weight.grad.tolist()


def scaler_state(number: int = 0) -> tuple[float, int]:
    return tuple(amp.state_dict()[f"loss_scaler{number}"].values())


# Arguments.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_the_float32_loss_times_the_scale(level: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In float16 the product would be inf."""
    _, optimizer = setup(level, loss_scale=65536.0)
    loss = torch.full(shape, 6e4, dtype=dtype, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert torch.equal(scaled, loss.float() * 65536)
        scaled.sum().backward()
    assert loss.grad is not None
    assert loss.grad.dtype is dtype


def test_the_loss_itself_where_amp_is_disabled() -> None:
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    amp.initialize(net, optimizer, enabled=False)
    loss = net(torch.ones(3)).half()
    for optimizers in (optimizer, [optimizer]):
        with amp.scale_loss(loss, optimizers) as scaled:
            assert scaled is loss


@pytest.mark.parametrize(
    ("starts", "match"),
    [(False, r"amp\.initialize has not been called"), (True, r"not passed to amp\.initialize")],
)
def test_an_optimizer_that_initialize_has_not_seen(starts: bool, match: str) -> None:
    if starts:
        setup("O2")
    stranger = torch.optim.SGD(Weight().parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=match), amp.scale_loss(torch.ones(()), stranger):
        pass


def test_the_optimizer_before_the_loss() -> None:
    net, optimizer = setup("O2")
    with pytest.raises(TypeError, match="the loss first"), amp.scale_loss(optimizer, net(torch.ones(3))):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("loss_id", [0, 1, 2, -1, -3])
def test_loss_ids(loss_id: int) -> None:
    _, optimizer = setup("O2", num_losses=3)
    for number, scaler in enumerate(amp._amp_state.loss_scalers):
        scaler._loss_scale = 2.0**number
    with amp.scale_loss(torch.ones(()), optimizer, loss_id, object()) as scaled:  # a model, which is ignored
        assert scaled == 2.0 ** (loss_id % 3)


@pytest.mark.parametrize("loss_id", [3, -4])
def test_loss_ids_out_of_range(loss_id: int) -> None:
    net, optimizer = setup("O2", num_losses=3)
    backward(net, optimizer, 1.0)
    before = snapshot(net, optimizer)
    with pytest.raises(IndexError, match="num_losses"), amp.scale_loss(torch.ones(()), optimizer, loss_id):
        pass
    assert snapshot(net, optimizer) == before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [list, tuple, set, iter])
def test_any_iterable_of_optimizers(level: str, form: Callable[[Any], Any]) -> None:
    net, optimizer = setup(level, loss_scale=128.0)
    for _ in range(3):
        backward(net, form([optimizer]), 1.0)
    assert grad(optimizer) == [3.0] * 3


# Gradients.


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_of_different_losses_and_scales_add_up(level: str) -> None:
    net, optimizer = setup(level, num_losses=2)
    for number, (scale, value) in enumerate(((4.0, 1.0), (1024.0, 2.0), (1.0, 4.0), (0.5, 8.0))):
        amp._amp_state.loss_scalers[number % 2]._loss_scale = scale
        backward(net, optimizer, value, loss_id=number % 2)
    assert grad(optimizer) == [15.0] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_several_backward_passes_in_one_block(level: str) -> None:
    net, optimizer = setup(level, loss_scale=16.0)
    with amp.scale_loss(net(torch.ones(3)), optimizer) as scaled:
        scaled.backward(retain_graph=True)
        scaled.backward()
    assert grad(optimizer) == [2.0] * 3


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("static", [1.0, 128.0])
def test_float32_parameters_under_masters_add_up_too(level: str, static: float) -> None:
    """apex lost their gradients at a static scale of one."""
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=static, verbosity=0)
    for _ in range(3):
        with amp.scale_loss(net(torch.eye(2)).sum(), optimizer) as scaled:
            scaled.backward()
    assert net[1].bias.grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ["optimizer, to None", "optimizer, to zero"])
def test_an_unused_parameter_keeps_what_zero_grad_left(level: str, zero: str) -> None:
    net, optimizer = setup(level, loss_scale=128.0)
    unused = list(amp.master_params(optimizer))[1]
    unused.grad = torch.ones_like(unused)
    ZERO[zero](net, optimizer)
    backward(net, optimizer, 1.0)
    assert (unused.grad is None) == (zero == "optimizer, to None")
    assert unused.grad is None or unused.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_the_parameters_of_the_model_clips_what_is_stepped(level: str) -> None:
    """apex leaves their gradients 65,536 times too large, and the masters' as they were."""
    net, optimizer = setup(level, loss_scale="dynamic")
    backward(net, optimizer, 4.0)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 12**0.5)
    assert float(norm) == pytest.approx(48**0.5, rel=1e-3)
    torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 0.5)
    optimizer.step()
    assert net.weight.tolist() == pytest.approx([-0.5] * 3, rel=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_stay_after_a_step_until_zero_grad(level: str) -> None:
    net, optimizer = setup(level)
    backward(net, optimizer, 1.0)
    optimizer.step()
    assert grad(optimizer) == [1.0] * 3
    backward(net, optimizer, 2.0)
    optimizer.step()
    assert net.weight.tolist() == [-4.0] * 3
    net.zero_grad()
    backward(net, optimizer, 4.0)
    assert grad(optimizer) == [4.0] * 3


@pytest.mark.parametrize("level", MASTERED)
def test_a_backward_pass_past_scale_loss_adds_true_gradients(level: str) -> None:
    """Without a loss scale small gradients are lost in float16; apex's step did not read them at all."""
    net, optimizer = setup(level)
    backward(net, optimizer, 1.0)
    net(torch.full((3,), 2.0)).backward()
    optimizer.step()
    assert net.weight.tolist() == [-3.0] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_of_a_backward_pass_past_scale_loss_alone_says_so(level: str) -> None:
    net, optimizer = setup(level)
    net(torch.full((3,), 2.0)).backward()
    if scaler_state()[0] == 1:
        optimizer.step()  # no scale could help
    else:
        with pytest.warns(RuntimeWarning, match=r"write `with amp\.scale_loss") as told:
            optimizer.step()
        assert told[0].filename == __file__
    optimizer.step()  # the same gradients again, as in plain torch
    assert net.weight.tolist() == [-4.0] * 3
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    backward(net, optimizer, 1.0)
    optimizer.step()
    assert net.weight.tolist() == [-5.0] * 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", [Tensor.backward, lambda loss: None], ids=["of the loss itself", "none"])
def test_a_block_without_a_pass_of_the_scaled_loss_says_so(level: str, wrong: Any) -> None:
    net, optimizer = setup(level)
    loss = net(torch.ones(3))
    with pytest.warns(RuntimeWarning, match=r"scaled_loss\.backward\(\)"), amp.scale_loss(loss, optimizer):
        wrong(loss)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_body_that_raises_after_its_pass_has_not_happened(level: str, error: type[BaseException]) -> None:
    net, optimizer = setup(level, loss_scale="dynamic")
    backward(net, optimizer, 5.0)
    before, scales = snapshot(net, optimizer), amp.state_dict()

    def body() -> None:
        with amp.scale_loss(net(torch.ones(3)), optimizer) as scaled:
            scaled.backward()
            raise error

    with pytest.raises(error):
        body()
    assert snapshot(net, optimizer) == before
    assert amp.state_dict() == scales
    backward(net, optimizer, 2.0)
    optimizer.step()
    assert net.weight.tolist() == [-7.0] * 3


# delay_unscale: nothing is left to delay, because sums are float32. Only the scale waits.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("pattern", ["d.", ".dd.", "d.d.", ".d"])
def test_delayed_blocks_add_up(level: str, scale: float | str, pattern: str) -> None:
    net, optimizer = setup(level, loss_scale=scale)
    for index, kind in enumerate(pattern):
        backward(net, optimizer, 2.0**index, delay_unscale=kind == "d")
        assert grad(optimizer) == [2.0 ** (index + 1) - 1] * 3
    assert scaler_state()[1] == pattern.count(".")
    optimizer.step()
    assert net.weight.tolist() == [1 - 2.0 ** len(pattern)] * 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("pattern", ["dz.", "dzd.", ".dz."])
def test_zeroing_in_between_drops_the_gradients_before(level: str, zero: str, pattern: str) -> None:
    net, optimizer = setup(level, loss_scale=128.0)
    expected = 0.0
    for index, kind in enumerate(pattern):
        if kind == "z":
            ZERO[zero](net, optimizer)
            expected = 0.0
        else:
            backward(net, optimizer, 2.0**index, delay_unscale=kind == "d")
            expected += 2.0**index
    assert grad(optimizer) == [expected] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_scalers_of_delayed_blocks_may_differ(level: str) -> None:
    """apex divided the sum by the scale of the last block."""
    net, optimizer = setup(level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0
    backward(net, optimizer, 1.0, delay_unscale=True)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    backward(net, optimizer, 1.0, loss_id=1)
    backward(net, optimizer, 2.0)
    assert grad(optimizer) == [4.0] * 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check"])
@pytest.mark.parametrize("steps_between", [True, False])
def test_a_delayed_overflow_skips_and_counts_in_the_next_block(
    level: str, delay: str, steps_between: bool
) -> None:
    net, optimizer = setup(level, loss_scale="dynamic")
    backward(net, optimizer, float("nan"), **{delay: True})
    assert scaler_state() == (256.0, 0)
    if steps_between:
        optimizer.step()
        assert not amp.last_step(optimizer).stepped()
        assert net.weight.tolist() == [0.0] * 3
        assert grad(optimizer) is net.weight.grad is None
    backward(net, optimizer, 1.0)
    assert scaler_state() == (128.0, 0)
    optimizer.step()
    assert net.weight.tolist() == [-1.0 if steps_between else 0.0] * 3


def test_update_scale_counts_a_delayed_check_at_once() -> None:
    net, optimizer = setup("O2")
    scaler = amp._amp_state.loss_scalers[0]
    backward(net, optimizer, float("nan"), delay_overflow_check=True)
    assert scaler.update_scale() is True
    assert scaler_state() == (128.0, 0)
    optimizer.step()
    backward(net, optimizer, 1.0, delay_overflow_check=True)
    assert scaler.update_scale() is False
    assert scaler_state() == (128.0, 1)


@pytest.mark.parametrize("overflowed", [True, False])
def test_a_flag_can_be_lent_for_one_update(overflowed: bool) -> None:
    """A script that reduces gradients by hand sets its own overflow flag, which counts instead of the block's."""
    net, optimizer = setup("O2")
    scaler = amp._amp_state.loss_scalers[0]
    backward(net, optimizer, 1.0 if overflowed else float("nan"), delay_overflow_check=True)
    own = scaler._overflow_buf
    assert own.item() == (not overflowed)
    scaler._overflow_buf = torch.tensor([int(overflowed)], dtype=torch.int32)
    assert scaler.update_scale() is overflowed
    scaler._overflow_buf = own
    assert scaler.update_scale() is False
    assert scaler_state() == ((128.0, 1) if overflowed else (256.0, 2))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", LEVELS)
def test_passes_under_no_sync(level: str) -> None:
    """The loss scale moves, and the gradients may be stepped, after a pass that reduces them over the ranks."""
    net, optimizer = setup(level, loss_scale="dynamic")
    net.unused.requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(net)
    for value in (1.0, 2.0):
        with wrapped.no_sync():
            backward(wrapped, optimizer, value)
    assert scaler_state()[1] == 0
    with pytest.raises(RuntimeError, match="no_sync"):
        optimizer.step()
    backward(wrapped, optimizer, 4.0)
    assert scaler_state()[1] == 1
    optimizer.step()
    assert net.weight.tolist() == [-7.0] * 3
    optimizer.zero_grad()
    with wrapped.no_sync():
        backward(wrapped, optimizer, 1.0)
    optimizer.zero_grad()
    backward(wrapped, optimizer, 2.0)
    optimizer.step()
    assert net.weight.tolist() == [-9.0] * 3
