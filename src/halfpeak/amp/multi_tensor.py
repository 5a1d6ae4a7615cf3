"""``apex.multi_tensor_apply`` and the ``amp_C`` operations that scripts call, on any device, through torch's foreach kernels.

Every operation takes ``(chunk_size, noop_flag, tensor_lists, *args)``, the calling convention of :class:`MultiTensorApply`.
``chunk_size`` steered apex's kernels and has no effect here. ``noop_flag`` is a tensor of one element, of any dtype; an
operation sets it to 1 and never back to 0. The optimizer steps of ``amp_C`` are in :mod:`halfpeak.amp.optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfpeak.core.dtypes import is_low, largest
from halfpeak.core.errors import ConfigError
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance
from halfpeak.core.short_repr import short_repr
from halfpeak.ops import foreach

T = TypeVar("T")
TensorLists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls an operation with a chunk size in front of its arguments.

    >>> x, out, flag = [torch.ones(2)], [torch.empty(2)], torch.zeros(1, dtype=torch.int32)
    >>> multi_tensor_applier(multi_tensor_scale, flag, [x, out], 0.5)
    >>> out, flag
    ([tensor([0.5000, 0.5000])], tensor([0], dtype=torch.int32))
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., T], noop_flag: Tensor, tensor_lists: TensorLists, *args: Any) -> T:
        """``op(chunk_size, noop_flag, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """``out = in * scale`` for ``tensor_lists = [in, out]``; the flag is set if an input is not finite.

    Low-precision tensors are multiplied in float32 and rounded once. Outputs are always written, and may be the inputs.
    """
    sources, targets = _lists(tensor_lists, 2)
    if not sources:
        return
    _check(sources, noop_flag)
    with torch.no_grad():
        foreach.copy_cast_(targets, torch._foreach_mul(_upcast(sources), scale))


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """``out = a * x + b * y`` for ``tensor_lists = [x, y, out]``; the flag is set if a checked input is not finite.

    Args:
        arg_to_check: 0 checks x, 1 checks y, -1 both.
    """
    if arg_to_check not in (-1, 0, 1):
        raise ConfigError(f"arg_to_check={short_repr(arg_to_check)} must be 0 (x), 1 (y) or -1 (both)")
    x, y, out = _lists(tensor_lists, 3)
    if not x:
        return
    _check([*(x if arg_to_check != 1 else ()), *(y if arg_to_check != 0 else ())], noop_flag)
    with torch.no_grad():
        total = torch._foreach_mul(_upcast(x), a)
        torch._foreach_add_(total, torch._foreach_mul(_upcast(y), b))
        foreach.copy_cast_(out, total)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all elements of ``tensor_lists = [x]``; the flag is set if the norm is not finite.

    Returns:
        The norm, and the norm of each tensor (empty unless ``per_tensor``), in float32.  # f32[1], f32[n] or f32[0]
    """
    (x,) = _lists(tensor_lists, 1)
    return _norms(_upcast(x), noop_flag, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of ``x * inv_scale`` as :func:`multi_tensor_l2norm` does; x is not changed."""
    (x,) = _lists(tensor_lists, 1)
    with torch.no_grad():
        unscaled = torch._foreach_mul(_upcast(x), inv_scale.reshape(())) if x else []
    return _norms(unscaled, noop_flag, per_tensor)


def update_scale_hysteresis(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Move a loss scale in place by the rule of :func:`halfpeak.core.schedule.advance`, and return it.

    The scale falls after ``hysteresis`` overflows; an update without overflow restores that count. apex's kernel let
    the scale fall to 0; here it stops at the smallest normal float32.

    Args:
        scale: f32[1]; likewise ``found_inf``.
        growth_tracker: i32[1], clean updates in a row.
        hysteresis_tracker: i32[1], overflows left before the scale falls.

    Raises:
        ConfigError: a factor, the interval or the hysteresis is out of its range.
    """
    limits = torch.finfo(torch.float32)
    rule = ScaleConfig(
        growth=growth_factor,
        backoff=backoff_factor,
        interval=growth_interval,
        hysteresis=hysteresis,
        floor=limits.tiny,
        ceiling=largest(torch.float32),
        patience=None,
    )
    stuck = torch.zeros_like(growth_tracker)
    state = advance(rule, ScaleState(scale, growth_tracker, hysteresis_tracker, stuck), found_inf)
    growth_tracker.copy_(state.clean)
    hysteresis_tracker.copy_(state.grace)
    return scale.copy_(state.scale)


def _lists(tensor_lists: TensorLists, count: int) -> list[list[Tensor]]:
    lists = [list(tensors) for tensors in tensor_lists]
    lengths = [len(tensors) for tensors in lists]
    if len(lengths) != count or len(set(lengths)) != 1:
        raise ConfigError(
            f"tensor_lists has lists of lengths {lengths}; this operation expects {count} lists of equal length"
        )
    return lists


def _upcast(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().float() if is_low(tensor) else tensor.detach() for tensor in tensors]


def _check(tensors: Sequence[Tensor], noop_flag: Tensor) -> None:
    found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    foreach.check_([tensor.detach() for tensor in tensors], found_inf)
    noop_flag.copy_(torch.maximum(noop_flag, found_inf.to(noop_flag)))


def _norms(
    tensors: list[Tensor] | tuple[Tensor, ...], noop_flag: Tensor, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_zeros(0, dtype=torch.float32)
    norms = torch.stack([norm.to(noop_flag.device, torch.float32) for norm in torch._foreach_norm(tensors)])
    norm = torch.linalg.vector_norm(norms).reshape(1)
    noop_flag.copy_(torch.maximum(noop_flag, (~torch.isfinite(norm)).to(noop_flag).reshape(noop_flag.shape)))
    return norm, norms if per_tensor else norms[:0]
