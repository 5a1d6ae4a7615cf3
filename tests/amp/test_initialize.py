"""amp.initialize: what comes back, what is refused, what becomes of models and optimizers, and what is printed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from halfpeak import LEVELS as LEVELS_OF
from halfpeak import amp
from halfpeak.amp.properties import Properties, opt_levels
from halfpeak.amp.session import maybe_print
from halfpeak.core.errors import ConfigTypeError
from support.nets import LEVELS, MASTERED, PURE, STORED, make_batch, make_net
from support.snapshot import snapshot, values

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAMES = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


def initialize(level: Any = "O1", **options: Any) -> tuple[nn.Sequential, torch.optim.SGD]:
    net = make_net()
    return amp.initialize(net, sgd(net), opt_level=level, **{"verbosity": 0, **options})


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x, y = make_batch(seed)
    optimizer.zero_grad()
    with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("models_as_list", [False, True])
@pytest.mark.parametrize("optimizers_as", ["none", "one", "list", "empty"])
def test_the_same_objects_come_back(level: str, models_as_list: bool, optimizers_as: str) -> None:
    net = make_net()
    parameters = list(net.parameters())
    models: Any = [net] if models_as_list else net
    optimizers: Any = {"none": None, "one": sgd(net), "list": [sgd(net)], "empty": []}[optimizers_as]
    inside = list(optimizers) if isinstance(optimizers, list) else []
    returned = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    if optimizers is None:
        assert returned is models
    else:
        assert returned[0] is models
        assert returned[1] is optimizers
        assert all(a is b for a, b in zip(inside, optimizers if inside else [], strict=True))
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))


@pytest.mark.parametrize("enabled", [False, None, 0])
def test_disabled_gives_back_what_it_got_unchecked(enabled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net, anything = make_net(), ("anything", object())
    before = snapshot(net)
    assert amp.initialize(net, enabled=enabled) is net
    assert amp.initialize(anything, enabled=enabled, opt_level="nonsense") is anything
    models, optimizers = amp.initialize(net, anything, enabled=enabled)
    assert models is net
    assert optimizers is anything
    assert snapshot(net) == before
    assert amp._amp_state.loss_scalers == []
    assert [getattr(amp._amp_state.opt_properties, name) for name in NAMES] == [
        False, None, None, False, None, None, 1.0
    ]  # fmt: skip
    assert capsys.readouterr().out == ""


def test_a_level_as_the_third_argument_is_no_level() -> None:
    net = make_net()
    amp.initialize(net, sgd(net), "O1", verbosity=0)  # type: ignore[arg-type]
    net = make_net()
    with pytest.warns(UserWarning, match="enabled='O2' does not choose the level, which is 'O1'"):
        amp.initialize(net, sgd(net), "O2", verbosity=0)  # type: ignore[arg-type]
    assert {parameter.dtype for parameter in net.parameters()} == {FP32}


def traced(net: Any) -> Any:
    net[4] = torch.jit.trace(net[4], torch.ones(2, 8))
    return net


def with_half_parameter(net: Any) -> Any:
    net[4].half()
    return net


def with_half_buffer(net: Any) -> Any:
    net[1].running_mean = net[1].running_mean.half()
    return net


class FP16_Optimizer(torch.optim.SGD):
    """Refused because of its name: apex has two classes that scale losses by themselves."""


def wrapped(module: str) -> nn.Module:
    return type("DistributedDataParallel", (nn.Module,), {"__module__": module})()


BROKEN: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], type[Exception], str]] = {
    "model is a tuple": (lambda net, optimizer: ((net,), optimizer), TypeError, "list of models"),
    "optimizer is a tuple": (lambda net, optimizer: (net, (optimizer,)), TypeError, "list of optimizers"),
    "list holds something else": (lambda net, optimizer: ([net, 3], optimizer), TypeError, "Module objects"),
    "optimizer is something else": (lambda net, optimizer: (net, object()), TypeError, "object"),
    "same model twice": (lambda net, optimizer: ([net, net], optimizer), TypeError, "twice"),
    "same optimizer twice": (lambda net, optimizer: (net, [optimizer, optimizer]), TypeError, "twice"),
    "optimizer of a copy": (lambda net, optimizer: (copy.deepcopy(net), optimizer), TypeError, "model"),
    "scales by itself": (lambda net, optimizer: (net, FP16_Optimizer(net.parameters())), RuntimeError, "bare"),
    "DataParallel": (lambda net, optimizer: (nn.DataParallel(net), optimizer), RuntimeError, "DataParallel"),
    **{
        f"DDP of {module}": (
            lambda net, optimizer, module=module: (wrapped(module), None),
            RuntimeError,
            f"{module}.DistributedDataParallel.*wrap the model it returns",
        )
        for module in ("torch.nn.parallel.distributed", "apex.parallel.distributed")
    },
    "TorchScript": (lambda net, optimizer: (traced(net)[4], optimizer), ConfigTypeError, "TorchScript"),
    "TorchScript part": (lambda net, optimizer: (traced(net), optimizer), ConfigTypeError, "part '4'"),
    "half": (lambda net, optimizer: (with_half_parameter(net), optimizer), RuntimeError, "4.weight.*float16"),
    "half buffer": (lambda net, optimizer: (with_half_buffer(net), optimizer), RuntimeError, "1.running_mean"),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_refused_object_is_named_and_nothing_changes(
    level: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, error, match = BROKEN[case]
    net = make_net()
    models, optimizers = make(net, sgd(net, momentum=0.9))
    flat = [models, optimizers, *(list(models) if isinstance(models, (list, tuple)) else [])]
    objects = [o for o in flat if isinstance(o, (nn.Module, torch.optim.Optimizer))]
    before, session = snapshot(*objects), dict(vars(amp._amp_state))
    with pytest.raises(error, match=match):
        amp.initialize(models, optimizers, opt_level=level)
    assert snapshot(*objects) == before
    assert dict(vars(amp._amp_state)) == session
    assert capsys.readouterr().out == ""


REFUSED: list[tuple[Any, dict[str, Any], type[Exception]]] = [
    ("01", {}, RuntimeError),
    (None, {}, RuntimeError),
    ("O1", {"keep_batchnorm_fp32": False}, RuntimeError),
    ("O1", {"master_weights": False}, RuntimeError),
    ("O1", {"cast_model_type": HALF}, RuntimeError),
    ("O2", {"keep_batchnorm_fp32": "true"}, AssertionError),
    ("O2", {"keep_batchnorm_fp32": 0}, ValueError),
    ("O2", {"patch_torch_functions": True}, RuntimeError),
    ("O2", {"cast_model_type": torch.int32}, ValueError),
    ("O2", {"loss_scale": "Dynamic"}, ValueError),
    ("O2", {"loss_scale": 0.0}, ValueError),
    ("O2", {"loss_scale": "inf"}, ValueError),
    ("O2", {"num_losses": 0}, ValueError),
    ("O2", {"num_losses": 1.5}, ValueError),
    ("O2", {"min_loss_scale": -1.0}, ValueError),
    ("O2", {"min_loss_scale": 2.0**25}, ValueError),
    ("O2", {"max_loss_scale": float("inf")}, ValueError),
    ("O2", {"max_loss_scale": None}, TypeError),
    ("O2", {"cast_model_outputs": "half a float"}, ValueError),
    ("O2", {"norms": "layer"}, ValueError),
    ("O1", {"norms": "layer"}, ValueError),
    ("O2", {"patience": 0}, ValueError),
    ("O2", {"verbosity": "1"}, TypeError),
]


@pytest.mark.parametrize(("level", "overrides", "error"), REFUSED)
def test_a_refused_property_changes_nothing(
    level: Any, overrides: dict[str, Any], error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    net = make_net()
    optimizer = sgd(net, momentum=0.9)
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    before, session = snapshot(net, optimizer), dict(vars(amp._amp_state))
    with pytest.raises(error):
        amp.initialize(net, optimizer, opt_level=level, **overrides)
    assert snapshot(net, optimizer) == before
    assert dict(vars(amp._amp_state)) == session
    assert capsys.readouterr().out == ""
    amp.initialize(net, optimizer, opt_level="O2", verbosity=0)


def test_cudnn_must_be_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with pytest.raises(RuntimeError, match=r"torch\.backends\.cudnn\.enabled"):
        initialize("O2")
    amp.initialize(make_net(), enabled=False)


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_optimizer_again(level: str) -> None:
    net, optimizer = initialize(level)
    before, session = snapshot(net, optimizer), dict(vars(amp._amp_state))
    for other in (make_net(1), net):
        with pytest.raises(RuntimeError):
            amp.initialize(other, optimizer, opt_level=level, verbosity=0)
    assert snapshot(net, optimizer) == before
    assert dict(vars(amp._amp_state)) == session


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_the_same_model_again(level: str) -> None:
    net = amp.initialize(make_net(), opt_level=level, verbosity=0)
    before = snapshot(net)
    with pytest.raises(RuntimeError, match="was initialised before; pass all models"):
        amp.initialize(net, sgd(net), opt_level=level, verbosity=0)
    assert snapshot(net) == before


@pytest.mark.parametrize("bounds", [(8.0, 4.0), (-1.0, 0), (float("nan"), None)])
def test_a_static_scale_ignores_its_bounds(bounds: tuple[Any, Any]) -> None:
    initialize("O2", loss_scale=128, min_loss_scale=bounds[0], max_loss_scale=bounds[1])
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0


@pytest.mark.parametrize(
    ("low", "high", "start"),
    [(None, 2.0**24, 65536.0), (None, 1024.0, 1024.0), (2.0**20, 2.0**24, 65536.0)],
)
def test_where_a_dynamic_scale_starts(low: float | None, high: float, start: float) -> None:
    initialize("O2", min_loss_scale=low, max_loss_scale=high)
    assert amp._amp_state.loss_scalers[0].loss_scale() == start
    assert (amp._amp_state.min_loss_scale, amp._amp_state.max_loss_scale) == (low, high)


# Properties.


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", [True, "O0", FP32, False, None, False, 1.0]),
        ("O1", [True, "O1", None, True, None, None, "dynamic"]),
        ("O2", [True, "O2", HALF, False, True, True, "dynamic"]),
        ("O3", [True, "O3", HALF, False, False, False, 1.0]),
        ("O4", [True, "O4", None, True, None, None, 1.0]),
        ("O5", [True, "O5", BF16, False, True, True, 1.0]),
    ],
)
def test_defaults(level: str, expected: list[Any]) -> None:
    initialize(level)
    assert [getattr(amp._amp_state.opt_properties, name) for name in NAMES] == expected
    assert opt_levels[level](Properties()).options == Properties(LEVELS_OF[level].properties).options
    assert opt_levels[level].brief.startswith(f"{level}:  ")


@pytest.mark.parametrize(
    ("level", "name", "value", "stored"),
    [
        (None, "loss_scale", "128.0", 128.0),
        ("O2", "keep_batchnorm_fp32", "False", False),
        ("O2", "cast_model_type", BF16, BF16),
        ("O1", "master_weights", None, None),
        ("O1", "master_weights", True, RuntimeError),
        (None, "patch_torch_functions", True, RuntimeError),
        ("O2", "keep_batchnorm_fp32", "maybe", AssertionError),
        ("O2", "unknown", 1, AttributeError),
    ],
)
def test_a_property_that_is_set_is_checked(level: str | None, name: str, value: Any, stored: Any) -> None:
    properties = Properties() if level is None else opt_levels[level](Properties())
    before = dict(properties.options)
    if isinstance(stored, type):
        with pytest.raises(stored):
            setattr(properties, name, value)
        assert properties.options == before
    else:
        setattr(properties, name, value)
        assert getattr(properties, name) == properties.options[name] == stored
    with pytest.raises(AttributeError):
        _ = properties.no_such_option


def test_hard_override_prints_and_stores(capsys: pytest.CaptureFixture[str]) -> None:
    amp._amp_state.hard_override = True
    initialize("O1", keep_batchnorm_fp32=True)
    assert amp._amp_state.opt_properties.keep_batchnorm_fp32 is True
    printed = capsys.readouterr().out  # although verbosity is 0, as in apex
    assert printed.startswith("Warning:")
    assert "keep_batchnorm_fp32" in printed
    initialize("O4", patch_torch_functions_type=HALF)
    assert amp._amp_state.opt_properties.patch_torch_functions_type is BF16
    with pytest.raises(ValueError, match="keep_batchnorm_fp32"):
        initialize("O1", keep_batchnorm_fp32="true")
    assert next(amp.initialize(make_net().half(), opt_level="O3", verbosity=0).parameters()).dtype is HALF


def test_a_low_model_may_be_allowed() -> None:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    net = make_net().half()
    amp.initialize(net, sgd(net), opt_level="O2", cast_model_type=False, verbosity=0)
    assert next(net.parameters()).dtype is HALF


# Models.


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes(level: str) -> None:
    net = make_net()
    net.register_buffer("table", torch.arange(3))
    net.register_buffer("factor", torch.ones(2))
    net, _ = amp.initialize(net, sgd(net), opt_level=level, verbosity=0)
    low = STORED[level]
    batch_norm = FP32 if level in MASTERED else low
    got = {name: tensor.dtype for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    assert {
        got["0.weight"],
        got["0.bias"],
        got["3.weight"],
        got["4.weight"],
        got["4.bias"],
        got["factor"],
    } == {low}
    assert {got["1.weight"], got["1.running_mean"]} == {batch_norm}
    assert {got["table"], got["1.num_batches_tracked"]} == {torch.int64}
    for module in net.modules():
        for name, value in module.state_dict().items():
            expected = torch.int64 if name.endswith(("num_batches_tracked", "table")) else FP32
            assert value.dtype is expected, name


def test_keys_order_and_metadata_of_state_dict_are_the_plain_model_s() -> None:
    plain, state = make_net().state_dict(), initialize("O2")[0].state_dict()
    assert list(state) == list(plain)
    assert state._metadata == plain._metadata


@pytest.mark.parametrize(("options", "kept"), [({}, HALF), ({"norms": "all"}, FP32)])
def test_the_norms_that_stay_float32(options: dict[str, Any], kept: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4))
    amp.initialize(net, opt_level="O2", verbosity=0, **options)
    assert [net[1].weight.dtype, net[2].running_mean.dtype, net[3].weight.dtype] == [FP32, kept, kept]
    assert net(torch.randn(5, 4)).dtype is FP32


def test_o0_makes_a_double_model_float32() -> None:
    net = amp.initialize(make_net().double(), opt_level="O0", verbosity=0)
    assert {p.dtype for p in net.parameters()} == {FP32}
    assert net(torch.randn(4, 6, dtype=torch.float64)).dtype is FP32


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("asked", [None, HALF, FP32])
def test_output(level: str, asked: torch.dtype | None) -> None:
    net, _ = initialize(level, cast_model_outputs=asked)
    assert net(torch.randn(4, 6)).dtype is (asked or {"O1": HALF, "O4": BF16}.get(level, FP32))


def test_o1_may_cast_inputs_and_outputs() -> None:
    net, _ = initialize("O1", cast_model_type=FP32)
    assert net(torch.randn(4, 6, dtype=torch.float64)).dtype is FP32


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_cast_model_type_false_leaves_the_model(level: str) -> None:
    net, _ = initialize(level, cast_model_type=False)
    assert values(net) == values(make_net())
    assert {p.dtype for p in net.parameters()} == {net(torch.randn(4, 6)).dtype} == {FP32}


# Optimizers and masters.


@pytest.mark.parametrize("level", LEVELS)
def test_only_zero_grad_is_replaced_on_the_optimizer(level: str) -> None:
    """It clears the gradients of weights and masters."""
    net = make_net()
    optimizer = sgd(net)
    before, groups = set(vars(optimizer)), [id(group) for group in optimizer.param_groups]
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert set(vars(optimizer)) - before == ({"zero_grad"} if level in MASTERED else set())
    assert [id(group) for group in optimizer.param_groups] == groups


@pytest.mark.parametrize("level", LEVELS)
def test_state_from_before_goes_on_in_the_dtype_of_what_is_stepped(level: str) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    exact = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    for parameter, moment in zip(amp.master_params(optimizer), exact, strict=True):
        got = optimizer.state[parameter]["exp_avg"]
        assert got.dtype is parameter.dtype
        # Moments of masters are not rounded; apex rounded them to half first.
        assert torch.equal(got, moment.to(parameter.dtype))
        assert optimizer.state[parameter]["step"] == 1
    assert len(optimizer.state) == len(exact)


def test_master_params_takes_any_optimizer_at_any_time() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1.0)
    found = amp.master_params(optimizer)
    assert isinstance(found, Iterator)
    assert all(a is b for a, b in zip(found, parameters, strict=True))


@pytest.mark.parametrize(
    ("level", "options"),
    [*((level, {}) for level in LEVELS), ("O2", {"master_weights": False}), ("O3", {"master_weights": True})],
)
def test_low_weights_are_stepped_by_float32_masters(level: str, options: dict[str, Any]) -> None:
    net, optimizer = initialize(level, max_loss_scale=256.0, **options)
    masters = options.get("master_weights", level in MASTERED)
    for step in range(2):
        for parameter, stepped in zip(net.parameters(), amp.master_params(optimizer), strict=True):
            if masters and parameter.dtype is not FP32:
                assert stepped is not parameter
                assert stepped.dtype is FP32
                assert stepped.is_leaf
                assert stepped.requires_grad
            else:
                assert stepped is parameter
        train(net, optimizer, step)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("moment", ["at once", "after a step", "between block and step"])
def test_a_model_loaded_later_is_what_trains_on(level: str, moment: str) -> None:
    """In apex the next step overwrote the loaded weights with the old masters."""
    net, optimizer = initialize(level, max_loss_scale=256.0)
    if moment == "after a step":
        train(net, optimizer)
    if moment == "between block and step":
        x, y = make_batch(0)
        with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
            scaled.backward()
    optimizer.zero_grad()
    loaded = make_net(7).state_dict()
    net.load_state_dict(loaded)
    optimizer.step()
    for name, value in net.state_dict().items():
        expected = loaded[name]
        if level in PURE and value.is_floating_point():
            expected = expected.to(STORED[level]).float()
        assert torch.equal(value, expected), name
    train(net, optimizer, 1)
    assert all((a.float() - loaded[n]).abs().max() < 0.2 for n, a in net.named_parameters())


@pytest.mark.parametrize("level", MASTERED)
def test_weights_written_through_data_are_warned_of(level: str) -> None:
    net, optimizer = initialize(level, max_loss_scale=256.0)

    def run() -> None:
        for step in range(20):
            train(net, optimizer, step)
            for parameter in net.parameters():
                parameter.data.mul_(0.5)

    with pytest.warns(UserWarning, match=r"parameter\.data"):
        run()


# What is printed.


@pytest.mark.parametrize("level", LEVELS)
def test_verbosity_1_prints_the_level_and_two_tables(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    initialize(level, verbosity=1, loss_scale="32.0")
    first, _, second = capsys.readouterr().out.partition(
        "\nProcessing user overrides (additional kwargs that are not None)...\n"
        "After processing overrides, optimization options are:\n"
    )
    assert first.startswith(f"Selected optimization level {level}")
    assert "\nDefaults for this optimization level are:\n" in first
    properties = amp._amp_state.opt_properties
    for table, scale in ((first, LEVELS_OF[level].properties.loss_scale), (f"\n{second}", 32.0)):
        rows = [f"\n{name:22} : {getattr(properties, name)}" for name in NAMES[:-1]]
        positions = [table.index(row) for row in [*rows, f"\n{'loss_scale':22} : {scale}"]]
        assert positions == sorted(positions)
        assert ("patch_torch_functions_type" in table) == (level == "O4")


@pytest.mark.parametrize(("verbosity", "prints"), [(0, False), (None, True)])
def test_verbosity_0_prints_nothing_and_none_means_1(
    verbosity: int | None, prints: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    maybe_print("on the first rank", True)
    net, optimizer = initialize("O2", verbosity=verbosity)
    with amp.scale_loss(net(torch.full((2, 6), 1e30)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not amp.last_step(optimizer).stepped()
    maybe_print("of a script")
    printed = capsys.readouterr().out.removeprefix("on the first rank\n")
    assert [word in printed for word in ("Selected", "Gradient overflow", "of a script")] == [prints] * 3
    assert prints or not printed


@pytest.mark.parametrize(("verbosity", "cast_lines"), [(1, False), (2, True), (3, False)])
def test_casts_are_printed_at_verbosity_2_only(
    verbosity: int, cast_lines: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    net, _ = initialize("O1", verbosity=verbosity)
    capsys.readouterr()
    mse_loss(net(torch.ones(2, 6)), torch.zeros(2, 3))
    printed = capsys.readouterr().out
    assert ("Float->Half (linear)" in printed) is cast_lines
    assert ("Half->Float (mse_loss)" in printed) is cast_lines
