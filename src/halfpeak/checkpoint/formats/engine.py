"""The state of a halfpeak engine, alone in a file. In a script's dict it is read by :mod:`.script`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from halfpeak.checkpoint.canonical import ENGINE, Contents, read_steps
from halfpeak.checkpoint.formats.format import Files, Format, Target
from halfpeak.core.errors import StateError


def read(tree: Any) -> Contents | None:
    """The contents of ``engine.state_dict()``."""
    if not isinstance(tree, Mapping) or set(tree.keys()) != set(ENGINE):
        return None
    contents = Contents(form="engine")
    contents.add_engine(tree)
    return contents


def write(contents: Contents) -> Files:
    """What ``engine.load_state_dict`` takes.

    Raises:
        StateError: there is no optimizer state.
    """
    if not contents.optimizers:
        raise StateError(
            "the file has no optimizer state, which an engine's state needs; convert it to weights, and load these with "
            "model.load_state_dict before halfpeak.prepare"
        )
    counted = max((step for one in contents.optimizers.values() for step in read_steps(one)), default=0.0)
    steps = int(counted) if math.isfinite(counted) else 0
    return {
        "version": 1,
        "level": contents.level,
        "models": list(contents.models.values()),
        "optimizers": list(contents.optimizers.values()),
        "scalers": [dict(state) for state in contents.scaler_states],
        "counters": dict(contents.engine_counters or {"taken": steps, "skipped": 0, "index": steps}),
        "buffers": [],
        "window": contents.window or {"lanes": [_empty_window() for _ in contents.optimizers], "losses": {}},
    }


def _empty_window() -> dict[str, Any]:
    """Between two windows there are no gradients. The keys are those of engine state version 1."""
    return {
        "phase": "CLEAN",
        "found_inf": torch.zeros(()),
        "true_sized": {},
        "scaled": {},
        "frozen": None,
        "parked": {},
    }


FORMAT = Format(
    "engine",
    "the state of a halfpeak engine",
    read,
    Target(
        "the state of a halfpeak engine",
        write,
        models=None,
        optimizers=None,
        scalers=None,
        needs_scale=True,
        keeps_rule=False,
        keeps_counters=False,
        keeps_window=True,
    ),
)
