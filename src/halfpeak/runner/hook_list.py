"""The hooks of a run: kept in order of priority, called by stage, saved by name."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.runner.hook import GENERIC, Hook
from halfpeak.runner.priority import Priority, get_priority


def insert(hooks: list[Hook], hook: Hook, priority: int | str | Priority) -> None:
    """Put a hook behind those of the same or a smaller priority number.

    Raises:
        ConfigTypeError: not a hook.
        ConfigError: it was registered before, or the priority is wrong.
    """
    if not isinstance(hook, Hook):
        raise ConfigTypeError(
            f"hook must be a Hook, not {type(hook).__name__}; pass an object of a subclass of halfpeak.runner.Hook"
        )
    if hasattr(hook, "priority"):
        raise ConfigError(
            f"{type(hook).__name__} has a priority already: it was registered before, or its class has an attribute of that "
            "name; register a new object"
        )
    hook.priority = get_priority(priority)
    place = sum(other.priority <= hook.priority for other in hooks)
    hooks.insert(place, hook)


def check_stage(stage: str, hooks: Sequence[Hook]) -> None:
    """Check that every hook can be called at a stage.

    Raises:
        ConfigError: one has no method of that name.
    """
    every: Sequence[object] = hooks or [Hook]
    if not all(callable(getattr(hook, stage, None)) for hook in every):
        raise unknown_stage(stage)


def unknown_stage(stage: str) -> ConfigError:
    """What is raised for a stage that does not exist."""
    names = ", ".join((*Hook.stages, *dict.fromkeys(GENERIC.values())))
    return ConfigError(f"unknown stage {stage!r}; the stages are {names}")


@contextmanager
def nested(contexts: Iterable[AbstractContextManager[Any] | None]) -> Generator[None]:
    """Enter the contexts that hooks gave, in their order."""
    with ExitStack() as stack:
        for context in contexts:
            if context is not None:
                stack.enter_context(context)
        yield


def describe(hooks: Sequence[Hook]) -> str:
    """Which hooks act at which stage, in the order of their calls."""
    blocks: list[str] = []
    for stage in Hook.stages:
        acting = [hook for hook in hooks if stage in hook.get_triggered_stages()]
        lines = [f"({_name(hook.priority):<12}) {type(hook).__name__:<35}" for hook in acting]
        if lines:
            blocks.append("\n".join([f"{stage}:", *lines, " -------------------- "]))
    return "\n".join(blocks)


def named(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """The hooks under names that are the same in every run with the same hooks: the class, numbered from the second."""
    names: dict[str, Hook] = {}
    for hook in hooks:
        kind = type(hook).__name__
        number = sum(type(other).__name__ == kind for other in names.values())
        names[f"{kind}.{number}" if number else kind] = hook
    return names


def take_states(hooks: Sequence[Hook]) -> dict[str, Any]:
    """The state of every hook that has one, by name."""
    states = {name: hook.state_dict() for name, hook in named(hooks).items()}
    return {name: state for name, state in states.items() if state}


def put_states(hooks: Sequence[Hook], states: Mapping[str, Any]) -> list[str]:
    """Give the hooks their states back; the names that no hook has are returned."""
    known = named(hooks)
    for name, hook in known.items():
        if name in states:
            hook.load_state_dict(states[name])
    return [name for name in states if name not in known]


def _name(priority: int) -> str:
    known = {member.value: member.name for member in Priority}
    return known.get(priority, str(priority))
