"""``apex.amp.initialize``, which sets apex's attributes on optimizers, and the uninstall of an amp session."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from halfpeak import amp
from halfpeak.amp.properties import opt_levels
from halfpeak.amp.session import _amp_state
from halfpeak.shim.apex_impl.stash import attach, detach
from halfpeak.shim.spec import Undo

O0, O1, O2, O3, O4, O5 = (opt_levels[name] for name in ("O0", "O1", "O2", "O3", "O4", "O5"))


@functools.wraps(amp.initialize)
def initialize(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Call :func:`halfpeak.amp.initialize` and give each optimizer apex's attributes, such as ``_amp_stash``."""
    result = amp.initialize(models, optimizers, *args, **kwargs)
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers or ():
        attach(optimizer)
    return result


def set_up() -> Undo:
    """Record the amp handle and registrations. The returned function restores them and removes the attributes."""
    handle, registered = _amp_state.handle, dict(_amp_state.registered)

    def undo() -> None:
        detach(_amp_state.optimizers())
        if _amp_state.handle is not handle and _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        _amp_state.registered = registered

    return undo
