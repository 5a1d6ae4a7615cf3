"""mmcv 1.x, halfpeak.runner and mmengine: ``meta``, ``state_dict``, ``optimizer``; the loss scale in one of these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from halfpeak.checkpoint.canonical import HALFPEAK_KEY, Contents
from halfpeak.checkpoint.formats.format import Files, Format, Target, add_entries, grad_scaler_entry
from halfpeak.checkpoint.scaler_states import to_mmengine

_COMMIT: Final = re.compile(r"\+?[0-9a-f]{40}$")


def read(tree: Any) -> Contents | None:
    """The contents of a run of mmcv, halfpeak.runner or mmengine."""
    meta = tree.get("meta") if isinstance(tree, Mapping) else None
    if not isinstance(meta, Mapping) or "state_dict" not in tree:
        return None
    version = str(meta.get("mmengine_version") or meta.get("mmcv_version") or "")
    contents = Contents(version=_COMMIT.sub("", version))

    def add(key: str, value: Any) -> bool:
        return (
            key in ("meta", HALFPEAK_KEY)
            or (key == "state_dict" and contents.add_model(key, value))
            or (key == "optimizer" and contents.add_optimizers(key, value))
            or contents.add_scaler(key, value)  # detection scripts kept apex's beside it
        )

    def add_of_meta(key: str, value: Any) -> bool:
        scaler = value.get("loss_scaler") if key == "meta.fp16" and isinstance(value, Mapping) else None
        return contents.add_scaler(key, scaler) or contents.add_counter(key.removeprefix("meta."), value)

    add_entries(contents, tree.items(), add)
    add_entries(contents, ((f"meta.{key}", value) for key, value in meta.items()), add_of_meta)
    contents.add_halfpeak_entry(tree.get(HALFPEAK_KEY))
    contents.form = _form(contents, tree, meta)
    return contents


def _form(contents: Contents, tree: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    places = [scaler.where for scaler in contents.scalers]
    if {"loop", "hooks", "random"} <= set(tree):
        return "runner"
    if any(where.endswith("apex_amp") for where in places):
        return "mmengine_apex"
    if "message_hub" in tree or "mmengine_version" in meta or any("loss_scaler" in one for one in places):
        return "mmengine"
    return "mmcv"


def write_mmcv(contents: Contents) -> Files:
    """A checkpoint for mmcv 1.x and halfpeak.runner."""
    entry = grad_scaler_entry("loss_scaler", contents)
    return _write(contents, {"fp16": entry} if entry else {}, {})


def write_mmengine(contents: Contents) -> Files:
    """A checkpoint for mmengine's Runner with AmpOptimWrapper."""
    states = contents.scaler_states
    return _with_hub(contents, to_mmengine(states, contents.rule) if states else {})


def write_mmengine_apex(contents: Contents) -> Files:
    """A checkpoint for mmengine's Runner with ApexOptimWrapper."""
    states = contents.scaler_states
    return _with_hub(contents, to_mmengine(states, apex=True) if states else {})


def _with_hub(contents: Contents, entry: dict[str, Any]) -> Files:
    hub = {"message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}}}
    return {**hub, **_write(contents, {}, {**_inside(contents.rest, "optimizer"), **entry})}


def _write(contents: Contents, meta: dict[str, Any], beside_optimizer: dict[str, Any]) -> Files:
    """What both have in common: ``beside_optimizer`` goes into the optimizer's entry."""
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
        **contents.halfpeak_entry,
    }


def _inside(rest: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The entries that were read from inside another one."""
    return {name.removeprefix(f"{key}."): value for name, value in rest.items() if name.startswith(f"{key}.")}


_MMENGINE: Final = ("mmengine", "mmengine_apex")

RUNNER = Format("runner", "a run of halfpeak.runner", read)
MMCV = Format(
    "mmcv",
    "a run of mmcv 1.x",
    read,
    Target("a checkpoint of mmcv 1.x and of halfpeak.runner", write_mmcv, family=("mmcv", "runner")),
)
MMENGINE = Format(
    "mmengine",
    "a run of mmengine",
    read,
    Target("a checkpoint of mmengine's Runner with AmpOptimWrapper", write_mmengine, family=_MMENGINE),
)
MMENGINE_APEX = Format(
    "mmengine_apex",
    "a run of mmengine with ApexOptimWrapper",
    read,
    Target(
        "the same with ApexOptimWrapper",
        write_mmengine_apex,
        scalers=None,
        family=_MMENGINE,
        keeps_rule=False,
    ),
)
