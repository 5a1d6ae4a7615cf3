"""What an optimizer has never stepped, as state: a distributed checkpoint is read into tensors that are there before."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.state_checks import has_memory, is_number, require_mapping

_NUMBER: Final = re.compile("[0-9]{1,9}")


def with_initial_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` with an entry for every trainable parameter, ``step`` 0 where it has not been stepped.

    Args:
        optimizer: looked at only.
        state: of ``optimizer.state_dict()``.
    """
    known, parameters = dict(state["state"]), (p for group in optimizer.param_groups for p in group["params"])
    groups = (group for group in optimizer.param_groups for _ in group["params"])
    for index, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
        if index not in known and parameter.requires_grad:
            entry = initial_moments(optimizer, parameter, group)
            if entry:
                known[index] = entry
    return {**state, "state": known}


def without_initial_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without what was never stepped, which an optimizer makes by itself; keys as the optimizer numbers them.

    A distributed checkpoint writes every key as a string, and puts plain values back under that.

    Raises:
        StateError: it is no state of an optimizer.
    """
    rows = require_mapping(
        require_mapping(state, "an optimizer's state").get("state"), "the state of an optimizer's parameters"
    )
    known: dict[Any, dict[str, Any]] = {}
    for key, entry in rows.items():
        index = int(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else key
        known.setdefault(index, {}).update(require_mapping(entry, "the state of a parameter"))
    return {**state, "state": {i: entry for i, entry in known.items() if not _is_unstepped(entry)}}


def initial_moments(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer of this class keeps of a parameter, before its first step; empty where that cannot be known."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    stand_in = torch.zeros_like(parameter, requires_grad=True)
    stand_in.grad = torch.zeros_like(parameter)
    try:
        fresh = type(optimizer)(
            [stand_in], **{k: v for k, v in group.items() if k in accepted and k != "params"}
        )
        fresh.step()
    except (TypeError, ValueError, RuntimeError):
        return {}
    entry = dict(fresh.state[stand_in])
    if isinstance(entry.get("step"), Tensor):
        entry["step"] = torch.zeros_like(entry["step"])
    elif "step" in entry:
        entry["step"] = 0
    return entry


def has_moments(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps anything of a parameter that it has stepped."""
    found = ((p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    first = next(found, None)
    return first is not None and bool(initial_moments(optimizer, *first))


def _is_unstepped(entry: Mapping[str, Any]) -> bool:
    step = entry.get("step")
    if isinstance(step, Tensor):
        return has_memory(step) and step.numel() == 1 and step.item() == 0
    return is_number(step) and step == 0
