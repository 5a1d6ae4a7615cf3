"""Format and Target: the types of the format table (how a format is recognised and written, and what it can hold)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.file import save
from halfpeak.checkpoint.scaler_states import to_grad_scaler

Files = dict[str, Any]
"""What to write: the dict of a file, or for a folder the dict of each file by file name."""

SCRIPTS: Final = frozenset({"apex", "fp16_optimizer", "grad_scaler", "recipe"})
"""Formats whose keys a training script chose; a conversion keeps those keys, because the script looks for them."""


class Target(NamedTuple):
    """A format to convert to.

    Attributes:
        brief: what the format is, and which library reads it.
        write: returns the files' contents.
        models: maximum number of models; None for any number.
        optimizers: maximum number of optimizers; None for any number.
        scalers: maximum number of loss scalers; None for any number.
        family: formats whose ``rest`` entries are kept; None for a script's dict, which keeps those of scripts and
            engines.
        needs_scale: whether a loss scale is required.
        keeps_rule: whether the format holds growth factor, backoff factor and interval.
        keeps_counters: whether the format holds epochs and iterations.
        keeps_window: whether the format holds the gradients of an open accumulation window.
        weights_only: whether the format holds only weights; every other part is then left out without asking.
        by_name: whether optimizers may list parameters by name; if not, ``convert`` numbers them.
        store: writes the result of ``write`` to the disk.
    """

    brief: str
    write: Callable[[Contents], Files]
    models: int | None = 1
    optimizers: int | None = 1
    scalers: int | None = 1
    family: tuple[str, ...] | None = ()
    needs_scale: bool = False
    keeps_rule: bool = True
    keeps_counters: bool = True
    keeps_window: bool = False
    weights_only: bool = False
    by_name: bool = False
    store: Callable[[Path, Files], None] = save


class Format(NamedTuple):
    """One row of the table.

    Attributes:
        brief: what the format is.
        is_form: whether a dict with these contents has this format; None if the reader recognises the format itself.
        target: how to write the format; None if ``convert`` cannot write it.
    """

    name: str
    brief: str
    is_form: Callable[[Mapping[Any, Any], Contents], bool] | None = None
    target: Target | None = None


def grad_scaler_entry(key: str, contents: Contents) -> dict[str, Any]:
    """The first loss scale as torch's GradScaler saves it, under ``key``; empty if there is none."""
    states = contents.scaler_states
    return {key: to_grad_scaler(states[0], contents.rule)} if states else {}
