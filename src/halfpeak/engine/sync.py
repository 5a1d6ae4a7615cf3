"""Whether a wrapped model reduces its gradients over the ranks in a backward pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def synchronising(wrapped: nn.Module, synchronise: bool) -> Generator[None]:
    """Let DDP (``no_sync``) or FSDP2 (``set_requires_gradient_sync``) reduce gradients in the body, or not."""
    unknown: Any = wrapped
    if callable(getattr(unknown, "set_requires_gradient_sync", None)):
        unknown.set_requires_gradient_sync(synchronise)
        yield
    elif callable(getattr(unknown, "no_sync", None)) and not synchronise:
        with unknown.no_sync():
            yield
    else:
        yield
