"""Opt levels: their properties, which a caller may override at each level, and the resulting policy and scale."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.levels import LEVELS, LevelName, Properties, get_level, parse_loss_scale, resolve
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.short_repr import short_repr
from halfpeak.insight.checkup import COLORS
from halfpeak.insight.doctor import SAFEST

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

DEFAULTS: dict[str, tuple[Any, ...]] = {
    # cast_model_type, patch_torch_functions, its type, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (FP32, False, None, None, False, 1.0),
    "O1": (None, True, FP16, None, None, "dynamic"),
    "O2": (FP16, False, None, True, True, "dynamic"),
    "O3": (FP16, False, None, False, False, 1.0),
    "O4": (None, True, BF16, None, None, 1.0),
    "O5": (BF16, False, None, True, True, 1.0),
}

PER_OP, PER_MODULE = ("O1", "O4"), ("O0", "O2", "O3", "O5")
ALL = (*PER_MODULE, *PER_OP)


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(set(DEFAULTS), id="DEFAULTS of this file"),
        pytest.param(set(ALL), id="PER_OP and PER_MODULE of this file"),
        pytest.param(set(get_args(LevelName)) - {"auto"}, id="LevelName in core/levels.py"),
        pytest.param(set(COLORS), id="COLORS in insight/checkup.py"),
        pytest.param(set(SAFEST), id="SAFEST in insight/doctor.py"),
    ],
)
def test_what_has_a_row_for_each_level_has_one_for_all(named: set[str]) -> None:
    assert named == set(LEVELS)


def test_what_casts_per_operation_leaves_weights_alone() -> None:
    """The refusals of ``resolve`` and ``fully_shard`` in distributed/fsdp.py rely on it."""
    assert all((policy := resolve(level).policy()).param is None and not policy.masters for level in PER_OP)


@pytest.mark.parametrize("level", LEVELS)
def test_defaults(level: str) -> None:
    properties = resolve(level)
    assert dataclasses.astuple(properties) == (True, level, *DEFAULTS[level])
    assert LEVELS[level].properties == properties
    assert LEVELS[level].name == level


def test_properties_print_in_the_order_of_apex() -> None:
    assert [field.name for field in dataclasses.fields(Properties)] == [
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "patch_torch_functions_type",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
    ]


ALLOWED: list[tuple[tuple[str, ...], str, Any, Any]] = [
    (ALL, "enabled", False, False),
    (PER_MODULE, "cast_model_type", FP16, FP16),
    (PER_MODULE, "cast_model_type", BF16, BF16),
    (ALL, "cast_model_type", FP32, FP32),
    (ALL, "cast_model_type", False, False),
    (PER_OP, "patch_torch_functions", True, True),
    (ALL, "patch_torch_functions", False, False),
    (("O1",), "patch_torch_functions_type", FP16, FP16),
    (("O4",), "patch_torch_functions_type", BF16, BF16),
    (PER_MODULE, "keep_batchnorm_fp32", True, True),
    (PER_MODULE, "keep_batchnorm_fp32", False, False),
    (PER_MODULE, "keep_batchnorm_fp32", "True", True),
    (PER_MODULE, "keep_batchnorm_fp32", "False", False),
    (PER_MODULE, "master_weights", True, True),
    (PER_MODULE, "master_weights", False, False),
    (ALL, "loss_scale", "dynamic", "dynamic"),
    (ALL, "loss_scale", 128, 128.0),
    (ALL, "loss_scale", 128.0, 128.0),
    (ALL, "loss_scale", "128.0", 128.0),
    (ALL, "loss_scale", True, 1.0),
]

REFUSED: list[tuple[tuple[str, ...], str, Any]] = [
    (PER_OP, "cast_model_type", FP16),
    (PER_OP, "cast_model_type", BF16),
    (ALL, "cast_model_type", FP64),
    (ALL, "cast_model_type", torch.int8),
    (ALL, "cast_model_type", "float16"),
    (ALL, "cast_model_type", True),
    (ALL, "cast_model_type", 0),
    (ALL, "cast_model_type", []),
    (PER_MODULE, "patch_torch_functions", True),
    (("O0", "O2", "O3", "O4", "O5"), "patch_torch_functions_type", FP16),
    (("O0", "O1", "O2", "O3", "O5"), "patch_torch_functions_type", BF16),
    (ALL, "patch_torch_functions_type", FP32),
    (PER_OP, "keep_batchnorm_fp32", True),
    (PER_OP, "keep_batchnorm_fp32", False),
    (PER_OP, "keep_batchnorm_fp32", "False"),
    (ALL, "keep_batchnorm_fp32", "true"),
    (ALL, "keep_batchnorm_fp32", 1),
    (ALL, "keep_batchnorm_fp32", 0),
    (ALL, "keep_batchnorm_fp32", torch.ones(2)),
    (PER_OP, "master_weights", True),
    (PER_OP, "master_weights", False),
    (ALL, "loss_scale", "Dynamic"),
    (ALL, "loss_scale", 0),
    (ALL, "loss_scale", -1.0),
    (ALL, "loss_scale", "inf"),
]


@pytest.mark.parametrize(
    ("level", "name", "value", "expected"),
    [(level, *row) for levels, *row in ALLOWED for level in levels],
    ids=str,
)
def test_allowed_override(level: str, name: str, value: Any, expected: Any) -> None:
    changed = resolve(level, **{name: value})
    assert getattr(changed, name) is expected or getattr(changed, name) == expected
    assert type(getattr(changed, name)) is type(expected)
    assert dataclasses.replace(changed, **{name: getattr(resolve(level), name)}) == resolve(level)


@pytest.mark.parametrize(
    ("level", "name", "value"), [(level, *row) for levels, *row in REFUSED for level in levels], ids=str
)
def test_refused_override_names_itself(level: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        resolve(level, **{name: value})
    assert short_repr(value).strip("'") in str(caught.value)


@pytest.mark.parametrize("level", LEVELS)
def test_none_means_the_own_value_of_the_level(level: str) -> None:
    names = [field.name for field in dataclasses.fields(Properties)]
    assert resolve(level, **dict.fromkeys(set(names) - {"opt_level"})) == resolve(level)


@pytest.mark.parametrize("level", ["O9", "", "O2 ", None, ["O2"], {}, torch.int8], ids=repr)
def test_unknown_level(level: Any) -> None:
    with pytest.raises(ConfigError, match="with the letter O, not the digit zero") as caught:
        get_level(level)
    assert all(name in str(caught.value) for name in LEVELS)


@pytest.mark.parametrize(
    ("level", "write"), [("o2", "'O2'"), (2, "'O2'"), ("02", "'O2', with the letter O, not the digit zero")]
)
def test_a_level_that_is_nearly_one_is_told_which(level: Any, write: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_level(level)
    assert str(caught.value) == f"Unexpected optimization level {level!r}; write {write}"


@pytest.mark.parametrize("scale", [128.0, 64, "dynamic"])
def test_a_scale_that_is_no_config_is_told_its_keyword(scale: Any) -> None:
    with pytest.raises(ConfigTypeError) as caught:
        resolve("O2").scale_config(scale)
    assert str(caught.value) == (
        f"scale={scale!r} must be a ScaleConfig; write level=halfpeak.LEVELS['O2'].replace(loss_scale={scale!r})"
    )


def test_a_refusal_that_returns_lets_the_value_through() -> None:
    said: list[str] = []
    properties = resolve(
        "O1",
        cast_model_type=FP16,
        keep_batchnorm_fp32="True",
        master_weights=True,
        patch_torch_functions_type=BF16,
        refuse=said.append,
    )
    assert (properties.cast_model_type, properties.keep_batchnorm_fp32, properties.master_weights) == (
        FP16,
        True,
        True,
    )
    # The only refused value that is not stored.
    assert properties.patch_torch_functions_type is FP16
    assert [message.partition("=")[0] for message in said] == [
        "cast_model_type",
        "patch_torch_functions_type",
        "keep_batchnorm_fp32",
        "master_weights",
    ]


def test_a_refusal_that_returns_does_not_let_nonsense_through() -> None:
    for overrides in ({"cast_model_type": FP64}, {"keep_batchnorm_fp32": "true"}):
        with pytest.raises(ConfigError):
            resolve("O1", **overrides, refuse=lambda message: None)  # type: ignore[arg-type]


POLICIES = {
    "O0": Policy(param=FP32, compute=FP32, output=FP32, norms="none"),
    "O1": Policy(compute=FP16, norms="none", per_op=True),
    "O2": Policy(param=FP16, compute=FP16, output=FP32, masters=True, norms="all"),
    "O3": Policy(param=FP16, compute=FP16, output=FP32, norms="none"),
    "O4": Policy(compute=BF16, norms="none", per_op=True),
    "O5": Policy(param=BF16, compute=BF16, output=FP32, masters=True, norms="all"),
}


@pytest.mark.parametrize("level", LEVELS)
def test_policy_of_a_level(level: str) -> None:
    assert resolve(level).policy() == POLICIES[level]


def test_policy_takes_output_and_norms() -> None:
    policy = resolve("O2").policy(norms="batchnorm", output=FP16)
    assert (policy.norms, policy.output) == ("batchnorm", FP16)
    assert resolve("O3").policy(norms="batchnorm").norms == "none"
    assert resolve("O2", cast_model_type=False).policy() == Policy(masters=True, norms="all")


@pytest.mark.parametrize(
    ("level", "loss_scale", "dynamic", "init"),
    [
        ("O1", None, True, 32.0),
        ("O2", None, True, 32.0),
        ("O3", None, False, 1.0),
        ("O5", None, False, 1.0),
        ("O2", 128.0, False, 128.0),
        ("O5", "dynamic", True, 32.0),
    ],
)
def test_scale_of_a_level(level: str, loss_scale: Any, dynamic: bool, init: float) -> None:
    base = ScaleConfig(init=32.0, interval=7, patience=3)
    config = resolve(level, loss_scale=loss_scale).scale_config(base)
    assert config == dataclasses.replace(base, dynamic=dynamic, init=init)


def test_scale_without_a_base_is_that_of_apex() -> None:
    config = resolve("O2").scale_config()
    assert (config.init, config.growth, config.backoff) == (2.0**16, 2.0, 0.5)
    assert (config.interval, config.hysteresis, config.ceiling) == (2000, 1, 2.0**24)


def test_tables_and_values_cannot_be_edited() -> None:
    with pytest.raises(TypeError):
        LEVELS["O9"] = LEVELS["O2"]  # type: ignore[index]
    for value, name in ((LEVELS["O2"], "name"), (resolve("O2"), "loss_scale"), (Policy(), "param")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
    assert {Policy(), Policy(), Policy(masters=True)} == {Policy(), Policy(masters=True)}


def test_loss_scale_is_read_as_apex_read_it() -> None:
    assert parse_loss_scale("dynamic") == "dynamic"
    for value in (128, 128.0, "128", " 128.0 ", "1.28e2", torch.tensor(128.0)):
        assert parse_loss_scale(value) == 128.0
