"""ClosureHook: one function at one stage. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halfpeak.core.errors import ConfigTypeError
from halfpeak.runner.hook import GENERIC, Hook
from halfpeak.runner.hook_list import unknown_stage

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class ClosureHook(Hook):
    """Calls ``fn(runner)`` at the stage ``fn_name``.

    Raises:
        ConfigError: there is no such stage.
        ConfigTypeError: ``fn`` cannot be called.

    >>> ClosureHook("after_run", print).get_triggered_stages()
    ['after_run']
    """

    def __init__(self, fn_name: str, fn: Callable[[BaseRunner], Any]) -> None:
        if not callable(fn):
            raise ConfigTypeError(f"fn={fn!r} must be a function of the runner")
        if fn_name not in (*Hook.stages, *GENERIC.values()):
            raise unknown_stage(fn_name)
        self.fn_name, self.fn = fn_name, fn
        setattr(self, fn_name, fn)

    def get_triggered_stages(self) -> list[str]:
        """The stages at which the function is called."""
        return [stage for stage in Hook.stages if self.fn_name in (stage, GENERIC.get(stage))]
