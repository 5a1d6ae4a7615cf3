"""Runs the hooks around ``optimizer.step``, and makes a profiler entry only while a profiler runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.short_repr import short_repr


def with_step_hooks(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` in its hooks, as :meth:`torch.optim.Optimizer.profile_hook_step` does.

    torch's wrapper makes a profiler entry in every step. That takes longer than all hooks together: 80 us after a
    backward pass has filled the cache. This wrapper makes the entry only if a profiler runs in this thread.
    """
    profiled = Optimizer.profile_hook_step(func)

    @wraps(func)
    def between_hooks(*args: Any, **kwargs: Any) -> Any:
        if torch.autograd._profiler_enabled():
            return profiled(*args, **kwargs)
        optimizer = cast(Optimizer, args[0])
        given: tuple[Any, Any] = (args, kwargs)
        for pre_hook in chain(
            _global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
        ):
            changed: Any = pre_hook(optimizer, *given)
            if changed is not None:
                if not isinstance(changed, tuple) or len(cast("tuple[Any, ...]", changed)) != 2:
                    name = getattr(pre_hook, "__qualname__", type(pre_hook).__name__)
                    raise ConfigTypeError(
                        f"the optimizer step pre-hook {name} must return None or (args, kwargs), not {short_repr(changed)}"
                    )
                given = changed
        result = func(*given[0], **given[1])
        for post_hook in chain(
            optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()
        ):
            post_hook(optimizer, *given)
        return result

    return between_hooks
