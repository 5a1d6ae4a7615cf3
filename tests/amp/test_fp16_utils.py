"""fp16_utils: low-precision models, lists of masters, and loss scalers called by user code."""

from __future__ import annotations

import math
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
    FP16Model,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from halfpeak.core.errors import ConfigError, ParameterError


def test_the_names_of_apex() -> None:
    assert set(fp16_utils.__all__) == {
        "BN_convert_float", "network_to_half", "prep_param_lists", "model_grads_to_master_grads",
        "master_params_to_model_params", "tofp16", "to_python_float", "clip_grad_norm", "convert_module",
        "convert_network", "FP16Model", "FP16_Optimizer", "LossScaler", "DynamicLossScaler",
    }  # fmt: skip
    assert all(hasattr(fp16_utils, name) for name in fp16_utils.__all__)
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


def network() -> nn.Sequential:
    inner = nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1), nn.LayerNorm(5))
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), inner)


@pytest.mark.parametrize("make", [FP16Model, network_to_half])
def test_only_affine_batch_norms_stay_float32(make: Any) -> None:
    model = network()
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
    assert out.dtype is torch.float16
    assert out.shape == (2, 2)


def test_small_ones() -> None:
    assert tofp16()(torch.ones(2)).dtype is torch.float16
    norms = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)).half()
    assert BN_convert_float(norms) is norms
    assert norms[0].running_mean.dtype is norms[0].weight.dtype is torch.float32
    assert norms[1].running_mean.dtype is norms[2].weight.dtype is torch.float16
    assert list(network_to_half(nn.Linear(2, 2)).state_dict()) == ["1.weight", "1.bias"]
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float([3]) == 3


def low_model(dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)).to(dtype)
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_by_hand(flat: bool, dtype: torch.dtype) -> None:
    model = low_model(dtype)
    values = [parameter.detach().float() for parameter in model.parameters() if parameter.requires_grad]
    model_params, master_params = prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in model_params] == [id(p) for p in list(model.parameters())[:4]]
    assert all(m.dtype is torch.float32 and m.requires_grad and m.is_leaf for m in master_params)
    assert torch.equal(flat_of(master_params), flat_of(values))
    if flat:
        assert len(master_params) == 1
        assert master_params[0].grad is not None
    else:
        assert [m.grad for m in master_params] == [None] * 4
        assert all(m.data_ptr() != p.data_ptr() for m, p in zip(master_params, model_params, strict=True))

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


def flat_of(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


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


def test_mixed_dtypes_make_one_flat_master() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    model_params, master_params = prep_param_lists(model, flat_master=True)
    master_params_to_model_params(model_params, master_params, flat_master=True)
    assert master_params[0].shape == (12,)


def test_lists_that_do_not_fit() -> None:
    model = low_model(torch.float16)
    model_params, master_params = prep_param_lists(model)
    _, flat_params = prep_param_lists(model, flat_master=True)
    for parameter in model_params:
        parameter.grad = torch.ones_like(parameter)
    for function in (model_grads_to_master_grads, master_params_to_model_params):
        with pytest.raises(ConfigError, match="do not have the same shapes"):
            function(model_params, master_params[:-1])
        with pytest.raises(ConfigError, match="do not have the same shapes"):
            function(model_params, flat_params)
        with pytest.raises(ConfigError, match="takes one master of 26 elements"):
            function(model_params, master_params, flat_master=True)
    with pytest.raises(ParameterError, match="this model has none"):
        prep_param_lists(nn.Sequential(), flat_master=True)
    with pytest.raises(ParameterError, match="has them on cpu, meta"):
        prep_param_lists(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), flat_master=True)


def test_the_history_that_apex_gives() -> None:
    scaler = DynamicLossScaler(init_scale=4, scale_window=3)
    scales = []
    for step in range(13):
        scaler.update_scale(step in (2, 9, 10, 11, 12))
        scales.append(scaler.cur_scale)
    assert scales == [4, 4, 2, 2, 2, 4, 4, 4, 8, 4, 2, 1, 1]
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.loss_scale) == (13, 12, 1.0)


def test_the_first_growth_comes_after_a_thousand() -> None:
    scaler = DynamicLossScaler()
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (2.0**32, 0, -1)
    for _ in range(999):
        scaler.update_scale(False)
    assert scaler.cur_scale == 2.0**32
    scaler.update_scale(False)
    assert scaler.cur_scale == 2.0**33


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_against_the_rule_of_apex(seed: int) -> None:
    rng = random.Random(seed)
    factor, window = rng.choice([2.0, 4.0]), rng.choice([1, 2, 5])
    scaler, rule = (
        DynamicLossScaler(2.0**10, factor, window),
        Mmcv(init=2.0**10, factor=factor, window=window),
    )
    for step in range(120):
        if rng.random() < 0.02:  # as a script that restores this number from a checkpoint
            scaler.last_overflow_iter = rule.last_overflow = rng.randrange(-1, step)
        overflow = rng.random() < 0.2
        scaler.update_scale(overflow)
        rule.update(overflow)
        rule.scale = min(rule.scale, LIMITS.max)
        found = (scaler.cur_scale, scaler.last_overflow_iter, scaler.cur_iter)
        assert found == (rule.scale, rule.last_overflow, rule.iteration)


def test_the_scale_stays_finite() -> None:
    scaler = DynamicLossScaler(2.0**126, 2.0, 1)
    for _ in range(5):
        scaler.update_scale(False)
        assert math.isfinite(scaler.cur_scale)


@pytest.mark.parametrize("cls", [LossScaler, DynamicLossScaler])
def test_what_both_do(cls: type[LossScaler]) -> None:
    scaler = cls(8.0)
    weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    loss = weight.sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert torch.equal(weight.grad, torch.full((2,), 16.0))  # type: ignore[arg-type]
    assert scaler.loss_scale == scaler.cur_scale == 8.0
    assert scaler.scale_gradient(nn.Linear(1, 1), (torch.ones(1), None), ()) == (torch.tensor([8.0]), None)
    assert not scaler.has_overflow([weight, unused])
    assert not scaler.has_overflow([unused])
    weight.grad = torch.tensor([3e38, 3e38])
    assert not scaler.has_overflow([weight]), "finite, although the sum is not"
    for bad in (math.inf, -math.inf, math.nan):
        weight.grad = torch.tensor([1.0, bad])
        assert scaler.has_overflow(iter([unused, weight]))


def test_a_static_scale_stays() -> None:
    scaler = LossScaler()
    scaler.update_scale(True)
    scaler.update_scale(False)
    assert scaler.loss_scale == 1.0


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "8", None, True])
def test_bad_scales(bad: Any) -> None:
    for make in (LossScaler, DynamicLossScaler, lambda value: DynamicLossScaler(scale_factor=value)):
        with pytest.raises(ConfigError):
            make(bad)
    with pytest.raises(ConfigError):
        DynamicLossScaler(scale_window=0)
