"""convert: write a checkpoint in another format; entries that the new format cannot hold are refused unless allowed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from halfpeak.checkpoint.canonical import EPOCHS, Contents, FoundScaler, is_empty, numbered, summary, walk
from halfpeak.checkpoint.file import StrPath
from halfpeak.checkpoint.formats import FORMS, SCRIPTS, TARGETS, Target, read_contents
from halfpeak.checkpoint.match_params import match_params
from halfpeak.checkpoint.open import Opened, open_any
from halfpeak.checkpoint.plain import MAX_DEPTH, plain
from halfpeak.checkpoint.safe_unpickle import Record
from halfpeak.checkpoint.scaler_states import read_config
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
        kept: descriptions of the weights, optimizers and loss scales in the output.
        dropped: descriptions of the entries that are not in the output, by name.
        notes: how many weights got the values of which masters.
    """

    source: str
    target: str
    output: Path
    kept: tuple[str, ...]
    dropped: dict[str, str]
    notes: tuple[str, ...]


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
        path: a file, or a folder of accelerate or of ``torch.distributed.checkpoint``.
        form: the target format, a key of :data:`~halfpeak.checkpoint.formats.TARGETS`.
        output: the file (a folder for ``accelerate`` and ``dcp``) to write; it must not exist yet.
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
    drop, target, place = frozenset(drop), TARGETS[form], _check_output(output)
    opened = open_any(path)
    if opened.unread:
        raise CheckpointError(f"{opened.path} ({opened.container}) cannot be converted: {opened.unread}")
    contents = read_contents(opened.tree)
    lost = {name: f"cannot be read: {reason}" for name, reason in opened.left_out.items()}
    lost |= _drop_parts(contents, drop)
    if not (contents.models or contents.optimizers or contents.scalers):
        raise StateError(
            f"the file ({FORMS[contents.form]}) has no model weights, optimizer state or loss scale to convert"
            f"{_deeper(contents)}"
        )
    notes = _merge_masters(contents)
    contents.level = contents.level or level
    # Versions of libraries and the time of writing are dropped without asking.
    free = {
        name
        for name, value in contents.rest.items()
        if isinstance(value, (str, int)) and (name == "meta.time" or name.endswith("_version"))
    }
    lost |= _fit(contents, form, scale)
    _check_losses(lost, drop, free, form)
    target.store(place, _as_plain(target.write(contents), opened))
    return Conversion(contents.form, form, place, _describe(contents, target), lost, tuple(notes))


def _check_output(output: StrPath) -> Path:
    place = Path(output)
    if os.path.lexists(place):
        raise ConfigError(f"output {str(place)!r} exists already; name one that does not")
    if not place.parent.is_dir():
        raise ConfigError(
            f"output {str(place)!r} cannot be written: there is no directory {str(place.parent)!r}"
        )
    return place


def _as_plain(files: dict[str, Any], opened: Opened) -> dict[str, Any]:
    try:
        return plain(files, "the result")
    except CheckpointError as error:
        if not opened.symbols:
            raise
        raise CheckpointError(
            f"{error.reason}, and {opened.path} holds more than plain data; leave the entry out with --drop, or load the file "
            "in the program that wrote it, and save dicts, lists, numbers and tensors in place of objects"
        ) from None


def _describe(contents: Contents, target: Target) -> tuple[str, ...]:
    counted = [(len(contents.weights), "tensor", " of weights")]
    if not target.weights_only:
        counted += [(len(contents.optimizers), "optimizer", ""), (len(contents.scalers), "loss scale", "")]
    return tuple(f"{count} {what}{'s' * (count != 1)}{of}" for count, what, of in counted if count)


def _check_losses(lost: Mapping[str, str], drop: frozenset[str], free: Set[str], form: str) -> None:
    """Raise unless ``drop`` allows every loss.

    Args:
        free: names that may be lost without being in ``drop``.

    Raises:
        ConfigError: ``drop`` names an entry that is not lost.
        StateError: an entry is lost and ``drop`` does not name it.
    """
    refused = {name: what for name, what in lost.items() if not (drop & {ALL, name} or name in free)}
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


def _deeper(contents: Contents) -> str:
    """A hint for the error message: the dicts in the file, one of which may be the checkpoint."""
    names = [
        f"{name!r} ({summary(value)})" for name, value in contents.rest.items() if isinstance(value, dict)
    ]
    return f"; if {' or '.join(names)} is the checkpoint, save it as a file of its own" if names else ""


def _drop_parts(contents: Contents, drop: frozenset[str]) -> dict[str, str]:
    """Remove the entries that ``drop`` names; return their descriptions by name."""
    tables: tuple[dict[str, Any], ...] = (
        contents.models,
        contents.optimizers,
        contents.masters,
        contents.rest,
        contents.counters,
    )
    lost = {name: summary(table.pop(name)) for table in tables for name in drop & table.keys()}
    lost |= {scaler.where: "a loss scale" for scaler in contents.scalers if scaler.where in drop}
    contents.scalers = [scaler for scaler in contents.scalers if scaler.where not in drop]
    return lost


def _merge_masters(contents: Contents) -> list[str]:
    """Replace weights by their masters; return a note per list of masters.

    Raises:
        StateError: the masters do not fit the weights, or there are several models.
    """
    if not contents.masters:
        return []
    lists, models = ", ".join(contents.masters), ", ".join(contents.models)
    if not models:
        raise StateError(
            f"the file has masters in {lists}, and no weights to match them with; to leave the masters out, pass --drop "
            f"{','.join(contents.masters)}"
        )
    if len(contents.models) > 1:
        raise StateError(
            f"the file has {len(contents.models)} models, and it is unclear which of them the masters in {lists} belong to; "
            f"pass --drop with all models but one of {models}"
        )
    ((where, weights),) = contents.models.items()
    notes: list[str] = []
    for at, masters in contents.masters.items():
        found = match_params(weights, masters)
        weights = {name: found.get(name, value) for name, value in weights.items()}
        notes.append(f"{len(found)} weights have the float32 values of {at}")
    contents.models[where] = weights
    return notes


def _fit(contents: Contents, form: str, scale: float | None) -> dict[str, str]:
    """Reduce the contents to what the format ``form`` can hold, as it holds it; return descriptions of the losses by name.

    Raises:
        StateError: an entry that the target needs is missing, or a loss scale is invalid.
        ConfigError: ``scale`` is given, and the file has a loss scale.
    """
    target = TARGETS[form]
    lost = _take_from(contents.models, target.models, "weights")
    if not contents.models and target.models is not None:
        raise StateError(f"format {form!r} needs model weights, and the file has none")
    if target.weights_only:
        return lost
    lost |= _take_from(contents.optimizers, target.optimizers, "optimizer state")
    if not target.by_name:
        contents.optimizers = {where: numbered(state) for where, state in contents.optimizers.items()}
    for scaler in contents.scalers:
        contents.rule = read_config(scaler.state, contents.rule)
    scalers = _scalers(contents, scale)
    lost |= _take_from(scalers, target.scalers, "a loss scale")
    contents.scalers = [FoundScaler(where, "halfpeak", state) for where, state in scalers.items()]
    if target.needs_scale and not scalers:
        raise StateError(
            f"format {form!r} needs a loss scale, and the file has none; pass --scale 65536 (scale=65536.0)"
        )
    lost |= _fit_rest(contents, target)
    lost |= _overwritten(contents, target)
    rule = contents.rule
    if not target.keeps_rule and (rule.growth, rule.backoff, rule.interval) != (2.0, 0.5, 2000):
        lost["rule"] = f"growth {rule.growth:g}, backoff {rule.backoff:g}, interval {rule.interval}"
    lost |= {
        name: f"the counter {value}"
        for name, value in contents.counters.items()
        if value and not _keeps_counter(contents, target, name, value)
    }
    if contents.window is not None and not target.keeps_window:
        lost["window"] = "gradients of an open accumulation window"
    return lost


def _keeps_counter(contents: Contents, target: Target, name: str, value: int) -> bool:
    """Whether the target holds a counter. A library's format has one number of epochs and one of iterations."""
    in_library = contents.epoch if name in EPOCHS else contents.iteration
    return target.keeps_counters and (target.family is None or value == in_library)


def _overwritten(contents: Contents, target: Target) -> dict[str, str]:
    """The losses by name among the entries of ``rest`` that the target can hold: it writes something else in their place."""
    marks = {name: object() for name in contents.rest}
    if not marks:
        return {}
    found = {id(one) for one in walk(target.write(replace(contents, rest=marks)))}
    return {name: summary(contents.rest[name]) for name, mark in marks.items() if id(mark) not in found}


def _take_from(things: dict[str, Any], most: int | None, what: str) -> dict[str, str]:
    """Keep the first ``most`` entries (None: all); return the names of the removed ones."""
    extra = [] if most is None else list(things)[most:]
    for name in extra:
        del things[name]
    return dict.fromkeys(extra, what)


def _scalers(contents: Contents, scale: float | None) -> dict[str, ScalerState]:
    found = {where: state for scaler in contents.scalers for where, state in scaler.states().items()}
    if scale is not None and found:
        places = [scaler.where for scaler in contents.scalers]
        raise ConfigError(
            f"scale={short_repr(scale)} is for a file without a loss scale, and this one has it in {', '.join(places)}; "
            f"leave out --scale, or replace what the file has with --drop {','.join(places)}"
        )
    if scale is not None:
        found["scale"] = ScalerState(scale=require_scale("scale", scale), clean=0, grace=1, stuck=0)
    return found


def _fit_rest(contents: Contents, target: Target) -> dict[str, str]:
    """Keep the entries of ``rest`` that the target can hold and that are plain data; return the losses by name."""
    kept: dict[str, Any] = {}
    lost: dict[str, str] = {}
    in_family = target.family is not None and contents.form in target.family
    of_a_script = target.family is None and contents.form in {*SCRIPTS, "engine"}
    for name, value in contents.rest.items():
        if is_empty(value):
            continue
        if not (in_family or (of_a_script and "." not in name)):
            lost[name] = summary(value)
            continue
        try:
            kept[name] = plain(_as_dicts(value, {}), name)
        except CheckpointError as error:
            found = ", ".join(sorted({one.name for one in walk(value) if isinstance(one, Record)}))
            lost[name] = f"holds {found}" if found else error.reason
    contents.rest = kept
    return lost


def _as_dicts(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    """A copy of a tree with each ``Counter``, which schedulers keep, as a dict."""
    kind = type(value)
    if id(value) in seen or depth > MAX_DEPTH or kind not in (dict, Counter, list, tuple):
        return seen.get(id(value), value)
    seen[id(value)] = value  # ends the recursion in a value that contains itself; plain() refuses it
    if kind in (list, tuple):
        seen[id(value)] = kind(_as_dicts(one, seen, depth + 1) for one in value)
    else:
        seen[id(value)] = {key: _as_dicts(one, seen, depth + 1) for key, one in value.items()}
    return seen[id(value)]
