"""``apex.amp`` as scripts find it: halfpeak's, with the marks that apex left on optimizers; and the end of a session."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from halfpeak import amp
from halfpeak.amp.registration import restore, saved
from halfpeak.amp.session import _amp_state
from halfpeak.shim.description import Undo
from halfpeak.shim.emulated.stash import attach, detach


@functools.wraps(amp.initialize)
def initialize(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    """:func:`halfpeak.amp.initialize`; its optimizers get ``_amp_stash`` and what goes with it."""
    result = amp.initialize(models, optimizers, *args, **kwargs)
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers or ():
        attach(optimizer)
    return result


def set_up() -> Undo:
    """Remember how things stand; the undo takes marks, casts and registrations of the session back."""
    handle, registered = _amp_state.handle, saved()

    def undo() -> None:
        detach(_amp_state.optimizers())
        if _amp_state.handle is not handle and _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        restore(registered)

    return undo
