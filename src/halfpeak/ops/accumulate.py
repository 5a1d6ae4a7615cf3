"""Unscale the gradients of a backward pass and add them to earlier sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_dense, are_none


def add_unscaled(
    earlier: Sequence[Tensor | None],
    fresh: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    memory: Callable[[list[int]], list[Tensor]] | None = None,
) -> list[Tensor | None]:
    """``earlier + fresh * inv_scale``, each product and sum in the given dtype; None where both are None.

    Writes in place into earlier sums, and into fresh gradients that have the wanted dtype. Each sum is computed by itself,
    so the order of the tensors changes no bit. A gradient with a graph (``create_graph=True``) keeps it.

    Args:
        earlier: unscaled sums.
        fresh: scaled gradients.
        dtypes: of the results.
        inv_scale: 1 / scale.                             # f32[]
        found_inf: set to 1 if a product is not finite.   # f32[]
        memory: gives, for places in the lists, tensors to unscale low-precision gradients into; None allocates them.

    >>> add_unscaled([torch.ones(1)], [torch.tensor([8.0])], [torch.float32], torch.tensor(0.25), torch.zeros(()))
    [tensor([3.])]
    """
    if are_none(earlier) and not any(map(is_, fresh, repeat(None))) and not any(map(_HAS_GRAPH, fresh)):
        return _unscaled(fresh, dtypes, range(len(fresh)), inv_scale, found_inf, memory)
    totals = list(earlier)
    first: list[int] = []
    more: list[int] = []
    for i, (total, grad) in enumerate(zip(earlier, fresh, strict=True)):
        if grad is None:
            continue
        if grad.requires_grad or (total is not None and total.requires_grad):
            with torch.enable_grad():
                (unscaled,) = reference.unscaled([grad], [dtypes[i]], inv_scale, found_inf)
                totals[i] = unscaled if total is None else total + unscaled
        elif total is None:
            first.append(i)
        else:
            # A dense tensor cannot be added in place to a sparse one.
            totals[i] = total.to_dense() if total.is_sparse and not grad.is_sparse else total
            more.append(i)
    unscaled = _unscaled(
        [fresh[i] for i in first], [dtypes[i] for i in first], first, inv_scale, found_inf, memory
    )
    for i, grad in zip(first, unscaled, strict=True):
        totals[i] = grad
    if more:
        foreach.accumulate_([totals[i] for i in more], [fresh[i] for i in more], inv_scale, found_inf)  # type: ignore[misc]
    return totals


def _unscaled(
    grads: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    places: Sequence[int],
    inv_scale: Tensor,
    found_inf: Tensor,
    memory: Callable[[list[int]], list[Tensor]] | None,
) -> list[Tensor | None]:
    """Unscale gradients that have no earlier sum: in place, or into a new tensor of a wider dtype."""
    given = list(map(_DTYPE, grads))
    if given == list(dtypes):
        foreach.unscale_(grads, inv_scale, found_inf)
        return list(grads)
    result: list[Tensor | None] = list(grads)
    same = [k for k, (had, wanted) in enumerate(zip(given, dtypes, strict=True)) if had is wanted]
    other = [k for k, (had, wanted) in enumerate(zip(given, dtypes, strict=True)) if had is not wanted]
    if same:
        foreach.unscale_([grads[k] for k in same], inv_scale, found_inf)
    low = [grads[k] for k in other]
    if memory is not None and are_dense(low):
        wide = memory([places[k] for k in other])
        foreach.unscale_into(wide, low, inv_scale, found_inf)
    else:
        wide = foreach.unscaled(low, [dtypes[k] for k in other], inv_scale, found_inf)
    for k, grad in zip(other, wide, strict=True):
        result[k] = grad
    return result


_DTYPE: Final = attrgetter("dtype")
_HAS_GRAPH: Final = attrgetter("requires_grad")
