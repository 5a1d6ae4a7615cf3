"""convert: write a checkpoint in another format; entries that the new format cannot hold are refused unless allowed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from halfpeak.checkpoint.formats import TARGETS
from halfpeak.checkpoint.match_params import match_params
from halfpeak.checkpoint.open import Folder, find_files, read_files
from halfpeak.checkpoint.parts import FORMS, Parts, find_parts, is_empty, summary, with_steps
from halfpeak.checkpoint.plain import plain
from halfpeak.checkpoint.read import StrPath, Unknown, refusing, walk
from halfpeak.checkpoint.scaler_states import read_config, translate
from halfpeak.core.errors import CheckpointError, ConfigError, StateError
from halfpeak.core.schedule import ScalerState, require_scale
from halfpeak.core.short_repr import short_repr

ALL: Final = "all"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source: the format of the input.
        target: the format of the output.
        output: the file or folder that was written.
        kept: descriptions of the weights, optimizers, loss scales and masters in the output.
        dropped: descriptions of the entries that are not in the output, by name.
    """

    source: str
    target: str
    output: Path
    kept: tuple[str, ...]
    dropped: dict[str, str]


def convert(
    path: StrPath,
    form: str,
    output: StrPath,
    *,
    drop: Iterable[str] = (),
    scale: float | None = None,
    level: str | None = None,
) -> Conversion:
    """Write a checkpoint in another format; the input is not changed.

    Weights keep their names. If the file has float32 masters beside low-precision weights, the output has the masters'
    values, bit for bit, in place of the weights. Optimizer states and loss scales keep their values.

    Args:
        path: a file, or a folder of accelerate.
        form: the target format, a key of :data:`~halfpeak.checkpoint.formats.TARGETS`.
        output: the file (a folder for ``accelerate``) to write; it must not exist yet.
        drop: names of entries that may be lost, as the error lists them, or of parts to leave out; ``"all"``: any loss.
        scale: the initial loss scale, if the file has none.
        level: the opt level to write, if the file names none.

    Raises:
        StateError: an entry would be lost and ``drop`` does not name it, a part is missing, or parts do not fit.
        CheckpointError: the file is damaged or unreadable, or an entry to convert is not plain data.
        ConfigError: an argument is invalid. After each of these errors, nothing was written.

    >>> import tempfile, torch
    >>> from halfpeak.checkpoint import save
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder / "a.pt", {"model": {"w": torch.ones(2)}, "amp": {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}})
    >>> convert(folder / "a.pt", "weights", folder / "b.pt").kept
    ('1 tensor of weights',)
    """
    if form not in TARGETS:
        raise ConfigError(f"form={form!r} must be one of {', '.join(TARGETS)}")
    if isinstance(drop, str):
        raise ConfigError(f"drop={short_repr(drop)} must be a list of names; write drop=[{short_repr(drop)}]")
    drop, place = frozenset(drop), _check_output(output)
    target, files = find_files(path)
    tree = read_files(target, files).tree
    with refusing(target, "cannot be converted"):
        _replace_counters(tree)
        parts = find_parts(tree)
        left_out = tree.left_out if isinstance(tree, Folder) else {}
        lost = {name: f"cannot be read: {reason}" for name, reason in left_out.items()}
        lost |= _drop_parts(parts, drop)
        if not (parts.models or parts.optimizers or parts.scalers):
            raise StateError(
                f"the file ({FORMS[parts.form]}) has no model weights, optimizer state or loss scale to convert"
            )
        kept = _merge_masters(parts)
        parts.level = parts.level or level
        if form != "weights":
            lost |= _drop_objects(parts)
            _read_scales(parts, scale)
        if form not in ("apex", "weights"):
            parts.optimizers = {name: with_steps(one) for name, one in parts.optimizers.items()}
        texts = {name for name, value in parts.rest.items() if isinstance(value, (str, int))}
        before = _counts(parts)
        result = plain(TARGETS[form].take(parts), "the result")
        kept = [f"{number} {what}" for what, number in (before - _counts(parts)).items()] + kept
        left = _left(parts)
        lost |= left
        # Versions of libraries and the time of writing are lost without asking.
        free = {name for name in lost if name in texts and (name == "meta.time" or name.endswith("_version"))}
        if form == "weights":
            free |= left.keys() - parts.models.keys()
        _check_losses(lost, drop | free, form)
        TARGETS[form].store(place, result)
    return Conversion(parts.form, form, place, tuple(kept), lost)


def _check_output(output: StrPath) -> Path:
    place = Path(output)
    if os.path.lexists(place):
        raise ConfigError(f"output {str(place)!r} exists already; name one that does not")
    if not place.parent.is_dir():
        raise ConfigError(
            f"output {str(place)!r} cannot be written: there is no directory {str(place.parent)!r}"
        )
    return place


def _counts(parts: Parts) -> Counter[str]:
    """How much there is of each kind of part, by its name in the singular or plural."""
    counts = (sum(map(len, parts.models.values())), len(parts.optimizers), len(parts.scales))
    names = ("tensor{} of weights", "optimizer{}", "loss scale{}")
    return Counter({name.format("s" * (n != 1)): n for name, n in zip(names, counts, strict=True)})


def _check_losses(lost: dict[str, str], drop: frozenset[str], form: str) -> None:
    """Raise unless ``drop`` allows every loss.

    Raises:
        ConfigError: ``drop`` names an entry that is not lost.
        StateError: an entry is lost and ``drop`` does not name it.
    """
    refused = {} if ALL in drop else {name: what for name, what in lost.items() if name not in drop}
    unknown = sorted(drop - {ALL} - lost.keys())
    if unknown:
        names = ", ".join(map(repr, refused)) or "nothing"
        raise ConfigError(
            f"drop names {unknown}, which is no entry to leave out; what format {form!r} cannot hold is {names}"
        )
    if refused:
        listed = "; ".join(f"{name!r} ({what})" for name, what in refused.items())
        raise StateError(
            f"format {form!r} cannot hold {listed}; to leave it out, pass --drop {','.join(refused)} "
            f"(drop={list(refused)}), or --drop all"
        )


def _left(parts: Parts) -> dict[str, str]:
    """A description of everything that the format has not taken, by name."""
    lost = dict.fromkeys(parts.models, "weights") | dict.fromkeys(parts.optimizers, "optimizer state")
    lost |= dict.fromkeys(parts.scales, "a loss scale")
    lost |= {name: summary(one) for name, one in parts.rest.items()}
    lost |= {name: f"the counter {count}" for name, count in parts.counters.items() if count}
    rule = parts.rule
    if (rule.growth, rule.backoff, rule.interval) != (2.0, 0.5, 2000):
        lost["rule"] = f"growth {rule.growth:g}, backoff {rule.backoff:g}, interval {rule.interval}"
    if parts.has_window():
        lost["window"] = "gradients of an open accumulation window"
    if any(parts.engine.get("parameters", ())):
        lost["parameters"] = "parameters of no model, or masters whose weights were written past halfpeak"
    return lost


def _drop_parts(parts: Parts, drop: frozenset[str]) -> dict[str, str]:
    """Remove the entries that ``drop`` names; return their descriptions by name."""
    of_state: list[dict[str, Any]] = [parts.models, parts.optimizers, parts.masters, parts.scalers]
    tables = [*of_state, parts.counters, parts.rest]
    return {name: summary(table.pop(name)) for table in tables for name in drop & table.keys()}


def _merge_masters(parts: Parts) -> list[str]:
    """Replace weights by their masters; return a note per list of masters.

    Raises:
        StateError: the masters do not fit the weights, or there is not one model.
    """
    if parts.masters and len(parts.models) != 1:
        raise StateError(
            f"the file has masters in {', '.join(parts.masters)}, which belong to one model, and the models "
            f"{', '.join(parts.models) or '(none)'}; pass --drop with the masters, or with all models but one"
        )
    notes: list[str] = []
    for at, masters in parts.masters.items():
        ((where, weights),) = parts.models.items()
        fitting = match_params(weights, masters)
        parts.models[where] = {name: fitting.get(name, value) for name, value in weights.items()}
        notes.append(f"{len(fitting)} of them the float32 values of {at}")
    return notes


def _drop_objects(parts: Parts) -> dict[str, str]:
    """Remove entries that are empty or no plain data; return descriptions of the latter by name."""
    lost: dict[str, str] = {}
    for name, value in list(parts.rest.items()):
        try:
            parts.rest[name] = plain(value, name)
        except CheckpointError as error:
            kinds = sorted({one.name for one in walk(value) if isinstance(one, Unknown)})
            lost[name] = f"holds {', '.join(kinds)}" if kinds else error.reason
        if name in lost or is_empty(value):
            del parts.rest[name]
    return lost


def _read_scales(parts: Parts, scale: float | None) -> None:
    """Read every loss scale and their rule, or take the scale that the caller gives for a file without one."""
    if scale is not None and parts.scalers:
        raise ConfigError(
            f"scale={short_repr(scale)} is for a file without a loss scale, and this one has it in {', '.join(parts.scalers)}; "
            f"leave out --scale, or replace what the file has with --drop {','.join(parts.scalers)}"
        )
    if scale is not None:
        parts.scales["scale"] = ScalerState(scale=require_scale("scale", scale), clean=0, grace=1, stuck=0)
    for where, scaler in parts.scalers.items():
        states = translate(scaler)
        parts.scales |= {where if len(states) == 1 else f"{where}.{i}": one for i, one in enumerate(states)}
        parts.rule = read_config(scaler, parts.rule)


def _replace_counters(tree: Any) -> None:
    """Make each ``Counter``, which schedulers keep, a dict."""
    for holder in walk(tree):
        if isinstance(holder, (dict, list)):
            pairs = list(enumerate(holder) if isinstance(holder, list) else holder.items())
            for key, one in pairs:
                if type(one) is Counter:
                    holder[key] = dict(one)
