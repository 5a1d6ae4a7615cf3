"""Advice on what to write when a tensor is not finite. A remedy is advised only if a replay with it is finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from halfpeak.casting.modules import holds_constants
from halfpeak.core.dtypes import LOW, largest
from halfpeak.core.policy import KeepFp32
from halfpeak.diagnosis.subject import Change, Replay
from halfpeak.diagnosis.suspect import Suspect, find_suspect
from halfpeak.diagnosis.trace import Trace

MOST_TRIES: Final = 6
"""The largest number of replays with modules in float32."""

SMALLEST_EXPONENT: Final = -14
"""Of the loss scales tried, as in :class:`~halfpeak.ScaleConfig`: a smaller scale makes gradients of 1 subnormal."""

STEEP: Final = (
    "Sqrt",
    "Rsqrt",
    "Pow",
    "Log",
    "Norm",
    "Div",
    "Reciprocal",
    "Std",
    "Var",
    "Acos",
    "Asin",
    "Cdist",
)
"""Beginnings and ends of the names of derivatives that are infinite somewhere."""


class Advice(NamedTuple):
    """What to write.

    Attributes:
        text: one or two sentences.
        largest_scale: for an overflow in the backward pass, the largest loss scale that fits; None if there is none.
        keep_fp32: modules with which in float32 nothing overflows any more; empty if there are none.
    """

    text: str
    largest_scale: float | None = None
    keep_fp32: tuple[str, ...] = ()


def advice_on(suspect: Suspect, low: Trace, wide: Trace, replay: Replay) -> Advice:
    """Advice on what is blamed.

    Args:
        low: the run as in training.
        wide: the same run in float32.
        replay: tries the remedies.
    """
    if suspect.reason != "overflow":
        return Advice(_for_fault(suspect, low))
    where, size = suspect.where, _size(suspect, low, replay)
    scale = _largest_scale(replay) if where == "backward" else None
    kept = _layers(suspect, wide, replay) if replay.subject.can_convert else []
    remedies = ", or ".join(_remedies(suspect, kept, wide, replay))
    write = f"{remedies[:1].upper()}{remedies[1:]}." if remedies else ""
    if where == "backward":
        parts = [_for_scale(scale, replay), write]
    elif where == "input":
        parts = [f"{size}.", "Scale the data down before the model.", write]
    elif where == "weight":
        parts = [f"{size}.", write, "Weight decay keeps weights from growing so far."]
    else:
        smaller = "take a mean in the place of a sum" if where == "loss" else "make the values smaller there"
        parts = [f"{size}.", write or f"{smaller.capitalize()}."]
    return Advice(" ".join(filter(None, parts)), scale, tuple(kept))


def _for_scale(fitting: float | None, replay: Replay) -> str:
    if fitting is None:
        return "No loss scale helps."
    if fitting < 1:
        return (
            f"It takes a loss scale of {fitting:g} to fit this batch, so the loss itself is too large: take a mean in the "
            "place of a sum, or divide it."
        )
    if not replay.subject.is_dynamic:
        return f"A loss scale of {fitting:g} fits this batch."
    remedy = f"scale=halfpeak.ScaleConfig(ceiling={fitting!r}, recovers=True)" if replay.subject.level else ""
    return f"A loss scale of {fitting:g} fits this batch; a dynamic scale finds it{f', or write {remedy}' if remedy else ''}."


def _largest_scale(replay: Replay) -> float | None:
    """The largest power of two under which every gradient is finite; None if there is none."""
    below, above = SMALLEST_EXPONENT - 1, math.ceil(math.log2(float(replay.subject.scale)))
    while above - below > 1:
        middle = (above + below) // 2
        if replay.trace(Change(scale=2.0**middle)).is_finite:
            below = middle
        else:
            above = middle
    return None if below < SMALLEST_EXPONENT else 2.0**below


def _size(suspect: Suspect, low: Trace, replay: Replay) -> str:
    """Which number is beyond the range of which dtype."""
    dtype = _low_dtype(suspect, replay)
    limit = f"beyond what {str(dtype).removeprefix('torch.')} holds ({largest(dtype):.3g})"
    name, value = _named(suspect.module), suspect.value
    if suspect.where == "loss":
        return f"The loss, {value:.3g}, is {limit}"
    if suspect.where in ("input", "weight"):
        return f"{suspect.tensor} of {name}, {value:.3g}, is {limit}"
    if not value <= largest(dtype):
        return f"{value:.3g} is {limit}"
    for event in low.events:  # an operand that is finite in float32, and is cast
        of_call = event.key[:2] == suspect.event.key[:2] and event.kind in ("input", "weight")
        if of_call and event.summary is not None and event.summary.largest > largest(dtype):
            return f"{event.key.tensor} of {name}, {event.summary.largest:.3g}, is {limit}"
    return f"A value inside of {name} is {limit}"


def _low_dtype(suspect: Suspect, replay: Replay) -> torch.dtype:
    """The low dtype of the blamed tensor, or of what made it."""
    summary, policy = suspect.event.summary, replay.subject.policy
    own = None if summary is None else getattr(torch, summary.dtype)
    return next((dtype for dtype in (own, policy.compute, policy.param) if dtype in LOW), torch.float16)


def _remedies(suspect: Suspect, kept: Sequence[str], wide: Trace, replay: Replay) -> Iterator[str]:
    """What to write, in words that continue a sentence."""
    subject, policy = replay.subject, replay.subject.policy
    is_outside = suspect.where == "loss" or (suspect.where == "backward" and suspect.event.call is None)
    if is_outside and not _left(suspect, Change(loss_fp32=True), wide, replay):
        yield "compute the loss in float32: loss_function(output.float(), target)"
    # Otherwise user code casts, or the API has no keyword.
    says_level = bool(subject.level) and not LOW.isdisjoint((policy.compute, policy.param))
    if kept:
        given = [_shown(entry) for entry in policy.keep_fp32 if entry is not holds_constants]
        entries = ", ".join([*given, *(f'"{name}"' for name in kept)])
        keyword = f"keep_fp32=[{entries}]"
        if says_level:
            yield f'write halfpeak.prepare(..., "{subject.level}", {keyword})'
        else:
            yield f"compute {' and '.join(map(_named, kept))} in float32"
            yield f"go over to halfpeak.prepare(..., {keyword})"
    if _low_dtype(suspect, replay) is torch.float16:
        change = Change(dtype=torch.bfloat16)
        if says_level and subject.can_convert:
            param, compute = (
                torch.bfloat16 if dtype is torch.float16 else dtype
                for dtype in (policy.param, policy.compute)
            )
            change = Change(policy=replace(policy, param=param, compute=compute))
        if not _left(suspect, change, wide, replay):
            yield f'use bfloat16 ("{"O4" if policy.per_op else "O5"}")' if says_level else "use bfloat16"


def _layers(suspect: Suspect, wide: Trace, replay: Replay) -> list[str]:
    """The names of modules with which in float32 nothing overflows any more; empty if there are none."""
    policy, kept, left = replay.subject.policy, list[str](), suspect
    for _ in range(MOST_TRIES):
        name = left.module.rpartition(": ")[2]  # without the number of the model
        if name in kept:  # What it returns is cast back, and overflows: try the module around it.
            name = name.rpartition(".")[0]
        if not name:
            break
        kept = [*(one for one in kept if not one.startswith(f"{name}.")), name]
        left = _left(
            suspect, Change(policy=replace(policy, keep_fp32=(*policy.keep_fp32, *kept))), wide, replay
        )
        if left is None:
            return kept
    return []


def _left(suspect: Suspect, change: Change, wide: Trace, replay: Replay) -> Suspect | None:
    """What overflows in spite of a change; None if nothing does. A loss scale that moves may move to 1."""
    if replay.subject.is_dynamic:
        change = replace(change, scale=min(1.0, float(replay.subject.scale)))
    trace = replay.trace(change)
    if trace.is_finite:
        return None
    if trace.loss is None:  # The closure raised.
        return suspect
    found = find_suspect(trace, wide, replay)
    return found if found.reason == "overflow" else None


def _named(module: str) -> str:
    return f"'{module}'" if module else "the model"


def _shown(entry: KeepFp32) -> str:
    return f'"{entry}"' if isinstance(entry, str) else getattr(entry, "__name__", "...")


def _for_fault(suspect: Suspect, low: Trace) -> str:
    """For what float32 gives as well, where no precision helps."""
    where, tensor, reason, event = suspect.where, suspect.tensor, suspect.reason, suspect.event
    name = _named(suspect.module)
    if event.is_mask_like and event.kind != "output":
        return (
            f"{tensor} of {name} holds minus infinity. A softmax takes it away where a row keeps other values; a row of "
            "nothing else is nan, and so are gradients elsewhere. Leave one value in each row, or write "
            "torch.finfo(torch.float32).min for minus infinity."
        )
    if where == "input":
        return f"The batch itself is not finite ({tensor} holds {reason}). Check the data; torch.isfinite(x).all() finds it."
    if where == "weight":
        if low.is_step_finite:
            return (
                f"{name}.{tensor} itself holds {reason}. This batch has a finite loss and finite gradients all the same; "
                "weight decay and other batches do not. Go back to a checkpoint from before."
            )
        return (
            f"{name}.{tensor} itself holds {reason}. Go back to a checkpoint from before. Steps with such gradients are "
            "skipped, so something else has written this weight."
        )
    if where == "loss":
        return f"All outputs are finite, and the loss is {reason} in float32, too: look for a log, root or division in it."
    if where == "backward":
        operation = event.operation
        of = f" of {operation}" if operation else ""
        text = f"The derivative{of} in {name} is {reason} in float32, too: no loss scale helps."
        if operation.startswith(STEEP) or operation.endswith(STEEP):
            text += " Roots, norms and logarithms have infinite slopes at zero: add a small number inside of them."
        return text
    return (
        f"{name} makes {reason} of finite numbers in float32, too: no precision helps. Look for a logarithm, root, division "
        "or an empty mean, or a row that is masked as a whole."
    )
