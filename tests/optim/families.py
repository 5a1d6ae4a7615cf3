"""halfpeak's wrappers and mmengine's side by side, with helpers that run both on a CPU."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak.optim as ours

# Its import warns about other packages.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine
    import mmengine.optim as theirs
    from mmengine.config import ConfigDict as ConfigDict
    from mmengine.logging import MessageHub, MMLogger
    from mmengine.optim.optimizer import amp_optimizer_wrapper
    from mmengine.optim.optimizer import default_constructor as default_constructor

assert mmengine.__version__ == "0.10.7"

FAMILIES: dict[str, ModuleType] = {"ours": ours, "theirs": theirs}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine's AmpOptimWrapper refuses a CPU although torch's scaler works there."""
    monkeypatch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    monkeypatch.setattr(amp_optimizer_wrapper, "GradScaler", scaler)


@contextmanager
def new_hub() -> Iterator[Any]:
    """Make a message hub and let it be mmengine's current one."""
    name = f"hub {len(MessageHub._instance_dict)}"
    yield MessageHub.get_instance(name)
    MessageHub._instance_dict.pop(name)


@contextmanager
def logged_records() -> Iterator[list[logging.LogRecord]]:
    """The records that mmengine's current logger receives."""
    logger = MMLogger.get_current_instance()
    records: list[logging.LogRecord] = []
    handler, level = logging.Handler(), logger.level
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def logged(hub: Any, key: str = "train/grad_norm") -> list[float]:
    """The values of a key in a message hub."""
    return hub.log_scalars[key].data[0].tolist() if key in hub.log_scalars else []


class Unit(nn.Module):
    """One weight with gradient 1: a step at ``lr=1`` moves it by the sum of the factors on the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        return self.weight * 1.0


def wrap(family: ModuleType, kind: str = "OptimWrapper", **options: Any) -> tuple[Unit, Any]:
    """A unit model and a wrapper over plain SGD."""
    model = Unit()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, getattr(family, kind)(optimizer=optimizer, **options)


def moves(model: Unit, wrapper: Any, calls: int) -> list[float | str]:
    """The distance that each call moves the weight, up to the first AssertionError."""
    found: list[float | str] = []
    for _ in range(calls):
        before = model.weight.item()
        try:
            wrapper.update_params(model())
        except AssertionError as error:
            return [*found, type(error).__name__]
        found.append(round(before - model.weight.item(), 4))
    return found


def outcome(call: Any) -> str:
    """The name of the builtin exception that a call raises, or "fine"."""
    try:
        call()
    except Exception as error:
        return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins")
    return "fine"


def groups_of(wrapper: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """For each group, the ids of its parameters in order, and all its options."""
    return [
        (
            [id(one) for one in group["params"]],
            {key: value for key, value in group.items() if key != "params"},
        )
        for group in wrapper.optimizer.param_groups
    ]


def named_groups(wrapper: Any, model: nn.Module, *options: str) -> Mapping[str, Any]:
    """The options of each parameter's group: name -> one option, or a tuple of several."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: tuple(group[one] for one in options) if len(options) > 1 else group[options[0]]
        for group in wrapper.optimizer.param_groups
        for parameter in group["params"]
    }
