"""The launches of a step: three where all parameters are of one kind, and none of them waits for the device."""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfpeak.ops.triton.control import control_kernel
from halfpeak.ops.triton.measure import measure_kernel
from halfpeak.ops.triton.update import update_kernel

CHUNK = 1024
"""Elements that a program works on at a time."""

COLUMNS = 8
"""Of a member's row: numel, addresses of weight, low weight and three slots, and its row of numbers."""

HYPER = 8
"""Of a group's row: sign, lr, weight decay, two numbers of the rule, eps, and two switches of the rule."""

_WARPS = 4
_PER_PROCESSOR = 8
"""Programs that a multiprocessor holds at once, with the 64 registers per thread that the update takes."""

_DTYPES: Final = MappingProxyType(
    {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
)


class Chunks(NamedTuple):
    """Parameters of one kind, in chunks.

    Attributes:
        members: see :func:`~halfpeak.ops.triton.update.update_kernel`.   # i64[members, COLUMNS]
        grads: where gradients lie.                                        # i64[members]
        chunks: member, and which of its chunks.                           # i32[count, 2]
        full: how many chunks their parameter fills; they come first.
        programs: how many programs walk over them.
        is_aligned: whether every address is a multiple of 16 bytes.
        grad: dtype of the gradients.
    """

    members: Tensor
    grads: Tensor
    chunks: Tensor
    full: int
    programs: int
    is_aligned: bool
    grad: torch.dtype


class Schedule(NamedTuple):
    """Of the loss scale: configuration, state, and the steps so far; see :func:`halfpeak.core.schedule.advance`."""

    growth: float
    backoff: float
    floor: float
    ceiling: float
    interval: int
    hysteresis: int
    is_dynamic: bool
    refills_clean: bool
    state: tuple[Tensor, ...]


def is_interpreted() -> bool:
    """Whether the kernels run in triton's interpreter, on the CPU."""
    return not isinstance(measure_kernel, triton.JITFunction)


def programs_for(count: int, device: torch.device) -> int:
    """How many programs share ``count`` chunks: as many as the device holds at once; the same in every run there."""
    if device.type != "cuda":
        return min(count, 3)
    return min(count, torch.cuda.get_device_properties(device).multi_processor_count * _PER_PROCESSOR)


def measure(chunks: Chunks, factor: Tensor, squares: Tensor, flags: Tensor) -> None:
    """See :func:`~halfpeak.ops.triton.measure.measure_kernel`."""
    measure_kernel[(chunks.programs,)](
        chunks.members,
        chunks.grads,
        chunks.chunks,
        chunks.full,
        len(chunks.chunks),
        factor,
        squares,
        flags,
        GRAD=_DTYPES[chunks.grad],
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        ALIGN=16 // chunks.grad.itemsize if chunks.is_aligned else 1,
        num_warps=_WARPS,
    )


def control(
    partials: tuple[Tensor, Tensor] | None,
    factor: Tensor,
    found_inf: Tensor,
    rows: Tensor,
    hyper: Tensor,
    numbers: Tensor,
    floats: Tensor,
    ints: Tensor,
    *,
    rule: str,
    limit: float | None = None,
    schedule: Schedule | None = None,
    count: int | None = None,
) -> None:
    """See :func:`~halfpeak.ops.triton.control.control_kernel`.

    Args:
        partials: what was measured; None where ``found_inf`` says all that is known.
        count: how many rows of numbers are worked out; None for all.
    """
    squares, flags = partials or (floats, ints)
    many = 0 if partials is None else len(squares)
    known = schedule or Schedule(
        1.0, 1.0, 1.0, 1.0, 1, 1, False, False, (floats, ints, ints, ints, ints, ints)
    )
    control_kernel[(1,)](
        squares,
        flags,
        many,
        factor,
        found_inf,
        *known.state,
        rows,
        len(rows) if count is None else count,
        hyper,
        numbers,
        floats,
        ints,
        float(limit or 0.0),
        known.growth,
        known.backoff,
        known.floor,
        known.ceiling,
        known.interval,
        known.hysteresis,
        CLIPS=limit is not None,
        KEEPS_BOOKS=schedule is not None,
        IS_DYNAMIC=known.is_dynamic,
        REFILLS_CLEAN=known.refills_clean,
        RULE=rule,
        HYPER=HYPER,
        BLOCK=max(128, triton.next_power_of_2(many)),
        num_warps=4,
        # A multiply-add with one rounding would give other numbers than the rules give.
        enable_fp_fusion=False,
    )


def update(
    chunks: Chunks,
    numbers: Tensor,
    found_inf: Tensor,
    rows: Tensor,
    *,
    counters: int,
    weight: torch.dtype,
    low: torch.dtype | None,
    rule: str,
    option: Any,
    other: bool,
) -> None:
    """See :func:`~halfpeak.ops.triton.update.update_kernel`."""
    update_kernel[(chunks.programs,)](
        chunks.members,
        chunks.grads,
        chunks.chunks,
        chunks.full,
        len(chunks.chunks),
        numbers,
        found_inf,
        rows,
        counters,
        WEIGHT=_DTYPES[weight],
        LOW=None if low is None else _DTYPES[low],
        GRAD=_DTYPES[chunks.grad],
        RULE=rule,
        OPTION=option,
        OTHER=other,
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        # Four elements at a time in every dtype: then all of a chunk is laid out alike, and nothing changes threads.
        ALIGN=4 if chunks.is_aligned else 1,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
