"""Sums: gradients are divided and added up in one compiled pass where the optimizer's kernels are compiled as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import compress
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.fused.compiling import Kernel, Vector, compiled
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.choose import WORTH_COMPILING, has_compiler
from halfpeak.ops import chunks, foreach


class Sums:
    """The verbs of :mod:`halfpeak.ops.foreach`, with the same results to the bit.

    A compiled kernel reads a gradient once and its sum once, where torch's operations go over every chunk three times.

    Args:
        compiles: whether there are kernels for large tensors.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self._compiles = compiles

    def accumulate_(
        self, into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        """``into += grad * inv_scale``; see :func:`halfpeak.ops.reference.accumulate_`."""
        into, grads = self._left_by(_add, into, grads, inv_scale, found_inf)
        foreach.accumulate_(into, grads, inv_scale, found_inf)

    def unscaled(
        self, grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], inv_scale: Tensor, found_inf: Tensor
    ) -> list[Tensor]:
        """New tensors ``grad * inv_scale`` in the given dtypes; see :func:`halfpeak.ops.reference.unscaled`."""
        if any(dtype is not torch.float32 or not _is_low(g) for g, dtype in zip(grads, dtypes, strict=True)):
            return foreach.unscaled(grads, dtypes, inv_scale, found_inf)
        fresh = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        self.unscale_into(fresh, grads, inv_scale, found_inf)
        return fresh

    def unscale_into(
        self, into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
    ) -> None:
        """``into = grad * inv_scale`` of low, dense gradients; see :func:`halfpeak.ops.foreach.unscale_into`."""
        into, grads = self._left_by(_set, into, grads, inv_scale, found_inf)
        foreach.unscale_into(into, grads, inv_scale, found_inf)

    def _left_by(
        self,
        verb: Callable[..., tuple[()]],
        into: Sequence[Tensor],
        grads: Sequence[Tensor],
        inv_scale: Tensor,
        found_inf: Tensor,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Run ``verb`` on those for which it has a kernel; the others."""
        if not self._compiles:
            return into, grads
        ran = [_run(verb, i, grad, inv_scale, found_inf) for i, grad in zip(into, grads, strict=True)]
        left = [not has_run for has_run in ran]
        return list(compress(into, left)), list(compress(grads, left))


def sums_of(optimizers: Iterable[Optimizer], targets: Sequence[Tensor]) -> Sums:
    """How gradients are summed that go to ``targets`` of some optimizers."""
    return Sums(compiles=all(_compiles(optimizer, targets) for optimizer in optimizers))


def _compiles(optimizer: Optimizer, targets: Sequence[Tensor]) -> bool:
    if not isinstance(optimizer, FusedOptimizer) or optimizer.road not in ("auto", "compiled"):
        return False
    if optimizer.road == "compiled":
        return True
    # It has not taken a step yet. What it will take, or nearly so: either way the bits are the same.
    on_host = all(target.device.type == "cpu" for target in targets)
    return on_host and sum(map(Tensor.numel, targets)) >= WORTH_COMPILING and has_compiler()


def _run(
    verb: Callable[..., tuple[()]], into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor
) -> bool:
    """Whether ``verb`` has a kernel for these, which has run then."""
    if (
        grad.dtype not in _READ
        or grad.is_neg()
        or inv_scale.device.type != "cpu"
        or found_inf.device.type != "cpu"
    ):
        return False
    vectors = chunks.vectors(into, grad)
    if vectors is None:
        return False
    _kernel(verb, grad.dtype)(*vectors, inv_scale, found_inf)
    return True


def _set(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> tuple[()]:
    true = grad.float() * inv_scale
    into.copy_(true)
    _check(true, found_inf)
    return ()


def _add(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> tuple[()]:
    true = grad.float() * inv_scale
    into.add_(true)
    _check(true, found_inf)
    return ()


def _check(true: Tensor, found_inf: Tensor) -> None:
    bad = torch.isfinite(true).logical_not().any()
    found_inf.copy_(torch.maximum(found_inf, bad.float()))


def _is_low(grad: Tensor) -> bool:
    return grad.dtype in (torch.float16, torch.bfloat16) and grad.layout is torch.strided


_READ: Final = frozenset((torch.float16, torch.bfloat16, torch.float32))


@cache
def _kernel(verb: Callable[..., tuple[()]], dtype: torch.dtype) -> Kernel:
    host = torch.device("cpu")
    vectors = (Vector(torch.float32, host, None), Vector(dtype, host, None))
    scalars = (Vector(torch.float32, host, ()), Vector(torch.float32, host, ()))
    return compiled(verb, (*vectors, *scalars))
