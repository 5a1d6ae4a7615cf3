"""Entering whatever scope of per-operation casts there is, run by Python or traced by the compiler."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.compiler import is_dynamo_compiling

from halfpeak.casting.device import DeviceCasts
from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.scope import contained


@contextmanager
def casts_on(casting: AbstractContextManager[Any]) -> Generator[None]:
    """Run the block inside ``casting``: an :class:`OpCasts`, a :class:`DeviceCasts`, or a context of another kind."""
    if is_dynamo_compiling():
        with casting.traced if isinstance(casting, OpCasts | DeviceCasts) else casting:
            yield
    else:
        with contained(), casting:
            yield
