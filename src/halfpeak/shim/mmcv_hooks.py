"""``install("mmcv")`` with a real mmcv 1.x: puts halfpeak's optimizer hooks into mmcv's registry, for its runners."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from halfpeak.runner import (
    HOOKS,
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    OptimizerHook,
)
from halfpeak.shim.import_hooks import when_imported
from halfpeak.shim.registries import put
from halfpeak.shim.spec import Undo


def set_up() -> Undo:
    """Register the hooks as soon as a real ``mmcv.runner`` is imported."""
    return when_imported("mmcv.runner", register)


def register(runner: ModuleType) -> Undo:
    """Replace mmcv's optimizer hooks in its registry by halfpeak's.

    Args:
        runner: the module ``mmcv.runner``.
    """
    registry: Any = vars(runner)["HOOKS"]
    if registry is HOOKS:  # this mmcv.runner is the shim's
        return put([])
    return put([(registry, name, cls) for name, cls in make_hooks(vars(runner)["Hook"]).items()])


def make_hooks(base: type) -> dict[str, type]:
    """Each of halfpeak's optimizer hooks as a subclass of mmcv's ``Hook``, because mmcv's runners require one."""
    made: dict[str, type] = {}
    for own in (
        OptimizerHook,
        GradientCumulativeOptimizerHook,
        Fp16OptimizerHook,
        GradientCumulativeFp16OptimizerHook,
    ):
        made[own.__name__] = type(own.__name__, (own, base), {"__module__": __name__, "__doc__": own.__doc__})
    return made
