"""Entering whatever scope of per-operation casts there is, run by Python or traced by the compiler."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.compiler import is_dynamo_compiling

from halfpeak.casting.device import DeviceCasts
from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.scope import contained


@contextmanager
def casts_on(casting: AbstractContextManager[Any] | None) -> Generator[None]:
    """Run the block inside ``casting``: an :class:`OpCasts`, a :class:`DeviceCasts`, or a context of another kind.

    None casts nothing. It says so where a null context would be one that the compiler of torch 2.11 cannot look at.
    """
    if not is_dynamo_compiling():
        with contained(), nullcontext() if casting is None else casting:
            yield
    elif casting is None:
        yield
    else:
        with casting.traced if isinstance(casting, OpCasts | DeviceCasts) else casting:
            yield
