"""auto_fp16, force_fp32, wrap_fp16_model, patch_norm_fp32, cast_tensor_type and LossScaler, used alone."""

from __future__ import annotations

import collections
import copy
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from halfpeak.checkpoint.scaler_states import from_mmcv
from halfpeak.core.errors import ConfigError, ConfigTypeError, StateError
from halfpeak.runner.fp16_decorators import auto_fp16, cast_tensor_type, force_fp32
from halfpeak.runner.fp16_model import patch_norm_fp32, wrap_fp16_model
from halfpeak.runner.loss_scaler import LossScaler
from support.nets import make_net

MMCV: dict[str, Any] = json.loads((Path(__file__).parent / "oracle" / "mmcv.json").read_text())
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ONE = torch.ones(2)


class Pair(NamedTuple):
    x: Any
    y: Any


class Probe(nn.Module):
    """Methods that return the arguments that they receive."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.fp16_enabled = enabled

    @auto_fp16()
    def all(self, x: Any, y: Any = ONE) -> Any:
        return x, y

    @auto_fp16(apply_to=("x", "extra", "only"))
    def some(self, x: Any, y: Any, *args: Any, only: Any = None, **kwargs: Any) -> Any:
        return x, y, args, only, kwargs

    @auto_fp16()
    def gather(self, *args: Any, only: Any = None, **kwargs: Any) -> Any:
        return args, only, kwargs

    @auto_fp16(apply_to="x", out_fp32=True)
    def widened(self, x: Any) -> Any:
        return {"seen": x.dtype, "out": [x]}

    @force_fp32()
    def forced(self, x: Any) -> Any:
        return x

    @force_fp32(apply_to=("x",), out_fp16=True)
    def forced_and_back(self, x: Any) -> Any:
        return x.dtype, x

    @auto_fp16(apply_to=("x",))
    @force_fp32(apply_to=("y",))
    def stacked(self, x: Any, y: Any) -> Any:
        return x, y

    @auto_fp16()
    def product(self, x: Any) -> Any:
        return x @ torch.ones(2, 2)

    @auto_fp16()
    def exact(self, x: Any) -> Any:
        return self.forced_product(x)

    @force_fp32()
    def forced_product(self, x: Any) -> Any:
        return x @ torch.ones(2, 2)


def dtypes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, (list, tuple)):
        return [dtypes(item) for item in value]
    if isinstance(value, dict):
        return {key: dtypes(item) for key, item in value.items()}
    return value


def test_which_arguments_are_cast() -> None:
    probe = Probe()
    assert dtypes(probe.all(ONE)) == [F16, F32]  # a default is not cast
    assert dtypes(probe.all(ONE, y=ONE)) == [F16, F16]
    assert dtypes(probe.all(y=ONE, x=ONE.double())) == [torch.float64, F16]
    assert dtypes(probe.some(ONE, ONE, ONE, only=ONE, extra=ONE, other=ONE)) == [
        F16, F32, [F32], F16, {"extra": F16, "other": F32},
    ]  # fmt: skip
    assert dtypes(probe.gather(ONE, ONE.int(), only=ONE, other=ONE)) == [
        [F16, torch.int32],
        F32,
        {"other": F32},
    ]
    assert dtypes(probe.forced([ONE.half(), ONE.bfloat16()])) == [F32, BF16]
    assert dtypes(probe.stacked(ONE, ONE.half())) == [F16, F32]


def test_what_comes_back() -> None:
    probe = Probe()
    assert dtypes(probe.widened(ONE)) == {"seen": F16, "out": [F32]}
    assert dtypes(probe.forced_and_back(ONE.half())) == [F32, F16]


def test_operations_are_cast_too() -> None:
    probe, x = Probe(), torch.ones(2, 2)
    assert probe.product(x).dtype is F16
    assert probe.exact(x).dtype is F32
    assert not torch.is_autocast_enabled("cpu")


def test_nothing_happens_unless_enabled() -> None:
    probe = Probe(enabled=False)
    assert dtypes(probe.some(ONE, ONE, ONE, extra=ONE)) == [F32, F32, [F32], None, {"extra": F32}]
    assert probe.product(torch.ones(2, 2)).dtype is F32
    del probe.fp16_enabled
    assert dtypes(probe.all(ONE)) == [F32, F32]


def test_other_owners() -> None:
    class Coder:
        fp16_enabled = True

        @auto_fp16(supported_types=(object,))
        def allowed(self, x: Any) -> Any:
            return x

        @auto_fp16()
        def refused(self, x: Any) -> Any:
            return x

        @force_fp32()
        def refused_too(self, x: Any) -> Any:
            return x

    assert Coder().allowed(ONE).dtype is F16
    for method in (Coder().refused, Coder().refused_too):
        with pytest.raises(TypeError, match="methods of Module"):
            method(ONE)
    with pytest.raises(ConfigTypeError, match="methods of Module"):
        Probe.all()  # type: ignore[call-arg]


@pytest.mark.parametrize("decorator", [auto_fp16, force_fp32])
def test_brackets_are_needed(decorator: Any) -> None:
    with pytest.raises(ConfigTypeError, match=rf"@{decorator.__name__}\(\)"):
        decorator(lambda self: None)


def test_cast_tensor_type_keeps_containers_and_other_dtypes() -> None:
    half = ONE.half()
    default = collections.defaultdict(list, a=[ONE])
    cast = cast_tensor_type(
        [Pair(ONE, "text"), default, collections.OrderedDict(b=half), {1: ONE.double()}, 3, (ONE.int(),)],
        F32,
        F16,
    )
    assert type(cast[0]) is Pair
    assert cast[0].y == "text"
    assert type(cast[1]) is collections.defaultdict
    assert cast[1].default_factory is list
    assert dtypes([cast[0].x, cast[1]["a"], cast[2]["b"], cast[3], cast[5]]) == [
        F16, [F16], F16, {1: torch.float64}, [torch.int32],
    ]  # fmt: skip
    assert cast[2]["b"] is half
    assert dtypes(default["a"]) == [F32]
    generator = (one for one in [ONE])
    assert cast_tensor_type(generator, F32, F16) is generator
    module = nn.Linear(1, 1)
    assert cast_tensor_type(module, F32, F16) is module
    assert module.weight.dtype is F32


def test_casts_are_differentiable() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_tensor_type({"x": x}, F32, F16)["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is F32


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
def test_wrap_fp16_model_master(dtype: Any) -> None:
    low = torch.float16 if dtype == "float16" else dtype
    net = nn.Sequential(make_net(), Probe(enabled=False))
    wrap_fp16_model(net, mode="master", dtype=dtype)
    inner: Any = net[0]
    assert [inner[i].weight.dtype for i in (0, 1, 3, 4)] == [low, F32, F32, low]
    assert inner(torch.ones(4, 6, dtype=low)).dtype is low
    assert net[1].fp16_enabled
    assert net[1].all(ONE)[0].dtype is low
    assert copy.deepcopy(net)[1].all(ONE)[0].dtype is low


def test_low_weights_need_no_autocast() -> None:
    probe = Probe(enabled=False)
    wrap_fp16_model(probe, mode="master")
    with pytest.raises(RuntimeError, match="same dtype"):
        probe.product(torch.ones(2, 2))  # the other factor stays float32 without autocast


def test_wrap_fp16_model_sets_flags_where_they_are() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Probe(enabled=False))
    wrap_fp16_model(net, dtype="bfloat16")
    assert not hasattr(net[0], "fp16_enabled")
    assert net[0].weight.dtype is F32
    assert net[1].product(torch.ones(2, 2)).dtype is BF16


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: wrap_fp16_model("net"), ConfigTypeError, "takes a module"),  # type: ignore[arg-type]
        (lambda: wrap_fp16_model(nn.Linear(1, 1), mode="o2"), ConfigError, "'master'"),  # type: ignore[arg-type]
        (lambda: wrap_fp16_model(nn.Linear(1, 1), dtype="float64"), ConfigError, "not a low dtype"),
        (lambda: patch_norm_fp32(nn.Linear(1, 1), "fp8"), ConfigError, "unknown dtype"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.InstanceNorm1d(2, affine=True),
        nn.BatchNorm1d(2),
        nn.RMSNorm(2),
    ],
)
def test_patch_norm_fp32(layer: nn.Module) -> None:
    x = torch.randn(3, 2, 2)
    expected = copy.deepcopy(layer)(x.half().float()).half()
    patched = layer.half()
    assert patch_norm_fp32(patch_norm_fp32(patched)) is patched
    assert all(p.dtype is F32 for p in patched.parameters())
    assert torch.equal(patched(x.half()), expected)
    assert len(patched._forward_pre_hooks) <= 1
    assert vars(patched).get("forward") is None
    file = io.BytesIO()
    torch.save(copy.deepcopy(patched).state_dict(), file)


@pytest.mark.parametrize("recorded", MMCV["scalers"], ids=lambda row: str(row["options"]))
def test_scales_recorded_of_mmcv(recorded: dict[str, Any]) -> None:
    scaler = LossScaler(**recorded["options"])
    scales = []
    for overflow in recorded["overflows"]:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == recorded["scales"]
    assert scaler.state_dict() == recorded["state"]


@pytest.mark.parametrize("recorded", MMCV["scalers"], ids=lambda row: str(row["options"]))
@pytest.mark.parametrize("at", [0, 7, 23])
def test_a_scaler_resumes_exactly(recorded: dict[str, Any], at: int) -> None:
    first, second = LossScaler(**recorded["options"]), LossScaler(4.0, scale_window=11)
    for overflow in recorded["overflows"][:at]:
        first.update_scale(overflow)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    for overflow in recorded["overflows"][at:]:
        second.update_scale(torch.tensor(overflow))
    assert second.state_dict() == recorded["state"]
    assert from_mmcv(second.state_dict())["scale"] == second.cur_scale


def test_overflow_is_seen_in_elements_not_in_their_sum() -> None:
    big, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    scaler = LossScaler()
    assert not scaler.has_overflow([big, plain])
    big.grad = torch.full((4,), 3e38)  # mmcv summed them, which gives inf
    assert not scaler.has_overflow([big, plain])
    for bad in (float("inf"), float("-inf"), float("nan")):
        plain.grad = torch.tensor([1.0, bad])
        assert scaler.has_overflow([big, plain])
        assert LossScaler(mode="static").has_overflow([plain])


@pytest.mark.parametrize(
    "options", [{"mode": "fast"}, {"scale_window": 0}, {"init_scale": 0}, {"scale_factor": 0.5}]
)
def test_a_scaler_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        LossScaler(**options)


@pytest.mark.parametrize(
    "change",
    [{"mode": "fast"}, {"scale_window": 0}, {"cur_scale": -1.0}, {"last_overflow_iter": 9}, {"extra": 1}],
)
def test_a_scaler_refuses_a_state(change: dict[str, Any]) -> None:
    scaler = LossScaler(8.0)
    before = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict({**before, **change})
    assert scaler.state_dict() == before
