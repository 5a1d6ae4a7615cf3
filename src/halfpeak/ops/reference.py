"""The reference of each operation, one tensor at a time. Every other backend is tested against this file.

``inv_scale``, ``factor`` and ``found_inf`` are float32 scalars on the device. No operation resets ``found_inf`` to zero;
it sets it to exactly 1 if a value that it computed is infinite or not a number. Arithmetic on low-precision tensors is
done in float32, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfpeak.core.decide import clip_coef
from halfpeak.core.dtypes import LOW
from halfpeak.core.torch_compat import scalar_on


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grad = grad * inv_scale`` in place.

    >>> grad, found_inf = torch.tensor([8.0, 16.0]), torch.zeros(())
    >>> unscale_([grad], torch.tensor(0.125), found_inf)
    >>> grad, found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    for grad in grads:
        grad.copy_(_times(grad, inv_scale))
        check_([grad], found_inf)


def unscaled(
    grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], inv_scale: Tensor, found_inf: Tensor
) -> list[Tensor]:
    """New tensors ``grad * inv_scale`` in the given dtypes; duplicates in a sparse gradient are summed."""
    fresh = [_times(_coalesced(grad), inv_scale).to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
    check_(fresh, found_inf)
    return fresh


def accumulate_(
    into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
) -> None:
    """``into += grad * inv_scale``, the product in the dtype of ``into``; only the product is checked."""
    for total, fresh in zip(
        into, unscaled(grads, [t.dtype for t in into], inv_scale, found_inf), strict=True
    ):
        total.add_(fresh)


def check_(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` to 1 if any element is infinite or not a number."""
    for tensor in tensors:
        bad = ~torch.isfinite(_values(tensor)).all()
        found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf.device, found_inf.dtype)))


def copy_cast_(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    """``dst = src``, rounded to the dtype of ``dst`` (to nearest, ties to even)."""
    for target, source in zip(dst, src, strict=True):
        target.copy_(source)


def merged(wide: Tensor, low: Tensor) -> Tensor:
    """``wide`` where it rounds to ``low``, and ``low`` elsewhere: a new tensor in the dtype of ``wide``.

    >>> wide = torch.tensor([1.001, 1.001])
    >>> merged(wide, torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
    tensor([1.0010, 3.0000])
    """
    return torch.where(wide.to(low.dtype) == low, wide, low.to(wide.dtype))


def merge_(wide: Sequence[Tensor], low: Sequence[Tensor]) -> None:
    """:func:`merged` in place."""
    for one, other in zip(wide, low, strict=True):
        one.copy_(merged(one, other))


def global_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The ``norm_type`` norm of all elements together, in float32; 0 where there are none."""  # f32[]
    filled = [values for values in map(_values, grads) if values.numel() > 0]
    if not filled:
        return torch.zeros((), dtype=torch.float32, device=grads[0].device if grads else None)
    norms = [torch.linalg.vector_norm(_wide(values), norm_type).to(torch.float32) for values in filled]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def scale_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """``grad = grad * factor`` in place."""
    for grad in grads:
        grad.copy_(_times(grad, factor))


def clip_norm_(grads: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``grad = grad * clip_coef(norm, max_norm)`` in place; returns the norm before that."""  # f32[]
    norm = global_norm(grads, norm_type)
    scale_(grads, clip_coef(norm, max_norm))
    return norm


def clamp_(grads: Sequence[Tensor], limit: float) -> None:
    """Clamp every element to ``[-limit, limit]`` in place, and of a complex element both parts."""
    for grad in grads:
        if grad.is_sparse:
            summed = grad.coalesce()
            clamp_([summed.values()], limit)
            grad.copy_(summed)
        elif grad.is_complex():
            grad.copy_(torch.view_as_complex(torch.view_as_real(grad.resolve_conj()).clamp(-limit, limit)))
        else:
            grad.clamp_(-limit, limit)


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    """The product, in float32 or wider."""
    factor = scalar_on(tensor.device, factor)
    if tensor.is_complex() and not tensor.is_sparse:
        # A complex product would turn the real part into nan where the imaginary part is infinite, and vice versa.
        return torch.view_as_complex(torch.view_as_real(tensor.resolve_conj()) * factor)
    return _wide(tensor) * factor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _coalesced(grad: Tensor) -> Tensor:
    # Duplicates are summed in float32: their sum can overflow a low dtype although each of them fits.
    return _wide(grad).coalesce() if grad.is_sparse else grad


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor
