"""Where the settings of ``halfpeak train`` come from: its command line, and a TOML, YAML or JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.recipes.settings import (
    COMMON,
    DEFAULT_RECIPE,
    RECIPES,
    REMOVED,
    TrainConfig,
    members_of,
    parse_values,
    refuse_removed,
)

LATEST = "latest"
AUTO = "auto"

_ALONE: Mapping[str, str] = MappingProxyType({"--resume": LATEST, "--diagnose": "true"})
"""What an option means that has no value."""

_EXAMPLES = """\
For example:

halfpeak train --level O2 --steps 200 --clip-norm 1

halfpeak train pysource --level O5 --size small

halfpeak train --resume"""


class Request(NamedTuple):
    """What was typed.

    Attributes:
        values: the settings that were given, as text.
        resume: where to continue; :data:`LATEST` for the newest run, :data:`AUTO` for that of ``--output`` if there is one.
    """

    values: dict[str, Any]
    config: Path | None
    resume: str | None


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line. Values stay text: :func:`parse_values` reads them, wherever they come from.

    Raises:
        SystemExit: help was asked for (0), or an option is unknown (2).
        ConfigError: an option of an earlier version; the message names the script that shows the same.
        MissingExtraError: tyro is not installed.

    >>> parse(["pysource", "--steps", "5", "--resume"])
    Request(values={'recipe': 'pysource', 'steps': '5'}, config=None, resume='latest')
    """
    for name in REMOVED:
        if any(argument.partition("=")[0] == f"--{name}" for argument in arguments):
            refuse_removed(name)
    with needs_extra():
        import tyro
    wants_all = "--help-all" in arguments
    # tyro does not parse what it does not show, so options are left out where nothing is parsed: in the short help.
    is_short = not wants_all and any(argument in ("-h", "--help") for argument in arguments)
    typed = tyro.cli(
        tyro.conf.OmitArgPrefixes[_options(common_only=is_short)],
        args=["--help"] if wants_all else _with_values(arguments),
        prog="halfpeak train",
        description=_description(common_only=is_short),
    )
    given = {name: value for name, value in _flat(typed) if value is not None}
    config, resume = given.pop("config", None), given.pop("resume", None)
    return Request(given, None if config is None else Path(config), resume)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a file, under their own types.

    Raises:
        ConfigError: the file is missing, of another kind, broken, or holds something else than settings.
        MissingExtraError: the file is YAML and pyyaml is not installed.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"config {str(path)!r} must end in {', '.join(readers)}")
    try:
        values = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config {str(path)!r} is not valid {path.suffix[1:].upper()}: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config {str(path)!r} must be a table of settings, such as level = 'O2'")
    try:
        return parse_values({str(name): value for name, value in values.items()})
    except ConfigError as error:
        raise type(error)(f"config {str(path)!r}: {error}") from None


def _options(*, common_only: bool) -> Any:
    """A dataclass of dataclasses for tyro, one per group of settings, made from the fields of a configuration.

    Args:
        common_only: leave out what only ``--help-all`` shows.
    """
    with needs_extra():
        import tyro
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    hints = get_type_hints(TrainConfig)
    for item in dataclasses.fields(TrainConfig):
        is_recipe = item.name == "recipe"
        note = tyro.conf.arg(
            help=item.metadata["help"],
            help_behavior_hint=f"(default: {_default(item)})",
            metavar="[RECIPE]" if is_recipe else _metavar(hints[item.name]),
        )
        kind: Any = Annotated[str | None, note]
        if is_recipe:
            kind = tyro.conf.Positional[kind]
        elif common_only and item.name not in COMMON:
            kind = tyro.conf.Suppress[kind]
        groups.setdefault(item.metadata["group"], []).append(
            (item.name, kind, dataclasses.field(default=None))
        )
    extra = {
        "config": "A TOML, YAML or JSON file of settings; the command line wins over it.",
        "resume": "Continue a run bit for bit: its folder, nothing for the newest, or 'auto': that of --output, if any.",
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
    values = {name: info.defaults.get(item.name, own) for name, info in RECIPES.items()}
    if set(values.values()) == {None}:
        return "the level's own" if item.metadata["group"] == "precision" else "none"
    if len(set(values.values())) == 1:
        return _spell(values[DEFAULT_RECIPE])
    return ", ".join(f"{name} {_spell(value)}" for name, value in values.items() if value is not None)


def _spell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 and abs(exponent) > 10 else f"{value:g}"


def _metavar(kind: Any) -> str:
    """What a value looks like."""
    kinds = [one for one in members_of(kind) if one is not type(None)]
    if len(kinds) > 1 or kinds[0] is not kind:
        return "|".join(map(_metavar, kinds))
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


def _with_values(arguments: Sequence[str]) -> list[str]:
    """``--resume`` without a path means the newest run, ``--diagnose`` alone means true."""
    result: list[str] = []
    for place, argument in enumerate(arguments):
        result.append(argument)
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        if argument in _ALONE and following.startswith("-"):
            result.append(_ALONE[argument])
    return result


def _description(*, common_only: bool) -> str:
    recipes = "\n\n".join(f"{name}: {info.brief}" for name, info in RECIPES.items())
    more = f"\n\n{_EXAMPLES}\n\n--help-all lists every option." if common_only else ""
    return f"Train a real model in mixed precision, on whatever device is there.\n\n{recipes}{more}"


def _read_yaml(text: str) -> Any:
    with needs_extra():
        import yaml
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
