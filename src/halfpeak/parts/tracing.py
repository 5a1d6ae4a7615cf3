"""While torch.compile traces, gradients that are wider than their weights step aside.

The compiler refuses to trace a leaf whose gradient has another dtype: a new shape inside a window, or ``zero_grad()`` after
the forward pass, would break the graph. Its own callbacks tell when it traces.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from torch import Tensor

from halfpeak.parts.pairs import LIVE

_ASIDE: Final[list[tuple[Tensor, Tensor]]] = []


def watch_compiler() -> None:
    """Register the callbacks, if the compiler was imported. ``torch._dynamo.reset()`` forgets them, so call it often."""
    module: Any = sys.modules.get("torch._dynamo.callback")
    if module is not None and _begin not in module.callback_handler.start_callbacks:
        module.callback_handler.register_start_callback(_begin)
        module.callback_handler.register_end_callback(_end)


def _begin(_: object) -> None:
    for pairs in LIVE:
        for weight in pairs.widened():
            grad = weight.grad
            if grad is not None and grad.dtype is not weight.dtype:
                _ASIDE.append((weight, grad))
                weight.grad = None


def _end(_: object) -> None:
    for weight, grad in _ASIDE:
        weight.grad = grad
    _ASIDE.clear()
