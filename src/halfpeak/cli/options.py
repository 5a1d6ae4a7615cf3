"""The settings of ``halfpeak train``: reads its command line, and a TOML, YAML or JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from halfpeak.cli.arguments import Arguments
from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.recipes.settings import (
    COMMON,
    DEFAULT_RECIPE,
    RECIPES,
    TrainConfig,
    members_of,
    parse_values,
)

LATEST = "latest"
AUTO = "auto"

_EXAMPLES = """\
For example:

halfpeak train --level O2 --steps 200 --clip-norm 1

halfpeak train pysource --level O5 --size small

halfpeak train --resume"""


class Request(NamedTuple):
    """The parsed command line.

    Attributes:
        values: the settings that were given, as text.
        resume: the run to continue; :data:`LATEST`: the newest run; :data:`AUTO`: the run in ``--output``, if any.
    """

    values: dict[str, Any]
    config: Path | None
    resume: str | None


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line. Values stay text; :func:`parse_values` converts them later.

    Raises:
        SystemExit: the command line asks for help.
        ConfigError: an option is unknown.

    >>> parse(["pysource", "--steps", "5", "--resume"])
    Request(values={'recipe': 'pysource', 'steps': '5'}, config=None, resume='latest')
    """
    # Accept `--clip_norm`, the spelling in files, for `--clip-norm`.
    arguments = [
        argument.replace("_", "-") if argument.startswith("--") and "=" not in argument else argument
        for argument in arguments
    ]
    wants_all = "--help-all" in arguments
    parser = _parser(common_only=not wants_all)
    typed, unknown = parser.parse_known_args(["--help"] if wants_all else arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0], [f"--{_option(name)}" for name in vars(typed)], n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ConfigError(f"unknown option {unknown[0]!r}{hint} {parser.prog} --help lists them")
    given = {name: value for name, value in vars(typed).items() if value is not None}
    config, resume = given.pop("config", None), given.pop("resume", None)
    return Request(given, None if config is None else Path(config), resume)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a file, converted to their types.

    Raises:
        ConfigError: the file is missing, broken, of another kind, or holds something other than settings.
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


def _parser(*, common_only: bool) -> Arguments:
    """A parser with an option for each field of ``TrainConfig``, in the fields' groups.

    Args:
        common_only: whether the help omits the options that only ``--help-all`` lists.
    """
    parser = Arguments("train", _description(common_only=common_only))
    parser.usage = f"{parser.prog} [OPTIONS] [RECIPE]"
    hints = get_type_hints(TrainConfig)
    groups: dict[str, Any] = {"": parser}
    for item in dataclasses.fields(TrainConfig):
        name, title = item.name, item.metadata["group"]
        help = f"{item.metadata['help']} (default: {_default(item)})"
        if name == "recipe":
            parser.add_argument(name, nargs="?", metavar="RECIPE", help=help)
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            f"--{_option(name)}",
            metavar=_metavar(hints[name]),
            help=argparse.SUPPRESS if common_only and name not in COMMON else help.replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if name == "diagnose" else {}),
        )
    groups["run"].add_argument(
        "--config",
        metavar="PATH",
        help="A TOML, YAML or JSON file of settings; the command line wins over it.",
    )
    groups["run"].add_argument(
        "--resume",
        metavar="PATH",
        nargs="?",
        const=LATEST,
        help="Continue a run bit for bit: its folder, nothing for the newest, or 'auto': that of --output, if any.",
    )
    return parser


def _option(name: str) -> str:
    return name.replace("_", "-")


def _default(item: dataclasses.Field[Any]) -> str:
    """The default of a setting as the help shows it; if recipes differ, the default of each recipe."""
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
    """The placeholder for a value of this type in the help."""
    kinds = [one for one in members_of(kind) if one is not type(None)]
    if len(kinds) > 1 or kinds[0] is not kind:
        return "|".join(map(_metavar, kinds))
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {int: "INT", float: "NUMBER", bool: "true|false", str: "NAME"}[kind]


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
