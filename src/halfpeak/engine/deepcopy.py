"""Deep copies of an engine: models, optimizers, masters, counters and the open window, connected like the originals."""

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
from halfpeak.engine.model_hooks import hook_model
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
        """Copy scales and counters (by reference: their tensors are never edited), statistics and the open window."""
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
        OrderError: the caller steps the optimizers, as after ``amp.initialize``.
    """
    if context.config.stepped_by == "caller":
        raise OrderError(
            "this engine cannot be copied, because its front end steps the optimizers; copy the model, and initialise the "
            "copy with a new optimizer"
        )
    models = [copy.deepcopy(model, memo) for model in context.models]
    # Masters are copied before the optimizers, whose groups contain them.
    masters = copy.deepcopy(context.masters, memo)
    optimizers = [_copy_optimizer(optimizer, memo) for optimizer in context.optimizers]
    for optimizer in optimizers:
        # Masters are copied already. This registers optimizers that keep remainders instead of masters.
        masters.adopt(optimizer)
    handles: list[RemovableHandle] = []
    for model in models:
        if _strip(model, context.handles):
            handles += hook_model(model, context.config.policy, masters)
    return CopiedParts(models, optimizers, masters, handles)


def _strip(model: nn.Module, handles: Sequence[RemovableHandle]) -> bool:
    """Remove the copies of the hooks in ``handles`` from a model; return whether the model itself had one."""
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
    """A copy of an optimizer over the copied parameters in ``memo``.

    torch copies groups and state only. This also copies other attributes, such as LBFGS's list of parameters. Callables
    are left out, because those that other libraries set are bound to the original.
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
