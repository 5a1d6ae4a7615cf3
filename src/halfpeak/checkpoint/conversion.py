"""convert: a checkpoint of one form written in another; what has no place there is named, and never lost unasked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from halfpeak.checkpoint.canonical import Contents, FoundScaler, is_empty, numbered, summary, walk
from halfpeak.checkpoint.file import StrPath
from halfpeak.checkpoint.formats import FORMS, SCRIPTS, TARGETS, Target, read_contents
from halfpeak.checkpoint.match_params import match_params
from halfpeak.checkpoint.open import Opened, open_any
from halfpeak.checkpoint.plain import MAX_DEPTH, plain
from halfpeak.checkpoint.safe_unpickle import Record
from halfpeak.checkpoint.scaler_states import read_config
from halfpeak.core.errors import CheckpointError, ConfigError, StateError
from halfpeak.core.schedule import ScaleConfig, ScalerState, require_scale
from halfpeak.core.short_repr import short_repr

ALL: Final = "all"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source: the form of the input.
        target: the form of the output.
        output: the file or folder that was written.
        kept: what is in the output, in words.
        dropped: what is not, in words, by its name.
        notes: what else is worth knowing.
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
    """Write a checkpoint in another form; the input is not changed.

    Weights keep their names. Where the file has float32 masters beside low weights, they take the place of these, bit
    for bit. Optimizer states and loss scales are carried over as they stand.

    Args:
        path: a file, or a folder of accelerate or of ``torch.distributed.checkpoint``.
        form: a key of :data:`~halfpeak.checkpoint.formats.TARGETS`.
        output: a file, for ``accelerate`` and ``dcp`` a folder, that does not exist yet.
        drop: names of what may be lost, as the refusal lists them, or of parts to leave out; ``"all"`` allows every loss.
        scale: the loss scale to begin with, where the file has none.
        level: the opt level to note, where the file names none.

    Raises:
        StateError: something has no place in the target and ``drop`` does not name it, or does not fit together.
        CheckpointError: the file is damaged, unreadable, or not plain data where it matters.
        ConfigError: an argument makes no sense. In every case nothing was written.

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
    target, losses, place = TARGETS[form], Losses(frozenset(drop)), _check_output(output)
    opened = open_any(path)
    if opened.unread or opened.damaged:
        raise CheckpointError(f"{opened.path} ({opened.container}) cannot be converted: {opened.unread}")
    contents = read_contents(opened.tree, is_folder=opened.is_folder)
    made = prepare(contents, target, losses, scale, level)
    losses.raise_unless_allowed(form)
    files = _as_plain(target.write(made), opened)
    target.store(place, files)
    return Conversion(
        contents.form, form, place, _describe(made, target), losses.dropped, tuple(losses.notes)
    )


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
        found = str(error).partition(";")[0]
        raise CheckpointError(
            f"{found}: {opened.path} is not plain data. Leave that out with drop, or load the file where its classes are and "
            "you trust it, and save dicts, lists, numbers and tensors in their place"
        ) from None


def _describe(made: Contents, target: Target) -> tuple[str, ...]:
    tensors = sum(isinstance(value, Tensor) for model in made.models.values() for value in model.values())
    counted = [(tensors, "tensor", " of weights")]
    if not target.weights_only:
        counted += [(len(made.optimizers), "optimizer", ""), (len(made.scalers), "loss scale", "")]
    return tuple(f"{count} {what}{'s' * (count != 1)}{of}" for count, what, of in counted if count)


@dataclass
class Losses:
    """What a conversion leaves out.

    Attributes:
        dropped: what was asked to be left out, or may be.
        refused: what has no place, and may not.
        notes: what else is worth knowing.
    """

    drop: frozenset[str]
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    def lose(self, name: str, what: str) -> None:
        """Something has no place."""
        allowed = ALL in self.drop or name in self.drop
        (self.dropped if allowed else self.refused)[name] = what

    def raise_unless_allowed(self, form: str) -> None:
        """Refuse what was not allowed.

        Raises:
            ConfigError: ``drop`` names what is not there.
            StateError: something would be lost unasked.
        """
        unknown = sorted(self.drop - {ALL} - self.dropped.keys())
        if unknown:
            names = ", ".join(map(repr, self.refused)) or "nothing"
            raise ConfigError(f"drop names {unknown}, which is not lost; what would be is {names}")
        if self.refused:
            listed = "; ".join(f"{name!r} ({what})" for name, what in self.refused.items())
            raise StateError(
                f"the form {form!r} has no place for {listed}. To go without, write --drop {','.join(self.refused)} "
                f"(drop={list(self.refused)}), or --drop all"
            )


def prepare(
    contents: Contents, target: Target, losses: Losses, scale: float | None, level: str | None
) -> Contents:
    """The contents that the target is to hold.

    Raises:
        StateError: masters do not fit the weights, or a loss scale is none.
        ConfigError: ``scale`` for a file that has one.
    """
    _drop_parts(contents, losses)
    if not (contents.models or contents.optimizers or contents.scalers):
        raise StateError(
            f"the file ({FORMS[contents.form]}) holds nothing that could be converted{_deeper(contents)}"
        )
    models = _fit(_merge_masters(contents, losses), target.models, losses, "weights")
    if not models and target.models is not None:
        raise StateError("the file holds no weights, and this form cannot do without")
    made = Contents(
        form=contents.form,
        models=models,
        level=contents.level or level,
        counters=contents.counters,
        engine_counters=contents.engine_counters,
        window=contents.window,
        buffers=contents.buffers,
        rule=_read_rule(contents),
    )
    if not target.weights_only:
        optimizers = _fit(contents.optimizers, target.optimizers, losses, "optimizer state")
        made.optimizers = (
            optimizers if target.by_name else {where: numbered(state) for where, state in optimizers.items()}
        )
        made.scalers = [
            FoundScaler(where, "halfpeak", state)
            for where, state in _scalers(contents, target, losses, scale).items()
        ]
        if target.needs_scale and not made.scalers:
            raise StateError(
                "the file has no loss scale, and this form is made around one; write --scale 65536 (scale=65536.0)"
            )
        made.rest = _rest(contents, target, losses)
        _note_losses(contents, made.rule, target, losses)
    return made


def _read_rule(contents: Contents) -> ScaleConfig:
    """What the file says of growth and interval."""
    rule = ScaleConfig()
    for scaler in contents.scalers:
        if scaler.kind in ("grad_scaler", "mmcv"):
            rule = read_config(scaler.state, rule)
    return rule


def _deeper(contents: Contents) -> str:
    """Where to look in a dict of dicts."""
    names = [
        f"{name!r} ({summary(value)})" for name, value in contents.rest.items() if isinstance(value, dict)
    ]
    return f"; if {' or '.join(names)} is the checkpoint, save it as a file of its own" if names else ""


def _drop_parts(contents: Contents, losses: Losses) -> None:
    """Leave out what was asked to be left out, wherever it could have gone."""
    tables: tuple[dict[str, Any], ...] = (
        contents.models,
        contents.optimizers,
        contents.masters,
        contents.rest,
        contents.counters,
    )
    for table in tables:
        for name in losses.drop & table.keys():
            losses.dropped[name] = summary(table.pop(name))
    for scaler in [one for one in contents.scalers if one.where in losses.drop]:
        contents.scalers.remove(scaler)
        losses.dropped[scaler.where] = "a loss scale"


def _merge_masters(contents: Contents, losses: Losses) -> dict[str, Mapping[str, Any]]:
    """The models, with the values of their masters."""
    models = dict(contents.models)
    if not contents.masters:
        return models
    if len(models) != 1:
        raise StateError(
            f"the file holds masters and {len(models)} models, and whose they are cannot be told; drop all models but one"
        )
    ((where, weights),) = models.items()
    for at, masters in contents.masters.items():
        found = match_params(weights, masters)
        weights = {name: found.get(name, value) for name, value in weights.items()}
        losses.notes.append(f"{len(found)} weights have the float32 values of {at}")
    return {where: weights}


def _scalers(
    contents: Contents, target: Target, losses: Losses, scale: float | None
) -> dict[str, ScalerState]:
    found = {where: state for scaler in contents.scalers for where, state in scaler.states().items()}
    if scale is not None and found:
        raise ConfigError(
            f"scale={short_repr(scale)}: the file has a loss scale of its own, in {', '.join(found)}"
        )
    if scale is not None:
        found["scale"] = ScalerState(scale=require_scale("scale", scale), clean=0, grace=1, stuck=0)
    return _fit(found, target.scalers, losses, "a loss scale")


def _fit(things: Mapping[str, Any], most: int | None, losses: Losses, what: str) -> dict[str, Any]:
    """The first of them, as many as there is room for."""
    names = list(things)
    room = len(names) if most is None else most
    for name in names[room:]:
        losses.lose(name, what)
    return {name: things[name] for name in names[:room]}


def _rest(contents: Contents, target: Target, losses: Losses) -> dict[str, Any]:
    """Entries that have a place in the target, as far as they are plain data."""
    kept: dict[str, Any] = {}
    for name, value in contents.rest.items():
        own_key = "." not in name and contents.form in {*SCRIPTS, "engine"}
        has_place = own_key if target.family is None else contents.form in target.family
        if is_empty(value):
            continue
        if not has_place:
            of_the_writer = name == "meta.time" or name.endswith("_version")
            (losses.dropped.__setitem__ if of_the_writer else losses.lose)(name, summary(value))
            continue
        try:
            kept[name] = plain(_as_dicts(value, {}), name)
        except CheckpointError as error:
            found = ", ".join(sorted({one.name for one in walk(value) if isinstance(one, Record)}))
            losses.lose(name, f"holds {found}" if found else str(error).partition(";")[0])
    return kept


def _as_dicts(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    """Counters, as schedulers keep them, as the dicts that they also are."""
    kind = type(value)
    if id(value) in seen or depth > MAX_DEPTH or kind not in (dict, Counter, list, tuple):
        return seen.get(id(value), value)
    seen[id(value)] = value  # for what refers to itself, which plain() refuses
    if kind in (list, tuple):
        seen[id(value)] = kind(_as_dicts(one, seen, depth + 1) for one in value)
    else:
        seen[id(value)] = {key: _as_dicts(one, seen, depth + 1) for key, one in value.items()}
    return seen[id(value)]


def _note_losses(contents: Contents, rule: ScaleConfig, target: Target, losses: Losses) -> None:
    if not target.keeps_rule and (rule.growth, rule.backoff, rule.interval) != (2.0, 0.5, 2000):
        losses.lose("rule", f"growth {rule.growth:g}, backoff {rule.backoff:g}, interval {rule.interval}")
    if not target.keeps_counters:
        for name, value in contents.counters.items():
            if value:
                losses.lose(name, f"the counter {value}")
    if contents.window is not None and not target.keeps_window:
        losses.lose("window", "gradients of an open accumulation window")
