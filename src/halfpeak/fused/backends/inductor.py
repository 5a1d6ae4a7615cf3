"""The compiled backend: the kernels as code of torch.compile, two calls per buffer whatever the number of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from halfpeak.core.torch_compat import host_values
from halfpeak.fused.backends.base import GradStats, HostBackend, UpdateArgs
from halfpeak.fused.backends.kernels import flat_update_of, measure, squares
from halfpeak.fused.flat.buffers import FlatBuffer, flat
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.fused.rules.base import Rule

LENGTH = 2**20 + 7
"""Length of the example vectors of a compilation: no other argument has it, so none is taken for it. The compiler
judges by it whether work is worth sharing among all threads of the machine, and whether a sum is long enough to be made
of partial ones, which keeps it exact. A quarter of it is enough for both, with up to 512 threads."""


class Vector(NamedTuple):
    """An argument of a kernel.

    Attributes:
        dtype: of its elements.
        device: where it lies.
        shape: None for a vector of any length; what else a kernel is given has the same shape in every call.
        block_size: elements of the longest vectors for each of this one's.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...] | None
    block_size: int = 1

    @classmethod
    def long(cls, tensor: Tensor, block_size: int = 1) -> Vector:
        """The description of a vector that may have any length in another call."""
        return cls(tensor.dtype, tensor.device, None, block_size)

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

    def bind(self, *vectors: Tensor) -> BoundKernel | None:
        """This kernel on vectors of which all but the last two stay: they are checked now, and never again.

        Returns:
            None where it does more than run native code on what it is given. Nothing has been run.
        """
        return _bound(self._code.current_callable, vectors)


class BoundKernel:
    """Native code with the memory that it works on: a call takes 1 us where :class:`Kernel` takes 4 to check arguments.

    Attributes:
        outputs: what a call returns; it holds until the next.
    """

    def __init__(
        self, calls: Sequence[_NativeCall], fixed: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self._calls = [(call.function, itemgetter(*call.places), call.rest) for call in calls]
        self._fixed = fixed
        self.outputs = outputs

    def __call__(self, *last: Tensor) -> Sequence[Tensor]:
        """Run with other last vectors, whose dtypes and numbers of elements are those of the ones it was bound with."""
        for run in self.calls(*last):
            run()
        return self.outputs

    def calls(self, *last: Tensor) -> Iterator[Callable[[], None]]:
        """What a call runs, one after the other, with all that it needs."""
        for function, pick, rest in self._calls:
            yield partial(function, *pick((*self._fixed, *last, *rest)))


class _NativeCall(NamedTuple):
    """One call of native code. Its arguments are the vectors and ``rest``, in the order of ``places``."""

    function: Callable[..., None]
    places: Sequence[int]
    rest: Sequence[Any]


def compile_kernel(function: Callable[..., Any], arguments: Sequence[Vector]) -> Kernel:
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
    shape = (-(-LENGTH // argument.block_size),) if argument.shape is None else argument.shape
    return torch.zeros(shape, dtype=argument.dtype, device=argument.device)


_HARMLESS: Final = {"clear", "size", "assert_size_stride", "empty_strided_cpu", "torch", "float32", "bool"}
"""Names that generated code may use around its native kernels; with any other it cannot be bound."""


def _bound(generated: Any, vectors: Sequence[Tensor]) -> BoundKernel | None:
    """Run the generated Python code once, with recorders in place of the native kernels, to learn what it calls them with."""
    code = getattr(generated, "__func__", generated)
    native_kernels = {
        name: value
        for name, value in code.__globals__.items()
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    }
    if not set(code.__code__.co_names) <= _HARMLESS | set(native_kernels):
        return None
    recorded: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def recorder_of(native: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: recorded.append((native, arguments))

    recorders = {name: recorder_of(native) for name, native in native_kernels.items()}
    recorder = FunctionType(code.__code__, {**code.__globals__, **recorders}, closure=code.__closure__)
    self = (generated.__self__,) if hasattr(generated, "__self__") else ()
    outputs = recorder(*self, list(vectors))
    calls = [_native(function, arguments, vectors) for function, arguments in recorded]
    room = [one for call in calls for one in call.rest if isinstance(one, Tensor)]
    # Intermediate results would stay allocated.
    return None if any(one.dim() for one in room) else BoundKernel(calls, vectors[:-2], outputs)


def _native(
    function: Callable[..., None], arguments: Sequence[Any], vectors: Sequence[Tensor]
) -> _NativeCall:
    known = {id(vector): place for place, vector in enumerate(vectors)}
    rest = [argument for argument in arguments if id(argument) not in known]
    known |= {id(one): len(vectors) + place for place, one in enumerate(rest)}
    return _NativeCall(function, [known[id(argument)] for argument in arguments], rest)


CHUNK = 2**18
"""Elements at a time where a kernel needs memory for intermediate results: 8 bytes for each."""

MIN_COMPILED_LENGTH = 16
"""Smaller buffers are measured by torch's operations: the compiler might specialise on the length of their quarters."""


class InductorBackend(HostBackend):
    """Kernels made by torch.compile's C++ backend, once per process, rule and combination of dtypes.

    Lengths are dynamic and every number comes in a tensor, so neither more parameters nor another learning rate, scale,
    step or clipping multiplier compiles anything anew. The code is kept on disk between runs by torch's own cache.
    """

    name = "compiled"

    def __init__(self) -> None:
        super().__init__()
        # Weak: with other gradients present, buffers are cut into other slices.
        self._calls: WeakKeyDictionary[FlatBuffer, _Call] = WeakKeyDictionary()
        self._sums: WeakKeyDictionary[FlatBuffer, _Call] = WeakKeyDictionary()

    def measure(
        self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> GradStats:
        sums: list[Tensor] = []
        runs: list[Callable[[], None]] = []
        for slice_ in slices:
            grad = self._packer.in_place(slice_.buffer, grads)
            is_whole = slice_.buffer.length >= MIN_COMPILED_LENGTH and not slice_.buffer.length % 4
            bound = (
                self._sum(slice_.buffer, grad, multiplier).bound if grad is not None and is_whole else None
            )
            if grad is None or bound is None:
                sums += self._squares(slice_.buffer, grads, multiplier)
            else:
                runs += bound.calls(grad, multiplier)
                sums += bound.outputs
        # Build all argument lists before the first call: a kernel evicts Python's data from the CPU cache.
        for run in runs:
            run()
        total = torch.stack(sums).sum() if sums else torch.zeros_like(multiplier)
        found_inf = torch.zeros_like(total)
        # A sum is not finite if anything in it is not, but also where finite numbers are too many or too large.
        known = host_values(total)
        if known is None or not math.isfinite(known[0]):
            bad = [measure(self._packer(slice_.buffer, grads), multiplier)[1] for slice_ in slices]
            found_inf.copy_(torch.stack(bad).any())
        return GradStats(total, found_inf)

    def update(self, updates: Sequence[UpdateArgs], grads: Sequence[Tensor | None]) -> None:
        runs = [run for args in updates for run in self._calls_of(args, grads)]
        for run in runs:
            run()

    def invalidate_layout(self) -> None:
        super().invalidate_layout()
        self._calls.clear()
        self._sums.clear()

    def _squares(
        self, buffer: FlatBuffer, grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> Iterator[Tensor]:
        """Sums of squares that make up that of a buffer."""
        grad = self._packer.packed(buffer, grads)
        if buffer.length >= MIN_COMPILED_LENGTH:
            yield self._sum(buffer, grad, multiplier)(grad, multiplier)[0]
        rest = buffer.length % 4 if buffer.length >= MIN_COMPILED_LENGTH else buffer.length
        if rest:
            yield measure(flat(grad)[-rest:], multiplier)[0]

    def _sum(self, buffer: FlatBuffer, grad: Tensor, multiplier: Tensor) -> _Run:
        known = self._sums.get(buffer)
        if known is None or known.grad != grad.dtype:
            kernel = _measuring(grad.dtype, grad.device)
            run = _Run(slice(None), kernel, kernel.bind(flat(grad), multiplier), ())
            known = self._sums[buffer] = _Call(grad.dtype, [run])
        return known.runs[0]

    def _calls_of(self, args: UpdateArgs, grads: Sequence[Tensor | None]) -> Iterator[Callable[[], object]]:
        """The calls that update one slice."""
        grad = self._packer.in_place(args.slice_.buffer, grads)
        if grad is None:
            yield partial(self._pack_and_update, args, grads)
            return
        for run in self._call(args, grad).runs:
            if run.bound is None:
                yield partial(run, grad, args.numbers)
            else:
                yield from run.bound.calls(grad, args.numbers)

    def _pack_and_update(self, args: UpdateArgs, grads: Sequence[Tensor | None]) -> None:
        """Update a slice whose gradients must be packed first, into scratch memory that the next slice reuses."""
        grad = self._packer.packed(args.slice_.buffer, grads)
        for run in self._call(args, grad).runs:
            run(grad, args.numbers)

    def _call(self, args: UpdateArgs, grad: Tensor) -> _Call:
        buffer = args.slice_.buffer
        known = self._calls.get(buffer)
        if known is None or known.grad != grad.dtype:
            known = self._calls[buffer] = _Call(grad.dtype, _runs_of(args, flat(grad)))
        return known


class _Run(NamedTuple):
    """One call of a kernel: the elements of the gradient that it reads, and the memory that it updates."""

    at: slice
    kernel: Callable[..., Sequence[Tensor]]
    bound: BoundKernel | None
    memory: tuple[Tensor, ...]

    def __call__(self, grad: Tensor, numbers: Tensor) -> Sequence[Tensor]:
        if self.bound is not None:
            return self.bound(grad, numbers)
        return self.kernel(*self.memory, flat(grad)[self.at], numbers)


class _Call(NamedTuple):
    """What is the same in every step of a buffer. It holds no reference to the buffer."""

    grad: torch.dtype
    runs: list[_Run]


def _runs_of(args: UpdateArgs, grad: Tensor) -> list[_Run]:
    buffer = args.slice_.buffer
    size = CHUNK if buffer.block_sizes else buffer.length
    runs: list[_Run] = []
    for start in range(0, buffer.length or 1, size or 1):
        at = slice(start, min(start + size, buffer.length))
        weight, low, states = buffer.chunk(at)
        memory = (weight, *(() if low is None else (low,)), *states)
        kernel = _kernel_for(args, memory, grad[at])
        bound = None
        if isinstance(kernel, Kernel) and size >= buffer.length:
            bound = kernel.bind(*memory, grad, args.numbers)
        runs.append(_Run(at, kernel, bound, memory))
    return runs


def _kernel_for(args: UpdateArgs, memory: Sequence[Tensor], grad: Tensor) -> Callable[..., Sequence[Tensor]]:
    buffer = args.slice_.buffer
    has_low = buffer.low is not None
    if len(grad) < 2:
        return flat_update_of(args.rule, has_low=has_low)
    first, full = 1 + has_low, len(memory) - buffer.per_param_scalars
    states = zip(memory[first:full], buffer.block_sizes or (1,) * len(buffer.states), strict=False)
    vectors = (
        *map(Vector.long, memory[:first]),
        *(Vector.long(state, block_size) for state, block_size in states),
        *map(Vector.fixed, memory[full:]),
        Vector.long(grad),
        Vector.fixed(args.numbers),
    )
    return _updating(args.rule, has_low, vectors)


@cache
def _measuring(dtype: torch.dtype, device: torch.device) -> Kernel:
    return compile_kernel(squares, (Vector(dtype, device, None), Vector(torch.float32, device, ())))


@cache
def _updating(rule: Rule, has_low: bool, vectors: tuple[Vector, ...]) -> Kernel:
    return compile_kernel(flat_update_of(rule, has_low=has_low), vectors)
