"""FP16_Optimizer's own interface; ``tests/laws/drivers.py`` covers its steps, skips, windows, closures and resumes."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfpeak.amp.fp16_utils.fp16_optimizer import FP16_Optimizer
from halfpeak.amp.fp16_utils.loss_scaler import DYNAMIC_ARGUMENTS
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, StateError
from halfpeak.fused import FusedAdam
from support.states import same


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Two low-precision parameters, a float32 one and a frozen low one."""
    tensors = [
        torch.randn(3, 2).to(dtype),
        torch.randn(4).to(dtype),
        torch.randn(2),
        torch.randn(2).to(dtype),
    ]
    made = [nn.Parameter(tensor) for tensor in tensors]
    made[3].requires_grad_(False)
    return made


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in ((3, 2), (4,), (2,))]


def loss_of(made: list[nn.Parameter], grads: list[Tensor]) -> Tensor:
    """A loss with the given gradients."""
    return sum((p.float() * g).sum() for p, g in zip(made[:3], grads, strict=True))  # type: ignore[return-value]


class Reference:
    """Adam over float32 copies; each scaled gradient is rounded to the dtype of its model parameter."""

    def __init__(self, made: list[nn.Parameter], scale: float, **settings: Any) -> None:
        self.low = made
        self.high = [nn.Parameter(p.detach().float()) for p in made[:3]]
        self.scale = scale
        self.optimizer = torch.optim.Adam(self.high, lr=0.01, **settings)

    def step(self, *grads: list[Tensor]) -> None:
        self.optimizer.zero_grad()
        for each in grads:
            for low, high, grad in zip(self.low, self.high, each, strict=False):
                part = (grad * self.scale).to(low.dtype).float() / self.scale
                high.grad = part if high.grad is None else high.grad + part
        self.optimizer.step()

    def check(self, made: list[nn.Parameter]) -> None:
        for low, high in zip(made, self.high, strict=False):
            assert torch.equal(low, high.to(low.dtype))


def make(dtype: torch.dtype = torch.float16, **settings: Any) -> tuple[list[nn.Parameter], FP16_Optimizer]:
    made = parameters(dtype)
    return made, FP16_Optimizer(torch.optim.Adam(made, lr=0.01), **{"static_loss_scale": 128.0, **settings})


def state_of(made: list[nn.Parameter], optimizer: FP16_Optimizer) -> list[Tensor]:
    state = [v for s in optimizer.state.values() for v in s.values()]
    masters = [m for group in optimizer.fp32_from_fp16_groups for m in group]
    return [torch.as_tensor(t).detach().clone() for t in (*made, *masters, *state, optimizer.loss_scale)]


def test_where_everything_is() -> None:
    made, optimizer = make()
    masters = optimizer.param_groups[0]["params"]
    assert [[id(p) for p in group] for group in optimizer.fp16_groups] == [[id(made[0]), id(made[1])]]
    assert [id(m) for m in optimizer.fp32_from_fp16_groups[0]] == [id(masters[0]), id(masters[1])]
    assert [[id(p) for p in group] for group in optimizer.fp32_from_fp32_groups] == [[id(made[2])]]
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.loss_scale == 128.0
    assert not optimizer.dynamic_loss_scale


@pytest.mark.parametrize("update", [True, False])
def test_passes_add_up_in_float32(update: bool) -> None:
    """``update_master_grads=False`` has nothing left to delay."""
    made, optimizer = make()
    reference = Reference(made, 128.0)
    for window in range(2):
        first, second = gradients(2 * window), gradients(2 * window + 1)
        optimizer.zero_grad(set_grads_to_None=True)
        optimizer.backward(loss_of(made, first), update_master_grads=update)
        optimizer.backward(loss_of(made, second), update_master_grads=update)
        optimizer.update_master_grads()
        reference.step(first, second)
        optimizer.step()
        reference.check(made)


def test_a_backward_pass_of_the_callers_own() -> None:
    made, optimizer = make()
    reference = Reference(made, 128.0)
    (loss_of(made, gradients(1)) * optimizer.loss_scale).backward()
    with pytest.raises(OrderError, match=r"update_master_grads\(\) before step"):
        optimizer.step()
    optimizer.update_master_grads()
    optimizer.update_master_grads()
    optimizer.step()
    reference.step(gradients(1))
    reference.check(made)


@pytest.mark.parametrize("verbose", [True, False])
def test_an_overflow_is_said_once_and_a_static_scale_stays(
    verbose: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made, optimizer = make(verbose=verbose)
    optimizer.backward(loss_of(made, gradients(0)) * math.inf)
    assert optimizer.overflow
    before = state_of(made, optimizer)
    assert optimizer.step() is None
    assert optimizer.overflow
    assert same(state_of(made, optimizer), before)
    printed = capsys.readouterr().out
    assert printed.count("Gradient overflow.  Skipping step") == verbose == bool(printed)
    frozen = made[3].detach().clone()
    optimizer.backward(loss_of(made, gradients(1)))
    optimizer.step()
    assert not optimizer.overflow
    assert torch.equal(made[3], frozen)


def test_clipping_is_of_unscaled_gradients() -> None:
    made, optimizer = make(torch.bfloat16, static_loss_scale=1024.0)
    reference = Reference(made, 1024.0)
    optimizer.backward(loss_of(made, gradients(0)))
    shown = optimizer.inspect_master_grad_data()
    assert shown is not None
    flat = torch.cat([grad.reshape(-1) for grad in shown[0] if grad is not None])
    assert shown[0][3] is None
    norm = optimizer.clip_master_grads(0.5)
    torch.testing.assert_close(norm, flat.norm())
    after = optimizer.inspect_master_grad_data()
    clipped = [grad for grad in after[0] if grad is not None]  # type: ignore[index]
    torch.testing.assert_close(
        torch.cat([grad.reshape(-1) for grad in clipped]), flat * 0.5 / (flat.norm() + 1e-6)
    )
    optimizer.step()
    for high, grad in zip(reference.high, clipped, strict=True):
        high.grad = grad.clone()
    reference.optimizer.step()
    reference.check(made)


def test_clipping_by_the_largest() -> None:
    made, optimizer = make()
    optimizer.backward(loss_of(made, gradients(0)))
    norm = optimizer.clip_master_grads(0.01, norm_type=math.inf)
    grads = [grad for grad in optimizer.inspect_master_grad_data()[0] if grad is not None]  # type: ignore[index]
    assert norm > 0.01
    assert max(grad.abs().max().item() for grad in grads) <= 0.01


def test_after_an_overflow_nothing_is_clipped_or_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made, optimizer = make()
    optimizer.backward(loss_of(made, gradients(0)) * math.nan)
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert "not finite" in capsys.readouterr().out


def test_zero_grad_drops_the_window() -> None:
    made, optimizer = make()
    reference = Reference(made, 128.0)
    optimizer.backward(loss_of(made, gradients(7)) * math.inf)
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in (*made, *optimizer.param_groups[0]["params"]))
    optimizer.backward(loss_of(made, gradients(8)))
    optimizer.zero_grad()
    held = [p.grad for p in optimizer.param_groups[0]["params"]]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in held if g is not None)
    assert sum(g is not None for g in held) == 3
    optimizer.backward(loss_of(made, gradients(9)))
    optimizer.step()
    reference.step(gradients(9))
    reference.check(made)


def test_a_dynamic_scale_moves_as_told() -> None:
    arguments = {
        "init_scale": 8.0,
        "scale_factor": 4.0,
        "scale_window": 2,
        "min_loss_scale": 2.0,
        "max_loss_scale": 64.0,
    }
    assert set(arguments) == set(DYNAMIC_ARGUMENTS)
    made, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False)
    scales = []
    for overflow in (0, 0, 0, 0, 0, 0, 1, 1, 1, 1):
        optimizer.backward(loss_of(made, gradients(0)) * (math.inf if overflow else 1e-3))
        optimizer.step()
        scales.append(optimizer.loss_scale)
    assert scales == [8, 32, 32, 64, 64, 64, 16, 4, 2, 2]


def test_dynamic_defaults() -> None:
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"min_loss_scale": None})
    config = optimizer.loss_scaler.config
    assert (optimizer.loss_scale, config.interval, config.ceiling) == (2.0**16, 2000, 2.0**24)
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0


def test_lbfgs_sees_where_it_has_moved() -> None:
    weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.bfloat16))
    optimizer = FP16_Optimizer(torch.optim.LBFGS([weight], lr=0.5, max_iter=20), static_loss_scale=64.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.float() - torch.tensor([1.0, 1.0])).square().sum()
        optimizer.backward(loss)
        return loss

    first = optimizer.step(closure)
    assert first.item() == 13.0
    assert closure().item() < 1e-3


def test_new_groups_get_masters() -> None:
    made, optimizer = make()
    reference = Reference(made, 128.0)
    more = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    assert [id(p) for p in optimizer.fp16_groups[1]] == [id(more)]
    optimizer.backward(loss_of(made, gradients(0)) + more.float().sum())
    optimizer.step()
    reference.step(gradients(0))
    reference.check(made)
    assert torch.equal(more, torch.full((2,), 0.5, dtype=torch.float16))


def train(made: list[nn.Parameter], optimizer: FP16_Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(made, gradients(step)) * (math.inf if step == 3 else 1.0))
        optimizer.step()


def test_the_model_follows_a_load_at_once() -> None:
    made, optimizer = make()
    state = copy.deepcopy(optimizer.state_dict())
    before = [p.detach().clone() for p in made[:2]]
    train(made, optimizer, range(3))
    assert not same(before, [p.detach() for p in made[:2]])
    optimizer.load_state_dict(state)
    assert same(before, [p.detach() for p in made[:2]])


def test_a_load_leaves_the_given_state_as_it_was() -> None:
    made, optimizer = make()
    train(made, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    before = [value.clone() for value in state["optimizer_state_dict"]["state"][0].values()]
    others, other = make()
    other.load_state_dict(state)
    train(others, other, range(4, 6))
    assert same(before, list(state["optimizer_state_dict"]["state"][0].values()))


def test_loading_restores_the_flag_of_the_last_step() -> None:
    made, optimizer = make(verbose=False)
    train(made, optimizer, range(3, 4))
    _, other = make()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.overflow


def test_a_step_with_a_closure_ends_the_flag_of_a_skipped_one() -> None:
    made, optimizer = make(verbose=False)
    train(made, optimizer, range(3, 4))
    assert optimizer.overflow

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(made, gradients(4))
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert not optimizer.overflow


def test_a_fused_optimizer_shows_the_same_gradients() -> None:
    made, plain = make()
    others = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in made]
    fused = FP16_Optimizer(FusedAdam(others, lr=0.01), static_loss_scale=128.0)
    for optimizer, of in ((plain, made), (fused, others)):
        optimizer.backward(loss_of(of, gradients(0)))
    shown = [optimizer.inspect_master_grad_data() for optimizer in (plain, fused)]
    assert same(*([grad for grad in groups[0] if grad is not None] for groups in shown if groups))


def test_loading_restores_whether_the_scale_moves() -> None:
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0})
    _, static = make()
    static.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert static.dynamic_loss_scale
    assert static.loss_scale == 64.0


def broken_states() -> dict[str, Any]:
    return {
        "empty": lambda s: s.clear(),
        "no masters": lambda s: s.pop("fp32_from_fp16"),
        "apex's object": lambda s: s.update(loss_scaler=object()),
        "bad scale": lambda s: s["loss_scaler"].update(scale=math.nan),
        "other shapes": lambda s: s["fp32_from_fp16"][0].reverse(),
        "fewer masters": lambda s: s["fp32_from_fp16"][0].pop(),
        "no group": lambda s: s["fp32_from_fp16"].clear(),
        "not masters": lambda s: s.update(fp32_from_fp16=[[1, 2]]),
        "not lists": lambda s: s.update(fp32_from_fp16=None),
        "another optimizer": lambda s: s["optimizer_state_dict"]["param_groups"].clear(),
        "no optimizer": lambda s: s.update(optimizer_state_dict={}),
        "nothing": lambda s: s.update(optimizer_state_dict=None),
    }


@pytest.mark.parametrize("breaks", broken_states().values(), ids=broken_states())
def test_a_state_that_does_not_fit_changes_nothing(breaks: Any) -> None:
    made, optimizer = make()
    train(made, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    train(made, optimizer, range(4, 6))
    before = state_of(made, optimizer)
    breaks(state)
    with pytest.raises(StateError):
        optimizer.load_state_dict(state)
    assert same(state_of(made, optimizer), before)


def test_pickles_and_copies_are_refused() -> None:
    _, optimizer = make()
    for call in (lambda: pickle.dumps(optimizer), lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match=r"save state_dict\(\)"):
            call()
    torch.save(optimizer.state_dict(), io.BytesIO())


def test_refusals_change_nothing() -> None:
    made = parameters(torch.float16)
    inside = torch.optim.SGD(made, lr=0.1)
    for settings in (
        {"static_loss_scale": 0.0},
        {"static_loss_scale": math.nan},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": -1.0}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 0}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"min_scale": 1.0}},
    ):
        with pytest.raises(ConfigError):
            FP16_Optimizer(inside, **settings)
    assert [id(p) for p in inside.param_groups[0]["params"]] == [id(p) for p in made]
    with pytest.raises(ConfigTypeError):
        FP16_Optimizer(made)  # type: ignore[arg-type]
    FP16_Optimizer(inside)
    with pytest.raises(OrderError):
        FP16_Optimizer(inside)
