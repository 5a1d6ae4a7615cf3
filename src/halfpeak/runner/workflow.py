"""The workflow of a run: which loader is used for training or validation, and for how long at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from halfpeak.core.errors import ConfigError, ConfigTypeError


class Flow(NamedTuple):
    """One entry: a loader, the name of the runner's method that it goes to, and how many times in a row."""

    loader: Any
    mode: str
    times: int


def parse(runner: object, data_loaders: Sequence[Any], workflow: Sequence[tuple[str, int]]) -> list[Flow]:
    """Check a workflow such as ``[("train", 2), ("val", 1)]`` against its loaders.

    Raises:
        ConfigTypeError: something is not of its type.
        ConfigError: the lengths differ, a mode that the runner does not have, or nothing to train.
    """
    for name, value in (("data_loaders", data_loaders), ("workflow", workflow)):
        if not isinstance(value, (list, tuple)):
            raise ConfigTypeError(
                f"{name} must be a list, not {type(value).__name__}; write runner.run([loader], [('train', 1)])"
            )
    if len(data_loaders) != len(workflow):
        raise ConfigError(
            f"{len(data_loaders)} data loaders and {len(workflow)} entries in the workflow; give one loader per entry"
        )
    flows = [
        Flow(loader, *_entry(runner, entry)) for loader, entry in zip(data_loaders, workflow, strict=True)
    ]
    if not any(flow.mode == "train" and flow.times for flow in flows):
        raise ConfigError(f"workflow={list(workflow)} never trains; write [('train', 1)]")
    return flows


def _entry(runner: object, entry: Any) -> tuple[str, int]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise ConfigTypeError(f"{entry!r} in the workflow must be a pair; write ('train', 1)")
    mode, times = entry
    if not isinstance(mode, str):
        raise ConfigTypeError(
            f"mode in the workflow must be a string, not {type(mode).__name__}; write 'train'"
        )
    if mode.startswith("_") or not callable(getattr(runner, mode, None)):
        raise ConfigError(
            f"{type(runner).__name__} has no method {mode!r} to run an epoch; write 'train' or 'val' in the workflow"
        )
    if isinstance(times, bool) or not isinstance(times, int) or times < 0:
        raise ConfigTypeError(f"{times!r} in the workflow must be a number of times; write ('{mode}', 1)")
    return mode, times
