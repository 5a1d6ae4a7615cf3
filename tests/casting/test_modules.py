"""Low-precision modules: what conversion casts, which norms stay float32, and the casts at a model's boundary."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfpeak.casting.modules import (
    convert_module,
    convert_network,
    converted_parameters,
    hook_boundary,
    hook_kept,
    is_kept_fp32,
    is_prepared,
)
from halfpeak.core.policy import NormRule, Policy

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
RULES: tuple[NormRule, ...] = ("batchnorm", "all", "none")

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    # how to make the layer, and under which rules for norms it stays float32
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), ("batchnorm", "all")),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), ("batchnorm", "all")),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), ("batchnorm", "all")),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), ("batchnorm", "all")),
    "BatchNorm1d, no statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        ("batchnorm", "all"),
    ),
    "BatchNorm1d, not affine": (lambda: nn.BatchNorm1d(4, affine=False), ("all",)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), ("all",)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), ("all",)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, track_running_stats=True), ("all",)),
    "LayerNorm": (lambda: nn.LayerNorm(4), ("all",)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), ("all",)),
    "RMSNorm": (lambda: nn.RMSNorm(4), ("all",)),
    "Linear": (lambda: nn.Linear(4, 4), ()),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 1), ()),
    "Embedding": (lambda: nn.Embedding(4, 4), ()),
    "LSTM": (lambda: nn.LSTM(4, 4), ()),
    "PReLU": (lambda: nn.PReLU(), ()),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), ()),
}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_a_rule_keeps(layer: str, rule: NormRule, dtype: torch.dtype) -> None:
    make, kept_under = LAYERS[layer]
    network = nn.Sequential(make(), nn.Sequential(make()))
    before = [(name, id(p), p.detach().clone()) for name, p in network.named_parameters()]
    expected = FP32 if rule in kept_under else dtype
    assert [id(p) for p in converted_parameters(network, dtype, rule)] == [
        key for _, key, _ in before if expected is dtype
    ]
    assert all(p.dtype is FP32 for p in network.parameters()), "asking changes nothing"
    assert convert_network(network, dtype, rule) is network
    assert is_kept_fp32(network[0], rule) is (rule in kept_under)
    for (name, parameter), (was_name, key, value) in zip(network.named_parameters(), before, strict=True):
        assert (name, id(parameter)) == (was_name, key), "parameters keep their identity"
        assert parameter.dtype is expected
        assert torch.equal(parameter, value.to(expected))
    for name, buffer in network.named_buffers():
        assert buffer.dtype is (torch.int64 if "num_batches" in name else expected)


@pytest.mark.parametrize("rule", RULES)
def test_lazy_layers(rule: NormRule) -> None:
    network = convert_network(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), BF16, rule)
    network(torch.randn(3, 2).bfloat16())
    assert network[0].weight.dtype is BF16
    kept = BF16 if rule == "none" else FP32
    assert network[1].weight.dtype is network[1].running_mean.dtype is kept


def name_of(dtype: torch.dtype) -> str:
    return "in_" + str(dtype).removeprefix("torch.")


class Mixed(nn.Module):
    """Has a parameter and a buffer of each floating and complex dtype, and an integer and a boolean buffer."""

    DTYPES = (FP16, BF16, FP32, FP64, torch.complex64)

    def __init__(self) -> None:
        super().__init__()
        for dtype in self.DTYPES:
            self.register_parameter(name_of(dtype), nn.Parameter(torch.ones(2, dtype=dtype)))
            self.register_buffer(name_of(dtype) + "_buffer", torch.ones(2, dtype=dtype))
        self.register_buffer("index", torch.arange(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [(FP16, {FP16, BF16, FP32}), (BF16, {FP16, BF16, FP32}), (FP32, {FP16, BF16, FP32, FP64})],
)
def test_which_dtypes_are_cast(dtype: torch.dtype, cast: set[torch.dtype]) -> None:
    module = Mixed()
    convert_module(module, dtype)
    for was in Mixed.DTYPES:
        expected = dtype if was in cast else was
        assert module.get_parameter(name_of(was)).dtype is expected
        assert module.get_buffer(name_of(was) + "_buffer").dtype is expected
    assert (module.get_buffer("index").dtype, module.get_buffer("mask").dtype) == (torch.int64, torch.bool)


def test_gradients_follow_their_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    network(torch.randn(4, 2)).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    convert_network(network, BF16)
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype is parameter.dtype
        assert torch.equal(parameter.grad, grads[name].to(parameter.dtype))


def test_tied_parameters_and_shared_modules_stay_so() -> None:
    shared = nn.Linear(3, 3)
    network = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(3, 3)})
    network["c"].weight = shared.weight  # type: ignore[assignment]
    assert len(list(converted_parameters(network, FP16, "all"))) == 3
    convert_network(network, FP16)
    assert network["a"] is network["b"]
    assert network["c"].weight is network["a"].weight
    assert shared.weight.dtype is FP16


LOW_POLICY = {
    dtype: Policy(param=dtype, compute=dtype, output=FP32, masters=True, norms="all")
    for dtype in (FP16, BF16)
}


INPUTS = {
    "InstanceNorm1d": (2, 4, 5),
    "InstanceNorm2d": (2, 4, 3, 3),
    "InstanceNorm3d": (2, 4, 3, 2, 2),
    "LayerNorm": (3, 4),
    "GroupNorm": (3, 4, 2),
    "RMSNorm": (3, 4),
}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("layer", INPUTS)
def test_a_kept_norm_computes_in_float32_and_returns_low(layer: str, dtype: torch.dtype) -> None:
    norm, seen = LAYERS[layer][0](), []
    exact = copy.deepcopy(norm)
    model = convert_network(nn.Sequential(nn.Identity(), norm), dtype, "all")
    handles = hook_kept(model, LOW_POLICY[dtype])
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    x = (torch.randn(INPUTS[layer]) * 3).to(dtype)
    output = model(x)
    assert seen == [FP32]
    assert output.dtype is dtype
    assert torch.equal(output, exact(x.float()).to(dtype))
    for handle in handles:
        handle.remove()
    assert not norm._forward_hooks
    assert len(norm._forward_pre_hooks) == 1


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_kept_batch_norm_takes_low_inputs_itself(dtype: torch.dtype) -> None:
    model = convert_network(nn.Sequential(nn.BatchNorm2d(4)), dtype, "all").eval()
    assert hook_kept(model, LOW_POLICY[dtype]) == []
    x = torch.randn(2, 4, 3, 3).to(dtype)
    assert torch.equal(model(x), nn.BatchNorm2d(4).eval()(x.float()).to(dtype))


Result = namedtuple("Result", "hidden mask extra")


class Probe(nn.Module):
    """Records its inputs, and returns them in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Result:
        self.seen = (x, args, kwargs)
        return Result(x * self.weight, torch.ones(2, dtype=torch.bool), {"kwargs": kwargs, "none": None})


@pytest.mark.parametrize("output", [None, FP16, FP32, FP64])
@pytest.mark.parametrize("param", [None, FP16, BF16, FP32])
def test_boundary(param: torch.dtype | None, output: torch.dtype | None) -> None:
    model = Probe()
    handles = hook_boundary(model, Policy(param=param, output=output))
    x, index, text = torch.ones(2, dtype=FP64), torch.tensor([1]), "text"
    result = model(x, [x, index], text, more={"x": x, "none": None})
    seen, (listed, said), kwargs = model.seen
    assert {t.dtype for t in (seen, listed[0], kwargs["more"]["x"])} == {param or FP64}
    assert listed[1] is index
    assert said is text
    assert kwargs["more"]["none"] is None
    assert isinstance(result, Result)
    assert result.hidden.dtype is (output or (FP64 if param is None else FP32))
    assert result.extra["kwargs"]["more"]["x"].dtype is (output or param or FP64)
    assert result.mask.dtype is torch.bool
    assert x.dtype is FP64
    assert len(handles) == (param is not None) + (output is not None)
    assert is_prepared(model) is bool(handles)
    for handle in handles:
        handle.remove()
    assert not is_prepared(model)
    assert vars(model).get("forward") is None, "nothing is assigned on the module"


def test_hooks_of_the_user_see_what_the_caller_gives_and_gets() -> None:
    model, seen = Probe(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, output: seen.append(output.hidden.dtype))
    hook_boundary(model, Policy(param=BF16, output=FP64))
    model.register_forward_hook(lambda module, args, output: seen.append(output.hidden.dtype))
    model(torch.ones(2))
    assert seen == [FP32, FP64, FP64]


def low_model() -> nn.Module:
    model = convert_network(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3)), BF16, "all")
    hook_boundary(model, LOW_POLICY[BF16])
    hook_kept(model, LOW_POLICY[BF16])
    return model.eval()


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_casts_for_itself(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = low_model()
    x = torch.randn(4, 3)
    expected = model(x)
    again = duplicate(model)
    assert is_prepared(again)
    assert torch.equal(again(x), expected)
    assert again(x).dtype is FP32
    if duplicate is not copy.copy:
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        assert torch.equal(again(x), torch.zeros(4, 3)), "it runs on its own weights"
        assert torch.equal(model(x), expected)


def test_functional_calls_cast_too() -> None:
    model = low_model()
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, values, (torch.randn(4, 3),))
    assert torch.equal(output, torch.zeros(4, 3))
