"""The recipes by name, and how what a person asked for becomes a complete plan."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.core.levels import LEVELS
from halfpeak.insight.suitable import suitable_level
from halfpeak.recipes import digits, pysource
from halfpeak.recipes.base import Recipe, Spec
from halfpeak.recipes.driver import properties
from halfpeak.recipes.order import Order
from halfpeak.recipes.plan import Plan, check
from halfpeak.recipes.runner_job import check_runner
from halfpeak.recipes.wrapper_driver import check_wrapper, suited

RECIPES: Mapping[str, Spec] = MappingProxyType({spec.name: spec for spec in (digits.SPEC, pysource.SPEC)})
"""Every recipe by its name."""

DEFAULT = digits.SPEC.name

AUTO = "auto"
"""The level that suits the device."""


def find_recipe(name: object) -> Spec:
    """The recipe of that name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in RECIPES:
        near = difflib.get_close_matches(str(name), RECIPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown recipe {name!r}; write one of {', '.join(RECIPES)}{hint}")
    return RECIPES[name]


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One set of values from several, later ones winning. A length in epochs replaces one in steps, and so on.

    >>> layered({"steps": 10, "lr": 0.1}, {"epochs": 2.0})
    {'lr': 0.1, 'epochs': 2.0}
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for rivals in (("steps", "epochs"), ("clip_norm", "clip_value")):
            if any(layer.get(name) is not None for name in rivals):
                for name in rivals:
                    merged.pop(name, None)
        merged.update(layer)
    return merged


def draft(*layers: Mapping[str, Any]) -> Plan:
    """A plan from the recipe's defaults and the given layers, later ones winning.

    Raises:
        ConfigError: an unknown setting, a bad value, a setting that the recipe does not read, or an override that makes
            no sense at the level.
    """
    given = layered(*(check(layer) for layer in layers))
    spec = find_recipe(given.get("recipe", DEFAULT))
    for name in ("size", "context"):
        if given.get(name) is not None and name not in spec.own:
            raise ConfigError(
                f"{name}={given[name]!r}: recipe {spec.name!r} has no such setting; leave it out"
            )
    # The recipe's warm-up may be too long for the run, whose length only measure() knows.
    plan = Plan.from_values(layered(spec.defaults, {"warmup": None}, given))
    _check_level(plan.level)
    if plan.level != AUTO:
        properties(plan)
    check_wrapper(plan)
    check_runner(plan)
    return plan


def settle(plan: Plan, device: torch.device) -> tuple[Plan, str | None]:
    """The plan with the level that suits the device where none was asked for, and the reason for it."""
    if plan.level != AUTO:
        return plan, None
    advice = suited(plan, suitable_level(device))
    chosen = replace(plan, level=advice.level)
    properties(chosen)
    return chosen, advice.reason


def measure(plan: Plan, recipe: Recipe) -> tuple[Plan, Order]:
    """The plan with its length and its warm-up in steps, now that the amount of data is known, and the data order."""
    order = Order(samples=recipe.samples, batch=plan.batch, seed=plan.seed)
    if plan.steps is None:
        if plan.epochs is None:
            raise ConfigError("neither steps nor epochs is given; write one of them")
        steps = math.ceil(plan.epochs * order.batches / plan.accumulate)
        plan = replace(plan, steps=steps, epochs=None)
    if plan.schedule_steps is None:
        plan = replace(plan, schedule_steps=plan.steps)
    if plan.warmup is None:
        longest = find_recipe(plan.recipe).defaults["warmup"]
        plan = replace(plan, warmup=min(longest, (plan.schedule_steps or 0) // 10))
    return plan, order


def _check_level(level: str) -> None:
    if level in (AUTO, *LEVELS):
        return
    near = next((name for name in (AUTO, *LEVELS) if name in (level.lower(), f"O{level[1:]}")), None)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(
        f"unknown level {level!r}; write one of {AUTO}, {', '.join(LEVELS)}, with the letter O, not the digit zero{hint}"
    )
