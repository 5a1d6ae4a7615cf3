"""Launches of the Triton kernels: three in a fused step if all parameters are of one kind. None waits for the device."""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfpeak.core.decide import Decision, LossFacts
from halfpeak.core.schedule import ScaleConfig, ScaleState, numbers_of, switches_of
from halfpeak.core.torch_compat import single
from halfpeak.ops.triton import KernelConfig
from halfpeak.ops.triton import step_numbers as _numbers
from halfpeak.ops.triton.add import add_kernel
from halfpeak.ops.triton.columns import COLUMNS
from halfpeak.ops.triton.control import control_kernel
from halfpeak.ops.triton.decide import decide_kernel
from halfpeak.ops.triton.layerwise import lamb_trust_kernel, norm_kernel
from halfpeak.ops.triton.measure import measure_kernel
from halfpeak.ops.triton.update import update_kernel

CHUNK = 1024
"""Elements that a program works on at a time."""

HYPER: int = _numbers.HYPER.value
"""Columns of a group's row: sign, lr, weight decay, two numbers of the rule, eps, and three switches of the rule."""

NUMBERS: int = _numbers.NUMBERS.value
"""Columns of a row of numbers: the multiplier of gradients, up to nine constants of the rule, and the step."""

_OPTIONS: Final = MappingProxyType({"num_warps": 4, "enable_fp_fusion": False})
"""No fused multiply-add, because its single rounding would give other results than the rules."""

_PARTS = 1024
"""The number of chunks whose sums a program loads at a time."""

_READING = 8
"""Programs of the measure kernel that a multiprocessor runs at once, with up to 64 registers per thread."""

_DTYPES: Final = MappingProxyType(
    {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
)


class Chunks(NamedTuple):
    """The chunks of the parameters of one launch, which have the same dtypes and rule.

    Attributes:
        first: the row of the first of these parameters.
        many: the number of these parameters.
        members: the rows of all parameters, see :mod:`~halfpeak.ops.triton.columns`.  # i64[members, COLUMNS]
        grads: the addresses of all gradients.                             # i64[members]
        chunks: for each chunk the row of its parameter, and its number in it.  # i32[count, 2]
        full: the number of full chunks, which come first.
        processors: the multiprocessors of the device; 0 in the interpreter.
        is_aligned: whether every address is a multiple of 16 bytes.
        weight: dtype of the weights that the rule updates.
        low: dtype of the model's weights; None if the rule updates these.
        grad: dtype of the gradients.
    """

    first: int
    many: int
    members: Tensor
    grads: Tensor
    chunks: Tensor
    full: int
    processors: int
    is_aligned: bool
    weight: torch.dtype
    low: torch.dtype | None
    grad: torch.dtype

    def programs(self) -> int:
        """The number of programs that measure the chunks: as many as the device runs at once, so the same in every run."""
        return min(len(self.chunks), self.processors * _READING or 3)


def is_interpreted() -> bool:
    """Whether the kernels run in triton's interpreter, on the CPU."""
    return not isinstance(measure_kernel, triton.JITFunction)


def processors_of(device: torch.device) -> int:
    """How many multiprocessors a device has; 0 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def measure(
    chunks: Chunks, factor: Tensor, squares: Tensor, flags: Tensor, each: Tensor | None = None, take: str = ""
) -> None:
    """See :func:`~halfpeak.ops.triton.measure.measure_kernel`.

    Args:
        each: result for each chunk: what ``take`` names, ``squares`` or ``largest``.
    """
    measure_kernel[(chunks.programs(),)](
        chunks.members,
        chunks.grads,
        chunks.chunks,
        chunks.full,
        len(chunks.chunks),
        factor,
        squares,
        flags,
        squares if each is None else each,
        GRAD=_DTYPES[chunks.grad],
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        ALIGN=16 // chunks.grad.itemsize if chunks.is_aligned else 1,
        EACH=take,
        **_OPTIONS,
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
    judges: bool = True,
    max_norm: float | None = None,
    own_max_norm: float | None = None,
    scale: ScaleConfig | None = None,
    state: tuple[Tensor, ...] = (),
) -> None:
    """See :func:`~halfpeak.ops.triton.control.control_kernel`.

    Args:
        partials: ``squares`` and ``flags`` of the measure kernel; None if nothing was measured.
        judges: whether ``flags`` may skip the step.
        scale: the configuration of the loss scale; None if the kernel does not move it.
        state: the state of the loss scale, then the numbers of steps taken and skipped.
    """
    squares, flags = partials or (floats, ints)
    many = 0 if partials is None else len(squares)
    known = scale or ScaleConfig.static()
    control_kernel[(1,)](
        squares,
        flags,
        many,
        factor,
        found_inf,
        *(state or (floats, *[ints] * (len(ScaleState._fields) + 1))),
        rows,
        len(rows),
        hyper,
        numbers,
        floats,
        ints,
        float(max_norm or 0.0),
        float(own_max_norm or 0.0),
        known.growth,
        known.backoff,
        known.floor,
        known.ceiling,
        known.interval,
        known.hysteresis,
        *(known.recovery or (0.0, 0, 0, 0)),
        JUDGES=judges and partials is not None,
        CLIPS=max_norm is not None,
        CLIPS_AGAIN=own_max_norm is not None,
        DECIDES=scale is not None,
        IS_DYNAMIC=known.dynamic,
        REFILLS_CLEAN=known.refill == "clean",
        RECOVERS=known.recovery is not None,
        RULE=rule,
        BLOCK=max(128, triton.next_power_of_2(many)),
        **_OPTIONS,
    )


def add_unscaled(
    into: Sequence[Tensor], grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor, *, adds: bool
) -> None:
    """See :func:`~halfpeak.ops.triton.add.add_kernel`: one launch for each dtype of gradients.

    Args:
        into: float32, each with the strides of its gradient.
        grads: with elements, without gaps.
    """
    device, kinds = found_inf.device, list(map(_DTYPE_OF, grads))
    for dtype in dict.fromkeys(kinds):
        rows: list[tuple[int, int, int, int]] = []
        programs = 0
        for total, grad, kind in zip(into, grads, kinds, strict=True):
            if kind is dtype:
                rows.append((programs, grad.numel(), total.data_ptr(), grad.data_ptr()))
                programs += -(-grad.numel() // CHUNK)
        is_aligned = not any((there | here) % 16 for _, _, there, here in rows)
        table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        add_kernel[(programs,)](
            table.to(device, non_blocking=True),
            len(rows),
            factor,
            found_inf,
            GRAD=_DTYPES[dtype],
            ADDS=adds,
            STEPS=(len(rows) - 1).bit_length(),
            CHUNK=CHUNK,
            ALIGN=4 if is_aligned else 1,
            **_OPTIONS,
        )


def decide(
    found: Tensor,
    losses: Sequence[LossFacts],
    norm: Tensor | None,
    max_norm: float | None,
    counters: tuple[Tensor, Tensor],
) -> Decision:
    """:func:`halfpeak.core.decide.decide` on the device of ``found``, where all tensors are."""
    count = len(losses)
    floats = torch.empty(2 + count, dtype=torch.float32, device=found.device)
    ints = torch.empty(2 + 3 * count, dtype=torch.int32, device=found.device)
    decide_kernel[(1,)](
        found,
        found if norm is None else norm,
        float(max_norm or 0.0),
        tuple(one for loss in losses for one in loss.state),
        tuple(loss.found for loss in losses),
        tuple(loss.first for loss in losses),
        tuple(single(factor) for loss in losses for factor in (loss.config.growth, loss.config.backoff)),
        tuple(number for loss in losses for number in numbers_of(loss.config)),
        *counters,
        floats,
        ints,
        OWNED=tuple(loss.owned for loss in losses),
        COUNTS=tuple(loss.counts for loss in losses),
        SWITCHES=tuple(switch for loss in losses for switch in switches_of(loss.config)),
        HAS_NORM=norm is not None,
        CLIPS=norm is not None and max_norm is not None,
        **_OPTIONS,
    )
    scalars, counts = floats.unbind(), ints.unbind()
    states = [ScaleState(scalars[2 + k], *counts[2 + 3 * k : 5 + 3 * k]) for k in range(count)]
    coef = 1.0 if norm is None or max_norm is None else scalars[1]
    return Decision(scalars[0], coef, states, counts[0], counts[1])


def update(
    chunks: Chunks, numbers: Tensor, found_inf: Tensor, rows: Tensor, *, counters: int, config: KernelConfig
) -> None:
    """See :func:`~halfpeak.ops.triton.update.update_kernel`."""
    _move(chunks, numbers, found_inf, rows, found_inf, counters=counters, config=config)


def _move(
    chunks: Chunks,
    numbers: Tensor,
    found_inf: Tensor,
    rows: Tensor,
    each: Tensor,
    *,
    counters: int,
    config: KernelConfig,
) -> None:
    update_kernel[(len(chunks.chunks),)](
        chunks.members,
        chunks.grads,
        chunks.chunks,
        chunks.full,
        len(chunks.chunks),
        numbers,
        found_inf,
        rows,
        counters,
        each,
        DTYPE=_DTYPES[chunks.weight],
        LOWER=None if chunks.low is None else _DTYPES[chunks.low],
        GRAD=_DTYPES[chunks.grad],
        RULE=config.rule,
        OPTION=config.option,
        OTHER=config.other,
        MASTER=config.master,
        A=config.moments[0],
        B=config.moments[1],
        C=config.moments[2],
        BLOCK=config.block,
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        # Four elements at a time in every dtype, so that all tensors of a chunk have one layout and none changes threads.
        ALIGN=4 if chunks.is_aligned else 1,
        **_OPTIONS,
    )


def norm(
    chunks: Chunks, numbers: Tensor, factor: Tensor, found_inf: Tensor, each: Tensor, *, largest: bool
) -> None:
    """See :func:`~halfpeak.ops.triton.layerwise.norm_kernel`."""
    norm_kernel[(chunks.many,)](
        chunks.members,
        chunks.first,
        numbers,
        factor,
        found_inf,
        each,
        LARGEST=largest,
        COLUMNS=COLUMNS,
        BLOCK=_PARTS,
        **_OPTIONS,
    )


def lamb_trust_update(
    chunks: Chunks, numbers: Tensor, found_inf: Tensor, rows: Tensor, *, counters: int, config: KernelConfig
) -> None:
    """Update by LAMB in three launches: the moments, the learning rate of each parameter from its norms, the weights."""
    count = len(chunks.chunks)
    sums = torch.empty((2, count), dtype=torch.float32, device=chunks.members.device)
    rates = torch.empty(chunks.first + chunks.many, dtype=torch.float32, device=chunks.members.device)
    _move(chunks, numbers, found_inf, rows, sums, counters=0, config=config._replace(other="moments"))
    lamb_trust_kernel[(chunks.many,)](
        chunks.members,
        chunks.first,
        count,
        numbers,
        sums,
        rates,
        COLUMNS=COLUMNS,
        BLOCK=_PARTS,
        **_OPTIONS,
    )
    config = config._replace(other="weights")
    _move(chunks, numbers, found_inf, rows, rates, counters=counters, config=config)


_DTYPE_OF: Final = attrgetter("dtype")
