"""``paramwise_cfg`` makes the same parameter groups as mmengine 0.10.7 makes of the same model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.optim.builder import build_optim_wrapper
from optim import original
from optim.original import groups_of, named_groups
from optim.zoo import (
    MULTIPLIERS,
    SGD,
    DeformConv2d,
    Deformed,
    Headed,
    Roots,
    Tied,
    Wrapped,
    Zoo,
    cfg_of,
    frozen_tied,
    frozen_zoo,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "zoo": Zoo,
    "frozen": frozen_zoo,
    "roots": Roots,
    "wrapped": Wrapped,
    "linear": lambda: nn.Linear(2, 2),
}

PARAMWISE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": {},
    "nothing said": {"bypass_duplicate": False},
    **{key: {key: value} for key, value in MULTIPLIERS.items()},
    "all": MULTIPLIERS,
    "absent": dict.fromkeys(MULTIPLIERS),
    "an offset of zero": {"dcn_offset_lr_mult": 0, "bias_lr_mult": 2},
    "integers": {"bias_lr_mult": 2, "norm_decay_mult": 0},
    "flat before nothing": {"flat_decay_mult": 0.3, "dwconv_decay_mult": 0.1},
    "bias before flat": {"flat_decay_mult": 0.3, "bias_decay_mult": 0.5},
    "norm before bias": {"norm_decay_mult": 0.0, "bias_decay_mult": 0.5},
    "custom lr": {"custom_keys": {"block": {"lr_mult": 0.1}}},
    "custom decay": {"custom_keys": {"block": {"decay_mult": 0.1}}},
    "custom empty": {"custom_keys": {}},
    "custom says nothing": {"custom_keys": {"block": {}}, "bias_lr_mult": 2.0},
    "longest wins": {"custom_keys": {"block": {"lr_mult": 0.1}, "block.linear": {"lr_mult": 0.2}}},
    "longest, not deepest": {"custom_keys": {"blocks": {"lr_mult": 0.1}, "scale": {"lr_mult": 0.2}}},
    "ties by the alphabet": {"custom_keys": {"scale": {"lr_mult": 0.1}, "block": {"lr_mult": 0.2}}},
    "inside a word": {"custom_keys": {"cal": {"lr_mult": 0.1}}},
    "root dot": {"custom_keys": {".scale": {"lr_mult": 0.1}, ".weight": {"decay_mult": 0.0}}},
    "everything": {"custom_keys": {"": {"lr_mult": 0.1}}},
    "no such part": {"custom_keys": {"absent": {"lr_mult": 0.0}}},
    "before the other rules": {"custom_keys": {"bn": {"lr_mult": 0.1}, "bias": {"decay_mult": 0.2}}, **MULTIPLIERS},
    "options": {"custom_keys": {"block": {"lr_mult": 0.1, "momentum": 0.5, "nesterov": True}}},
    "options override": {"custom_keys": {"block": {"lr": 7.0, "weight_decay": 3.0, "lr_mult": 0.1}}},
    "bypass": {"bypass_duplicate": True},
}  # fmt: skip

ADAMW = {"type": "AdamW", "lr": 0.01, "weight_decay": 0.05, "betas": (0.8, 0.9)}


def assert_same(model: nn.Module, cfg: dict[str, Any]) -> None:
    ours = build_optim_wrapper(model, cfg)
    theirs = original.build_optim_wrapper(model, copy.deepcopy(cfg))
    assert groups_of(ours) == groups_of(theirs)
    assert repr(ours.base_param_settings) == repr(theirs.base_param_settings)
    assert ours.get_lr() == theirs.get_lr()
    assert ours.get_momentum() == theirs.get_momentum()


@pytest.mark.parametrize("paramwise", PARAMWISE)
@pytest.mark.parametrize("model", MODELS)
def test_groups_are_those_of_mmengine(model: str, paramwise: str) -> None:
    cfg = cfg_of(SGD, PARAMWISE[paramwise])
    before = copy.deepcopy(cfg)
    assert_same(MODELS[model](), cfg)
    assert cfg == before


@pytest.mark.parametrize("paramwise", ["none", "all", "before the other rules"])
def test_groups_of_another_optimizer(paramwise: str) -> None:
    assert_same(Zoo(), cfg_of(ADAMW, PARAMWISE[paramwise]))


@pytest.mark.parametrize("model", [Tied, frozen_tied])
@pytest.mark.parametrize("paramwise", ["bypass", "all", "longest wins", "before the other rules"])
def test_shared_parameters_keep_their_first_group(model: Callable[[], nn.Module], paramwise: str) -> None:
    assert_same(model(), cfg_of(SGD, {**(PARAMWISE[paramwise] or {}), "bypass_duplicate": True}))


@pytest.mark.parametrize("optimizer", [{"type": "SGD", "lr": 0.01}, {"type": "Rprop", "lr": 0.01}])
def test_without_weight_decay_no_rule_writes_it(optimizer: dict[str, Any]) -> None:
    paramwise = {"bias_lr_mult": 2.0, "custom_keys": {"block": {"lr_mult": 0.1}}}
    assert_same(Zoo(), cfg_of(optimizer, paramwise))


def test_a_tensor_learning_rate_is_multiplied_as_a_tensor() -> None:
    rate = torch.tensor(0.01)
    wrapper = build_optim_wrapper(Roots(), cfg_of({**SGD, "lr": rate}, {"bias_lr_mult": 2.0}))
    first, second = (group["lr"] for group in wrapper.optimizer.param_groups)
    assert torch.equal(first, rate)
    assert torch.equal(second, torch.tensor(0.02))


@pytest.mark.parametrize("paramwise", [*MULTIPLIERS, "all", "before the other rules", "an offset of zero"])
def test_deformable_convolutions(paramwise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ModuleType("mmcv.ops")
    ops.DeformConv2d = DeformConv2d  # type: ignore[attr-defined]
    ops.ModulatedDeformConv2d = type("ModulatedDeformConv2d", (nn.Module,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmcv", ModuleType("mmcv"))
    monkeypatch.setitem(sys.modules, "mmcv.ops", ops)
    monkeypatch.setattr(original.default_constructor, "mmcv_full_available", lambda: True)
    assert_same(Deformed(), cfg_of(SGD, PARAMWISE[paramwise]))


class Renamed(torch.optim.SGD):
    """An optimizer whose first argument is not called ``params``."""

    def __init__(
        self, model_params: Any, lr: float = 0.1, *, momentum: float = 0, weight_decay: float = 0
    ) -> None:
        super().__init__(model_params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def open_ended(model_params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model_params, **options)


@pytest.mark.parametrize("factory", [Renamed, open_ended])
@pytest.mark.parametrize("paramwise", ["none", "all", "options override"])
def test_the_parameters_go_to_the_first_argument(factory: Any, paramwise: str) -> None:
    assert_same(Zoo(), cfg_of({**SGD, "type": factory}, PARAMWISE[paramwise]))


# Where mmengine does worse


@pytest.mark.parametrize("paramwise", [None, {"bias_lr_mult": 2.0}])
def test_a_part_called_module_is_not_taken_for_the_whole_model(paramwise: dict[str, Any] | None) -> None:
    model = Headed()
    trained = named_groups(build_optim_wrapper(model, cfg_of(SGD, paramwise)), model, "lr")
    assert trained.keys() == dict(model.named_parameters()).keys()
    assert len(original.build_optim_wrapper(model, cfg_of(SGD, paramwise)).optimizer.param_groups) <= 2


def test_a_decay_multiplier_needs_no_learning_rate() -> None:
    model = Roots()
    cfg = cfg_of({"type": "AdamW", "weight_decay": 0.5}, {"custom_keys": {"bias": {"decay_mult": 0.0}}})
    with pytest.raises(TypeError):
        original.build_optim_wrapper(model, cfg)
    expected = {"weight": (1e-3, 0.5), "bias": (1e-3, 0.0)}
    assert named_groups(build_optim_wrapper(model, cfg), model, "lr", "weight_decay") == expected
