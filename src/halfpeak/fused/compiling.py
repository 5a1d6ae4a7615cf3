"""Compiling a function of vectors once, for vectors of every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

LENGTH = 2**20 + 7
"""Of the vectors that a kernel is made with: like no other length of its arguments, so none is taken for it. The compiler
judges by it whether work is worth sharing among all threads of the machine, and whether a sum is long enough to be made
of partial ones, which keeps it exact. A quarter of it is enough for both, with up to 512 threads."""


class Vector(NamedTuple):
    """An argument of a kernel.

    Attributes:
        dtype: of its elements.
        device: where it lies.
        shape: None for a vector of any length; what else a kernel is given has the same shape in every call.
        grain: elements of the longest vectors for each of this one's.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...] | None
    grain: int = 1

    @classmethod
    def long(cls, tensor: Tensor, grain: int = 1) -> Vector:
        """The description of a vector that may have any length in another call."""
        return cls(tensor.dtype, tensor.device, None, grain)

    @classmethod
    def fixed(cls, tensor: Tensor) -> Vector:
        """The description of an argument that has this shape in every call."""
        return cls(tensor.dtype, tensor.device, tuple(tensor.shape))


class Kernel:
    """A compiled function of vectors.

    Args:
        code: what the compiler made.
    """

    def __init__(self, code: Any) -> None:
        self._code = code

    def __call__(self, *vectors: Tensor) -> Sequence[Tensor]:
        """What the function returns. The vectors are checked."""
        returned: Sequence[Tensor] = self._code(list(vectors))
        return returned

    def bind(self, *vectors: Tensor) -> Bound | None:
        """This kernel on vectors of which all but the last two stay: they are checked now, and never again.

        Returns:
            None where it does more than run native code on what it is given. Nothing has been run.
        """
        return _bound(self._code.current_callable, vectors)


class Bound:
    """Native code with the memory that it works on: a call takes 1 us where :class:`Kernel` takes 4 to check arguments.

    Attributes:
        outputs: what a call returns; it holds until the next.
    """

    def __init__(self, calls: Sequence[_Native], fixed: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._calls = [(call.function, itemgetter(*call.places), call.rest) for call in calls]
        self._fixed = fixed
        self.outputs = outputs

    def __call__(self, *last: Tensor) -> Sequence[Tensor]:
        """Run on other last vectors, whose dtypes and numbers of elements are those of the ones it was bound with."""
        for run in self.ready(*last):
            run()
        return self.outputs

    def ready(self, *last: Tensor) -> Iterator[Callable[[], None]]:
        """What a call runs, one after the other, with all that it needs."""
        for function, pick, rest in self._calls:
            yield partial(function, *pick((*self._fixed, *last, *rest)))


class _Native(NamedTuple):
    """One call of native code. Its arguments are the vectors and ``rest``, in the order of ``places``."""

    function: Callable[..., None]
    places: Sequence[int]
    rest: Sequence[Any]


def compiled(function: Callable[..., Any], arguments: Sequence[Vector]) -> Kernel:
    """``function`` as one kernel that serves every length but 0 and 1, which are special to the compiler.

    The graph is traced with symbolic lengths and compiled ahead of the first call, so nothing looks at arguments to find
    out whether it must be compiled anew.

    Args:
        function: of tensors, returning a tuple of tensors; it may write its arguments.
        arguments: what it is called with.
    """
    # On a thread of its own, what the caller is in the middle of is not traced into a kernel that others use as well: a mode
    # that casts, or an operator of a compiled graph.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_compile, function, arguments).result()


def _compile(function: Callable[..., Any], arguments: Sequence[Vector]) -> Kernel:
    # Not at the top: it takes longer to import than all of halfpeak.
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    example = [_stand_in(argument) for argument in arguments]

    # Not the function itself: its annotations would get into the graph and keep it out of the cache on disk.
    @torch.func.functionalize
    def pure(*vectors: Tensor) -> Any:
        return function(*vectors)

    with torch.no_grad():
        graph = make_fx(pure, select_decomp_table(), tracing_mode="symbolic")(*example)
        given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        with tracing(TracingContext(given[0].fake_mode)):
            return Kernel(compile_fx_inner(graph, given))


def _stand_in(argument: Vector) -> Tensor:
    shape = (-(-LENGTH // argument.grain),) if argument.shape is None else argument.shape
    return torch.zeros(shape, dtype=argument.dtype, device=argument.device)


_HARMLESS: Final = {"clear", "size", "assert_size_stride", "empty_strided_cpu", "torch", "float32", "bool"}
"""What generated code may do around its native code, for that to be all that counts."""


def _bound(generated: Any, vectors: Sequence[Tensor]) -> Bound | None:
    """Run the Python code that the compiler generated once, with natives that only write down what they are given."""
    code = getattr(generated, "__func__", generated)
    natives = {
        name: value
        for name, value in code.__globals__.items()
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    }
    if not set(code.__code__.co_names) <= _HARMLESS | set(natives):
        return None
    written: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def scribe_of(native: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: written.append((native, arguments))

    scribes = {name: scribe_of(native) for name, native in natives.items()}
    scribe = FunctionType(code.__code__, {**code.__globals__, **scribes}, closure=code.__closure__)
    self = (generated.__self__,) if hasattr(generated, "__self__") else ()
    outputs = scribe(*self, list(vectors))
    calls = [_native(function, arguments, vectors) for function, arguments in written]
    room = [one for call in calls for one in call.rest if isinstance(one, Tensor)]
    # What it computes in between would stay allocated.
    return None if any(one.dim() for one in room) else Bound(calls, vectors[:-2], outputs)


def _native(function: Callable[..., None], arguments: Sequence[Any], vectors: Sequence[Tensor]) -> _Native:
    known = {id(vector): place for place, vector in enumerate(vectors)}
    rest = [argument for argument in arguments if id(argument) not in known]
    known |= {id(one): len(vectors) + place for place, one in enumerate(rest)}
    return _Native(function, [known[id(argument)] for argument in arguments], rest)
