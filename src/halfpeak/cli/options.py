"""The command line of ``halfpeak train``: every setting of a plan, plus --config and --resume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from halfpeak.insight.extras import needs
from halfpeak.recipes.catalog import DEFAULT, RECIPES
from halfpeak.recipes.plan import Plan

LATEST = "latest"


class Request(NamedTuple):
    """What was typed.

    Attributes:
        values: the settings that were given, as text.
        resume: where to continue; :data:`LATEST` for the newest run.
    """

    values: dict[str, Any]
    config: Path | None
    resume: str | None


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line. Values stay text: a plan checks them, wherever they come from.

    Raises:
        SystemExit: help was asked for (0), or an option is unknown (2).
        MissingExtraError: tyro is not installed.

    >>> parse(["pysource", "--steps", "5", "--resume"])
    Request(values={'recipe': 'pysource', 'steps': '5'}, config=None, resume='latest')
    """
    with needs("cli"):
        import tyro
    typed = tyro.cli(
        tyro.conf.OmitArgPrefixes[_options()],
        args=_with_resume_value(arguments),
        prog="halfpeak train",
        description=_description(),
    )
    given = {name: value for name, value in _flat(typed) if value is not None}
    config, resume = given.pop("config", None), given.pop("resume", None)
    return Request(given, None if config is None else Path(config), resume)


def _options() -> Any:
    """A dataclass of dataclasses for tyro, one per group of settings, made from the fields of a plan."""
    with needs("cli"):
        import tyro
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    hints = get_type_hints(Plan)
    for item in dataclasses.fields(Plan):
        is_recipe = item.name == "recipe"
        note = tyro.conf.arg(
            help=item.metadata["help"],
            help_behavior_hint=f"(default: {_default(item)})",
            metavar="[RECIPE]" if is_recipe else _metavar(hints[item.name]),
        )
        kind = Annotated[str | None, tyro.conf.Positional, note] if is_recipe else Annotated[str | None, note]
        groups.setdefault(item.metadata["group"], []).append(
            (item.name, kind, dataclasses.field(default=None))
        )
    extra = {
        "config": "A TOML, YAML or JSON file of settings; the command line wins over it.",
        "resume": "Continue a run bit for bit: its folder, or nothing for the newest run.",
    }
    for name, text in extra.items():
        note = tyro.conf.arg(
            help=text, help_behavior_hint="", metavar="PATH" if name == "config" else "[PATH]"
        )
        groups["run"].append((name, Annotated[str | None, note], dataclasses.field(default=None)))
    return dataclasses.make_dataclass("Train", [*groups.pop(""), *map(_group, groups, groups.values())])


def _group(title: str, members: list[tuple[str, Any, Any]]) -> tuple[str, Any, Any]:
    kind = dataclasses.make_dataclass(title.title().replace(" ", ""), members)
    return title.replace(" ", "_"), kind, dataclasses.field(default_factory=kind)


def _default(item: dataclasses.Field[Any]) -> str:
    """The default of a setting as help shows it; where recipes differ, each one's."""
    own = None if item.default is dataclasses.MISSING else item.default
    values = {name: spec.defaults.get(item.name, own) for name, spec in RECIPES.items()}
    if set(values.values()) == {None}:
        return "the level's own" if item.metadata["group"] == "precision" else "none"
    if len(set(values.values())) == 1:
        return _spell(values[DEFAULT])
    return ", ".join(f"{name} {_spell(value)}" for name, value in values.items() if value is not None)


def _spell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 and abs(exponent) > 10 else f"{value:g}"


def _metavar(kind: Any) -> str:
    """What a value looks like."""
    if get_origin(kind) in (Union, UnionType):
        return "|".join(_metavar(one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {int: "INT", float: "NUMBER", bool: "true|false", str: "NAME"}[kind]


def _flat(typed: Any) -> Iterator[tuple[str, Any]]:
    """Names and values, whatever group they are in."""
    for name, value in dataclasses.asdict(typed).items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _with_resume_value(arguments: Sequence[str]) -> list[str]:
    """``--resume`` without a path means the newest run."""
    result: list[str] = []
    for place, argument in enumerate(arguments):
        result.append(argument)
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        if argument == "--resume" and following.startswith("-"):
            result.append(LATEST)
    return result


def _description() -> str:
    recipes = "\n\n".join(f"{spec.name}: {spec.brief}" for spec in RECIPES.values())
    return f"Train a real model in mixed precision, on whatever device is there.\n\n{recipes}"
