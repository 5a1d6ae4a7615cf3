"""The smallest configuration that still fails, and a script of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz.compare import Mismatch, compare
from fuzz.config import Config


def shrink(config: Config) -> Config:
    """Drop events, then options, then parts of the model, for as long as it fails in the same way."""
    wanted, smaller = failure(config), True
    while smaller:
        smaller = False
        for candidate in candidates(config):
            if failure(candidate) == wanted:
                config, smaller = candidate, True
                break
    return config


def failure(config: Config) -> list[str] | None:
    """How the sides differ: the first words of the message, without numbers and names of parameters; None if they agree."""
    try:
        compare(config)
    except Mismatch as error:
        where, _, what = str(error).partition(": ")
        # Without a part, an optimizer may have no parameters left.
        return [where] if where == "prepare" else [word for word in what.split() if word.isalpha()][:3]
    return None


def candidates(config: Config) -> Iterator[Config]:
    """Configurations with one thing less."""
    for name in ("events", "options", "scale", "parts"):
        given: tuple[Any, ...] = getattr(config, name)
        for i in range(len(given)):
            yield replace(config, **{name: given[:i] + given[i + 1 :]})
    plain = Config(config.seed)
    for name in ("clip", "in_turns", "held_out", "losses", "heads", "groups", "accumulate"):
        if getattr(config, name) != getattr(plain, name):
            yield replace(config, **{name: getattr(plain, name)})
    if len(config.optimizers) > 1:
        yield replace(config, optimizers=config.optimizers[:1], in_turns=False)
    if config.optimizers != plain.optimizers and len(config.optimizers) == 1:
        yield replace(config, optimizers=plain.optimizers)
    if config.iterations > 1:
        yield replace(config, iterations=config.iterations - 1)


def script(config: Config) -> str:
    """A script that runs a configuration, with what differs from the defaults."""
    plain = Config(config.seed)
    given = [(field.name, getattr(config, field.name)) for field in fields(config)]
    lines = [
        f"    {name}={value!r}," for name, value in given if name == "seed" or value != getattr(plain, name)
    ]
    return "\n".join(
        [
            "# PYTHONPATH=src:tests python",
            "from fuzz.compare import compare",
            "from fuzz.config import Config, Planned",
            "",
            "config = Config(",
            *lines,
            ")",
            "compare(config)",
        ]
    )
