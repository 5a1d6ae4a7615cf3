"""Checkpoints of mmcv 1.x, halfpeak.runner and mmengine: ``meta`` or ``optimizer`` has the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.formats.format import Files, Format, Target, grad_scaler_entry
from halfpeak.checkpoint.scaler_states import to_mmengine


def is_run(tree: Mapping[Any, Any], contents: Contents) -> bool:
    """Whether a dict is a checkpoint of mmcv, halfpeak.runner or mmengine."""
    return isinstance(tree.get("meta"), Mapping) and "state_dict" in tree


def _is_runner(tree: Mapping[Any, Any], contents: Contents) -> bool:
    return is_run(tree, contents) and {"loop", "hooks", "random"} <= set(tree)


def _is_mmengine_apex(tree: Mapping[Any, Any], contents: Contents) -> bool:
    return is_run(tree, contents) and any(scaler.where.endswith("apex_amp") for scaler in contents.scalers)


def _is_mmengine(tree: Mapping[Any, Any], contents: Contents) -> bool:
    return is_run(tree, contents) and (
        "message_hub" in tree
        or "mmengine_version" in tree["meta"]
        or any("loss_scaler" in scaler.where for scaler in contents.scalers)
    )


def write_mmcv(contents: Contents) -> Files:
    """A checkpoint for mmcv 1.x and halfpeak.runner; the loss scale is in ``meta``."""
    entry = grad_scaler_entry("loss_scaler", contents)
    return _write(contents, {"fp16": entry} if entry else {}, {})


def write_mmengine(contents: Contents, *, apex: bool = False) -> Files:
    """A checkpoint for mmengine's Runner with AmpOptimWrapper (``apex``: ApexOptimWrapper); scale in ``optimizer``."""
    states = contents.scaler_states
    entry = to_mmengine(states, contents.rule, apex=apex) if states else {}
    hub = {"message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}}}
    return {**hub, **_write(contents, {}, {**_inside(contents.rest, "optimizer"), **entry})}


def _write(contents: Contents, meta: dict[str, Any], beside_optimizer: dict[str, Any]) -> Files:
    """The entries common to both; ``meta`` and ``beside_optimizer`` are added to ``meta`` and ``optimizer``."""
    optimizer = contents.optimizer
    return {
        **{name: value for name, value in contents.rest.items() if "." not in name},
        "meta": {
            **_inside(contents.rest, "meta"),
            "epoch": contents.epoch or 0,
            "iter": contents.iteration or 0,
            **meta,
        },
        "state_dict": contents.model,
        **({} if optimizer is None else {"optimizer": {**optimizer, **beside_optimizer}}),
        **contents.halfpeak_entry(),
    }


def _inside(rest: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The entries of ``rest`` that were read from inside the entry ``key``."""
    return {name.removeprefix(f"{key}."): value for name, value in rest.items() if name.startswith(f"{key}.")}


_MMENGINE: Final = ("mmengine", "mmengine_apex")

RUNNER = Format("runner", "a run of halfpeak.runner", _is_runner)
MMCV = Format(
    "mmcv",
    "a run of mmcv 1.x",
    is_run,
    Target("a checkpoint of mmcv 1.x and of halfpeak.runner", write_mmcv, family=("mmcv", "runner")),
)
MMENGINE = Format(
    "mmengine",
    "a run of mmengine",
    _is_mmengine,
    Target("a checkpoint of mmengine's Runner with AmpOptimWrapper", write_mmengine, family=_MMENGINE),
)
MMENGINE_APEX = Format(
    "mmengine_apex",
    "a run of mmengine with ApexOptimWrapper",
    _is_mmengine_apex,
    Target(
        "a checkpoint of mmengine's Runner with ApexOptimWrapper",
        partial(write_mmengine, apex=True),
        scalers=None,
        family=_MMENGINE,
        keeps_rule=False,
    ),
)
