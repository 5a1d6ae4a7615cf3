"""Which of the non-finite tensors of a run is to blame, and whether float32 is finite there."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from halfpeak.diagnosis.report import Reason, Where
from halfpeak.diagnosis.subject import FLOAT32, Change, Replay
from halfpeak.diagnosis.trace import Event, Trace


class Suspect(NamedTuple):
    """The blamed event, the place that the report names, and what float32 gives there."""

    where: Where
    module: str
    tensor: str
    event: Event
    reason: Reason
    value: float


def find_suspect(low: Trace, wide: Trace, replay: Replay) -> Suspect:
    """The first non-finite event, except harmless ones.

    Args:
        low: of a run that is not finite.
        wide: of the same run in float32.
        replay: for runs without a mask that may be the cause.
    """
    bad = low.bad_weights if low.is_step_finite else [event for event in low.events if not event.is_finite]
    if wide.is_finite:  # Events that are non-finite even in this run are harmless, such as masks.
        harmless = {event.key for event in wide.events if not event.is_finite}
        bad = [event for event in bad if event.key not in harmless] or bad
    plain = [event for event in bad if not event.is_mask_like] or bad
    first = min(plain, key=lambda event: event.is_gradient)
    return _blame(_mask_behind(first, bad, wide, replay) or first, wide)


def _mask_behind(first: Event, bad: list[Event], wide: Trace, replay: Replay) -> Event | None:
    """The mask-like event that caused ``first``, or None. Found by replays, because a softmax may remove a mask."""
    before = bad[: next(index for index, event in enumerate(bad) if event is first)]
    by_data = {event.data: event for event in reversed(before) if event.is_mask_like}
    masks = list(reversed(by_data.values()))
    change = FLOAT32 if any(not event.is_finite for event in wide.find(first.key)) else Change()

    def cures(count: int) -> bool:
        """Whether ``first`` is finite, or a mask itself, without the first masks."""
        keys = frozenset(event.key for event in masks[:count])
        found = replay.trace(Change(dtype=change.dtype, unmasked=keys)).find(first.key)
        return bool(found) and all(event.is_finite or event.is_mask_like for event in found)

    if not masks or not cures(len(masks)):
        return None
    return masks[bisect_left(range(1, len(masks)), True, key=cures)]


def _blame(event: Event, wide: Trace) -> Suspect:
    key, kind = event.key, event.kind
    reason, value = _reason(event, wide)
    where: Where = "backward"
    module, tensor = key.module, key.tensor
    if kind == "loss":
        where, module = "loss", ""
    elif kind in ("weight", "buffer"):
        where = "weight"
    elif kind == "output":
        where = "forward"
    elif kind == "input":
        parent = None if event.call is None else event.call.parent
        where = "input" if parent is None else "forward"
        if parent is not None:
            child = key.module.removeprefix(f"{parent.module}.") if parent.module else key.module
            module, tensor = parent.module, f"{child}.{tensor}"
    return Suspect(where, module, tensor, event, reason, value)


def _reason(event: Event, wide: Trace) -> tuple[Reason, float]:
    """Why an event is not finite, and the largest magnitude there in float32."""
    found = wide.find(event.key)
    if event.is_gradient and event.call is not None:
        inside = wide.gradients_of(*event.key[:2])
        same = [e for e in inside if e.key == event.key and e.operation == event.operation]
        # Only the first: later events in the call may be its consequences.
        found = same[:1] or inside
    if not found:  # The float32 run did not reach this event, because the closure raised on casts of its own.
        summary = event.summary
        is_half = summary is not None and summary.dtype == "float16"
        return "nan" if summary is not None and summary.nan else "overflow" if is_half else "inf", math.nan
    summaries = [event.summary for event in found if event.summary is not None]
    if any(summary.nan for summary in summaries):
        return "nan", math.nan
    if any(not summary.is_finite for summary in summaries):
        return "inf", math.inf
    return "overflow", max((summary.largest for summary in summaries), default=0.0)
