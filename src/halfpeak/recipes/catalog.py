"""Builds recipes by name, and completes a user's settings to a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.core.levels import LEVELS
from halfpeak.core.short_repr import short_repr
from halfpeak.core.suitable import suitable_level
from halfpeak.recipes import digits, pysource
from halfpeak.recipes.base import Recipe
from halfpeak.recipes.precision import level_of
from halfpeak.recipes.sampler import BatchSampler
from halfpeak.recipes.settings import (
    AUTO,
    DEFAULT_RECIPE,
    TrainConfig,
    find_recipe,
    merge_layers,
    parse_values,
)

_BUILDERS: Final[Mapping[str, Callable[[TrainConfig, torch.device], Recipe]]] = {
    "digits": digits.build,
    "pysource": pysource.build,
}


def build_recipe(config: TrainConfig, device: torch.device) -> Recipe:
    """Build the recipe that a configuration names, with its data on the device."""
    return _BUILDERS[config.recipe](config, device)


def build_config(*layers: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from the recipe's defaults and the given layers. Later layers override earlier ones.

    Raises:
        ConfigError: an unknown setting, a bad value, a setting that the recipe does not read, or an override that makes
            no sense at the level.
    """
    given = merge_layers(*(parse_values(layer) for layer in layers))
    name = given.get("recipe", DEFAULT_RECIPE)
    info = find_recipe(name)
    for setting in ("size", "context"):
        if given.get(setting) is not None and setting not in info.own:
            raise ConfigError(
                f"recipe {name!r} has no setting {setting!r} (given: {short_repr(given[setting])}); leave it out"
            )
    # The recipe's warm-up may be too long for the run. Only complete() knows the run's length.
    config = TrainConfig.from_values(merge_layers(info.defaults, {"warmup": None}, given))
    _check_level(config.level)
    if config.level != AUTO:
        level_of(config)
    return config


def choose_level(config: TrainConfig, device: torch.device) -> tuple[TrainConfig, str | None]:
    """Replace level ``"auto"`` by the level that suits the device; also return the reason, None for any other level."""
    if config.level != AUTO:
        return config, None
    advice = suitable_level(device)
    chosen = replace(config, level=advice.level)
    level_of(chosen)
    return chosen, advice.reason


def complete(config: TrainConfig, recipe: Recipe) -> tuple[TrainConfig, BatchSampler]:
    """Fill in length and warm-up in steps, which depend on the amount of data, and build the data order."""
    sampler = BatchSampler(samples=recipe.samples, batch=config.batch, seed=config.seed)
    if config.steps is None:
        if config.epochs is None:
            raise ConfigError("neither steps nor epochs is given; write one of them, such as steps=100")
        steps = math.ceil(config.epochs * sampler.batches / config.accumulate)
        config = replace(config, steps=steps, epochs=None)
    if config.schedule_steps is None:
        config = replace(config, schedule_steps=config.steps)
    if config.warmup is None:
        longest = find_recipe(config.recipe).defaults["warmup"]
        config = replace(config, warmup=min(longest, (config.schedule_steps or 0) // 10))
    return config, sampler


def _check_level(level: str) -> None:
    if level in (AUTO, *LEVELS):
        return
    near = next((name for name in (AUTO, *LEVELS) if name in (level.lower(), f"O{level[1:]}")), None)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(
        f"unknown level {short_repr(level)}; write one of {AUTO}, {', '.join(LEVELS)}, with the letter O, not the digit "
        f"zero{hint}"
    )
