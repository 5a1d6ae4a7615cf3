"""The state of a halfpeak engine in a file, in a DCP folder, or in the ``checkpoint.pt`` of ``halfpeak train``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfpeak.checkpoint.canonical import Contents, has_names, read_steps
from halfpeak.checkpoint.dcp import write_dcp
from halfpeak.checkpoint.formats.format import Files, Format, Target
from halfpeak.checkpoint.temporary import temporary_folder
from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import renamed


def write(contents: Contents) -> Files:
    """The state for ``engine.load_state_dict``.

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
        # Index 0 begins an accumulation window, however many passes a step of the engine has.
        "counters": dict(contents.engine_counters or {"taken": steps, "skipped": 0, "index": 0}),
        "buffers": contents.buffers,
        "window": contents.window or {"lanes": [_empty_window() for _ in contents.optimizers], "losses": {}},
    }


def write_for_dcp(contents: Contents) -> Files:
    """The state for ``dcp.load({"engine": engine})``: with parameter names, and without an open accumulation window.

    Raises:
        StateError: there is no optimizer state, or its parameters cannot be matched to names.
    """
    state = write(replace(contents, window=None))
    return {"engine": {**state, "optimizers": [_named(contents, one) for one in state["optimizers"]]}}


def _named(contents: Contents, optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameter names. Parameters of one shape in one group are named in the model's order."""
    if has_names(optimizer):
        return optimizer
    weights = {name: tuple(value.shape) for name, value in contents.model.items() if _is_trained(name, value)}
    places = [(number, group) for group in optimizer["param_groups"] for number in group["params"]]
    is_whole = len(optimizer["param_groups"]) == 1 and len(places) == len(weights)
    guessed = dict(zip((number for number, _ in places), weights.values(), strict=False)) if is_whole else {}
    shapes = {number: _shape(optimizer["state"].get(number), guessed.get(number)) for number, _ in places}
    names: dict[Any, str] = {}
    for shape in {*shapes.values(), *weights.values()}:
        same = [(number, group) for number, group in places if shapes[number] == shape]
        known = [name for name, other in weights.items() if other == shape]
        if len(contents.models) != 1 or len(same) != len(known) or any(g is not same[0][1] for _, g in same):
            raise StateError(
                "format 'dcp' names the parameters of an optimizer, the file numbers them, and it is unclear which weight each "
                "number is; load the file with engine.load_state_dict after init_process_group, and write "
                "dcp.save({'engine': engine})"
            )
        names.update(zip((number for number, _ in same), known, strict=True))
    return renamed(optimizer, names)


def _shape(row: Any, otherwise: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of a parameter, told by its moments; ``otherwise`` if it has none."""
    values = row.values() if isinstance(row, Mapping) else ()
    found = (tuple(value.shape) for value in values if isinstance(value, Tensor) and value.dim() > 0)
    return next(found, otherwise)


def _is_trained(name: str, value: Any) -> bool:
    statistic = name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    return isinstance(value, Tensor) and value.is_floating_point() and not statistic


def store_for_dcp(place: Path, files: Files) -> None:
    """Write the whole folder or nothing."""
    with temporary_folder(place) as folder:
        write_dcp(folder, files)


def _empty_window() -> dict[str, Any]:
    """An empty accumulation window of an optimizer, with the keys of engine state version 1."""
    return {
        "phase": "CLEAN",
        "found_inf": torch.zeros((), dtype=torch.float32),
        "true_sized": {},
        "scaled": {},
        "frozen": None,
        "parked": {},
    }


_TARGET = Target(
    "the state of a halfpeak engine",
    write,
    models=None,
    optimizers=None,
    scalers=None,
    needs_scale=True,
    keeps_rule=False,
    keeps_counters=False,
    keeps_window=True,
    by_name=True,
)
FORMAT = Format("engine", "the state of a halfpeak engine", target=_TARGET)

DCP = Format(
    "dcp",
    "a folder of torch.distributed.checkpoint",
    target=_TARGET._replace(
        brief="a folder from which torch.distributed.checkpoint loads {'engine': engine}",
        write=write_for_dcp,
        keeps_window=False,
        store=store_for_dcp,
    ),
)


def _is_train(tree: Mapping[Any, Any], contents: Contents) -> bool:
    return tree.get("format") == "halfpeak.train"


TRAIN = Format("train", "a run of halfpeak train", _is_train)
