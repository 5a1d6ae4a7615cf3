"""Registries: a name finds only what was registered under it, here or with mmengine, and imports nothing."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.core.errors import ConfigTypeError, HalfpeakError, RegistryError
from halfpeak.optim.builder import build_optim_wrapper
from halfpeak.optim.members import (
    FUSED_OPTIMIZERS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    TORCH_OPTIMIZERS,
)
from halfpeak.optim.registry import Registry
from halfpeak.optim.wrapper import OptimWrapper
from optim import families

mmengine: Any = families.mmengine


class Walk:
    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        self.values = (params, lr, momentum)


def run(params: Any, **options: Any) -> Any:
    return params, options


@pytest.fixture
def registry() -> Registry:
    return Registry("optimizer")


def test_registering(registry: Registry) -> None:
    assert registry.register_module()(Walk) is Walk
    assert registry.get("Walk") is registry["Walk"] is Walk
    assert registry.register_module("stroll")(Walk) is Walk
    registry.register_module(["jog", "hike"], module=Walk)
    assert registry.register_module(module=run) is run
    assert list(registry) == ["Walk", "stroll", "jog", "hike", "run"]
    assert (len(registry), "hike" in registry, registry["run"]) == (5, True, run)
    assert repr(registry) == "Registry('optimizer': Walk, hike, jog, run, stroll)"
    with pytest.raises(TypeError):
        registry.module_dict["Walk"] = Walk  # type: ignore[index]


def test_a_taken_name_is_refused_unless_forced(registry: Registry) -> None:
    registry.register_module(module=Walk)
    for names in ("Walk", ["fresh", "Walk"]):
        with pytest.raises(
            RegistryError, match=r"'Walk' is already registered as optimizer by .*test_registry"
        ):
            registry.register_module(names, module=run)
    assert dict(registry.module_dict) == {"Walk": Walk}
    registry.register_module("Walk", force=True, module=run)
    assert registry["Walk"] is run


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": Walk},  # @register_module without its brackets
        {"name": ["a", 3], "module": Walk},
        {"name": "", "module": Walk},
        {"name": "torch.optim.SGD", "module": Walk},
        {"force": "yes", "module": Walk},
        {"module": 3},
    ],
    ids=str,
)
def test_registering_nonsense_is_a_type_error(registry: Registry, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigTypeError):
        registry.register_module(**arguments)
    assert len(registry) == 0


@pytest.mark.parametrize("kind", ["Walk", Walk])
def test_build_calls_with_the_rest_as_keywords(registry: Registry, kind: Any) -> None:
    registry.register_module(module=Walk)
    cfg = {"type": kind, "lr": 0.1}
    built = registry.build(cfg, default_args={"params": "p", "lr": 9.0})
    assert built.values == ("p", 0.1, 0.0)
    assert cfg == {"type": kind, "lr": 0.1}
    assert registry.build({"params": 1}, default_args={"type": run, "lr": 2}) == (1, {"lr": 2})


def test_an_error_of_the_factory_comes_out_as_it_is(registry: Registry) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'lr'") as caught:
        registry.build({"type": Walk, "params": []})
    assert not isinstance(caught.value, HalfpeakError)


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"params": []}, RegistryError, "no 'type' (keys: ['params'])"),
        ({"type": "walk"}, RegistryError, "did you mean 'Walk'?"),
        ({"type": "mmengine.Walk"}, RegistryError, "dotted names are never imported; did you mean 'Walk'?"),
        ({"type": "Adam"}, RegistryError, "Registered are Walk; add one with"),
        ({"type": None}, ConfigTypeError, "type=None must be the name of a registered optimizer"),
        ({"type": "Walk", "params": [], "lr": 1, "momentun": 0}, ConfigTypeError, "did you mean 'momentum'?"),
        ({"type": "Walk", "params": [], "lr": 1, 3: 0}, ConfigTypeError, "It takes params, lr, momentum"),
        (["Walk"], ConfigTypeError, "cfg must be a dict"),
        ({"type": dict}, ConfigTypeError, "dict has no signature that can be read"),
    ],
    ids=str,
)
def test_refusals(registry: Registry, cfg: Any, error: type[Exception], message: str) -> None:
    registry.register_module(module=Walk)
    with pytest.raises(error) as caught:
        registry.build(cfg)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [" SGD", "sgd", "", "__class__"])
def test_names_are_exact(name: str) -> None:
    assert OPTIMIZERS.get(name) is None


@pytest.mark.parametrize("name", ["SGD.", ".SGD", "torch.optim.SGD", "os.abort", "subprocess.check_output"])
def test_only_members_are_found_and_nothing_is_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Any] = []
    for kind in ("OPTIMIZERS", "OPTIM_WRAPPERS", "OPTIM_WRAPPER_CONSTRUCTORS"):
        getattr(mmengine.registry, kind).import_from_location()  # imports mmengine's own modules
    model, cfg = nn.Linear(2, 1), {"optimizer": {"type": "SGD", "lr": 0.1}}
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", lambda *args: imported.append(args))
        patch.setattr(builtins, "__import__", lambda *args: imported.append(args))
        for bad in ({**cfg, "type": name}, {"optimizer": {"type": name}}, {**cfg, "constructor": name}):
            with pytest.raises(RegistryError):
                build_optim_wrapper(model, bad)
    assert imported == []


# What is registered


def test_torch_optimizers_are_those_of_mmengine() -> None:
    theirs = {*mmengine.optim.optimizer.builder.TORCH_OPTIMIZERS}
    assert set(TORCH_OPTIMIZERS) == theirs - {"TorchAdafactor"} | {"Adafactor"}
    assert set(OPTIMIZERS) == {
        *TORCH_OPTIMIZERS,
        "TorchAdafactor",
        *(kind.__name__ for kind in FUSED_OPTIMIZERS),
    } - {"Optimizer"}
    assert OPTIMIZERS["TorchAdafactor"] is OPTIMIZERS["Adafactor"] is torch.optim.Adafactor


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_each_optimizer_builds_by_name(name: str) -> None:
    model = nn.Linear(2, 2, bias=False)  # Muon takes matrices only
    wrapper = build_optim_wrapper(model, {"optimizer": {"type": name, "lr": 0.01}})
    assert type(wrapper.optimizer) is OPTIMIZERS[name]
    assert wrapper.get_lr() == {"lr": [0.01]}


def test_wrappers_and_constructors() -> None:
    assert set(OPTIM_WRAPPERS) == {"OptimWrapper", "AmpOptimWrapper", "ApexOptimWrapper"}
    assert set(OPTIM_WRAPPER_CONSTRUCTORS) == {"DefaultOptimWrapperConstructor"}


@pytest.fixture
def child() -> Iterator[Any]:
    """A child of mmengine's optimizer registry, as a project built on mmengine has."""
    root = mmengine.registry.OPTIMIZERS
    yield mmengine.registry.Registry("optimizer", parent=root, scope="halfpeak_child")
    del root.children["halfpeak_child"]


class OfTheChild(torch.optim.SGD):
    """Registered with mmengine only."""


def test_what_is_registered_with_mmengine_is_built(child: Any) -> None:
    child.register_module(module=OfTheChild)
    cfg = {"optimizer": {"type": "OfTheChild", "lr": 0.1}}
    model = nn.Linear(2, 1)
    with pytest.raises(RegistryError, match="OfTheChild"):
        build_optim_wrapper(model, cfg)
    for scoped in ({"type": "halfpeak_child.OfTheChild"}, {"_scope_": "halfpeak_child"}):
        wrapper = build_optim_wrapper(model, {"optimizer": {**cfg["optimizer"], **scoped}})
        assert type(wrapper.optimizer) is OfTheChild
    with mmengine.registry.DefaultScope.overwrite_default_scope("halfpeak_child"):
        assert type(build_optim_wrapper(model, cfg).optimizer) is OfTheChild
        assert OPTIMIZERS.get("OfTheChild") is OfTheChild
    wrapper = build_optim_wrapper(
        model, {"type": "mmengine.OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}}
    )
    assert type(wrapper) is OptimWrapper


def test_wrappers_and_constructors_of_mmengine_are_found() -> None:
    built: list[Any] = []

    class Constructor:
        def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
            built.append((optim_wrapper_cfg, paramwise_cfg))

        def __call__(self, model: nn.Module) -> str:
            return "made"

    registries = mmengine.registry
    registries.OPTIM_WRAPPER_CONSTRUCTORS.register_module(name="HalfpeakTest", module=Constructor)
    try:
        cfg = {"optimizer": {"type": "SGD"}, "constructor": "HalfpeakTest", "paramwise_cfg": {"a": 1}}
        assert build_optim_wrapper(nn.Linear(2, 1), cfg) == "made"
    finally:
        del registries.OPTIM_WRAPPER_CONSTRUCTORS.module_dict["HalfpeakTest"]
    assert built == [({"optimizer": {"type": "SGD"}}, {"a": 1})]
