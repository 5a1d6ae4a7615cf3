"""What the table of formats has a row of: a name, how it is told and written, and what a writer has a place for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.file import save
from halfpeak.checkpoint.scaler_states import to_grad_scaler

Files = dict[str, Any]
"""What to write: a dict, and for a folder one by file name."""

SCRIPTS: Final = frozenset({"apex", "fp16_optimizer", "grad_scaler", "recipe"})
"""Formats whose keys a script made up, and looks for again."""


class Target(NamedTuple):
    """A format to convert to.

    Attributes:
        brief: what it is, and who reads it.
        write: makes it.
        models: how many it holds at most; None for any number.
        optimizers: likewise.
        scalers: likewise.
        family: formats whose other entries have their places in it; None for a script's own dict, which takes those of
            a script.
        needs_scale: whether it is made around a loss scale.
        keeps_rule: whether growth factor and interval have a place.
        keeps_counters: whether epochs and iterations have.
        keeps_window: whether gradients of an open accumulation window have.
        weights_only: whether nothing but weights is asked for.
        by_name: whether optimizers may list parameters by name; elsewhere they are numbered.
        store: puts what ``write`` has made on the disk.
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
        brief: what it is.
        is_form: whether a dict with these contents is of this form; None where reading tells it.
        target: how it is written, if it can be.
    """

    name: str
    brief: str
    is_form: Callable[[Mapping[Any, Any], Contents], bool] | None = None
    target: Target | None = None


def grad_scaler_entry(key: str, contents: Contents) -> dict[str, Any]:
    """The first loss scale as torch's GradScaler saves it, under a key; empty where there is none."""
    states = contents.scaler_states
    return {key: to_grad_scaler(states[0], contents.rule)} if states else {}
