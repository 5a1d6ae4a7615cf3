"""Unscale the gradients of a backward pass and add them to the gradients that the optimizer reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.dtypes import is_low
from halfpeak.engine.gradients.params import ParamPairs
from halfpeak.fused.backends.choose import MIN_COMPILED, has_compiler
from halfpeak.fused.backends.inductor import Kernel, Vector, compile_kernel
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_dense, are_none, gradients_of
from halfpeak.state.grad_buffers import GradBufferPool


@dataclass(frozen=True, slots=True)
class GradAccumulator:
    """``main.grad += model.grad / scale``, in the dtype of the main parameter.

    Each parameter is accumulated by itself, so the order of the parameters changes no bit of the sums.

    Attributes:
        inv_scale: 1 / scale.                                  # f32[]
        found_inf: set to 1 if a gradient is not finite.       # f32[]
        kernels: the operations that unscale and add.
        buffers: memory for the gradients of masters; None allocates new memory.
    """

    inv_scale: Tensor
    found_inf: Tensor
    kernels: AccumulateKernels
    buffers: GradBufferPool | None = None

    def accumulate(self, pairs: ParamPairs, stashed: Mapping[int, Tensor]) -> None:
        """Accumulate ``.grad`` of the model parameters, and set it to None on parameters with a master.

        Args:
            pairs: every pair that the backward pass may have reached.
            stashed: earlier unscaled gradients of parameters without a master, by ``id`` of the parameter.
        """
        plain, none = pairs.unmastered, [None] * len(pairs.unmastered)
        earlier = [stashed.get(id(parameter)) for parameter in plain] if stashed else none
        self._accumulate(plain, plain, earlier)
        self._accumulate(pairs.low_params, pairs.masters, gradients_of(pairs.masters))
        for low in pairs.low_params:
            low.grad = None

    def _accumulate(
        self, models: Sequence[Tensor], mains: Sequence[Tensor], earlier: Sequence[Tensor | None]
    ) -> None:
        """:meth:`accumulate` for parameters that all have a master, or that all have none."""
        fresh = gradients_of(models)
        has_masters = models is not mains
        if are_dense(fresh):
            if are_none(earlier):
                self._unscale(mains, fresh, has_masters=has_masters, dense=True)
                return
            if are_dense(earlier):
                set_grads(mains, earlier)
                self.kernels.accumulate_(earlier, fresh, self.inv_scale, self.found_inf)
                return
        first: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for main, grad, total in zip(mains, fresh, earlier, strict=True):
            if grad is None:
                main.grad = total
            elif grad.requires_grad:
                main.grad = self._with_graph(total, grad, main.dtype)
            elif total is None:
                first.append((main, grad))
            else:
                main.grad = _summable(total, grad)
                more.append((main.grad, grad))
        grads = [grad for _, grad in first]
        self._unscale([main for main, _ in first], grads, has_masters=has_masters, dense=are_dense(grads))
        totals, grads = [total for total, _ in more], [grad for _, grad in more]
        self.kernels.accumulate_(totals, grads, self.inv_scale, self.found_inf)

    def _unscale(
        self, mains: Sequence[Tensor], grads: Sequence[Tensor], *, has_masters: bool, dense: bool
    ) -> None:
        """Unscale gradients that have no earlier sum: in place, or for masters into a tensor like the master."""
        if not has_masters:
            foreach.unscale_(grads, self.inv_scale, self.found_inf)
        elif self.buffers is not None and dense and set(map(type, mains)) == {Tensor}:
            unscaled = self.buffers.take(mains)
            self.kernels.unscale_into(unscaled, grads, self.inv_scale, self.found_inf)
            set_grads(mains, unscaled)
        else:
            dtypes = [main.dtype for main in mains]
            set_grads(mains, self.kernels.unscaled(grads, dtypes, self.inv_scale, self.found_inf))

    def _with_graph(self, total: Tensor | None, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum with its graph, because a gradient penalty may depend on it after ``create_graph=True``."""
        (unscaled,) = reference.unscaled([fresh], [dtype], self.inv_scale, self.found_inf)
        return unscaled if total is None else total + unscaled


class AccumulateKernels(Protocol):
    """The operations that accumulate gradients: :mod:`halfpeak.ops.foreach` or :class:`CompiledKernels`."""

    def accumulate_(
        self, into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        """``into += grad * inv_scale``; see :func:`halfpeak.ops.reference.accumulate_`."""
        ...

    def unscaled(
        self, grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], inv_scale: Tensor, found_inf: Tensor
    ) -> list[Tensor]:
        """New tensors ``grad * inv_scale`` in the given dtypes; see :func:`halfpeak.ops.reference.unscaled`."""
        ...

    def unscale_into(
        self, into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        """``into = grad * inv_scale`` of low, dense gradients; see :func:`halfpeak.ops.foreach.unscale_into`."""
        ...


class CompiledKernels:
    """Compiled kernels for large tensors, bitwise equal to :mod:`halfpeak.ops.foreach`.

    A compiled kernel reads a gradient once and its sum once. Torch's operations read every chunk three times.
    """

    def accumulate_(
        self, into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        """See :class:`AccumulateKernels`."""
        into, grads = _run_all(_add, into, grads, inv_scale, found_inf)
        foreach.accumulate_(into, grads, inv_scale, found_inf)

    def unscaled(
        self, grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], inv_scale: Tensor, found_inf: Tensor
    ) -> list[Tensor]:
        """See :class:`AccumulateKernels`."""
        if set(dtypes) - {torch.float32} or not all(is_low(g) and g.layout is torch.strided for g in grads):
            return foreach.unscaled(grads, dtypes, inv_scale, found_inf)
        fresh = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        self.unscale_into(fresh, grads, inv_scale, found_inf)
        return fresh

    def unscale_into(
        self, into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        """See :class:`AccumulateKernels`."""
        into, grads = _run_all(_set, into, grads, inv_scale, found_inf)
        foreach.unscale_into(into, grads, inv_scale, found_inf)


def kernels_for(optimizers: Iterable[Optimizer], main_params: Sequence[Tensor]) -> AccumulateKernels:
    """The kernels for the gradients of ``main_params``, the parameters that ``optimizers`` step."""
    compiles = all(_compiles(optimizer, main_params) for optimizer in optimizers)
    return CompiledKernels() if compiles else foreach


def _compiles(optimizer: Optimizer, targets: Sequence[Tensor]) -> bool:
    if not isinstance(optimizer, FusedOptimizer) or optimizer.backend not in ("auto", "compiled"):
        return False
    if optimizer.backend == "compiled":
        return True
    # Before the first step "auto" is undecided. This guess is close to its later choice, and the bits are equal anyway.
    on_host = all(target.device.type == "cpu" for target in targets)
    return on_host and sum(map(Tensor.numel, targets)) >= MIN_COMPILED and has_compiler()


def _run_all(
    operation: Callable[..., tuple[()]],
    into: Sequence[Tensor],
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Run the compiled ``operation`` on the tensors that it supports, and return the others."""
    ran = [_run(operation, i, grad, inv_scale, found_inf) for i, grad in zip(into, grads, strict=True)]
    left = [not has_run for has_run in ran]
    return list(compress(into, left)), list(compress(grads, left))


def _run(
    operation: Callable[..., tuple[()]], into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor
) -> bool:
    """Run the compiled ``operation`` if it supports these tensors. Returns whether it did."""
    if (
        grad.dtype not in _READ
        or grad.is_neg()
        or inv_scale.device.type != "cpu"
        or found_inf.device.type != "cpu"
    ):
        return False
    vectors = foreach.matching_vectors(into, grad)
    if vectors is None:
        return False
    _kernel(operation, grad.dtype)(*vectors, inv_scale, found_inf)
    return True


def _set(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> tuple[()]:
    unscaled = grad.float() * inv_scale
    into.copy_(unscaled)
    _check(unscaled, found_inf)
    return ()


def _add(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> tuple[()]:
    unscaled = grad.float() * inv_scale
    into.add_(unscaled)
    _check(unscaled, found_inf)
    return ()


def _check(unscaled: Tensor, found_inf: Tensor) -> None:
    bad = torch.isfinite(unscaled).logical_not().any()
    found_inf.copy_(torch.maximum(found_inf, bad.float()))


_READ: Final = frozenset((torch.float16, torch.bfloat16, torch.float32))


@cache
def _kernel(operation: Callable[..., tuple[()]], dtype: torch.dtype) -> Kernel:
    host = torch.device("cpu")
    vectors = (Vector(torch.float32, host, None), Vector(dtype, host, None))
    scalars = (Vector(torch.float32, host, ()), Vector(torch.float32, host, ()))
    return compile_kernel(operation, (*vectors, *scalars))


def set_grads(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set ``.grad`` of each parameter, possibly to None."""
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def _summable(total: Tensor, fresh: Tensor) -> Tensor:
    """``total``, made dense if ``fresh`` is: a dense tensor cannot be added in place to a sparse one."""
    return total.to_dense() if total.is_sparse and not fresh.is_sparse else total
