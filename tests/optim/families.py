"""The two families side by side: ours, and mmengine's own, brought to run on a CPU."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak.optim as ours
from optim import original

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mmengine.optim as theirs
    from mmengine.logging import MessageHub, MMLogger
    from mmengine.optim.optimizer import amp_optimizer_wrapper

FAMILIES: dict[str, ModuleType] = {"ours": ours, "theirs": theirs}

assert original.mmengine.__version__ == "0.10.7"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine's AmpOptimWrapper refuses a CPU although torch's scaler works there."""
    monkeypatch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    monkeypatch.setattr(amp_optimizer_wrapper, "GradScaler", scaler)


@contextmanager
def new_hub() -> Iterator[Any]:
    """A message hub that is mmengine's current one."""
    name = f"hub {len(MessageHub._instance_dict)}"
    yield MessageHub.get_instance(name)
    MessageHub._instance_dict.pop(name)


@contextmanager
def logged_records() -> Iterator[list[logging.LogRecord]]:
    """What mmengine's current logger is given."""
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
    """What a message hub was given."""
    return hub.log_scalars[key].data[0].tolist() if key in hub.log_scalars else []


class Unit(nn.Module):
    """One weight whose gradient is 1, so that a step of rate 1 moves it by what the divisors sum to."""

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
    """By how much each call moved the weight, up to the first exception."""
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
