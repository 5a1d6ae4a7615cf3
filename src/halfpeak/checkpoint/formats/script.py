"""A training script's own dict, with the loss scaler of apex.amp, torch.amp or FP16_Optimizer, or without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.formats.format import SCRIPTS, Files, Format, Target, grad_scaler_entry
from halfpeak.checkpoint.scaler_states import to_apex


def is_script(tree: Mapping[Any, Any], contents: Contents) -> bool:
    """Whether a dict holds weights or an optimizer, and no other format was recognised."""
    return contents.form == "unknown" and bool(contents.models or contents.optimizers)


def _is_apex(tree: Mapping[Any, Any], contents: Contents) -> bool:
    return is_script(tree, contents) and any(scaler.kind == "apex" for scaler in contents.scalers)


def _is_grad_scaler(tree: Mapping[Any, Any], contents: Contents) -> bool:
    return is_script(tree, contents) and bool(contents.scalers)


def write_apex(contents: Contents) -> Files:
    """A dict for a script that uses apex.amp or halfpeak.amp."""
    states = contents.scaler_states
    return {**_write(contents), **({"amp": to_apex(states)} if states else {})}


def write_grad_scaler(contents: Contents) -> Files:
    """A dict for a script that uses ``torch.amp.GradScaler``."""
    return {**_write(contents), **grad_scaler_entry("scaler", contents)}


def _write(contents: Contents) -> Files:
    keep = contents.form in SCRIPTS
    models = _under_keys(contents.models, "model", keep=keep)
    optimizers = _under_keys(contents.optimizers, "optimizer", keep=keep)
    return {**contents.rest, **contents.counters, **models, **optimizers, **contents.halfpeak_entry()}


def _under_keys(things: Mapping[str, Any], key: str, *, keep: bool) -> dict[str, Any]:
    """Entries under their old keys if ``keep`` and these are top-level keys, else under the usual ``key``."""
    if not things or (keep and not any(set(name) & set(".[(") for name in things)):
        return dict(things)
    return {key: next(iter(things.values())) if len(things) == 1 else list(things.values())}


APEX = Format(
    "apex",
    "a script's dict with amp.state_dict(), of apex.amp or halfpeak.amp",
    _is_apex,
    Target(
        "model, optimizer and amp, for apex.amp and halfpeak.amp",
        write_apex,
        models=None,
        optimizers=None,
        scalers=None,
        family=None,
        needs_scale=True,
        keeps_rule=False,
    ),
)
GRAD_SCALER = Format(
    "grad_scaler",
    "a script's dict with the state of a GradScaler",
    _is_grad_scaler,
    Target(
        "model, optimizer and scaler, for torch.amp",
        write_grad_scaler,
        models=None,
        optimizers=None,
        family=None,
        needs_scale=True,
    ),
)
FP16_OPTIMIZER = Format("fp16_optimizer", "a script's dict with the state of an FP16_Optimizer")
RECIPE = Format("recipe", "a script's dict without a loss scaler", is_script)
