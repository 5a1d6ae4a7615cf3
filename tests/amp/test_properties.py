"""Opt levels, overrides of their properties, and the printed summary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfpeak import LEVELS as LEVELS_OF
from halfpeak import amp
from halfpeak.amp.properties import Properties, opt_levels
from halfpeak.amp.session import maybe_print
from support.nets import LEVELS, make_net
from support.snapshot import snapshot

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


def initialize(level: Any = "O1", **overrides: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = make_net()
    return amp.initialize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level, verbosity=0, **overrides
    )


def test_properties_before_the_first_initialize() -> None:
    assert amp._amp_state.opt_properties is None
    net = make_net()
    amp.initialize(net, enabled=False)
    properties = amp._amp_state.opt_properties
    assert [getattr(properties, name) for name in NAMES] == [False, None, None, False, None, None, 1.0]


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
    properties = amp._amp_state.opt_properties
    assert [getattr(properties, name) for name in NAMES] == expected


def test_the_default_level_is_o1() -> None:
    amp.initialize(make_net(), verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == "O1"


REFUSED: list[tuple[Any, dict[str, Any], type[Exception]]] = [
    ("o1", {}, RuntimeError),
    ("01", {}, RuntimeError),
    ("O9", {}, RuntimeError),
    (None, {}, RuntimeError),
    (1, {}, RuntimeError),
    ("O1", {"keep_batchnorm_fp32": False}, RuntimeError),
    ("O1", {"keep_batchnorm_fp32": "False"}, RuntimeError),
    ("O1", {"master_weights": False}, RuntimeError),
    ("O1", {"cast_model_type": HALF}, RuntimeError),
    ("O2", {"keep_batchnorm_fp32": "true"}, ValueError),
    ("O2", {"keep_batchnorm_fp32": 1}, ValueError),
    ("O2", {"keep_batchnorm_fp32": 0}, AssertionError),
    ("O2", {"patch_torch_functions": True}, RuntimeError),
    ("O2", {"cast_model_type": torch.int32}, ValueError),
    ("O2", {"cast_model_type": "torch.float16"}, ValueError),
    ("O2", {"loss_scale": "Dynamic"}, ValueError),
    ("O2", {"loss_scale": 0.0}, ValueError),
    ("O2", {"loss_scale": -1.0}, ValueError),
    ("O2", {"loss_scale": "inf"}, ValueError),
    ("O2", {"loss_scale": "nan"}, ValueError),
    ("O2", {"loss_scale": []}, ValueError),
    ("O2", {"num_losses": 0}, ValueError),
    ("O2", {"num_losses": 1.5}, ValueError),
    ("O2", {"min_loss_scale": -1.0}, ValueError),
    ("O2", {"min_loss_scale": 2.0**25}, ValueError),
    ("O2", {"max_loss_scale": 0.0}, ValueError),
    ("O2", {"max_loss_scale": float("inf")}, ValueError),
    ("O2", {"max_loss_scale": None}, TypeError),
    ("O2", {"cast_model_outputs": "half a float"}, ValueError),
    ("O2", {"norms": "layer"}, ValueError),
    ("O2", {"patience": 0}, ValueError),
    ("O2", {"verbosity": "1"}, TypeError),
]


@pytest.mark.parametrize(("level", "overrides", "error"), REFUSED)
def test_a_refused_property_changes_nothing(
    level: Any, overrides: dict[str, Any], error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    before, session = snapshot(net, optimizer), dict(vars(amp._amp_state))
    with pytest.raises(error):
        amp.initialize(net, optimizer, opt_level=level, **overrides)
    assert snapshot(net, optimizer) == before
    assert dict(vars(amp._amp_state)) == session
    assert capsys.readouterr().out == ""
    amp.initialize(net, optimizer, opt_level="O2", verbosity=0)


def test_a_wrong_level_is_told_from_the_digit_zero() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected optimization level '01'; write 'O1'.*digit zero"):
        initialize("01")


def test_cudnn_must_be_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with pytest.raises(RuntimeError, match=r"torch\.backends\.cudnn\.enabled"):
        initialize("O2")
    amp.initialize(make_net(), enabled=False)


@pytest.mark.parametrize("bounds", [(8.0, 4.0), (-1.0, 0), (float("nan"), None)])
def test_a_static_scale_ignores_its_bounds(bounds: tuple[Any, Any]) -> None:
    initialize("O2", loss_scale=128, min_loss_scale=bounds[0], max_loss_scale=bounds[1])
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0


class TestProperties:
    def test_a_level_sets_them(self) -> None:
        for name, level in opt_levels.items():
            assert level(Properties()).options == Properties(LEVELS_OF[name].properties).options
            assert level.brief.startswith(f"{name}:  ")
        assert tuple(opt_levels["O2"](Properties()).options) == NAMES

    @pytest.mark.parametrize(
        ("level", "name", "value", "stored"),
        [
            (None, "loss_scale", "128.0", 128.0),
            ("O2", "keep_batchnorm_fp32", "False", False),
            ("O2", "cast_model_type", BF16, BF16),
            ("O1", "master_weights", None, None),
            ("O1", "master_weights", True, RuntimeError),
            ("O1", "cast_model_type", HALF, RuntimeError),
            ("O2", "patch_torch_functions", True, RuntimeError),
            (None, "patch_torch_functions", True, RuntimeError),
            ("O2", "keep_batchnorm_fp32", "maybe", AssertionError),
            ("O2", "loss_scale", "Dynamic", ValueError),
            ("O2", "unknown", 1, AttributeError),
        ],
    )
    def test_what_is_set_is_checked(self, level: str | None, name: str, value: Any, stored: Any) -> None:
        properties = Properties() if level is None else opt_levels[level](Properties())
        before = dict(properties.options)
        if isinstance(stored, type):
            with pytest.raises(stored):
                setattr(properties, name, value)
            assert properties.options == before
        else:
            setattr(properties, name, value)
            assert getattr(properties, name) == properties.options[name] == stored


class TestHardOverride:
    def test_prints_and_stores(self, capsys: pytest.CaptureFixture[str]) -> None:
        amp._amp_state.hard_override = True
        initialize("O1", keep_batchnorm_fp32=True)
        assert amp._amp_state.opt_properties.keep_batchnorm_fp32 is True
        printed = capsys.readouterr().out  # although verbosity is 0, as in apex
        assert printed.startswith("Warning:")
        assert "keep_batchnorm_fp32" in printed

    def test_still_checks_the_type(self) -> None:
        amp._amp_state.hard_override = True
        with pytest.raises(ValueError, match="keep_batchnorm_fp32"):
            initialize("O1", keep_batchnorm_fp32="true")

    def test_does_not_store_another_type_of_casts(self) -> None:
        amp._amp_state.hard_override = True
        initialize("O4", patch_torch_functions_type=HALF)
        assert amp._amp_state.opt_properties.patch_torch_functions_type is BF16

    def test_lets_a_low_model_pass(self) -> None:
        amp._amp_state.hard_override = True
        net = make_net().half()
        amp.initialize(net, opt_level="O3", verbosity=0)
        assert next(net.parameters()).dtype is HALF


def test_properties_refuse_unknown_names() -> None:
    initialize("O1")
    properties = amp._amp_state.opt_properties
    with pytest.raises(AttributeError):
        _ = properties.no_such_option
    with pytest.raises((AttributeError, TypeError)):
        properties.no_such_option = 1


class TestPrinting:
    @pytest.mark.parametrize("level", LEVELS)
    def test_verbosity_1_prints_the_level_and_two_tables(
        self, level: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        amp.initialize(make_net(), opt_level=level)
        printed = capsys.readouterr().out
        properties = amp._amp_state.opt_properties
        assert printed.startswith(f"Selected optimization level {level}")
        for heading in (
            "Defaults for this optimization level are:",
            "Processing user overrides (additional kwargs that are not None)...",
            "After processing overrides, optimization options are:",
        ):
            assert f"\n{heading}\n" in printed
        for name in NAMES:
            line = f"{name:22} : {getattr(properties, name)}\n"
            assert printed.count(line) == 2, line
        positions = [printed.index(f"{name:22} : ") for name in NAMES]
        assert positions == sorted(positions)

    def test_the_second_table_holds_the_overrides(self, capsys: pytest.CaptureFixture[str]) -> None:
        amp.initialize(make_net(), opt_level="O2", loss_scale="128.0")
        first, second = capsys.readouterr().out.split("overrides", 1)
        assert f"{'loss_scale':22} : dynamic" in first
        assert f"{'loss_scale':22} : 128.0" in second

    def test_only_o4_prints_the_type_of_its_casts(self, capsys: pytest.CaptureFixture[str]) -> None:
        amp.initialize(make_net(), opt_level="O1")
        assert "patch_torch_functions_type" not in capsys.readouterr().out
        amp.initialize(make_net(), opt_level="O4")
        assert capsys.readouterr().out.count("patch_torch_functions_type") == 2

    def test_verbosity_0_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        net, optimizer = initialize("O2")
        with amp.scale_loss(net(torch.full((2, 6), 1e30)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert not amp.last_step(optimizer).stepped()
        assert capsys.readouterr().out == ""

    def test_verbosity_none_prints_as_1(self, capsys: pytest.CaptureFixture[str]) -> None:
        amp.initialize(make_net(), opt_level="O1", verbosity=None)
        assert capsys.readouterr().out.startswith("Selected")

    def test_disabled_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        amp.initialize(make_net(), enabled=False)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(("verbosity", "cast_lines"), [(1, False), (2, True), (3, False)])
    def test_casts_are_printed_at_verbosity_2_only(
        self, verbosity: int, cast_lines: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        net = amp.initialize(make_net(), opt_level="O1", verbosity=verbosity)
        capsys.readouterr()
        torch.nn.functional.mse_loss(net(torch.ones(2, 6)), torch.zeros(2, 3))
        printed = capsys.readouterr().out
        assert ("Float->Half (linear)" in printed) is cast_lines
        assert ("Half->Float (mse_loss)" in printed) is cast_lines


def test_maybe_print_takes_what_apex_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts call it with a message and ``rank0``; the verbosity is that of the last ``initialize``."""
    maybe_print("by default")
    maybe_print("on the first rank", True)
    initialize("O2")
    maybe_print("not shown with verbosity=0")
    assert capsys.readouterr().out.splitlines() == ["by default", "on the first rank"]
