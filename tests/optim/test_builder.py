"""``build_optim_wrapper`` and its constructor: the wrapper and the parameter groups that mmengine makes of a configuration."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import MappingProxyType, ModuleType
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
from optim.families import ConfigDict, default_constructor, groups_of, logged_records, named_groups, theirs
from optim.zoo import (
    MULTIPLIERS,
    SGD,
    DeformConv2d,
    Deformed,
    Headed,
    Roots,
    Tied,
    Zoo,
    cfg_of,
    frozen_tied,
    frozen_zoo,
)
from support.snapshot import snapshot

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
def test_type_says_which_wrapper_and_other_keys_reach_it(kind: Any, expected: type) -> None:
    cfg = {"optimizer": SGD, "accumulative_counts": 2} | ({} if kind is None else {"type": kind})
    wrapper = build_optim_wrapper(Zoo(), cfg)
    assert (type(wrapper), type(wrapper.optimizer)) == (expected, torch.optim.SGD)
    assert wrapper._accumulative_counts == 2


class Greedy(DefaultOptimWrapperConstructor):
    """Removes entries from the dicts that it receives, as constructors of other projects do."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        optim_wrapper_cfg["clip_grad"].clear()
        optim_wrapper_cfg["optimizer"]["betas"].append(0.7)
        optim_wrapper_cfg.pop("type")
        paramwise_cfg["custom_keys"].popitem()
        super().__init__({"optimizer": SGD})


@pytest.mark.parametrize("constructor", [None, "DefaultOptimWrapperConstructor", Greedy])
@pytest.mark.parametrize("kind", [dict, ConfigDict, MappingProxyType])
def test_a_configuration_of_any_mapping_is_read_and_stays_as_it_was(constructor: Any, kind: Any) -> None:
    cfg = kind(copy.deepcopy({**FULL, "constructor": constructor}))
    before = copy.deepcopy(dict(cfg))
    model = Zoo()
    first, second = (build_optim_wrapper(model, cfg) for _ in range(2))
    assert dict(cfg) == before
    assert groups_of(first) == groups_of(second)
    expected = 1 if constructor is Greedy else len(list(model.parameters()))
    assert len(first.optimizer.param_groups) == expected


@pytest.mark.parametrize("kind", [None, "AmpOptimWrapper"])
def test_a_built_optimizer_is_wrapped_itself_with_its_groups(kind: str | None) -> None:
    model = Zoo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    cfg: dict[str, Any] = {"optimizer": optimizer, "accumulative_counts": 3, "paramwise_cfg": None}
    cfg |= {} if kind is None else {"type": kind}
    wrapper = build_optim_wrapper(model, cfg)
    assert wrapper.optimizer is optimizer
    assert type(wrapper).__name__ == (kind or "OptimWrapper")
    with pytest.raises(ConfigTypeError, match="is a built SGD"):
        build_optim_wrapper(model, {**cfg, "paramwise_cfg": {"bias_lr_mult": 2.0}})


class FakeWrapper:
    def __init__(self, optimizer: torch.optim.Optimizer, flavour: str = "plain") -> None:
        self.optimizer, self.flavour = optimizer, flavour


class Halves:
    """A constructor that makes one wrapper per child of the model."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.cfg = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        return {name: build_optim_wrapper(child, self.cfg[name]) for name, child in model.named_children()}


def test_registered_members_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (OPTIMIZERS, OPTIM_WRAPPERS, OPTIM_WRAPPER_CONSTRUCTORS):
        monkeypatch.setattr(registry, "_members", dict(registry._members))
    OPTIM_WRAPPERS.register_module()(FakeWrapper)
    OPTIM_WRAPPER_CONSTRUCTORS.register_module("halves", module=Halves)
    OPTIMIZERS.register_module("slow", module=lambda params, lr: torch.optim.SGD(params, lr=lr / 2))
    halves: Any = build_optim_wrapper(
        nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}),
        {
            "constructor": "halves",
            "a": {"type": "FakeWrapper", "flavour": "sweet", "optimizer": {"type": "slow", "lr": 1.0}},
            "b": {"optimizer": {"type": "SGD", "lr": 0.25}},
        },
    )
    assert (halves["a"].flavour, halves["a"].optimizer.defaults["lr"]) == ("sweet", 0.5)
    assert halves["b"].get_lr() == {"lr": [0.25]}


# paramwise_cfg

MODELS: dict[str, Callable[[], nn.Module]] = {
    "zoo": Zoo,
    "frozen": frozen_zoo,
    "roots": Roots,
    "wrapped": lambda: nn.DataParallel(Zoo()),
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
    "flat before nothing": {"flat_decay_mult": 0.3, "dwconv_decay_mult": 0.1},
    "bias before flat": {"flat_decay_mult": 0.3, "bias_decay_mult": 0.5},
    "norm before bias": {"norm_decay_mult": 0.0, "bias_decay_mult": 0.5},
    "custom decay": {"custom_keys": {"block": {"decay_mult": 0.1}}},
    "custom says nothing": {"custom_keys": {"block": {}}, "bias_lr_mult": 2.0},
    "longest wins": {"custom_keys": {"block": {"lr_mult": 0.1}, "block.linear": {"lr_mult": 0.2}}},
    "ties by the alphabet": {"custom_keys": {"scale": {"lr_mult": 0.1}, "block": {"lr_mult": 0.2}}},
    "inside a word": {"custom_keys": {"cal": {"lr_mult": 0.1}}},
    "root dot": {"custom_keys": {".scale": {"lr_mult": 0.1}, ".weight": {"decay_mult": 0.0}}},
    "no such part": {"custom_keys": {"absent": {"lr_mult": 0.0}}},
    "before the other rules": {"custom_keys": {"bn": {"lr_mult": 0.1}, "bias": {"decay_mult": 0.2}}, **MULTIPLIERS},
    "options override": {"custom_keys": {"block": {"lr": 7.0, "weight_decay": 3.0, "lr_mult": 0.1, "nesterov": True}}},
}  # fmt: skip


def assert_same(model: nn.Module, cfg: dict[str, Any]) -> None:
    mine = build_optim_wrapper(model, cfg)
    other = theirs.build_optim_wrapper(model, copy.deepcopy(cfg))
    assert groups_of(mine) == groups_of(other)
    assert repr(mine.base_param_settings) == repr(other.base_param_settings)
    assert (mine.get_lr(), mine.get_momentum()) == (other.get_lr(), other.get_momentum())


@pytest.mark.parametrize("paramwise", PARAMWISE)
@pytest.mark.parametrize("model", MODELS)
def test_groups_are_those_of_mmengine(model: str, paramwise: str) -> None:
    assert_same(MODELS[model](), cfg_of(SGD, PARAMWISE[paramwise]))


@pytest.mark.parametrize("model", [Tied, frozen_tied])
@pytest.mark.parametrize("paramwise", ["empty", "all", "longest wins", "before the other rules"])
def test_shared_parameters_keep_their_first_group(model: Callable[[], nn.Module], paramwise: str) -> None:
    assert_same(model(), cfg_of(SGD, {**(PARAMWISE[paramwise] or {}), "bypass_duplicate": True}))


@pytest.mark.parametrize("paramwise", [*MULTIPLIERS, "all", "before the other rules", "an offset of zero"])
def test_deformable_convolutions(paramwise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops: Any = ModuleType("mmcv.ops")
    ops.DeformConv2d = DeformConv2d
    ops.ModulatedDeformConv2d = type("ModulatedDeformConv2d", (nn.Module,), {})
    monkeypatch.setitem(sys.modules, "mmcv", ModuleType("mmcv"))
    monkeypatch.setitem(sys.modules, "mmcv.ops", ops)
    monkeypatch.setattr(default_constructor, "mmcv_full_available", lambda: True)
    assert_same(Deformed(), cfg_of(SGD, PARAMWISE[paramwise]))


class Renamed(torch.optim.SGD):
    """An optimizer whose first argument is not called ``params``."""

    def __init__(
        self, model_params: Any, lr: float = 0.1, *, momentum: float = 0, weight_decay: float = 0
    ) -> None:
        super().__init__(model_params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def open_ended(model_params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model_params, **options)


LR_ONLY = {"bias_lr_mult": 2.0, "custom_keys": {"block": {"lr_mult": 0.1}}}


@pytest.mark.parametrize(
    ("optimizer", "paramwise"),
    [
        ({"type": "AdamW", "lr": 0.01, "weight_decay": 0.05, "betas": (0.8, 0.9)}, MULTIPLIERS),
        ({"type": "SGD", "lr": 0.01}, LR_ONLY),
        ({"type": "Rprop", "lr": 0.01}, LR_ONLY),
        ({**SGD, "type": Renamed}, None),
        ({**SGD, "type": Renamed}, MULTIPLIERS),
        ({**SGD, "type": open_ended}, PARAMWISE["options override"]),
    ],
)
def test_groups_of_other_optimizers(optimizer: dict[str, Any], paramwise: dict[str, Any] | None) -> None:
    assert_same(Zoo(), cfg_of(optimizer, paramwise))


def test_a_tensor_learning_rate_is_multiplied_as_a_tensor() -> None:
    wrapper = build_optim_wrapper(Roots(), cfg_of({**SGD, "lr": torch.tensor(0.01)}, {"bias_lr_mult": 2.0}))
    rates = [group["lr"] for group in wrapper.optimizer.param_groups]
    torch.testing.assert_close(rates, [torch.tensor(0.01), torch.tensor(0.02)])


@pytest.mark.parametrize("paramwise", [None, {"bias_lr_mult": 2.0}])
def test_a_part_called_module_is_not_taken_for_the_whole_model(paramwise: dict[str, Any] | None) -> None:
    """mmengine would train that part alone."""
    model = Headed()
    trained = named_groups(build_optim_wrapper(model, cfg_of(SGD, paramwise)), model, "lr")
    assert trained.keys() == dict(model.named_parameters()).keys()


def test_a_decay_multiplier_needs_no_learning_rate() -> None:
    """With mmengine it does."""
    model = Roots()
    cfg = cfg_of({"type": "AdamW", "weight_decay": 0.5}, {"custom_keys": {"bias": {"decay_mult": 0.0}}})
    expected = {"weight": (1e-3, 0.5), "bias": (1e-3, 0.0)}
    assert named_groups(build_optim_wrapper(model, cfg), model, "lr", "weight_decay") == expected


# The constructor's interface for subclasses, and its log


def layer_decay(base: Any) -> Any:
    """A constructor as model libraries write it: it overrides ``add_params`` and reads its own options."""

    class LayerDecay(base):
        def add_params(self, params: Any, module: nn.Module, prefix: str = "", **kwargs: Any) -> None:
            rate = self.paramwise_cfg.get("decay_rate", 1.0)
            for name, parameter in module.named_parameters():
                depth = name.count(".")
                group = {"params": [parameter], "lr": self.base_lr * rate**depth, "lr_scale": rate**depth}
                params.append({**group, "weight_decay": self.base_wd if parameter.ndim > 1 else 0.0})

    return LayerDecay


def extended(base: Any) -> Any:
    """A constructor that adds an option to the groups that the base class makes for each module."""

    class Extended(base):
        def add_params(
            self, params: Any, module: nn.Module, prefix: str = "", is_dcn_module: Any = None
        ) -> None:
            before = len(params)
            super().add_params(params, module, prefix=prefix, is_dcn_module=is_dcn_module)
            for group in params[before:]:
                group.setdefault("path", prefix)

    return Extended


@pytest.mark.parametrize("make", [layer_decay, extended])
def test_subclasses_replace_or_extend_add_params(make: Callable[[Any], Any]) -> None:
    model = Zoo()
    paramwise = {"decay_rate": 0.5, "bias_lr_mult": 2.0, "norm_decay_mult": 0.0}
    mine, other = (
        make(base)({"optimizer": dict(SGD)}, dict(paramwise))(model)
        for base in (DefaultOptimWrapperConstructor, theirs.DefaultOptimWrapperConstructor)
    )
    assert groups_of(mine) == groups_of(other)


def test_attributes_are_those_of_mmengine() -> None:
    cfg = {"type": "OptimWrapper", "clip_grad": {"max_norm": 1.0}, "optimizer": SGD}
    for paramwise in (None, {"norm_decay_mult": 0.0}):
        mine = DefaultOptimWrapperConstructor(cfg, paramwise)
        other = theirs.DefaultOptimWrapperConstructor(dict(cfg), paramwise)
        assert {name: vars(mine)[name] for name in vars(other)} == vars(other)


def test_one_line_per_option_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen_tied()
    cfg = cfg_of(
        SGD, {**MULTIPLIERS, "bypass_duplicate": True, "custom_keys": {"embedding": {"lr_mult": 0.1}}}
    )
    expected: list[str] = []
    monkeypatch.setattr(default_constructor, "print_log", lambda message, **_: expected.append(message))
    theirs.build_optim_wrapper(model, cfg)
    with logged_records() as records:
        build_optim_wrapper(model, cfg)
    lines = {
        level: [r.getMessage() for r in records if r.levelname == level] for level in ("INFO", "WARNING")
    }
    assert lines["INFO"] == [line for line in expected if line.startswith("paramwise_options")]
    assert "paramwise_options -- head.bias:lr=0.02" in lines["INFO"]
    frozen = [line for line in lines["WARNING"] if line.endswith("is skipped since its requires_grad=False")]
    assert frozen == [line for line in expected if line.endswith("requires_grad=False")]
    assert lines["WARNING"][-1] == "head.weight is duplicate. It is skipped since bypass_duplicate=True"
    assert len(lines["WARNING"]) - len(frozen) == len([line for line in expected if "duplicate" in line])


# Refused before anything is built


def never(params: Any) -> None:
    raise AssertionError("never called")


def no_arguments(*args: Any) -> None:
    raise AssertionError("never called")


OPT = {"optimizer": SGD}


def paramwise(**cfg: Any) -> dict[str, Any]:
    return {**OPT, "paramwise_cfg": cfg}


def of_part(**entry: Any) -> dict[str, Any]:
    return paramwise(custom_keys={"block": entry})


def without(option: str, key: str) -> dict[str, Any]:
    """A configuration with a multiplier, whose optimizer lacks what it multiplies."""
    optimizer = {name: value for name, value in SGD.items() if name != option}
    return {"optimizer": optimizer, "paramwise_cfg": {key: 0.5}}


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("OptimWrapper", TypeError, "cfg must be a dict, not str"),
    (torch.optim.SGD([torch.zeros(1)]), TypeError, "cfg must be a dict, not SGD"),
    ({"type": "OptimWrapper"}, ValueError, "`optim_wrapper_cfg` must contain 'optimizer'"),
    ({**OPT, "type": "OptimWraper"}, KeyError, "did you mean 'OptimWrapper'"),
    ({"type": "AmpWraper", "optimizer": {"type": never}}, KeyError, "did you mean 'AmpOptimWrapper'"),
    ({**OPT, "type": "mmdet.OptimWrapper"}, KeyError, "did you mean 'OptimWrapper'"),
    ({**OPT, "type": 3}, TypeError, "type=3"),
    ({**OPT, "constructor": "Fancy"}, KeyError, "registered optimizer wrapper constructor"),
    ({**OPT, "_accumulative_counts": 2}, TypeError, "did you mean 'accumulative_counts'"),
    ({"optimizer": torch.optim.SGD}, TypeError, "optimizer must be a dict"),
    ({"optimizer": {"lr": 0.1}}, KeyError, "no 'type' (keys: ['lr'])"),
    ({"optimizer": {**SGD, "type": "SDG"}}, KeyError, "did you mean 'SGD'"),
    ({"optimizer": {**SGD, "momentun": 0}}, TypeError, "did you mean 'momentum'"),
    ({"optimizer": {**SGD, "params": []}}, ValueError, "'params' in the optimizer's dict"),
    ({"optimizer": {"type": no_arguments}}, TypeError, "no_arguments has no named argument"),
    ({**OPT, "paramwise_cfg": []}, TypeError, "paramwise_cfg must be None or a dict, not list"),
    (paramwise(bias_lr_mul=2.0), TypeError, "did you mean 'bias_lr_mult'"),
    (paramwise(decay_rate=2.0), TypeError, "It takes bias_lr_mult, dcn_offset_lr_mult, norm"),
    (paramwise(bypass_duplicate="no"), TypeError, "bypass_duplicate='no' must be True or False"),
    (paramwise(custom_keys=["block"]), TypeError, "custom_keys must be a dict, not list"),
    (paramwise(custom_keys={3: {}}), TypeError, "custom_keys[3]={} must be a part"),
    (paramwise(custom_keys={"block": 0.1}), TypeError, "custom_keys['block']=0.1 must be a part"),
    (of_part(lr_mul=2), TypeError, "did you mean 'lr_mult'"),
    (of_part(lr_mult=-0.1), ValueError, "custom_keys['block']['lr_mult']=-0.1 must be finite and not negative"),
    (of_part(decay_mult="0.1"), TypeError, "custom_keys['block']['decay_mult']='0.1' must be a number"),
    *((paramwise(**{key: float("nan")}), ValueError, f"{key}=nan must be finite and not negative") for key in MULTIPLIERS),
    *((paramwise(**{key: True}), TypeError, f"{key}=True must be a number") for key in MULTIPLIERS),
    *((without("lr", key), ValueError, f"{key}=0.5 multiplies lr") for key in MULTIPLIERS if "lr_mult" in key),
    *((without("weight_decay", key), ValueError, f"{key}=0.5 multiplies weight_d") for key in MULTIPLIERS if "decay" in key),
    ({"optimizer": {**SGD, "lr": "0.1"}, "paramwise_cfg": {"bias_lr_mult": 2}}, TypeError, "lr='0.1' must be a number"),
]  # fmt: skip


@pytest.mark.parametrize(("cfg", "builtin", "message"), REFUSED)
def test_refused_before_anything_is_built(cfg: Any, builtin: type[Exception], message: str) -> None:
    model = Zoo()
    before = snapshot(model), repr(cfg)
    with pytest.raises(builtin) as caught:
        build_optim_wrapper(model, cfg)
    assert isinstance(caught.value, (ConfigError, RegistryError))
    assert message in str(caught.value)
    assert (snapshot(model), repr(cfg)) == before


def test_models_that_cannot_be_trained() -> None:
    with pytest.raises(ConfigTypeError, match=r"model must be a torch\.nn\.Module"):
        build_optim_wrapper([Zoo()], OPT)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameter of Zoo requires a gradient"):
        build_optim_wrapper(Zoo().requires_grad_(False), paramwise(bias_lr_mult=2.0))
    with pytest.raises(
        ValueError, match=r"some parameters appear in more .*first\.weight.*tail\.1\.weight.*bypass_duplicate"
    ):
        build_optim_wrapper(Tied(), paramwise(bias_lr_mult=2.0))
