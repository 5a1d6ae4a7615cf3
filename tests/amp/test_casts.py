"""Casts per operation through amp: init, disable_casts, registrations; and the names of the session that scripts read."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfpeak import amp
from support.nets import product

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def initialize(level: str, **options: Any) -> nn.Linear:
    return amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **options)


def test_init_switches_casts_on_and_off() -> None:
    handle = amp.init()
    assert amp._amp_state.handle is handle
    assert handle.is_active()
    assert handle.has_cache
    assert not handle.verbose
    assert product() is HALF
    handle._clear_cache()
    with handle._disable_casts():
        assert product() is FP32
    assert product() is HALF
    for _ in range(2):
        handle._deactivate()
        assert not handle.is_active()
        assert amp._amp_state.handle is None
        assert product() is FP32


def test_init_disabled() -> None:
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert amp._amp_state.handle is None
    with handle._disable_casts():
        assert product() is FP32
    handle._deactivate()
    handle._clear_cache()


def test_init_again_replaces() -> None:
    first, second = amp.init(), amp.init(patch_type=BF16)
    assert not first.is_active()
    first._deactivate()
    assert product() is BF16
    second._deactivate()
    assert product() is FP32
    assert torch._C._len_torch_function_stack() == 0


def test_options_of_init(capsys: pytest.CaptureFixture[str]) -> None:
    handle = amp.init(allow_banned=True, verbose=True, enable_caching=False)
    assert handle.verbose
    assert not handle.has_cache
    x = torch.full((2,), 0.5).half().requires_grad_(True)
    loss = functional.binary_cross_entropy(x, torch.ones(2).half())
    assert loss.dtype is FP32
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype is HALF
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is HALF
    assert "Float->Half (linear)" in capsys.readouterr().out


def test_casts_are_on_again_in_the_forward_pass_after_a_step_that_raised() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert product() is FP32
            raise ArithmeticError

    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, Fails(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    for _ in range(2):
        assert model(torch.ones(1, 2)).dtype is HALF
        assert product() is HALF
        with pytest.raises(ArithmeticError):
            optimizer.step()


@pytest.mark.parametrize("options", [{"loss_scale": "Dynamic"}, {"loss_scale": None}, {"patch_type": FP32}])
def test_a_refused_init_changes_nothing(options: dict[str, Any]) -> None:
    handle = amp.init()
    with pytest.raises(ValueError):
        amp.init(**options)
    assert amp._amp_state.handle is handle
    assert product() is HALF


def test_disable_casts_does_nothing_without_casts() -> None:
    with amp.disable_casts():
        assert product() is FP32
    initialize("O2")
    with amp.disable_casts():
        assert product() is FP32


def test_disable_casts_reaches_models_that_run_under_casts_of_their_own() -> None:
    one, two = initialize("O1"), initialize("O4")
    x = torch.ones(1, 2)
    for disable in (amp.disable_casts, amp._amp_state.handle._disable_casts):
        with disable():
            assert one(x).dtype is two(x).dtype is FP32
    assert (one(x).dtype, two(x).dtype) == (HALF, BF16)


@pytest.mark.parametrize("disabled", [True, False])
def test_a_backward_pass_computes_again_under_the_casts_of_forward(disabled: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
    latest = initialize("O4")
    found: list[torch.dtype] = []
    net[0].register_forward_hook(lambda module, args, output: found.append(output.dtype))

    with amp.disable_casts() if disabled else nullcontext():
        loss = checkpoint(lambda x: net(x).square(), torch.ones(1, 2), use_reentrant=False).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    assert found == [FP32 if disabled else HALF] * 2
    del latest


@pytest.mark.parametrize("when", ["before", "after"])
def test_decorators_decide_when_they_are_called(when: str) -> None:
    def kind_of(x: Tensor, y: Tensor) -> tuple[torch.dtype, ...]:
        return x.dtype, y.dtype

    def make() -> list[Callable[..., Any]]:
        return [d(kind_of) for d in (amp.half_function, amp.float_function, amp.promote_function)]

    decorated = make() if when == "before" else []
    model = initialize("O1")
    half, float_, promote = decorated or make()
    f, h = torch.ones(1), torch.ones(1).half()
    assert half(f, y=h) == half(model.weight, h) == promote(h, h) == (HALF, HALF)
    assert float_(f, y=h) == promote(f, h) == (FP32, FP32)
    with amp.disable_casts():
        assert half(f, h) == (FP32, HALF)
    amp._amp_state.handle._deactivate()
    assert half(f, h) == (FP32, HALF)


@pytest.fixture
def module() -> types.ModuleType:
    made = types.ModuleType("user_module")
    vars(made).update(one=lambda x: x.dtype, two=lambda x, y: (x.dtype, y.dtype), three=3)
    return made


@pytest.mark.parametrize(
    "register",
    [
        amp.register_half_function,
        amp.register_bfloat16_function,
        amp.register_float_function,
        amp.register_promote_function,
    ],
)
@pytest.mark.parametrize("name", ["no_such_function", "three"])
def test_a_registration_of_what_is_no_function_is_refused_at_once(
    register: Callable[[Any, str], None], name: str, module: types.ModuleType
) -> None:
    with pytest.raises(ValueError, match=f"{name}.*user_module"):
        register(module, name)
    initialize("O1")


def test_registrations_take_effect_at_the_next_initialize_and_the_last_wins(module: types.ModuleType) -> None:
    before = dict(vars(module))
    first = initialize("O1")
    amp.register_float_function(module, "one")
    amp.register_half_function(module, "one")
    amp.register_promote_function(module, "two")
    f, h = torch.ones(1), torch.ones(1).half()
    assert module.one(f) is FP32
    second = initialize("O4")
    assert module.one(f) is BF16
    assert module.two(f, h) == (FP32, FP32)
    del first, second
    amp._amp_state.handle and amp._amp_state.handle._deactivate()  # type: ignore[func-returns-value]
    assert module.one(f) is FP32
    assert vars(module) == before


def test_the_session() -> None:
    state = amp._amp_state
    assert (state.hard_override, state.allow_incoming_model_not_fp32, state.verbosity) == (False, False, 1)
    assert (state.opt_properties, state.loss_scalers, state.handle) == (None, [], None)
    model = initialize("O1", num_losses=3, min_loss_scale=2.0, max_loss_scale=512.0)
    assert state.verbosity == 0
    assert (state.opt_properties.opt_level, state.opt_properties.loss_scale) == ("O1", "dynamic")
    assert (state.min_loss_scale, state.max_loss_scale) == (2.0, 512.0)
    assert len(state.loss_scalers) == 3
    assert state.handle.is_active()
    scalers = state.loss_scalers
    initialize("O2", enabled=False)
    assert state.loss_scalers is scalers
    assert state.opt_properties.enabled is False
    del model


def test_a_loss_scaler_of_the_session() -> None:
    initialize("O2", max_loss_scale=512.0)
    (scaler,) = amp._amp_state.loss_scalers
    assert type(scaler.loss_scale()) is float
    assert scaler.dynamic is True
    assert (scaler._scale_seq_len, scaler._unskipped, scaler._has_overflow) == (2000, 0, False)
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (2.0**-126, 512.0)
    scaler._loss_scale, scaler._scale_seq_len = 4.0, 2
    for bad in (0.0, float("nan")):
        with pytest.raises(ValueError):
            scaler._loss_scale = bad
    assert scaler.loss_scale() == scaler._loss_scale == 4.0
    scaler.clear_overflow_state()
    assert [scaler.update_scale(), scaler.update_scale()] == [False, False]
    assert (scaler.loss_scale(), scaler._unskipped) == (8.0, 0)
