"""amp.initialize: arguments, return values, refusals, and its changes to models and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak import amp
from halfpeak.core.errors import ConfigTypeError
from support.nets import LEVELS, MASTERED, STORED, make_net
from support.snapshot import snapshot, values


def sgd(*nets: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1, **options)


class TestReturnForms:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("models_as_list", [False, True])
    @pytest.mark.parametrize("optimizers_as", ["none", "one", "list", "empty"])
    def test_the_same_objects_come_back(self, level: str, models_as_list: bool, optimizers_as: str) -> None:
        net = make_net()
        parameters = list(net.parameters())
        models: Any = [net] if models_as_list else net
        optimizers: Any = {"none": None, "one": sgd(net), "list": [sgd(net)], "empty": []}[optimizers_as]
        inside = list(optimizers) if isinstance(optimizers, list) else None
        returned = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        if optimizers is None:
            assert returned is models
        else:
            assert isinstance(returned, tuple)
            assert returned[0] is models
            assert returned[1] is optimizers
            if inside is not None:
                assert all(a is b for a, b in zip(returned[1], inside, strict=True))
        assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))

    @pytest.mark.parametrize("enabled", [False, None, 0])
    def test_disabled_gives_back_what_it_got_unchecked(self, enabled: Any) -> None:
        net, anything = make_net(), ("anything", object())
        before = snapshot(net)
        assert amp.initialize(net, enabled=enabled) is net
        assert amp.initialize(anything, enabled=enabled, opt_level="nonsense") is anything
        models, optimizers = amp.initialize(net, anything, enabled=enabled)
        assert models is net
        assert optimizers is anything
        assert snapshot(net) == before
        assert amp._amp_state.loss_scalers == []


def traced(net: Any) -> Any:
    net[4] = torch.jit.trace(net[4], torch.ones(2, 8))
    return net


def with_half_parameter(net: Any) -> Any:
    net[4].half()
    return net


def with_half_buffer(net: Any) -> Any:
    net[1].running_mean = net[1].running_mean.half()
    return net


BROKEN: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], type[Exception]]] = {
    "model is a tuple": (lambda net, optimizer: ((net,), optimizer), TypeError),
    "optimizer is a tuple": (lambda net, optimizer: (net, (optimizer,)), TypeError),
    "model is something else": (lambda net, optimizer: ("a net", optimizer), TypeError),
    "list holds something else": (lambda net, optimizer: ([net, 3], optimizer), TypeError),
    "optimizer is something else": (lambda net, optimizer: (net, object()), TypeError),
    "optimizer list holds something else": (lambda net, optimizer: (net, [optimizer, object()]), TypeError),
    "DataParallel": (lambda net, optimizer: (nn.DataParallel(net), optimizer), RuntimeError),
    "TorchScript": (lambda net, optimizer: (traced(net)[4], optimizer), ConfigTypeError),
    "TorchScript part": (lambda net, optimizer: (traced(net), optimizer), ConfigTypeError),
    "half parameter": (lambda net, optimizer: (with_half_parameter(net), optimizer), RuntimeError),
    "half buffer": (lambda net, optimizer: (with_half_buffer(net), optimizer), RuntimeError),
    "same model twice": (lambda net, optimizer: ([net, net], optimizer), TypeError),
    "same optimizer twice": (lambda net, optimizer: (net, [optimizer, optimizer]), TypeError),
    "optimizer of another model": (lambda net, optimizer: (make_net(1), optimizer), TypeError),
    "optimizer of a copy": (lambda net, optimizer: (copy.deepcopy(net), optimizer), TypeError),
}


def test_a_level_as_the_third_argument_is_no_level() -> None:
    net = make_net()
    amp.initialize(net, sgd(net), "O1", verbosity=0)  # type: ignore[arg-type]
    net = make_net()
    with pytest.warns(UserWarning, match="enabled='O2' does not choose the level, which is 'O1'"):
        amp.initialize(net, sgd(net), "O2", verbosity=0)  # type: ignore[arg-type]
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


class TestRefusals:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("case", BROKEN)
    @pytest.mark.filterwarnings("ignore:.torch.jit")
    def test_changes_nothing(self, level: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
        make, error = BROKEN[case]
        net = make_net()
        models, optimizers = make(net, sgd(net, momentum=0.9))
        flat = [models, optimizers, *(list(models) if isinstance(models, (list, tuple)) else [])]
        objects = [o for o in flat if isinstance(o, (nn.Module, torch.optim.Optimizer))]
        before, session = snapshot(*objects), dict(vars(amp._amp_state))
        with pytest.raises(error):
            amp.initialize(models, optimizers, opt_level=level)
        assert snapshot(*objects) == before
        assert dict(vars(amp._amp_state)) == session
        assert capsys.readouterr().out == ""

    def test_an_optimizer_that_scales_by_itself(self) -> None:
        class FP16_Optimizer(torch.optim.SGD):  # refused because of its name
            pass

        net = make_net()
        with pytest.raises(RuntimeError, match="FP16_Optimizer"):
            amp.initialize(net, FP16_Optimizer(net.parameters(), lr=0.1), verbosity=0)
        with pytest.raises(RuntimeError, match="FP16_Optimizer"):
            amp.initialize(net, [FP16_Optimizer(net.parameters(), lr=0.1)], verbosity=0)

    @pytest.mark.parametrize("kind", ["torch", "apex"])
    def test_wrapped_models_are_named(self, kind: str) -> None:
        name = "torch.nn.parallel.distributed" if kind == "torch" else "apex.parallel.distributed"
        wrapper = type("DistributedDataParallel", (nn.Module,), {"__module__": name})
        with pytest.raises(RuntimeError, match=rf"{name}.DistributedDataParallel.*wrap the model it returns"):
            amp.initialize(wrapper(), opt_level="O2", verbosity=0)

    @pytest.mark.parametrize("what", ["4.weight", "1.running_mean"])
    def test_a_low_model_is_named(self, what: str) -> None:
        lower = with_half_parameter if what == "4.weight" else with_half_buffer
        with pytest.raises(RuntimeError, match=rf"{what}.*float16"):
            amp.initialize(lower(make_net()), opt_level="O2", verbosity=0)

    def test_a_low_model_may_be_allowed(self) -> None:
        amp._amp_state.allow_incoming_model_not_fp32 = True
        net = make_net().half()
        amp.initialize(net, sgd(net), opt_level="O2", cast_model_type=False, verbosity=0)
        assert next(net.parameters()).dtype is torch.float16

    @pytest.mark.parametrize("level", LEVELS)
    def test_the_same_optimizer_again(self, level: str) -> None:
        net = make_net()
        optimizer = sgd(net)
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        before, session = snapshot(net, optimizer), dict(vars(amp._amp_state))
        with pytest.raises(RuntimeError):
            amp.initialize(make_net(1), optimizer, opt_level=level, verbosity=0)
        with pytest.raises(RuntimeError):
            amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        assert snapshot(net, optimizer) == before
        assert dict(vars(amp._amp_state)) == session

    @pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
    def test_the_same_model_again(self, level: str) -> None:
        net = make_net()
        amp.initialize(net, opt_level=level, verbosity=0)
        before = snapshot(net)
        with pytest.raises(RuntimeError, match="was initialised before; pass all models"):
            amp.initialize(net, sgd(net), opt_level=level, verbosity=0)
        assert snapshot(net) == before


class TestModels:
    """Which parameters, buffers, inputs and outputs are cast."""

    @pytest.mark.parametrize("level", LEVELS)
    def test_dtypes(self, level: str) -> None:
        net = make_net()
        net.register_buffer("table", torch.arange(3))
        net.register_buffer("factor", torch.ones(2))
        amp.initialize(net, opt_level=level, verbosity=0)
        low = STORED[level]
        norm = torch.float32 if level in MASTERED else low
        got = {name: tensor.dtype for name, tensor in (*net.named_parameters(), *net.named_buffers())}
        assert {got["0.weight"], got["0.bias"], got["4.weight"], got["4.bias"], got["factor"]} == {low}
        assert {got["1.weight"], got["1.running_mean"], got["3.weight"], got["3.bias"]} == {norm}
        assert got["table"] is torch.int64
        assert got["1.num_batches_tracked"] is torch.int64

    def test_apex_s_own_norm_rule(self) -> None:
        net = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4)
        )
        amp.initialize(net, opt_level="O2", norms="batchnorm", verbosity=0)
        assert net[1].weight.dtype is torch.float32
        assert net[2].running_mean.dtype is torch.float16
        assert net[3].weight.dtype is torch.float16
        assert net(torch.randn(5, 4)).dtype is torch.float32

    def test_o0_makes_a_double_model_float32(self) -> None:
        net = make_net().double()
        amp.initialize(net, opt_level="O0", verbosity=0)
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        assert net(torch.randn(4, 6, dtype=torch.float64)).dtype is torch.float32

    @pytest.mark.parametrize(
        ("level", "output"),
        [
            ("O0", torch.float32),
            ("O1", torch.float16),
            ("O2", torch.float32),
            ("O3", torch.float32),
            ("O4", torch.bfloat16),
            ("O5", torch.float32),
        ],
    )
    @pytest.mark.parametrize("asked", [None, torch.float16, torch.float32])
    def test_output(self, level: str, output: torch.dtype, asked: torch.dtype | None) -> None:
        net = amp.initialize(make_net(), opt_level=level, cast_model_outputs=asked, verbosity=0)
        assert net(torch.randn(4, 6)).dtype is (output if asked is None else asked)

    def test_o1_may_cast_inputs_and_outputs(self) -> None:
        net = amp.initialize(make_net(), opt_level="O1", cast_model_type=torch.float32, verbosity=0)
        assert net(torch.randn(4, 6, dtype=torch.float64)).dtype is torch.float32

    @pytest.mark.parametrize("level", ["O2", "O3", "O5"])
    def test_cast_model_type_false_leaves_the_model(self, level: str) -> None:
        net = make_net()
        before = values(net)
        amp.initialize(net, opt_level=level, cast_model_type=False, verbosity=0)
        assert values(net) == before
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        assert net(torch.randn(4, 6, dtype=torch.float32)).dtype is torch.float32


class TestStateDictOfTheModel:
    @pytest.mark.parametrize("level", LEVELS)
    def test_never_low(self, level: str) -> None:
        net = make_net()
        net, _ = amp.initialize(net, sgd(net), opt_level=level, verbosity=0)
        for module in net.modules():
            for name, value in module.state_dict().items():
                expected = torch.int64 if name.endswith("num_batches_tracked") else torch.float32
                assert value.dtype is expected, name

    def test_keys_order_and_metadata_are_the_plain_model_s(self) -> None:
        plain, net = make_net().state_dict(), make_net()
        state = amp.initialize(net, opt_level="O2", verbosity=0).state_dict()
        assert list(state) == list(plain)
        assert state._metadata == plain._metadata


class TestOptimizers:
    @pytest.mark.parametrize("level", LEVELS)
    def test_only_zero_grad_is_replaced_on_the_optimizer(self, level: str) -> None:
        """It clears the gradients of weights and masters."""
        net = make_net()
        optimizer = sgd(net)
        before, groups = set(vars(optimizer)), [id(group) for group in optimizer.param_groups]
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        assert set(vars(optimizer)) - before == ({"zero_grad"} if level in MASTERED else set())
        assert [id(group) for group in optimizer.param_groups] == groups

    @pytest.mark.parametrize("level", LEVELS)
    def test_state_from_before_goes_on_in_the_dtype_of_what_is_stepped(self, level: str) -> None:
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
