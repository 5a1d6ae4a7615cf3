"""The hooks around ``optimizer.step``, with an entry for a profiler only while one runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def with_step_hooks(func: Callable[..., Any]) -> Callable[..., Any]:
    """A ``step`` between its hooks, as :meth:`torch.optim.Optimizer.profile_hook_step` makes it.

    torch's makes an entry for a profiler in every step, and that takes longer than all hooks together: 80 us, where a
    backward pass has filled the cache. This one makes it only where a profiler runs in this thread.
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
                    raise RuntimeError(
                        f"a hook before {func} must return None or a tuple (args, kwargs), not {changed!r}"
                    )
                given = changed
        result = func(*given[0], **given[1])
        for post_hook in chain(
            optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()
        ):
            post_hook(optimizer, *given)
        return result

    return between_hooks
