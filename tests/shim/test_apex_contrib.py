"""``apex.contrib.optimizers``: masters in the groups, low-precision gradients and parameters passed to ``step``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.core.errors import ClosureError, ConfigError, OrderError, StateError
from support.states import same, through_a_file

pytestmark = pytest.mark.usefixtures("apex_installed")


def old_adam(
    weight: Tensor, grads: list[Tensor], *, inside: bool, correct: bool, decay: float, lr: float = 0.05
) -> Tensor:
    weight, beta1, beta2, eps = weight.double(), 0.8, 0.95, 1e-3
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g * g
        denominator = (second + eps).sqrt() if inside else second.sqrt() + eps
        size = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t) if correct else lr
        weight = weight - size * (first / denominator + decay * weight)
    return weight


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_in_its_older_form(inside: bool, correct: bool, decay: float) -> None:
    from apex.contrib.optimizers import FusedAdam

    weight = nn.Parameter(torch.randn(5, 3))
    grads = [torch.randn(5, 3) for _ in range(4)]
    wanted = old_adam(weight.detach(), grads, inside=inside, correct=correct, decay=decay)
    optimizer = FusedAdam(
        [weight],
        lr=0.05,
        betas=(0.8, 0.95),
        eps=1e-3,
        eps_inside_sqrt=inside,
        bias_correction=correct,
        weight_decay=decay,
    )
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("form", ["one list", "a list per group"])
def test_gradients_and_parameters_that_are_given(form: str) -> None:
    from apex.contrib.optimizers import FusedAdam

    masters = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))]
    others = [nn.Parameter(master.detach().clone()) for master in masters]
    lows = [master.detach().half() for master in masters]
    grads = [torch.randn(4).half(), torch.randn(3).half()]
    split = form == "a list per group"
    groups = [{"params": [master]} for master in masters] if split else masters
    optimizer = FusedAdam(groups, lr=0.05)
    optimizer.step(
        grads=[[g * 4] for g in grads] if split else [g * 4 for g in grads],
        output_params=[[low] for low in lows] if split else lows,
        scale=4.0,
    )
    plain = FusedAdam(others, lr=0.05)
    for other, grad in zip(others, grads, strict=True):
        other.grad = grad.float()
    plain.step()
    for master, other, low in zip(masters, others, lows, strict=True):
        assert torch.equal(master, other)
        assert torch.equal(low, master.half())
        assert master.grad is None


def test_a_largest_norm_is_for_each_group_by_itself() -> None:
    from apex.contrib.optimizers import FusedAdam

    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    optimizer = FusedAdam([{"params": [w]} for w in weights], betas=(0.0, 0.0), max_grad_norm=1.0)
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])]
    optimizer.step(
        grads=[[g * 2] for g in grads], scale=2.0, grad_norms=[torch.tensor(10.0), torch.tensor(1.0)]
    )
    moments = [optimizer.state[weight]["exp_avg"] for weight in weights]
    torch.testing.assert_close(moments[0], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(moments[1], torch.tensor([0.3, 0.4]))
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"max_grad_norm=1\.0 needs step\(grad_norms="):
        optimizer.step(grads=[[g] for g in grads])


def test_lists_that_do_not_fit_are_refused() -> None:
    from apex.contrib.optimizers import FusedAdam, FusedSGD

    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        ConfigError, match=r"grads has lists of \[2\] tensors, but the groups have \[1\] parameters"
    ):
        FusedAdam([weight]).step(grads=[torch.ones(2), torch.ones(2)])
    with pytest.raises(OrderError, match=r"wrap it in apex\.contrib\.optimizers\.FP16_Optimizer"):
        FusedSGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="amsgrad=True"):
        FusedAdam([weight], amsgrad=True)


def test_lamb_rescales_every_parameter() -> None:
    from apex.contrib.optimizers import FusedLAMB

    weight = nn.Parameter(torch.full((4,), 2.0))
    weight.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
    FusedLAMB([weight], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([1.8, 2.2, 1.8, 2.2]))


def model_and_optimizer(name: str, **options: Any) -> tuple[nn.Module, Any]:
    from apex.contrib import optimizers

    torch.manual_seed(0)
    model = nn.Linear(6, 3).half()
    kind = getattr(optimizers, name)
    inner = kind(model.parameters(), lr=0.05, **({"momentum": 0.9} if name == "FusedSGD" else {}))
    return model, optimizers.FP16_Optimizer(inner, **options)


def train(model: nn.Module, optimizer: Any, steps: int, *, bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6).half()).float().square().mean()
        optimizer.backward(loss * (float("inf") if step in bad else 1.0))
        optimizer.step()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_masters_move_and_the_model_follows(name: str) -> None:
    model, optimizer = model_and_optimizer(name, static_loss_scale=128.0)
    first = [master.clone() for master in optimizer.fp32_groups[0]]
    train(model, optimizer, 3)
    for low, master, start in zip(model.parameters(), optimizer.fp32_groups[0], first, strict=True):
        assert torch.equal(low, master.half())
        assert not torch.equal(master, start)
        assert master.dtype is torch.float32
    twin, other = model_and_optimizer(name, static_loss_scale=1.0)
    train(twin, other, 3)
    for mine, theirs in zip(optimizer.fp32_groups[0], other.fp32_groups[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3)


def test_overflow_skips_and_halves(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = model_and_optimizer("FusedAdam", dynamic_loss_scale=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, 1, bad={0})
    assert optimizer.overflow
    assert optimizer.cur_scale == optimizer.loss_scale == 2.0**15
    assert same(model.parameters(), before)
    assert "Gradient overflow" in capsys.readouterr().out
    assert not optimizer.state


def test_an_overflow_in_the_second_group_skips_the_step() -> None:
    from apex.contrib.optimizers import FP16_Optimizer, FusedAdam

    weights = [nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    optimizer = FP16_Optimizer(FusedAdam([{"params": [weight]} for weight in weights]), verbose=False)
    optimizer.backward(weights[0].float().sum() + weights[1].float().sum() * float("inf"))
    optimizer.step()
    assert optimizer.overflow
    assert same(weights, [torch.ones(2).half()] * 2)


def test_with_an_engine_the_loss_scale_changes_no_step() -> None:
    from apex.contrib.optimizers import FusedAdam

    weights: list[Tensor] = []
    for scale in (1.0, 128.0):
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = FusedAdam(model.parameters(), lr=0.05, eps=0.5)
        engine = halfpeak.prepare(model, optimizer, "O2", loss_scale=scale)
        for _ in range(3):
            engine.backward(model(torch.ones(2, 6)).sum())
            engine.step()
        weights.append(model.weight.detach())
    assert same(weights[:1], weights[1:])
    torch.manual_seed(0)
    assert not same(weights[:1], [nn.Linear(6, 1).weight.detach().half()])


def test_saved_and_resumed_bit_for_bit() -> None:
    model, optimizer = model_and_optimizer("FusedAdam", dynamic_loss_scale=True, verbose=False)
    train(model, optimizer, 3, bad={0, 1})
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin, resumed = model_and_optimizer("FusedAdam", dynamic_loss_scale=True)
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.cur_scale == optimizer.cur_scale
    for one, its in ((model, optimizer), (twin, resumed)):
        train(one, its, 3)
    assert same(model.parameters(), twin.parameters())
    state = copy.deepcopy(optimizer.state_dict())
    state["fp32_groups"] = [[torch.ones(2)]]
    with pytest.raises(StateError, match="fp32_groups has other shapes"):
        resumed.load_state_dict(state)


def test_what_the_wrapper_refuses() -> None:
    from apex.contrib.optimizers import FP16_Optimizer

    with pytest.raises(ConfigError, match=r"use apex\.fp16_utils\.FP16_Optimizer"):
        FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(ConfigError, match="dynamic_loss_args"):
        model_and_optimizer("FusedAdam", dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 5})
    _, optimizer = model_and_optimizer("FusedAdam")
    with pytest.raises(ClosureError):
        optimizer.step(lambda: 0.0)
