"""fp16_utils: low-precision models, lists of masters, loss scalers by hand, and FP16_Optimizer's own interface.

``tests/laws/drivers.py`` covers FP16_Optimizer's steps, skips, windows, closures and resumes.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.scale_models import LIMITS, Mmcv
from halfpeak.amp import fp16_utils
from halfpeak.amp.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, ParameterError, StateError
from halfpeak.fused import FusedAdam
from support.states import same


def test_the_names_of_apex() -> None:
    assert set(fp16_utils.__all__) == {
        "BN_convert_float", "network_to_half", "prep_param_lists", "model_grads_to_master_grads",
        "master_params_to_model_params", "tofp16", "to_python_float", "clip_grad_norm", "convert_module",
        "convert_network", "FP16Model", "FP16_Optimizer", "LossScaler", "DynamicLossScaler",
    }  # fmt: skip
    assert all(hasattr(fp16_utils, name) for name in fp16_utils.__all__)
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


# Models.


@pytest.mark.parametrize("make", [FP16Model, network_to_half])
def test_only_affine_batch_norms_stay_float32(make: Any) -> None:
    inner = nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1), nn.LayerNorm(5))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), inner)
    half = make(model)
    kept = {id(tensor) for tensor in (*model[1].parameters(), *model[1].buffers())}
    for tensor in (*half.parameters(), *half.buffers()):
        if tensor.is_floating_point():
            assert tensor.dtype is (torch.float32 if id(tensor) in kept else torch.float16)
        else:
            assert tensor.dtype is torch.int64
    assert half(torch.randn(2, 3, 5, 5)).dtype is torch.float16


def test_fp16_model_takes_what_models_take() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, tokens: Tensor, *, extra: dict[str, list[Tensor]]) -> Tensor:
            return self.linear(self.embedding(tokens) + extra["more"][0])

    out = FP16Model(Pair())(torch.tensor([1, 2]), extra={"more": [torch.ones(2, 3)]})
    assert (out.dtype, out.shape) == (torch.float16, (2, 2))


def test_small_ones() -> None:
    assert tofp16()(torch.ones(2)).dtype is torch.float16
    norms = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)).half()
    assert BN_convert_float(norms) is norms
    assert norms[0].running_mean.dtype is norms[0].weight.dtype is torch.float32
    assert norms[1].running_mean.dtype is norms[2].weight.dtype is torch.float16
    assert list(network_to_half(nn.Linear(2, 2)).state_dict()) == ["1.weight", "1.bias"]
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float([3]) == 3


# Masters by hand.


def low_model(dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)).to(dtype)
    model[2].requires_grad_(False)
    return model


def flat_of(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_by_hand(flat: bool, dtype: torch.dtype) -> None:
    model = low_model(dtype)
    values = [parameter.detach().float() for parameter in model.parameters() if parameter.requires_grad]
    model_params, master_params = prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in model_params] == [id(p) for p in list(model.parameters())[:4]]
    assert all(m.dtype is torch.float32 and m.requires_grad and m.is_leaf for m in master_params)
    assert torch.equal(flat_of(master_params), flat_of(values))
    assert [m.grad is None for m in master_params] == ([False] if flat else [True] * 4)

    optimizer = torch.optim.SGD(master_params, lr=2**-11)
    for _ in range(3):
        for parameter in model_params:
            parameter.grad = torch.randn_like(parameter)
        model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        grads = [master.grad for master in master_params]
        assert torch.equal(flat_of(grads), flat_of([p.grad for p in model_params]).float())
        optimizer.step()
        values = [v - 2**-11 * p.grad.float() for v, p in zip(values, model_params, strict=True)]  # type: ignore[union-attr]
        master_params_to_model_params(model_params, master_params, flat_master=flat)
        assert torch.equal(flat_of(master_params), flat_of(values))
        assert all(torch.equal(p, v.to(dtype)) for p, v in zip(model_params, values, strict=True))


def test_missing_and_sparse_gradients() -> None:
    model_params, master_params = prep_param_lists(low_model(torch.float16))
    for parameter in model_params:
        parameter.grad = torch.ones_like(parameter)
    model_grads_to_master_grads(model_params, master_params)
    model_params[1].grad = None
    model_params[0].grad = torch.eye(4, 3).half().to_sparse()
    model_grads_to_master_grads(model_params, master_params)
    assert master_params[1].grad is None
    assert torch.equal(master_params[0].grad, torch.eye(4, 3))  # type: ignore[arg-type]

    model_params, master_params = prep_param_lists(low_model(torch.float16), flat_master=True)
    with pytest.raises(ParameterError, match=r"model_params\[0\] has no gradient"):
        model_grads_to_master_grads(model_params, master_params, flat_master=True)
    for parameter in model_params:
        parameter.grad = torch.ones_like(parameter)
    master_params[0].grad = None
    model_grads_to_master_grads(model_params, master_params, flat_master=True)
    assert torch.equal(master_params[0].grad, torch.ones(26))  # type: ignore[arg-type]


def test_lists_that_do_not_fit() -> None:
    model = low_model(torch.float16)
    model_params, master_params = prep_param_lists(model)
    _, flat_params = prep_param_lists(model, flat_master=True)
    for parameter in model_params:
        parameter.grad = torch.ones_like(parameter)
    for function in (model_grads_to_master_grads, master_params_to_model_params):
        with pytest.raises(ConfigError, match="do not have the same shapes"):
            function(model_params, flat_params)
        with pytest.raises(ConfigError, match="takes one master of 26 elements"):
            function(model_params, master_params, flat_master=True)
    with pytest.raises(ParameterError, match="this model has none"):
        prep_param_lists(nn.Sequential(), flat_master=True)


# Loss scalers by hand.


def test_the_history_that_apex_gives() -> None:
    scaler = DynamicLossScaler(init_scale=4, scale_window=3)
    scales = []
    for step in range(13):
        scaler.update_scale(step in (2, 9, 10, 11, 12))
        scales.append(scaler.cur_scale)
    assert scales == [4, 4, 2, 2, 2, 4, 4, 4, 8, 4, 2, 1, 1]
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.loss_scale) == (13, 12, 1.0)


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_against_the_rule_of_apex(seed: int) -> None:
    rng = random.Random(seed)
    factor, window = rng.choice([2.0, 4.0]), rng.choice([1, 2, 5])
    scaler = DynamicLossScaler(2.0**10, factor, window)
    rule = Mmcv(init=2.0**10, factor=factor, window=window)
    assert (scaler.scale_factor, scaler.scale_window) == (factor, window)
    for step in range(120):
        if rng.random() < 0.02:  # as a script that restores this number from a checkpoint
            scaler.last_overflow_iter = rule.last_overflow = rng.randrange(-1, step)
        overflow = rng.random() < 0.2
        scaler.update_scale(overflow)
        rule.update(overflow)
        rule.scale = min(rule.scale, LIMITS.max)
        found = (scaler.cur_scale, scaler.last_overflow_iter, scaler.cur_iter)
        assert found == (rule.scale, rule.last_overflow, rule.iteration)


@pytest.mark.parametrize("cls", [LossScaler, DynamicLossScaler])
def test_what_both_scalers_do(cls: type[LossScaler]) -> None:
    scaler = cls(8.0)
    weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    loss = weight.sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert torch.equal(weight.grad, torch.full((2,), 16.0))  # type: ignore[arg-type]
    assert scaler.loss_scale == scaler.cur_scale == 8.0
    assert scaler.scale_gradient(nn.Linear(1, 1), (torch.ones(1), None), ()) == (torch.tensor([8.0]), None)
    assert not scaler.has_overflow([weight, unused])
    weight.grad = torch.tensor([3e38, 3e38])
    assert not scaler.has_overflow([weight]), "finite, although the sum is not"
    for bad in (math.inf, math.nan):
        weight.grad = torch.tensor([1.0, bad])
        assert scaler.has_overflow(iter([unused, weight]))
    scaler.update_scale(True)
    assert scaler.loss_scale == (8.0 if cls is LossScaler else 4.0)


@pytest.mark.parametrize("bad", [0, math.nan, "8", None])
def test_bad_scales(bad: Any) -> None:
    for make in (LossScaler, DynamicLossScaler, lambda value: DynamicLossScaler(scale_factor=value)):
        with pytest.raises(ConfigError):
            make(bad)
    with pytest.raises(ConfigError):
        DynamicLossScaler(scale_window=0)


# FP16_Optimizer.


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


def twin(made: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in made]


class Reference:
    """Adam over float32 copies; each scaled gradient is rounded to the dtype of its model parameter."""

    def __init__(self, made: list[nn.Parameter], scale: float) -> None:
        self.low = made
        self.high = [nn.Parameter(p.detach().float()) for p in made[:3]]
        self.scale = scale
        self.optimizer = torch.optim.Adam(self.high, lr=0.01)

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


def train(made: list[nn.Parameter], optimizer: FP16_Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(made, gradients(step)) * (math.inf if step == 3 else 1.0))
        optimizer.step()


def test_where_everything_is() -> None:
    made, optimizer = make()
    masters = optimizer.param_groups[0]["params"]
    assert [[id(p) for p in group] for group in optimizer.fp16_groups] == [[id(made[0]), id(made[1])]]
    assert [id(m) for m in optimizer.fp32_from_fp16_groups[0]] == [id(masters[0]), id(masters[1])]
    assert [[id(p) for p in group] for group in optimizer.fp32_from_fp32_groups] == [[id(made[2])]]
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (128.0, False)
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0


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
    for step, to_none in enumerate((True, False, True)):
        optimizer.zero_grad(set_grads_to_None=to_none)
        (loss_of(made, gradients(step)) * optimizer.loss_scale).backward()
        with pytest.raises(OrderError, match=r"update_master_grads\(\) before step"):
            optimizer.step()
        optimizer.update_master_grads()
        optimizer.update_master_grads()
        optimizer.step()
        reference.step(gradients(step))
        reference.check(made)


@pytest.mark.parametrize("verbose", [True, False])
def test_an_overflow_is_said_once_and_a_static_scale_stays(
    verbose: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made, optimizer = make(verbose=verbose)
    optimizer.backward(loss_of(made, gradients(0)) * math.inf)
    before = state_of(made, optimizer)
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert "not finite" in capsys.readouterr().out
    assert optimizer.step() is None
    assert optimizer.overflow
    assert same(state_of(made, optimizer), before)
    printed = capsys.readouterr().out
    assert printed.count("Gradient overflow.  Skipping step") == verbose == bool(printed)
    optimizer.zero_grad()
    optimizer.backward(loss_of(made, gradients(1)))
    optimizer.step()
    assert not optimizer.overflow


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_is_of_unscaled_gradients(norm_type: float) -> None:
    made, optimizer = make(torch.bfloat16, static_loss_scale=1024.0)
    reference = Reference(made, 1024.0)
    optimizer.backward(loss_of(made, gradients(0)))
    shown = optimizer.inspect_master_grad_data()
    assert shown is not None
    assert shown[0][3] is None
    flat = torch.cat([grad.reshape(-1) for grad in shown[0] if grad is not None])
    norm = optimizer.clip_master_grads(0.5, norm_type)
    torch.testing.assert_close(norm, flat.norm(norm_type))
    clipped = [grad for grad in optimizer.inspect_master_grad_data()[0] if grad is not None]  # type: ignore[index]
    wanted = flat * 0.5 / (flat.norm(norm_type) + 1e-6)
    torch.testing.assert_close(torch.cat([grad.reshape(-1) for grad in clipped]), wanted)
    optimizer.step()
    for high, grad in zip(reference.high, clipped, strict=True):
        high.grad = grad.clone()
    reference.optimizer.step()
    reference.check(made)


def test_zero_grad_drops_the_window() -> None:
    made, optimizer = make()
    reference = Reference(made, 128.0)
    optimizer.backward(loss_of(made, gradients(7)) * math.inf)
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in (*made, *optimizer.param_groups[0]["params"]))
    optimizer.backward(loss_of(made, gradients(8)) * math.inf)
    assert optimizer.overflow
    optimizer.zero_grad()
    assert not optimizer.overflow
    held = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    assert [bool(g.any()) for g in held] == [False] * 3
    optimizer.backward(loss_of(made, gradients(9)))
    optimizer.step()
    reference.step(gradients(9))
    reference.check(made)


@pytest.mark.parametrize("optimizer_of", [torch.optim.Adam, FusedAdam])
def test_gradients_stay_after_a_step_and_a_second_one_takes_them_again(optimizer_of: Any) -> None:
    made = parameters(torch.float16)
    optimizer = FP16_Optimizer(optimizer_of(made, lr=0.01), static_loss_scale=128.0)
    reference = FP16_Optimizer(optimizer_of(twin(made), lr=0.01), static_loss_scale=128.0)
    optimizer.backward(loss_of(made, gradients(0)))
    held = [p.grad for p in made]
    for _ in range(2):
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(made, held, strict=True))
        others = [reference._pairs.weight_of(p) for p in reference.param_groups[0]["params"]]
        reference.zero_grad(set_grads_to_None=True)
        reference.backward(loss_of(others, gradients(0)))
        reference.step()
        assert same(made, others)


def test_a_skipped_step_keeps_its_gradients_until_they_are_zeroed() -> None:
    made, optimizer = make(dynamic_loss_scale=True, verbose=False)
    before = state_of(made, optimizer)[:-1]
    optimizer.backward(loss_of(made, gradients(0)) * math.inf)
    for _ in range(2):  # the pass has moved the scale, and a step moves none
        assert optimizer.step() is None
        assert (optimizer.overflow, optimizer.loss_scale) == (True, 2.0**15)
    assert same(state_of(made, optimizer)[:-1], before)
    assert made[0].grad is not None
    assert not bool(made[0].grad.isfinite().all())


@pytest.mark.parametrize("zero", ["optimizer", "in place"])
@pytest.mark.parametrize("begun", [False, True])
def test_zeros_are_stepped_as_zeros(zero: str, begun: bool) -> None:
    """Also those of a window that has overflowed: momentum and weight decay move the weights."""
    made, optimizer = make(verbose=False)
    reference = Reference(made, 128.0)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(made, gradients(step)))
        optimizer.step()
        reference.step(gradients(step))
    if begun:
        optimizer.backward(loss_of(made, gradients(5)) * math.inf)
    if zero == "optimizer":
        optimizer.zero_grad()
    else:
        for p in made[:3]:
            p.grad.zero_()  # type: ignore[union-attr]
    optimizer.step()
    reference.step([torch.zeros_like(p) for p in reference.high])
    reference.check(made)


def test_the_scale_moves_with_the_update_of_the_master_gradients() -> None:
    made, optimizer = make(dynamic_loss_scale=True, verbose=False)
    optimizer.backward(loss_of(made, gradients(0)) * math.inf, update_master_grads=False)
    optimizer.backward(loss_of(made, gradients(0)), update_master_grads=False)
    assert optimizer.loss_scale == 2.0**16
    optimizer.update_master_grads()
    assert optimizer.loss_scale == 2.0**15
    optimizer.step()
    assert optimizer.overflow
    optimizer.zero_grad()
    (loss_of(made, gradients(0)) * math.inf).backward()
    optimizer.update_master_grads()
    assert optimizer.loss_scale == 2.0**14
    assert optimizer.step() is None


def test_a_dynamic_scale_moves_as_told() -> None:
    arguments = {
        "init_scale": 8.0,
        "scale_factor": 4.0,
        "scale_window": 2,
        "min_loss_scale": 2.0,
        "max_loss_scale": 64.0,
    }
    made, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False)
    scales = []
    for overflow in (0, 0, 0, 0, 0, 0, 1, 1, 1, 1):
        optimizer.zero_grad()
        optimizer.backward(loss_of(made, gradients(0)) * (math.inf if overflow else 1e-3))
        optimizer.step()
        scales.append(optimizer.loss_scale)
    assert scales == [8, 32, 32, 64, 64, 64, 16, 4, 2, 2]
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"min_loss_scale": None})
    config = optimizer.loss_scaler.part.config
    assert (optimizer.loss_scale, config.interval) == (2.0**16, 2000)
    assert (config.floor, config.ceiling) == (2.0**-126, 2.0**24)


def test_lbfgs_sees_where_it_has_moved() -> None:
    """Also after a step that was skipped."""
    weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.bfloat16))
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS([weight], lr=0.5, max_iter=20), static_loss_scale=64.0, verbose=False
    )
    optimizer.backward(weight.float().sum() * math.inf)
    optimizer.step()
    assert optimizer.overflow

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.float() - torch.tensor([1.0, 1.0])).square().sum()
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 13.0
    assert not optimizer.overflow
    assert closure().item() < 1e-3


def test_a_step_with_a_closure_does_not_read_gradients_that_are_not_finite() -> None:
    """As SAM would, which reads those of a pass before its step."""
    seen: list[bool] = []

    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(bool(p.grad.isfinite().all()) for p in self.param_groups[0]["params"])
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = FP16_Optimizer(Reading([weight], lr=0.5), dynamic_loss_scale=True, verbose=False)
    optimizer.backward(weight.float().sum() * math.inf)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.float().sum()
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert seen == [True]
    assert (optimizer.loss_scale, weight.tolist()) == (2.0**15, [0.5, 0.5])


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


def test_a_fused_optimizer_shows_the_same_gradients() -> None:
    made, plain = make()
    others = twin(made)
    fused = FP16_Optimizer(FusedAdam(others, lr=0.01), static_loss_scale=128.0)
    for optimizer, of in ((plain, made), (fused, others)):
        optimizer.backward(loss_of(of, gradients(0)))
    shown = [optimizer.inspect_master_grad_data() for optimizer in (plain, fused)]
    assert same(*([grad for grad in groups[0] if grad is not None] for groups in shown if groups))


def test_a_load_moves_the_model_at_once_and_leaves_the_given_state_as_it_was() -> None:
    made, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0}, verbose=False)
    train(made, optimizer, range(4))  # the last step is skipped
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    others, other = make(verbose=False)
    other.load_state_dict(state)
    assert (other.dynamic_loss_scale, other.loss_scale, other.overflow) == (True, 32.0, True)
    assert same(made[:2], others[:2])
    train(others, other, range(4, 6))
    assert repr(state) == repr(kept)


BREAK: dict[str, Any] = {
    "empty": lambda s: s.clear(),
    "apex's object": lambda s: s.update(loss_scaler=object()),
    "bad scale": lambda s: s["loss_scaler"].update(scale=math.nan),
    "no flag": lambda s: s.update(overflow="no"),
    "other shapes": lambda s: s["fp32_from_fp16"][0].reverse(),
    "fewer masters": lambda s: s["fp32_from_fp16"][0].pop(),
    "no group": lambda s: s["fp32_from_fp16"].clear(),
    "not masters": lambda s: s.update(fp32_from_fp16=[[1, 2]]),
    "another optimizer": lambda s: s["optimizer_state_dict"]["param_groups"].clear(),
}


@pytest.mark.parametrize("breaks", BREAK.values(), ids=BREAK)
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
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": -1.0}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 0}},
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
