"""The wrappers that torch and apex put around a module, told by their class."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


def wrapper_of(model: nn.Module) -> str | None:
    """The class name of ``model`` if it is a parallel or compiling wrapper, else None."""
    for cls in type(model).__mro__:
        if cls.__name__ in _WRAPPERS and cls.__module__.partition(".")[0] in ("torch", "apex"):
            return f"{cls.__module__}.{cls.__name__}"
    return None


def uncompiled(model: Any) -> Any:
    """The module inside ``torch.compile(module)``, or ``model`` itself. A compiled module is traced again when it runs."""
    while isinstance(model, nn.Module) and (wrapper_of(model) or "").endswith(".OptimizedModule"):
        model = model._orig_mod
    return model
