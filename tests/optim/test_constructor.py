"""DefaultOptimWrapperConstructor: its interface for subclasses, its log lines, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.core.errors import ConfigError, ConfigTypeError, RegistryError
from halfpeak.optim.builder import DefaultOptimWrapperConstructor, build_optim_wrapper
from optim import original
from optim.families import logged_records
from optim.original import groups_of
from optim.zoo import MULTIPLIERS, SGD, Tied, Zoo, cfg_of, frozen_tied
from support.snapshot import snapshot


def layer_decay(base: Any) -> Any:
    """A constructor as model libraries write it: it overrides ``add_params`` and reads its own options."""

    class LayerDecay(base):
        def add_params(
            self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", **kwargs: Any
        ) -> None:
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
            self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", is_dcn_module: Any = None
        ) -> None:
            before = len(params)
            super().add_params(params, module, prefix=prefix, is_dcn_module=is_dcn_module)
            for group in params[before:]:
                group.setdefault("path", prefix)

    return Extended  # fmt: skip


@pytest.mark.parametrize("make", [layer_decay, extended])
def test_subclasses_replace_or_extend_add_params(make: Callable[[Any], Any]) -> None:
    model = Zoo()
    paramwise = {"decay_rate": 0.5, "bias_lr_mult": 2.0, "norm_decay_mult": 0.0}
    ours, theirs = (
        make(base)({"optimizer": dict(SGD)}, dict(paramwise))(model)
        for base in (DefaultOptimWrapperConstructor, original.DefaultOptimWrapperConstructor)
    )
    assert groups_of(ours) == groups_of(theirs)
    assert ours.get_lr() == theirs.get_lr()


def test_attributes_are_those_of_mmengine() -> None:
    cfg = {"type": "OptimWrapper", "clip_grad": {"max_norm": 1.0}, "optimizer": SGD}
    for paramwise in (None, {}, {"norm_decay_mult": 0.0}):
        ours = DefaultOptimWrapperConstructor(cfg, paramwise)
        theirs = original.DefaultOptimWrapperConstructor(dict(cfg), paramwise)
        assert {name: vars(ours)[name] for name in vars(theirs)} == vars(theirs)


def test_one_line_per_option_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = frozen_tied()
    cfg = cfg_of(
        SGD, {**MULTIPLIERS, "bypass_duplicate": True, "custom_keys": {"embedding": {"lr_mult": 0.1}}}
    )
    theirs: list[str] = []
    monkeypatch.setattr(
        original.default_constructor, "print_log", lambda message, **options: theirs.append(message)
    )
    original.build_optim_wrapper(model, cfg)
    with logged_records() as records:
        build_optim_wrapper(model, cfg)
    lines = {
        level: [r.getMessage() for r in records if r.levelname == level] for level in ("INFO", "WARNING")
    }
    assert lines["INFO"] == [line for line in theirs if line.startswith("paramwise_options")]
    assert "paramwise_options -- head.bias:lr=0.02" in lines["INFO"]
    frozen = [line for line in lines["WARNING"] if line.endswith("is skipped since its requires_grad=False")]
    assert frozen == [line for line in theirs if line.endswith("requires_grad=False")]
    shared = [line for line in lines["WARNING"] if line not in frozen]
    assert shared[-1] == "head.weight is duplicate. It is skipped since bypass_duplicate=True"
    assert len(shared) == len([line for line in theirs if "duplicate" in line])


# Refused


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -0.1])
@pytest.mark.parametrize("key", [*MULTIPLIERS, "lr_mult", "decay_mult"])
def test_multipliers_are_finite_and_not_negative(key: str, bad: float) -> None:
    paramwise = {key: bad} if key in MULTIPLIERS else {"custom_keys": {"block": {key: bad}}}
    with pytest.raises(ConfigError, match=f"{key}.*must be finite and not negative"):
        DefaultOptimWrapperConstructor({"optimizer": SGD}, paramwise)


@pytest.mark.parametrize("bad", ["0.1", True, [0.1], torch.tensor(0.1)], ids=str)
@pytest.mark.parametrize("key", [*MULTIPLIERS, "lr_mult", "decay_mult"])
def test_multipliers_are_numbers(key: str, bad: Any) -> None:
    paramwise = {key: bad} if key in MULTIPLIERS else {"custom_keys": {"block": {key: bad}}}
    with pytest.raises(ConfigTypeError, match=f"{key}.*must be a number"):
        DefaultOptimWrapperConstructor({"optimizer": SGD}, paramwise)


@pytest.mark.parametrize("key", [*MULTIPLIERS, "lr_mult", "decay_mult"])
def test_a_multiplier_needs_what_it_multiplies(key: str) -> None:
    paramwise = {key: 0.5} if key in MULTIPLIERS else {"custom_keys": {"decay_mult of lr": {key: 0.5}}}
    needed = "lr" if "lr_mult" in key else "weight_decay"
    optimizer = {name: value for name, value in SGD.items() if name != needed}
    with pytest.raises(
        ValueError, match=f"multiplies {needed}, which the optimizer's dict does not set"
    ) as caught:
        DefaultOptimWrapperConstructor({"optimizer": optimizer}, paramwise)
    assert type(caught.value) is ConfigError
    with pytest.raises(ConfigTypeError, match=f"{needed}='0.1' must be a number"):
        DefaultOptimWrapperConstructor({"optimizer": {**SGD, needed: "0.1"}}, paramwise)


OPTIMIZER = {"optimizer": SGD}

REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "cfg": ("SGD", None, TypeError, "optim_wrapper_cfg must be a dict, not str"),
    "no optimizer": ({"type": "OptimWrapper"}, None, ConfigError, "`optim_wrapper_cfg` must contain 'optimizer'"),
    "optimizer": ({"optimizer": "SGD"}, None, TypeError, "optimizer must be a dict"),
    "paramwise": (OPTIMIZER, ["bias_lr_mult"], TypeError, "paramwise_cfg must be None or a dict, not list"),
    "unknown rule": (OPTIMIZER, {"bias_lr_mul": 2.0}, TypeError, "did you mean 'bias_lr_mult'"),
    "unknown rules": (OPTIMIZER, {"decay_rate": 2.0}, TypeError, "It takes bias_lr_mult, dcn_offset_lr_mult, norm"),
    "bypass": (OPTIMIZER, {"bypass_duplicate": "no"}, TypeError, "bypass_duplicate='no' must be True or False"),
    "custom keys": (OPTIMIZER, {"custom_keys": ["block"]}, TypeError, "custom_keys must be a dict, not list"),
    "custom key": (OPTIMIZER, {"custom_keys": {3: {}}}, TypeError, "custom_keys[3]={} must be a part"),
    "custom entry": (OPTIMIZER, {"custom_keys": {"block": 0.1}}, TypeError, "custom_keys['block']=0.1 must be a part"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_construction(case: str) -> None:
    cfg, paramwise, error, message = REFUSED[case]
    with pytest.raises(error) as caught:
        DefaultOptimWrapperConstructor(cfg, paramwise)
    assert isinstance(caught.value, ConfigError)
    assert message in str(caught.value)


def no_arguments(*args: Any) -> None:
    raise AssertionError("never called")


def never(params: Any) -> None:
    raise AssertionError("never called")


REFUSED_CALLS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "wrapper type": ({"type": "AmpWraper", "optimizer": {"type": never}}, None, RegistryError, "did you mean 'AmpOpt"),
    "optimizer type": ({"optimizer": {**SGD, "type": "SDG"}}, None, RegistryError, "did you mean 'SGD'"),
    "no type": ({"optimizer": {"lr": 0.1}}, None, RegistryError, "no 'type' (keys: ['lr'])"),
    "optimizer key": ({"optimizer": {**SGD, "momentun": 0}}, None, TypeError, "did you mean 'momentum'"),
    "wrapper key": ({**OPTIMIZER, "acumulative_counts": 2}, None, TypeError, "did you mean 'accumulative_counts'"),
    "params": ({"optimizer": {**SGD, "params": []}}, None, ConfigError, "'params' in the optimizer's dict"),
    "no arguments": ({"optimizer": {"type": no_arguments}}, None, TypeError, "no_arguments has no named argument"),
    "custom option": (OPTIMIZER, {"custom_keys": {"block": {"lr_mul": 2}}}, TypeError, "did you mean 'lr_mult'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_refused_before_anything_is_built(case: str) -> None:
    cfg, paramwise, error, message = REFUSED_CALLS[case]
    model = Zoo()
    before = snapshot(model)
    with pytest.raises(error) as caught:
        DefaultOptimWrapperConstructor(cfg, paramwise)(model)
    assert message in str(caught.value)
    assert snapshot(model) == before


@pytest.mark.parametrize("model", [None, [Zoo()], Zoo().parameters()], ids=["None", "list", "generator"])
def test_the_model_is_a_module(model: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"model must be a torch\.nn\.Module"):
        DefaultOptimWrapperConstructor(OPTIMIZER)(model)


def test_shared_parameters_are_named() -> None:
    fragment = "some parameters appear in more than one parameter group"
    with pytest.raises(ValueError, match=fragment):
        original.build_optim_wrapper(Tied(), cfg_of(SGD, {"bias_lr_mult": 2.0}))
    with pytest.raises(
        ValueError, match=rf"{fragment}: .*first\.weight.*tail\.1\.weight.*bypass_duplicate=True"
    ):
        build_optim_wrapper(Tied(), cfg_of(SGD, {"bias_lr_mult": 2.0}))


def test_a_frozen_model_has_nothing_to_train() -> None:
    model = Zoo().requires_grad_(False)
    for build in (build_optim_wrapper, original.build_optim_wrapper):
        with pytest.raises(ValueError):
            build(model, cfg_of(SGD, {"bias_lr_mult": 2.0}))
    with pytest.raises(ConfigError, match="no parameter of Zoo requires a gradient"):
        build_optim_wrapper(model, cfg_of(SGD, {"bias_lr_mult": 2.0}))
