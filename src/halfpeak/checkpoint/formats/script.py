"""A dict that somebody's training script made up, with the scaler of apex.amp, of torch.amp, of an FP16_Optimizer, or none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from halfpeak.checkpoint.canonical import HALFPEAK_KEY, Contents, scaler_kind
from halfpeak.checkpoint.formats.format import SCRIPTS, Files, Format, Target, add_entries, grad_scaler_entry
from halfpeak.checkpoint.scaler_states import to_apex

_EMA: Final = re.compile(r"(^|[_.])(ema|teacher|averaged?)([_.]|$)|ema$|^ema", re.IGNORECASE)


def read(tree: Any) -> Contents | None:
    """The contents of a dict: what each entry is shows in its content. Averaged weights stay in the rest."""
    if not isinstance(tree, Mapping):
        return None
    contents = Contents()

    def add(key: str, value: Any) -> bool:
        if key == HALFPEAK_KEY or contents.add_counter(key, value):
            return True
        if contents.add_engine(value):
            contents.form = "engine"
            return True
        return _EMA.search(key) is None and (
            contents.add_models(key, value)
            or contents.add_optimizers(key, value)
            or contents.add_scaler(key, value)
            or contents.add_masters(key, value)
        )

    add_entries(contents, tree.items(), add)
    contents.add_halfpeak_entry(tree.get(HALFPEAK_KEY))
    if contents.form == "unknown" and (contents.models or contents.optimizers):
        kinds = {scaler_kind(value) for value in tree.values()}
        known = next((kind for kind in ("apex", "grad_scaler") if kind in kinds), None)
        contents.form = known or ("grad_scaler" if contents.scalers else "recipe")
    return contents


def write_apex(contents: Contents) -> Files:
    """A dict for a script with apex.amp or halfpeak.amp."""
    states = contents.scaler_states
    return {**_write(contents), **({"amp": to_apex(states)} if states else {})}


def write_grad_scaler(contents: Contents) -> Files:
    """A dict for a script with ``torch.amp.GradScaler``."""
    return {**_write(contents), **grad_scaler_entry("scaler", contents)}


def _write(contents: Contents) -> Files:
    keep = contents.form in SCRIPTS
    models = _under_keys(contents.models, "model", keep=keep)
    optimizers = _under_keys(contents.optimizers, "optimizer", keep=keep)
    return {**contents.rest, **contents.counters, **models, **optimizers, **contents.halfpeak_entry}


def _under_keys(things: Mapping[str, Any], key: str, *, keep: bool) -> dict[str, Any]:
    """Under the keys that they had in the file of a script, else under one that scripts use."""
    if not things or (keep and not any(set(name) & set(".[(") for name in things)):
        return dict(things)
    return {key: next(iter(things.values())) if len(things) == 1 else list(things.values())}


APEX = Format(
    "apex",
    "a script's dict with amp.state_dict(), of apex.amp or halfpeak.amp",
    read,
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
    read,
    Target(
        "model, optimizer and scaler, for torch.amp",
        write_grad_scaler,
        models=None,
        optimizers=None,
        family=None,
        needs_scale=True,
    ),
)
FP16_OPTIMIZER = Format("fp16_optimizer", "a script's dict with the state of an FP16_Optimizer", read)
RECIPE = Format("recipe", "a script's dict without a loss scaler", read)
