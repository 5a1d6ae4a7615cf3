"""build_optim_wrapper: the wrapper that it builds from a configuration, which it leaves unchanged."""

from __future__ import annotations

import copy
import inspect
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.core.errors import ConfigError, ConfigTypeError, RegistryError
from halfpeak.optim.amp_wrapper import AmpOptimWrapper
from halfpeak.optim.apex_wrapper import ApexOptimWrapper
from halfpeak.optim.builder import DefaultOptimWrapperConstructor, build_optim_wrapper
from halfpeak.optim.members import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from halfpeak.optim.wrapper import OptimWrapper
from optim import original
from optim.original import groups_of
from optim.zoo import MULTIPLIERS, SGD, Zoo


@pytest.fixture(autouse=True)
def registries_left_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (OPTIMIZERS, OPTIM_WRAPPERS, OPTIM_WRAPPER_CONSTRUCTORS):
        monkeypatch.setattr(registry, "_members", dict(registry._members))


FULL: dict[str, Any] = {
    "type": "AmpOptimWrapper",
    "dtype": "bfloat16",
    "loss_scale": {"init_scale": 8.0},
    "accumulative_counts": 2,
    "clip_grad": {"type": "value", "clip_value": 0.5},
    "optimizer": {"type": "AdamW", "lr": 0.1, "weight_decay": 0.5, "betas": [0.8, 0.9], "eps": 1e-3},
    "paramwise_cfg": {**MULTIPLIERS, "custom_keys": {"block": {"lr_mult": 0.1}}},
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, OptimWrapper),
        ("OptimWrapper", OptimWrapper),
        ("AmpOptimWrapper", AmpOptimWrapper),
        ("ApexOptimWrapper", ApexOptimWrapper),
        (OptimWrapper, OptimWrapper),
    ],
)
def test_type_says_which_wrapper(kind: Any, expected: type) -> None:
    cfg = {"optimizer": SGD} if kind is None else {"type": kind, "optimizer": SGD}
    wrapper = build_optim_wrapper(Zoo(), cfg)
    assert type(wrapper) is expected
    assert type(wrapper.optimizer) is torch.optim.SGD


def test_other_keys_reach_the_wrapper() -> None:
    wrapper = build_optim_wrapper(Zoo(), FULL)
    assert wrapper._accumulative_counts == 2
    assert wrapper.cast_dtype is torch.bfloat16
    assert wrapper.optimizer.defaults["eps"] == 1e-3


# The caller's dict


class Greedy(DefaultOptimWrapperConstructor):
    """Removes entries from the dicts that it receives, as constructors of other projects do."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        optim_wrapper_cfg["clip_grad"].clear()
        optim_wrapper_cfg["optimizer"]["betas"].append(0.7)
        optim_wrapper_cfg.pop("type")
        paramwise_cfg["custom_keys"].popitem()
        paramwise_cfg.clear()
        super().__init__({"optimizer": SGD})


@pytest.mark.parametrize("constructor", [None, "DefaultOptimWrapperConstructor", Greedy])
def test_the_callers_dict_stays_as_it_was(constructor: Any) -> None:
    cfg = copy.deepcopy({**FULL, "constructor": constructor})
    before = copy.deepcopy(cfg)
    first = build_optim_wrapper(Zoo(), cfg)
    assert cfg == before
    second = build_optim_wrapper(Zoo(), cfg)
    assert cfg == before
    assert type(first) is type(second)


def test_what_is_refused_stays_as_it_was_too() -> None:
    cfg = copy.deepcopy({**FULL, "accumulative_count": 2})
    before = copy.deepcopy(cfg)
    with pytest.raises(TypeError):
        build_optim_wrapper(Zoo(), cfg)
    assert cfg == before


def test_mappings_of_other_types_are_read() -> None:
    model = Zoo()
    plain = groups_of(build_optim_wrapper(model, FULL))
    config = original.ConfigDict(copy.deepcopy(FULL))
    before = copy.deepcopy(config)
    assert groups_of(build_optim_wrapper(model, config)) == plain
    assert config == before
    assert groups_of(build_optim_wrapper(model, MappingProxyType(FULL))) == plain


def test_a_dict_keeps_its_type_on_the_way_to_the_constructor() -> None:
    seen: list[Any] = []

    def construct(optim_wrapper_cfg: Any, paramwise_cfg: Any) -> Any:
        seen.append((optim_wrapper_cfg["optimizer"].lr, paramwise_cfg.custom_keys.block.lr_mult))
        return lambda model: model

    model = Zoo()
    config = original.ConfigDict({**copy.deepcopy(FULL), "constructor": construct})
    assert build_optim_wrapper(model, config) is model
    assert seen == [(0.1, 0.1)]


# An optimizer that is built already


@pytest.mark.parametrize("kind", [None, "OptimWrapper", "AmpOptimWrapper"])
def test_a_built_optimizer_is_wrapped_itself(kind: str | None) -> None:
    model = Zoo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    cfg: dict[str, Any] = {"optimizer": optimizer, "accumulative_counts": 3, "paramwise_cfg": None}
    cfg |= {} if kind is None else {"type": kind}
    before = dict(cfg)
    wrapper = build_optim_wrapper(model, cfg)
    assert wrapper.optimizer is optimizer
    assert type(wrapper).__name__ == (kind or "OptimWrapper")
    assert wrapper._accumulative_counts == 3
    assert cfg == before


def test_a_built_optimizer_has_its_groups() -> None:
    model = Zoo()
    cfg = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "paramwise_cfg": {"bias_lr_mult": 2.0}}
    with pytest.raises(ConfigTypeError, match="is a built SGD"):
        build_optim_wrapper(model, cfg)


# Wrappers and constructors of user code


class FakeWrapper:
    def __init__(self, optimizer: torch.optim.Optimizer, flavour: str = "plain") -> None:
        self.optimizer, self.flavour = optimizer, flavour


class Halves:
    """A constructor that makes one wrapper per child of the model."""

    def __init__(
        self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None
    ) -> None:
        assert paramwise_cfg is None
        self.cfg = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        return {name: build_optim_wrapper(child, self.cfg[name]) for name, child in model.named_children()}


def test_registered_members_are_found_by_name() -> None:
    OPTIM_WRAPPERS.register_module()(FakeWrapper)
    OPTIM_WRAPPER_CONSTRUCTORS.register_module("halves", module=Halves)
    OPTIMIZERS.register_module("slow", module=lambda params, lr: torch.optim.SGD(params, lr=lr / 2))
    halves = build_optim_wrapper(
        nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}),
        {
            "constructor": "halves",
            "a": {"type": "FakeWrapper", "flavour": "sweet", "optimizer": {"type": "slow", "lr": 1.0}},
            "b": {"optimizer": {"type": "SGD", "lr": 0.25}},
        },
    )
    assert halves["a"].flavour == "sweet"
    assert halves["a"].optimizer.defaults["lr"] == 0.5
    assert halves["b"].get_lr() == {"lr": [0.25]}


def test_the_signature_is_that_of_mmengine() -> None:
    ours, theirs = (
        list(inspect.signature(f).parameters) for f in (build_optim_wrapper, original.build_optim_wrapper)
    )
    assert ours == theirs


# Refused


OPTIMIZER = {"optimizer": SGD}

REFUSED: dict[str, tuple[Any, type[Exception], type[Exception], str]] = {
    "str": ("OptimWrapper", ConfigTypeError, TypeError, "cfg must be a dict, not str"),
    "None": (None, ConfigTypeError, TypeError, "cfg must be a dict, not NoneType"),
    "optimizer": (torch.optim.SGD([torch.zeros(1)]), ConfigTypeError, TypeError, "cfg must be a dict, not SGD"),
    "empty": ({}, ConfigError, ValueError, "`optim_wrapper_cfg` must contain 'optimizer'"),
    "no optimizer": ({"type": "OptimWrapper"}, ConfigError, ValueError, "`optim_wrapper_cfg` must contain"),
    "type": ({**OPTIMIZER, "type": "OptimWraper"}, RegistryError, KeyError, "did you mean 'OptimWrapper'"),
    "scope": ({**OPTIMIZER, "type": "mmdet.OptimWrapper"}, RegistryError, KeyError, "did you mean 'OptimWrapper'"),
    "constructor": ({**OPTIMIZER, "constructor": "Fancy"}, RegistryError, KeyError, "registered optimizer wrapper constr"),
    "not a name": ({**OPTIMIZER, "type": 3}, ConfigTypeError, TypeError, "type=3"),
    "key": ({**OPTIMIZER, "_accumulative_counts": 2}, ConfigTypeError, TypeError, "did you mean 'accumulative_counts'"),
    "paramwise": ({**OPTIMIZER, "paramwise_cfg": []}, ConfigTypeError, TypeError, "paramwise_cfg must be None or a dict"),
    "a class": ({"optimizer": torch.optim.SGD}, ConfigTypeError, TypeError, "optimizer must be a dict"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    cfg, error, builtin, message = REFUSED[case]
    with pytest.raises(builtin) as caught:
        build_optim_wrapper(Zoo(), cfg)
    assert type(caught.value) is error
    assert message in str(caught.value)
