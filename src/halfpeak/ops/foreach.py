"""The operations of the reference over whole lists of tensors, by ``torch._foreach_*`` and ``torch._amp_foreach_*``.

Tensors are grouped by device and dtype first. Gradients that those kernels do not support (sparse, complex, bfloat16 on an
accelerator) are viewed as real, upcast, or passed to the reference. Dense gradients are unscaled and added in one pass over
memory instead of three: on CUDA by a Triton kernel, on the CPU chunk by chunk. For shards (``DTensor``) the kernels get the
local tensors, and ``found_inf`` and norms are reduced over the meshes, so every rank must make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Final, TypeAlias, TypeGuard

import torch
from torch import Tensor

from halfpeak.core.decide import clip_coef, clip_coef_of_number
from halfpeak.core.dtypes import LOW
from halfpeak.core.torch_compat import host_values, scalar_on
from halfpeak.ops import reference, shards
from halfpeak.ops.triton import is_installed, kernels

CHUNK = 2**16
"""Elements of a large tensor that are unscaled at a time, so that they stay in the cache."""

MIN_CHUNKED = 2**14
"""The number of elements from which a loop over a tensor's chunks is faster than an operation on a list."""

_Group: TypeAlias = tuple[torch.device, torch.dtype, list[Tensor]]

_AMP_DTYPES = (torch.float32, torch.float16, torch.float64)


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grad = grad * inv_scale`` in place; see :func:`halfpeak.ops.reference.unscale_`."""
    if shards.has_shards(grads):
        unscale_(shards.local_of(grads), inv_scale, found_inf)
        shards.reduce_found_inf_(found_inf, grads)
        return
    if found_inf.is_cuda:
        _, grads = _after_one_pass(grads, grads, inv_scale, found_inf, adds=False)
    groups, rest = _sorted(grads)
    _unscale_(groups, inv_scale, found_inf)
    if rest:
        reference.unscale_(rest, inv_scale, found_inf)


def unscaled(
    grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], inv_scale: Tensor, found_inf: Tensor
) -> list[Tensor]:
    """New tensors ``grad * inv_scale`` in the given dtypes; see :func:`halfpeak.ops.reference.unscaled`."""
    if shards.has_shards(grads):
        local = unscaled(shards.local_of(grads), dtypes, inv_scale, found_inf)
        shards.reduce_found_inf_(found_inf, grads)
        return list(map(shards.shard_like, local, grads))
    fresh: list[Tensor] = []
    copies: list[Tensor] = []
    sources: list[Tensor] = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        if _can_copy_first(grad, dtype):
            fresh.append(torch.empty_like(grad, dtype=dtype))
            copies.append(fresh[-1])
            sources.append(grad)
        else:
            fresh.extend(reference.unscaled([grad], [dtype], inv_scale, found_inf))
    unscale_into(copies, sources, inv_scale, found_inf)
    return fresh


def unscale_into(
    into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
) -> None:
    """``into = grad * inv_scale`` for strided real tensors, ``into`` in the same or a wider dtype; see :func:`unscaled`."""
    into, grads = _after_one_pass(into, grads, inv_scale, found_inf, adds=False)
    copy_cast_(into, grads)
    # A float16 overflows float32 only at a scale below 2**-111, where it would have underflowed before.
    may_overflow = set(zip(map(_DTYPE, into), map(_DTYPE, grads), strict=True)) != {
        (torch.float32, torch.float16)
    }
    _unscale_(_groups(into), inv_scale, found_inf, may_overflow=may_overflow)


def accumulate_(
    into: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor
) -> None:
    """``into += grad * inv_scale``; see :func:`halfpeak.ops.reference.accumulate_`."""
    if shards.has_shards(grads):
        accumulate_(shards.local_of(into), shards.local_of(grads), inv_scale, found_inf)
        shards.reduce_found_inf_(found_inf, grads)
        return
    into, grads = _after_one_pass(into, grads, inv_scale, found_inf, adds=True)
    fresh = unscaled(grads, [total.dtype for total in into], inv_scale, found_inf)
    together = [(t, f) for t, f in zip(into, fresh, strict=True) if not (t.is_sparse or f.is_sparse)]
    for _, _, group in _groups([t for t, _ in together]):
        chosen = {id(t) for t in group}
        torch._foreach_add_(group, [f for t, f in together if id(t) in chosen])
    for total, increment in zip(into, fresh, strict=True):
        if total.is_sparse or increment.is_sparse:
            total.add_(increment)


def check_(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` to 1 if any element is not finite; see :func:`halfpeak.ops.reference.check_`."""
    if shards.has_shards(tensors):
        check_(shards.local_of(tensors), found_inf)
        shards.reduce_found_inf_(found_inf, tensors)
        return
    groups, rest = _sorted(tensors)
    for device, dtype, group in groups:
        _check_group_(group, device, dtype, found_inf)
    if rest:
        reference.check_(rest, found_inf)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every element is finite. Waits for the device.

    >>> all_finite([torch.ones(2), torch.tensor([torch.inf])])
    False
    """
    if not tensors:
        return True
    found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    check_(tensors, found_inf)
    return not bool(found_inf)


def copy_cast_(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    """``dst = src``, rounded to the dtype of ``dst``; see :func:`halfpeak.ops.reference.copy_cast_`."""
    if not dst:
        return
    # On the host the kernel copies one by one in any case; on an accelerator it would if the list had several dtypes.
    if (dst[0].is_cpu and src[0].is_cpu) or (_are_alike(dst) and len(set(map(_DTYPE, src))) == 1):
        torch._foreach_copy_(list(dst), list(src))
        return
    pairs: dict[tuple[torch.device, torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(dst, src, strict=True):
        targets, sources = pairs.setdefault((target.device, target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in pairs.values():
        torch._foreach_copy_(targets, sources)


def merge_(wide: Sequence[Tensor], low: Sequence[Tensor]) -> None:
    """``wide = low`` where ``wide`` does not round to it; see :func:`halfpeak.ops.reference.merge_`.

    On the host, tensors that agree (nearly all of them, in nearly every call) are read and not written.
    """
    changed = [not (one.is_cpu and _rounds_to(one, other)) for one, other in zip(wide, low, strict=True)]
    reference.merge_(list(compress(wide, changed)), list(compress(low, changed)))


def global_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all elements together, in float32; see :func:`halfpeak.ops.reference.global_norm`."""  # f32[]
    if shards.has_shards(grads):
        return shards.global_norm(grads, norm_type, global_norm)
    home = grads[0].device if grads else None
    whole: list[Tensor] = []
    if norm_type != 2:
        # Only the 2-norm of a complex tensor is the norm of its real and imaginary parts.
        whole = [grad for grad in grads if grad.is_complex()]
        grads = [grad for grad in grads if not grad.is_complex()]
    groups, rest = _sorted(grads)
    norms: list[Tensor] = []
    for _, dtype, group in groups:
        wide = [g.float() for g in group] if dtype in LOW else group
        each = torch._foreach_norm(wide, norm_type)
        norms += each if dtype is torch.float32 else [norm.to(torch.float32) for norm in each]
    norms.extend(reference.global_norm([grad], norm_type) for grad in rest + whole)
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=home)
    if len(groups) + len(rest) + len(whole) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def scale_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """``grad = grad * factor`` in place; see :func:`halfpeak.ops.reference.scale_`."""
    grads = shards.local_of(grads) if shards.has_shards(grads) else grads
    groups, rest = _sorted(grads)
    for device, dtype, group in groups:
        if dtype in LOW:
            _scale_in_fp32_(group, scalar_on(device, factor))
        else:
            torch._foreach_mul_(group, scalar_on(device, factor))
    if rest:
        reference.scale_(rest, factor)


def clip_norm_(grads: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients down to a largest norm; see :func:`halfpeak.ops.reference.clip_norm_`.  # f32[]"""
    norm = global_norm(grads, norm_type)
    clip_to_norm_(grads, norm, max_norm)
    return norm


def clip_to_norm_(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """:func:`clip_norm_` of gradients whose norm is known."""
    known = host_values(norm)
    coef = None if known is None else clip_coef_of_number(known[0], max_norm)
    # Multiplying by one changes no bit.
    if coef is None:
        scale_(grads, clip_coef(norm, max_norm))
    elif coef != 1:
        scale_(grads, torch.scalar_tensor(coef, dtype=torch.float32, device="cpu"))


def clamp_(grads: Sequence[Tensor], limit: float) -> None:
    """Clamp every element to ``[-limit, limit]``; see :func:`halfpeak.ops.reference.clamp_`."""
    if shards.has_shards(grads):
        # The operations of DTensor itself, which complete a pending (partial) sum over ranks first.
        reference.clamp_(grads, limit)
        return
    groups, rest = _sorted(grads)
    for _, _, group in groups:
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)
    if rest:
        reference.clamp_(rest, limit)


def gradients_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each tensor, or None."""
    return list(map(_GRAD, tensors))


def are_none(grads: Sequence[Tensor | None]) -> bool:
    """Whether there is no gradient."""
    return all(map(is_, grads, repeat(None)))


def is_in_bucket(tensor: Tensor | None) -> bool:
    """Whether a tensor is part of other memory: a bucket of DDP, which it may fill, or a flat buffer of a fused optimizer."""
    return (
        tensor is not None
        and not tensor.is_sparse
        and (tensor._is_view() or tensor.untyped_storage().nbytes() != tensor.nbytes)
    )


def are_dense(grads: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
    """Whether every gradient exists and is a plain strided tensor without a graph. The loops run in C (``map``)."""
    return (
        set(map(type, grads)) <= {Tensor}
        and not any(map(_HAS_GRAPH, grads))
        and set(map(_LAYOUT, grads)) <= {torch.strided}
    )


def can_stay(grads: Sequence[Tensor]) -> bool:
    """Whether a fused step reads gradients where they are: dense ones; shards where some are in low precision.

    Float32 shards are unscaled in place when the pass ends, which takes no memory.
    """
    if shards.has_shards(grads) and any(grad.dtype in LOW for grad in grads):
        return not any(map(_HAS_GRAPH, grads)) and are_dense(shards.local_of(grads))
    return are_dense(grads)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in any order.

    >>> import torch
    >>> is_dense(torch.ones(2, 3).T), is_dense(torch.ones(2, 3)[:, :2])
    (True, False)
    """
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def as_vector(tensor: Tensor) -> Tensor | None:
    """The elements of a plain dense tensor as a vector, in the order of memory; None for any other tensor.

    >>> import torch
    >>> as_vector(torch.tensor([[1, 2], [3, 4]]).T)
    tensor([1, 2, 3, 4])
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_dense(tensor):
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _rounds_to(wide: Tensor, low: Tensor) -> bool:
    """Whether the bits of ``low`` are those of ``wide`` rounded; False if the host cannot compare them as integers."""
    if wide.shape != low.shape or as_vector(low) is None or low.element_size() != 2:
        return False
    rounded = wide.to(low.dtype)
    if rounded.stride() != low.stride():
        return False
    ours, theirs = as_vector(rounded), as_vector(low)
    integers = torch.int64 if low.numel() % 4 == 0 else torch.int16
    return ours is not None and theirs is not None and torch.equal(ours.view(integers), theirs.view(integers))


def _after_one_pass(
    into: Sequence[Tensor],
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    adds: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """``into = grad * inv_scale``, or ``into += ...``, where one pass over memory can; returns the pairs that remain."""
    if not into:
        return into, grads
    pairs = list(zip(into, grads, strict=True))
    if found_inf.is_cuda:
        if not is_installed() or torch.cuda.is_current_stream_capturing():
            return into, grads
        left = [not _fit_kernel(total, grad, found_inf) for total, grad in pairs]
        served = [pair for pair, is_left in zip(pairs, left, strict=True) if not is_left]
        if served:
            factor = scalar_on(found_inf.device, inv_scale)
            kernels().add_unscaled(*map(list, zip(*served, strict=True)), factor, found_inf, adds=adds)
    elif max(map(Tensor.numel, into)) < MIN_CHUNKED:
        return into, grads
    else:
        add = _accumulate_chunks if adds else _unscale_chunks
        left = [not add(total, grad, inv_scale, found_inf) for total, grad in pairs]
    return list(compress(into, left)), list(compress(grads, left))


def _fit_kernel(into: Tensor, grad: Tensor, found_inf: Tensor) -> bool:
    """Whether both are plain, have the same memory order, and lie on the device of ``found_inf``."""
    return (
        type(into) is type(grad) is Tensor
        and into.dtype is torch.float32
        and (grad.dtype is torch.float32 or grad.dtype in LOW)
        and into.get_device() == grad.get_device() == found_inf.get_device()
        and grad.numel() > 0
        and into.shape == grad.shape
        and into.stride() == grad.stride()
        and not (into.requires_grad or grad.requires_grad)
        and is_dense(grad)
    )


def _unscale_chunks(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> bool:
    """``into = grad * inv_scale`` in the dtype of ``into``; returns False and does nothing if :func:`_chunks` are none."""
    pairs = _chunks(into, grad, inv_scale, found_inf)
    for there, chunk in pairs:
        there.copy_(chunk)
        torch._amp_foreach_non_finite_check_and_unscale_([there], found_inf, inv_scale)
    return bool(pairs)


def _accumulate_chunks(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> bool:
    """``into += grad * inv_scale``; returns False and does nothing if :func:`_chunks` are none."""
    pairs = _chunks(into, grad, inv_scale, found_inf)
    scratch = into.new_empty(min(CHUNK, into.numel())) if pairs else into
    for there, chunk in pairs:
        true = scratch[: len(chunk)].copy_(chunk)
        torch._amp_foreach_non_finite_check_and_unscale_([true], found_inf, inv_scale)
        there.add_(true)
    return bool(pairs)


def _chunks(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of chunks of both if they are large, dense, on the host and of one memory order, and no product can overflow."""
    if (
        into.numel() < MIN_CHUNKED
        or not (into.is_cpu and found_inf.is_cpu)
        or into.dtype is not torch.float32
    ):
        return []
    if into.requires_grad or grad.requires_grad or grad.device != into.device or not grad.is_floating_point():
        return []
    if into.shape != grad.shape or into.stride() != grad.stride() or not _cannot_overflow(inv_scale):
        return []
    ours, theirs = as_vector(into), as_vector(grad)
    if ours is None or theirs is None:
        return []
    return list(zip(ours.split(CHUNK), theirs.split(CHUNK), strict=True))


def _cannot_overflow(inv_scale: Tensor) -> bool:
    """Whether the host knows, without waiting, that finite values times ``inv_scale`` stay finite.  # f32[]"""
    known = host_values(inv_scale)
    return known is not None and known[0] <= 1


def _unscale_(
    groups: Sequence[_Group], inv_scale: Tensor, found_inf: Tensor, *, may_overflow: bool = True
) -> None:
    for device, dtype, group in groups:
        if _has_amp_kernel(device, dtype):
            _amp_(group, inv_scale, found_inf)
        else:
            _scale_in_fp32_(group, scalar_on(device, inv_scale))
        if may_overflow and not _cannot_overflow(inv_scale):
            # The kernel above checks the values that it reads. With a scale below 1, those that it writes may overflow.
            _check_group_(group, device, dtype, found_inf)


def _scale_in_fp32_(group: list[Tensor], factor: Tensor) -> None:
    """``tensor = tensor * factor`` for low tensors: the product in float32, rounded once."""
    wide = [tensor.float() for tensor in group]
    torch._foreach_mul_(wide, factor)
    torch._foreach_copy_(group, wide)


def _amp_(group: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    device = group[0].device
    if found_inf.device == device:
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, scalar_on(device, inv_scale))
        return
    local = torch.zeros((), dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(group, local, scalar_on(device, inv_scale))
    _raise_flag_(found_inf, local)


def _check_group_(group: list[Tensor], device: torch.device, dtype: torch.dtype, found_inf: Tensor) -> None:
    if _has_amp_kernel(device, dtype):
        _amp_(group, torch.ones((), dtype=torch.float32, device=device), found_inf)
    else:
        largest = torch.stack(torch._foreach_norm(group, float("inf"))).max()
        _raise_flag_(found_inf, ~torch.isfinite(largest))


def _raise_flag_(found_inf: Tensor, bad: Tensor) -> None:
    found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf.device, found_inf.dtype)))


def _has_amp_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in _AMP_DTYPES or (dtype is torch.bfloat16 and device.type == "cpu")


def _can_copy_first(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``grad`` can be copied to ``dtype`` before the product, because that is the dtype of the product."""
    wide = torch.float32 if grad.dtype in LOW else grad.dtype
    return grad.layout is torch.strided and dtype is wide and not grad.is_complex()


def _split(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Dense real tensors (complex ones viewed as real) with elements, and all others."""
    dense: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_conj():
            rest.append(tensor)
        elif tensor.numel() > 0:
            dense.append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return dense, rest


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are of one dtype, on one device."""
    return len(set(map(_DTYPE, tensors))) == len(set(map(_DEVICE, tensors))) == 1


def _sorted(tensors: Sequence[Tensor]) -> tuple[list[_Group], list[Tensor]]:
    """Dense real tensors by device and dtype, and all others."""
    # A fast path for the usual list of one device and dtype. It runs for every list, so its loops run in C.
    if (
        _are_alike(tensors)
        and set(map(_LAYOUT, tensors)) == {torch.strided}
        and all(map(Tensor.numel, tensors))
    ):
        device, dtype = tensors[0].device, tensors[0].dtype
        if not dtype.is_complex:
            return [(device, dtype, list(tensors))], []
    dense, rest = _split(tensors)
    return _groups(dense), rest


def _groups(tensors: Sequence[Tensor]) -> list[_Group]:
    if _are_alike(tensors):
        return [(tensors[0].device, tensors[0].dtype, list(tensors))]
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [(device, dtype, group) for (device, dtype), group in groups.items()]


_DTYPE: Final = attrgetter("dtype")
_DEVICE: Final = Tensor.get_device
"""The device index, -1 on the host: half the cost of ``Tensor.device``, and no process has two kinds of accelerator."""
_LAYOUT: Final = attrgetter("layout")
_GRAD: Final = attrgetter("grad")
_HAS_GRAPH: Final = attrgetter("requires_grad")
