"""The operators by which a compiled graph calls the engine: the compiler does not look into them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from halfpeak.engine.whole import Whole

_WHOLES: Final[WeakValueDictionary[int, Whole]] = WeakValueDictionary()

_ENGINE = "int engine, Tensor(a!) ticket, int[] backward, int[] which, Tensor(b!)[] grads"

_SCHEMAS: Final = (
    f"backward({_ENGINE}) -> ()",
    f"step({_ENGINE}, int[] lanes, Tensor(c!)[] weights, Tensor(d!)[] buffers) -> (Tensor, Tensor, Tensor)",
    "watch(int engine, Tensor[] weights, bool first) -> ()",
)


def enlist(whole: Whole) -> int:
    """The number by which operators find ``whole`` while it lives."""
    number = max(_WHOLES, default=0) + 1
    _WHOLES[number] = whole
    return number


def operators() -> Any:
    """``torch.ops.halfpeak``, with

    ::

        backward    take the gradients of a backward pass in
        step        the same for one that the step follows at once, if there is one, and the step
        watch       runs while a graph is traced, and notices weights that something else in it writes

    A ``ticket`` that both write keeps them in order, and from being taken for superfluous. What the graph shares with
    the engine, weights and buffers, they are said to write: so whatever else reads it stays before them or after them.
    """
    _library()
    return torch.ops.halfpeak


@functools.cache
def _library() -> torch.library.Library:
    """What defines the operators, while somebody holds it."""
    library = torch.library.Library("halfpeak", "FRAGMENT")
    # What a CUDA graph replays does not call Python again.
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags = () if unsafe is None else (unsafe,)
    for schema in _SCHEMAS:
        library.define(schema, tags=tags)
    for name, run in (("backward", _backward), ("step", _step), ("watch", _nothing)):
        library.impl(name, run, "CompositeExplicitAutograd")
    for name, fake in (("backward", _nothing), ("step", _fake_step), ("watch", _fake_watch)):
        torch.library.register_fake(f"halfpeak::{name}", fake, lib=library)
    return library


def _backward(
    engine: int, ticket: Tensor, backward: list[int], which: list[int], grads: list[Tensor]
) -> None:
    ticket.add_(1)
    _WHOLES[engine].run_backward(backward, which, grads, own=False)


def _step(
    engine: int,
    ticket: Tensor,
    backward: list[int],
    which: list[int],
    grads: list[Tensor],
    lanes: list[int],
    weights: list[Tensor],
    buffers: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    ticket.add_(1)
    return _WHOLES[engine].run_step(backward, which, grads, lanes, weights, buffers)


def _fake_step(engine: int, ticket: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    number = ticket.new_empty(())
    return number, ticket.new_empty(_WHOLES[engine].num_losses), ticket.new_empty(())


def _fake_watch(engine: int, weights: list[Tensor], first: bool) -> None:  # a schema's argument
    _WHOLES[engine].watch([weight._version for weight in weights], first=first)


def _nothing(*_: object) -> None:
    """What needs not be done, or not be simulated."""
