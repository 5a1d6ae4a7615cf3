"""Priority, and functions over the list of a run's hooks, which is in the order of their calls. Compatible with mmcv 1.7.2.

A plain list, because code written for mmcv changes and replaces ``runner._hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.runner.hook import GENERIC, Hook, RunState


class PriorityNameError(ConfigError, KeyError):
    """A priority with an unknown name."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the message quoted


class Priority(IntEnum):
    """The named priorities. Hooks with smaller numbers are called earlier; any number from 0 to 100 is allowed."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


_NAMES: Final = ", ".join(Priority.__members__)


def get_priority(priority: int | str | Priority) -> int:
    """The number of a priority.

    Raises:
        ConfigTypeError: neither a number nor a name.
        PriorityNameError: no such name.
        ConfigError: a number below 0 or above 100.

    >>> get_priority("very_high"), get_priority(Priority.LOW), get_priority(55)
    (10, 70, 55)
    """
    if isinstance(priority, bool) or not isinstance(priority, (int, str)):
        raise ConfigTypeError(
            f"priority={short_repr(priority)} must be a number from 0 to 100 or one of {_NAMES}; write priority='NORMAL'"
        )
    if isinstance(priority, str):
        if priority.upper() not in Priority.__members__:
            raise PriorityNameError(
                f"priority={short_repr(priority)} is unknown; write a number from 0 to 100 or one of {_NAMES}"
            )
        return Priority[priority.upper()].value
    if not 0 <= priority <= 100:
        raise ConfigError(f"priority={short_repr(priority)} must be from 0 to 100")
    return int(priority)


def register(hooks: list[Hook], hook: Hook, priority: int | str | Priority) -> None:
    """Add a hook after all hooks with the same or a smaller priority number.

    Raises:
        ConfigTypeError: not a hook, or not a priority.
        ConfigError: the hook is registered already, or the priority does not exist.
    """
    if not isinstance(hook, Hook):
        raise ConfigTypeError(
            f"hook must be a Hook, not {type(hook).__name__}; pass an object of a subclass of halfpeak.runner.Hook"
        )
    if hasattr(hook, "priority"):
        raise ConfigError(
            f"{type(hook).__name__} has a priority already: it was registered before, or its class has an attribute of "
            "that name; register a new object"
        )
    hook.priority = get_priority(priority)
    hooks.insert(sum(other.priority <= hook.priority for other in hooks), hook)


def check_stage(hooks: list[Hook], stage: str) -> None:
    """Check that every hook has a method for a stage.

    Raises:
        ConfigError: a hook has no method of that name.
    """
    if not all(callable(getattr(hook, stage, None)) for hook in (hooks or [Hook])):
        raise unknown_stage(stage)


def call(hooks: list[Hook], stage: str, runner: RunState) -> None:
    """Call one stage of every hook, in order."""
    for hook in tuple(hooks):
        getattr(hook, stage)(runner)


def describe(hooks: list[Hook]) -> str:
    """The hooks that act at each stage, in the order of their calls, as text."""
    blocks: list[str] = []
    for stage in Hook.stages:
        acting = [hook for hook in hooks if stage in hook.get_triggered_stages()]
        lines = [f"({_name(hook.priority):<12}) {type(hook).__name__:<35}" for hook in acting]
        if lines:
            blocks.append("\n".join([f"{stage}:", *lines, " -------------------- "]))
    return "\n".join(blocks)


def by_name(hooks: list[Hook]) -> dict[str, Hook]:
    """The hooks by class name, with a number from the second hook of a class on; stable between runs."""
    names: dict[str, Hook] = {}
    for hook in hooks:
        kind = type(hook).__name__
        number = sum(type(other).__name__ == kind for other in names.values())
        names[f"{kind}.{number}" if number else kind] = hook
    return names


def state_dict(hooks: list[Hook]) -> dict[str, Any]:
    """The state of every hook that has one, by name."""
    states = {name: hook.state_dict() for name, hook in by_name(hooks).items()}
    return {name: state for name, state in states.items() if state}


def load_state_dict(hooks: list[Hook], states: Mapping[str, Any]) -> list[str]:
    """Restore the states of the hooks. Return the names in ``states`` that no hook has."""
    known = by_name(hooks)
    for name, hook in known.items():
        if name in states:
            hook.load_state_dict(states[name])
    return [name for name in states if name not in known]


def unknown_stage(stage: str) -> ConfigError:
    """The error for a stage that does not exist."""
    names = ", ".join((*Hook.stages, *dict.fromkeys(GENERIC.values())))
    return ConfigError(f"unknown stage {short_repr(stage)}; the stages are {names}")


def _name(priority: int) -> str:
    known = {member.value: member.name for member in Priority}
    return known.get(priority, str(priority))
