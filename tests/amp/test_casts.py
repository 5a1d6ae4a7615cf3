"""Casts per operation through amp: initialize at O1 and O4, init, registrations and decorators."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfpeak import amp
from support.nets import product

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class TestInit:
    def test_switches_casts_on_and_off(self) -> None:
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
        handle._deactivate()
        assert not handle.is_active()
        assert amp._amp_state.handle is None
        assert product() is FP32
        handle._deactivate()

    def test_disabled(self) -> None:
        handle = amp.init(enabled=False)
        assert not handle.is_active()
        assert amp._amp_state.handle is None
        assert product() is FP32
        with handle._disable_casts():
            assert product() is FP32
        handle._deactivate()

    def test_again_replaces(self) -> None:
        first, second = amp.init(), amp.init(patch_type=BF16)
        assert not first.is_active()
        assert product() is BF16
        second._deactivate()
        assert product() is FP32
        assert torch._C._len_torch_function_stack() == 0

    def test_allow_banned(self) -> None:
        amp.init(allow_banned=True)
        x = torch.full((2,), 0.5).half().requires_grad_(True)
        loss = functional.binary_cross_entropy(x, torch.ones(2).half())
        assert loss.dtype is FP32
        loss.backward()
        assert x.grad is not None
        assert x.grad.dtype is HALF

    def test_verbose(self, capsys: pytest.CaptureFixture[str]) -> None:
        handle = amp.init(verbose=True)
        assert handle.verbose
        product()
        assert "Float->Half" in capsys.readouterr().out

    def test_without_cache(self) -> None:
        handle = amp.init(enable_caching=False)
        assert not handle.has_cache
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is HALF

    @pytest.mark.parametrize(
        "options", [{"loss_scale": "Dynamic"}, {"loss_scale": None}, {"patch_type": FP32}]
    )
    def test_refusals_change_nothing(self, options: dict[str, Any]) -> None:
        handle = amp.init()
        with pytest.raises(ValueError):
            amp.init(**options)
        assert amp._amp_state.handle is handle
        assert handle.is_active()
        assert product() is HALF


class TestDisableCasts:
    def test_does_nothing_without_casts(self) -> None:
        with amp.disable_casts():
            assert product() is FP32
        amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
        with amp.disable_casts():
            assert product() is FP32

    def test_reaches_models_that_run_under_casts_of_their_own(self) -> None:
        one = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        two = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
        x = torch.ones(1, 2)
        with amp.disable_casts():
            assert one(x).dtype is two(x).dtype is FP32
        with amp._amp_state.handle._disable_casts():
            assert one(x).dtype is FP32
        assert (one(x).dtype, two(x).dtype) == (HALF, BF16)

    def test_reaches_what_a_backward_pass_computes_again(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
        latest = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
        found: list[torch.dtype] = []
        net[0].register_forward_hook(lambda module, args, output: found.append(output.dtype))
        with amp.disable_casts():
            loss = checkpoint(lambda x: net[0](x).square(), torch.ones(1, 2), use_reentrant=False).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        assert found == [FP32, FP32]
        del latest


def kind_of(x: Tensor, y: Tensor | None = None) -> tuple[torch.dtype, ...]:
    return (x.dtype,) if y is None else (x.dtype, y.dtype)


class TestDecorators:
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_decide_when_they_are_called(self, when: str) -> None:
        def make() -> list[Callable[..., Any]]:
            return [d(kind_of) for d in (amp.half_function, amp.float_function, amp.promote_function)]

        decorated = make() if when == "before" else []
        model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        half, float_, promote = decorated or make()
        f, h = torch.ones(1), torch.ones(1).half()
        assert half(f, y=h) == (HALF, HALF)
        assert float_(f, y=h) == (FP32, FP32)
        assert promote(f, h) == (FP32, FP32)
        assert promote(h, h) == (HALF, HALF)
        assert half(model.weight) == (HALF,)
        with amp.disable_casts():
            assert half(f, h) == (FP32, HALF)
        amp._amp_state.handle._deactivate()
        assert half(f, h) == (FP32, HALF)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A user module, in a process where no function is registered yet."""
    monkeypatch.setattr(amp._amp_state, "registered", {})
    made = types.ModuleType("user_module")
    vars(made).update(one=lambda x: x.dtype, two=lambda x, y: (x.dtype, y.dtype), three=3)
    return made


class TestRegistrations:
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
    def test_what_is_no_function_is_refused_at_once(
        self, register: Callable[[Any, str], None], name: str, module: types.ModuleType
    ) -> None:
        with pytest.raises(ValueError, match=f"{name}.*user_module"):
            register(module, name)
        amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)

    def test_take_effect_at_the_next_initialize(self, module: types.ModuleType) -> None:
        before = dict(vars(module))
        first = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        amp.register_half_function(module, "one")
        amp.register_promote_function(module, "two")
        f, h = torch.ones(1), torch.ones(1).half()
        assert module.one(f) is FP32
        second = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
        assert module.one(f) is BF16
        assert module.two(f, h) == (FP32, FP32)
        del first, second
        amp._amp_state.handle and amp._amp_state.handle._deactivate()  # type: ignore[func-returns-value]
        assert module.one(f) is FP32
        assert vars(module) == before

    def test_the_last_registration_of_a_name_wins(self, module: types.ModuleType) -> None:
        amp.register_half_function(module, "one")
        amp.register_float_function(module, "one")
        model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        assert module.one(torch.ones(1).half()) is FP32
        del model


class TestSession:
    def test_before_anything(self) -> None:
        state = amp._amp_state
        assert state.hard_override is False
        assert state.allow_incoming_model_not_fp32 is False
        assert state.verbosity == 1
        assert state.opt_properties is None
        assert state.loss_scalers == []
        assert state.handle is None

    def test_after_initialize(self) -> None:
        net = nn.Linear(2, 2)
        amp.initialize(
            net, opt_level="O1", num_losses=3, verbosity=0, min_loss_scale=2.0, max_loss_scale=512.0
        )
        state = amp._amp_state
        assert state.verbosity == 0
        assert state.opt_properties.opt_level == "O1"
        assert state.opt_properties.loss_scale == "dynamic"
        assert (state.min_loss_scale, state.max_loss_scale) == (2.0, 512.0)
        assert len(state.loss_scalers) == 3
        assert state.handle.is_active()

    def test_a_disabled_call_leaves_the_scalers(self) -> None:
        amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
        scalers = amp._amp_state.loss_scalers
        amp.initialize(nn.Linear(2, 2), enabled=False, verbosity=0)
        assert amp._amp_state.loss_scalers is scalers
        assert amp._amp_state.opt_properties.enabled is False

    def test_loss_scaler_surface(self) -> None:
        amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0, max_loss_scale=512.0)
        (scaler,) = amp._amp_state.loss_scalers
        assert scaler.loss_scale() == scaler._loss_scale == 512.0
        assert type(scaler.loss_scale()) is float
        assert scaler.dynamic is True
        assert scaler._scale_seq_len == 2000
        assert scaler._unskipped == 0
        assert scaler._max_loss_scale == 512.0
        assert scaler._min_loss_scale == 2.0**-14
        assert scaler._has_overflow is False
        scaler._loss_scale = 4.0
        assert scaler.loss_scale() == 4.0
        scaler.clear_overflow_state()
        assert scaler.update_scale() is False
        assert scaler._unskipped == 1
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError):
                scaler._loss_scale = bad
        assert scaler.loss_scale() == 4.0
