"""From the parts of a checkpoint to what a target is made of, with an account of what it has no place for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from halfpeak.checkpoint.foreign import ScalerState, read_config
from halfpeak.checkpoint.forms.pairing import pair
from halfpeak.checkpoint.forms.parts import Parts, walk
from halfpeak.checkpoint.forms.recognition import FORMS, SCRIPTS
from halfpeak.checkpoint.forms.targets import Material, Target
from halfpeak.checkpoint.plain import MAX_DEPTH, plain
from halfpeak.checkpoint.reading.records import Record
from halfpeak.core.errors import CheckpointError, ConfigError, StateError
from halfpeak.core.schedule import ScaleConfig, require_scale

ALL: Final = "all"


@dataclass
class Account:
    """What does not come along.

    Attributes:
        dropped: what was asked to be left out, or may be.
        losses: what has no place, and may not.
        notes: what else is worth knowing.
    """

    drop: frozenset[str]
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    losses: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    def lose(self, name: str, what: str) -> None:
        """Something has no place."""
        allowed = ALL in self.drop or name in self.drop
        (self.dropped if allowed else self.losses)[name] = what

    def settle(self, form: str) -> None:
        """Refuse what was not allowed.

        Raises:
            ConfigError: ``drop`` names what is not there.
            StateError: something would be lost unasked.
        """
        unknown = sorted(self.drop - {ALL} - self.dropped.keys())
        if unknown:
            names = ", ".join(map(repr, self.losses)) or "nothing"
            raise ConfigError(f"drop names {unknown}, which is not lost; what would be is {names}")
        if self.losses:
            listed = "; ".join(f"{name!r} ({what})" for name, what in self.losses.items())
            raise StateError(
                f"the form {form!r} has no place for {listed}. To go without, write --drop {','.join(self.losses)} "
                f"(drop={list(self.losses)}), or --drop all"
            )


def prepare(
    parts: Parts, target: Target, account: Account, scale: float | None, level: str | None
) -> Material:
    """What the target is to hold.

    Raises:
        StateError: masters do not fit the weights, or a loss scale is none.
        ConfigError: ``scale`` for a file that has one.
    """
    _drop_parts(parts, account)
    if not (parts.models or parts.optimizers or parts.scalers):
        raise StateError(
            f"the file ({FORMS[parts.form]}) holds nothing that could be converted{_deeper(parts)}"
        )
    models = _fit(_merge_masters(parts, account), target.models, account, "weights")
    if not models and target.models is not None:
        raise StateError("the file holds no weights, and this form cannot do without")
    material = Material(
        models=models,
        optimizers={},
        scalers=[],
        is_script=parts.form in SCRIPTS,
        rule=_rule(parts),
        level=parts.level or level,
        counters=parts.counters,
        epoch=parts.epoch,
        iteration=parts.iteration,
        engine_counters=parts.engine_counters,
        window=parts.window,
        rest={},
    )
    if not target.weights_only:
        material.optimizers.update(_fit(parts.optimizers, target.optimizers, account, "optimizer state"))
        material.scalers.extend(_scalers(parts, target, account, scale))
        if target.needs_scale and not material.scalers:
            raise StateError(
                "the file has no loss scale, and this form is made around one; write --scale 65536 (scale=65536.0)"
            )
        material.rest.update(_rest(parts, target, account))
        _note_losses(parts, material.rule, target, account)
    return material


def _deeper(parts: Parts) -> str:
    """Where to look in a dict of dicts."""
    names = [f"{name!r} ({summary(value)})" for name, value in parts.rest.items() if isinstance(value, dict)]
    return f"; if {' or '.join(names)} is the checkpoint, save it as a file of its own" if names else ""


def _drop_parts(parts: Parts, account: Account) -> None:
    """Leave out what was asked to be left out, wherever it could have gone."""
    tables: tuple[dict[str, Any], ...] = (
        parts.models,
        parts.optimizers,
        parts.masters,
        parts.rest,
        parts.counters,
    )
    for table in tables:
        for name in account.drop & table.keys():
            account.dropped[name] = summary(table.pop(name))
    for scaler in [one for one in parts.scalers if one.where in account.drop]:
        parts.scalers.remove(scaler)
        account.dropped[scaler.where] = "a loss scale"


def _merge_masters(parts: Parts, account: Account) -> dict[str, Mapping[str, Any]]:
    """The models, with the values of their masters."""
    models = dict(parts.models)
    if not parts.masters:
        return models
    if len(models) != 1:
        raise StateError(
            f"the file holds masters and {len(models)} models, and whose they are cannot be told; drop all models but one"
        )
    ((where, weights),) = models.items()
    for at, masters in parts.masters.items():
        found = pair(weights, masters)
        weights = {name: found.get(name, value) for name, value in weights.items()}
        account.notes.append(f"{len(found)} weights have the float32 values of {at}")
    return {where: weights}


def _scalers(parts: Parts, target: Target, account: Account, scale: float | None) -> list[ScalerState]:
    found = {
        scaler.where if len(several) == 1 else f"{scaler.where}.{number}": numbers
        for scaler in parts.scalers
        for several in [scaler.numbers()]
        for number, numbers in enumerate(several)
    }
    if scale is not None and found:
        raise ConfigError(f"scale={scale!r}: the file has a loss scale of its own, in {', '.join(found)}")
    if scale is not None:
        found["scale"] = ScalerState(scale=require_scale("scale", scale), clean=0, grace=1, stuck=0)
    return list(_fit(found, target.scalers, account, "a loss scale").values())


def _fit(things: Mapping[str, Any], most: int | None, account: Account, what: str) -> dict[str, Any]:
    """The first of them, as many as there is room for."""
    names = list(things)
    room = len(names) if most is None else most
    for name in names[room:]:
        account.lose(name, what)
    return {name: things[name] for name in names[:room]}


def _rest(parts: Parts, target: Target, account: Account) -> dict[str, Any]:
    """Entries that have a place in the target, as far as they are plain data."""
    kept: dict[str, Any] = {}
    for name, value in parts.rest.items():
        own_key = "." not in name and parts.form in {*SCRIPTS, "engine"}
        has_place = own_key if target.family is None else parts.form in target.family
        if is_empty(value):
            continue
        if not has_place:
            of_the_writer = name == "meta.time" or name.endswith("_version")
            (account.dropped.__setitem__ if of_the_writer else account.lose)(name, summary(value))
            continue
        try:
            kept[name] = plain(_as_dicts(value, {}), name)
        except CheckpointError as error:
            found = ", ".join(sorted({one.name for one in walk(value) if isinstance(one, Record)}))
            account.lose(name, f"holds {found}" if found else str(error).partition(";")[0])
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


def is_empty(value: object) -> bool:
    """Whether there is nothing in it but empty containers and None."""
    inside = (one for one in walk(value) if not isinstance(one, (Mapping, list, tuple)))
    return next(inside, None) is None


def _note_losses(parts: Parts, rule: ScaleConfig, target: Target, account: Account) -> None:
    if not target.keeps_rule and (rule.growth, rule.backoff, rule.interval) != (2.0, 0.5, 2000):
        account.lose("rule", f"growth {rule.growth:g}, backoff {rule.backoff:g}, interval {rule.interval}")
    if not target.keeps_counters:
        for name, value in parts.counters.items():
            if value:
                account.lose(name, f"the counter {value}")
    if parts.window is not None and not target.keeps_window:
        account.lose("window", "gradients of an open accumulation window")


def _rule(parts: Parts) -> ScaleConfig:
    """What the file says of growth and interval."""
    rule = ScaleConfig()
    for scaler in parts.scalers:
        if scaler.kind in ("grad_scaler", "mmcv"):
            rule = read_config(scaler.state, rule)
    return rule


def summary(value: object) -> str:
    """What something is, in a few words and without its content."""
    return next((words(value) for kind, words in _WORDS.items() if isinstance(value, kind)), _name(value))


def _name(value: object) -> str:
    name = getattr(value, "name", None)
    return f"an object of {name}" if isinstance(name, str) else f"a {type(value).__name__}"


_WORDS: Final[dict[type, Callable[[Any], str]]] = {
    Mapping: lambda value: f"a dict of {len(value)}",
    list: lambda value: f"a list of {len(value)}",
    tuple: lambda value: f"a tuple of {len(value)}",
    Tensor: lambda value: f"a {str(value.dtype).removeprefix('torch.')} tensor of {tuple(value.shape)}",
    str: lambda value: f"a str of length {len(value)}",
    bool: str,
    int: lambda value: f"the number {value}" if abs(value) < 10**18 else "a long integer",
    float: lambda value: f"the number {value:g}",
}
