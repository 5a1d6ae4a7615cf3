"""Deep copies of an engine: models, optimizers, masters and all that lies between, joined to one another as they were."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.errors import OrderError
from halfpeak.engine.hooks import hook
from halfpeak.engine.state import put_window, take_window
from halfpeak.parts.bound import BoundDefaults, bind

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine


def copy_engine(engine: Engine, memo: dict[int, Any]) -> Engine:
    """An independent engine in the same state. Learning-rate schedules and the user's step hooks stay with the old one.

    Raises:
        OrderError: the engine is a part of something that was set up around it, such as ``amp.initialize``.
    """
    if not engine.plan.steps_itself:
        raise OrderError(
            "this engine answers to a caller who steps the optimizers himself and cannot be copied alone; copy the model, "
            "and initialise the copy with an optimizer of its own"
        )
    models = [copy.deepcopy(model, memo) for model in engine.models]
    # Before the optimizers, whose groups hold the masters.
    masters = copy.deepcopy(engine.masters, memo)
    optimizers = [_copy_optimizer(optimizer, memo) for optimizer in engine.optimizers]
    for optimizer in optimizers:
        # Those that keep what masters would.
        masters.adopt(optimizer)
    handles: list[RemovableHandle] = []
    for model in models:
        if _strip(model, engine.handles):
            handles += hook(model, engine.policy, masters)
    copied = type(engine)(
        engine.plan,
        models,
        optimizers,
        masters=masters,
        casting=engine.casting,
        verdict=engine.phases.verdict,
        device=engine.device,
        handles=handles,
    )
    _copy_progress(engine, copied)
    return copied


def _strip(model: nn.Module, handles: Sequence[RemovableHandle]) -> bool:
    """Take off the copies of the hooks that ``handles`` stand for; whether the model itself had one."""
    numbers = {handle.id for handle in handles}
    found = False
    for module in model.modules():
        for name, hooks in vars(module).items():
            if "_hooks" in name and isinstance(hooks, dict):
                for number in numbers & hooks.keys():
                    del hooks[number]
                    found = found or module is model
    return found


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy over what ``memo`` says its parameters have become.

    Torch copies groups and state only. What else an optimizer keeps (LBFGS its list of parameters) is copied too, but
    no function, since those that others have put there are bound to the original.
    """
    bound = isinstance(optimizer.defaults, BoundDefaults)
    if bound:
        memo[id(optimizer.defaults)] = copy.deepcopy(dict(optimizer.defaults), memo)
    copied = copy.deepcopy(optimizer, memo)
    if bound:
        bind(copied)
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and not callable(value):
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def _copy_progress(source: Engine, target: Engine) -> None:
    """Loss scales, counters and statistics, whose tensors are replaced and never edited, and the open window."""
    for old, new in zip(source.scalers, target.scalers, strict=True):
        new.config, new.state = old.config, old.state
    journal = source.journal
    target.journal.taken, target.journal.skipped, target.journal.index = (
        journal.taken,
        journal.skipped,
        journal.index,
    )
    target.buffers.put_saved(source.buffers.saved())
    target.phases.look_for_trouble()
    put_window(target, take_window(source))
