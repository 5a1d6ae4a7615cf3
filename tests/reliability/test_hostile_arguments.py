"""Every argument accepts each value that a configuration file can hold, or raises one short ``HalfpeakError``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import halfpeak
from halfpeak import amp, fused, optim, runner
from halfpeak.core.errors import HalfpeakError
from halfpeak.core.short_repr import LONGEST
from support.damage import cycle, deep


def shared(levels: int) -> list[Any]:
    """Nested lists of shared values, as YAML anchors make from a few lines: 3**levels values if written out."""
    value: Any = "x"
    for _ in range(levels):
        value = [value] * 3
    return value


VALUES: dict[str, Any] = {
    "shared": shared(10),
    "shared in a dict": {"type": shared(10)},
    "many digits": 10**5000,
    "long": "x" * 10**5,
    "escapes": "\x1b[2J[/x]",
    "deep": deep(5000),
    "cycle": cycle(),
    "an object": object(),
    "none": None,
    "negative": -1,
}

GIVEN = {
    "step": [1],
    "periods": [2],
    "gamma": 0.5,
    "target_ratio": (1, 2),
    "dataloader": [1],
    "min_lr": 0,
    "fn": print,
    "fn_name": "print",
    "max_lr": 1,
}
"""Values of arguments that have no default."""

Case = Callable[[str, Any], object]
"""Call something with one argument of that name and value."""


def model() -> nn.Module:
    return nn.Linear(2, 2)


def sgd(owner: nn.Module) -> Optimizer:
    return torch.optim.SGD(owner.parameters(), lr=0.1)


def with_optimizer(factory: Callable[..., object]) -> Case:
    def call(name: str, value: Any) -> object:
        owner = model()
        return factory(owner, sgd(owner), **{name: value})

    return call


def of_runner(name: str, value: Any) -> object:
    return runner.EpochBasedRunner(model(), logger=logging.getLogger("halfpeak"), **{name: value})


def registered(name: str, value: Any) -> object:
    owner = model()
    one = runner.EpochBasedRunner(
        owner, optimizer=sgd(owner), logger=logging.getLogger("halfpeak"), max_epochs=1
    )
    return one.register_training_hooks(
        **{"lr_config": {"policy": "fixed"}, "optimizer_config": {}, name: value}
    )


def in_paramwise(name: str, value: Any) -> object:
    optimizer = {"type": "SGD", "lr": 0.1, "weight_decay": 0.1}
    return optim.build_optim_wrapper(model(), {"optimizer": optimizer, "paramwise_cfg": {name: value}})


def in_wrapper(name: str, value: Any) -> object:
    cfg = {"type": "AmpOptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}, name: value}
    return optim.build_optim_wrapper(model(), cfg)


def names_of(factory: Callable[..., Any], *left_out: str) -> list[str]:
    return [
        one.name
        for one in inspect.signature(factory).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in left_out
    ]


def of(factory: Callable[..., Any], made: Callable[[], dict[str, Any]] = dict, **fixed: Any) -> Case:
    needed = [
        one.name
        for one in inspect.signature(factory).parameters.values()
        if one.default is one.empty and one.name in GIVEN
    ]
    given = {**{name: GIVEN[name] for name in needed}, **fixed}
    return lambda name, value: factory(**{**given, **made(), name: value})


CASES: dict[str, tuple[Case, list[str]]] = {
    **{name: (of(runner.HOOKS[name]), names_of(runner.HOOKS[name])) for name in runner.HOOKS},
    **{
        name: (of(kind, lambda: {"params": model().parameters()}, lr=0.1), names_of(kind, "params"))
        for name in fused.__all__
        if inspect.isclass(kind := getattr(fused, name)) and issubclass(kind, Optimizer)
    },
    **{
        kind.__name__: (of(kind, lambda: {"optimizer": sgd(model())}), names_of(kind, "self", "optimizer"))
        for kind in (optim.OptimWrapper, optim.AmpOptimWrapper, optim.ApexOptimWrapper)
    },
    "ScaleConfig": (of(halfpeak.ScaleConfig), names_of(halfpeak.ScaleConfig)),
    "GradScaler": (of(halfpeak.GradScaler, device="cpu"), names_of(halfpeak.GradScaler)),
    "LossScaler": (of(runner.LossScaler), names_of(runner.LossScaler)),
    "prepare": (with_optimizer(halfpeak.prepare), names_of(halfpeak.prepare, "models", "optimizers")),
    "initialize": (with_optimizer(amp.initialize), names_of(amp.initialize, "models", "optimizers")),
    "get_priority": (of(runner.get_priority), ["priority"]),
    "runner": (of_runner, names_of(runner.EpochBasedRunner, "model", "logger")),
    "hooks of a run": (registered, names_of(runner.EpochBasedRunner.register_training_hooks, "self")),
    "paramwise_cfg": (in_paramwise, ["custom_keys", "bias_lr_mult", "norm_decay_mult", "bypass_duplicate"]),
    "optim_wrapper": (in_wrapper, ["loss_scale", "dtype", "clip_grad", "accumulative_counts", "optimizer"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.filterwarnings("ignore")
def test_hostile_value(name: str, value: str) -> None:
    call, arguments = CASES[name]
    for argument in arguments:
        try:
            call(argument, VALUES[value])
        except HalfpeakError as error:
            text = str(error)
            assert len(text) < 20 * LONGEST, f"{argument}: {text[:200]}"
            assert "\x1b" not in text, argument
        except Exception as error:
            raise AssertionError(f"{argument}={value}: {type(error).__name__} {error!s:.200}") from error
