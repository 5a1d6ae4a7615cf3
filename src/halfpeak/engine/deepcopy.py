"""Deep copies of an engine: models, optimizers, masters, counters and the open window, joined as the originals are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.errors import OrderError
from halfpeak.engine.context import EngineContext
from halfpeak.engine.model_hooks import hook
from halfpeak.engine.state_dict import load_window, save_window
from halfpeak.state.masters import Masters
from halfpeak.state.no_copy import NoCopyDefaults, forbid_copy


@dataclass(frozen=True, slots=True)
class CopiedParts:
    """Copies from which an independent engine is built."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    masters: Masters
    handles: list[RemovableHandle]

    def copy_progress(self, source: EngineContext, target: EngineContext) -> None:
        """Loss scales, counters and statistics, whose tensors are replaced and never edited, and the open window."""
        for old, new in zip(source.scalers, target.scalers, strict=True):
            new.config, new.state = old.config, old.state
        target.record.use_counters(source.record.num_steps, source.record.num_skipped)
        target.record.micro_step = source.record.micro_step
        target.stats.restore_saved(source.stats.saved(), is_loaded=True)
        target.train_step.poll_stuck()
        load_window(target, save_window(source))


def copy_parts(context: EngineContext, memo: dict[int, Any]) -> CopiedParts:
    """Copy models, optimizers and masters.

    Raises:
        OrderError: the engine is a part of something that was set up around it, such as ``amp.initialize``.
    """
    if not context.config.engine_steps:
        raise OrderError(
            "this engine answers to a caller who steps the optimizers himself and cannot be copied alone; copy the model, "
            "and initialise the copy with an optimizer of its own"
        )
    models = [copy.deepcopy(model, memo) for model in context.models]
    # Before the optimizers, whose groups hold the masters.
    masters = copy.deepcopy(context.masters, memo)
    optimizers = [_copy_optimizer(optimizer, memo) for optimizer in context.optimizers]
    for optimizer in optimizers:
        # Masters are there already; this is for optimizers that keep remainders instead.
        masters.adopt(optimizer)
    handles: list[RemovableHandle] = []
    for model in models:
        if _strip(model, context.handles):
            handles += hook(model, context.config.policy, masters)
    return CopiedParts(models, optimizers, masters, handles)


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

    Torch copies groups and state only. Other attributes (LBFGS has its list of parameters) are copied too, but no functions:
    those that others have put there are bound to the original.
    """
    forbidden = isinstance(optimizer.defaults, NoCopyDefaults)
    if forbidden:
        memo[id(optimizer.defaults)] = copy.deepcopy(dict(optimizer.defaults), memo)
    copied = copy.deepcopy(optimizer, memo)
    if forbidden:
        forbid_copy(copied)
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and not callable(value):
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied
