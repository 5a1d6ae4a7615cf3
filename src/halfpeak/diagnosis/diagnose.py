"""diagnose: find the module that made a loss or a gradient non-finite, and whether float32 is finite there."""

from __future__ import annotations

from typing import Final

from torch import nn

from halfpeak.core.errors import ConfigTypeError
from halfpeak.diagnosis.advice import advice_on
from halfpeak.diagnosis.replay import undisturbed
from halfpeak.diagnosis.report import Diagnosis, Frame
from halfpeak.diagnosis.subject import FLOAT32, Closure, Replay, subject_of
from halfpeak.diagnosis.suspect import find_suspect
from halfpeak.diagnosis.trace import Event, Summary, Trace
from halfpeak.engine.engine import Engine

AROUND = 4
"""How many calls before and after the cause a report shows."""


def diagnose(
    run: Engine | nn.Module, closure: Closure, *, level: str = "O0", scale: float | None = None
) -> Diagnosis:
    """Replay a batch and name the first module that makes a tensor non-finite, and what to do about it.

    Forward and backward pass run as in training, and once more in float32 from the masters: if that is finite, the cause
    is an overflow, else a fault. Everything is restored, even if the closure raises. Takes the memory of two copies of
    the weights, one in float32. Compiled models run uncompiled, and ranks do not wait for each other.

    Args:
        run: an engine, or a prepared model, of whichever API; or a model that was not prepared, which is converted
            for the time of the call.
        closure: returns the loss, the same in every call. It calls neither ``backward`` nor ``step``; casts are on.
        level: the opt level to try, for a model that was not prepared.
        scale: the factor of the loss; None for the current loss scale, which a skip has lowered.

    Raises:
        ConfigTypeError: ``run`` is no engine or module, or the closure cannot be called or returns no scalar tensor.
        OrderError: the model's engine has been deleted.

    >>> import torch
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.full((2, 4), 100.0)
    >>> _ = nn.init.constant_(model[0].weight, 200.0)
    >>> found = diagnose(model, lambda: model(x).mean(), level="O2")
    >>> found.where, found.module, found.tensor, found.reason
    ('forward', '0', 'output[0]', 'overflow')
    """
    if not callable(closure):
        raise ConfigTypeError(
            f"{type(closure).__name__} is no closure; write halfpeak.diagnose(engine, lambda: loss_of(model(x), y))"
        )
    subject = subject_of(run, level, scale)
    with undisturbed(subject.models) as rewind:
        replay = Replay(subject, closure, rewind)
        low = replay.trace()
        if low.is_finite:
            return Diagnosis(frames=_frames(low, None))
        wide = replay.trace(FLOAT32)
        suspect = find_suspect(low, wide, replay)
        advice = advice_on(suspect, low, wide, replay)
    return Diagnosis(
        where=suspect.where,
        module=suspect.module,
        tensor=suspect.tensor,
        reason=suspect.reason,
        value=suspect.value,
        suggestion=advice.text,
        largest_scale=advice.largest_scale,
        keep_fp32=advice.keep_fp32,
        frames=_frames(low, suspect.event),
    )


def _frames(trace: Trace, cause: Event | None) -> tuple[Frame, ...]:
    """The call at fault and its neighbours in order of execution, among the calls without calls inside."""
    calls = [call for call in trace.calls if not call.recomputed]
    parents = {id(call.parent) for call in calls}
    blamed = None if cause is None else cause.call
    if cause is not None and blamed is None:
        blamed = next((call for call in calls if call.module == cause.key.module and cause.key.module), None)
    shown = [call for call in calls if call is blamed or id(call) not in parents]
    if cause is not None:
        at = next((index for index, call in enumerate(shown) if call is blamed), len(shown) - 1)
        shown = shown[max(0, at - AROUND) : at + AROUND + 1]
    by_call: dict[int, list[Event]] = {}
    weights: dict[str, list[Event]] = {}
    for event in trace.events:
        if event.kind in ("weight", "buffer"):
            weights.setdefault(event.key.module, []).append(event)
        elif event.call is not None:
            by_call.setdefault(id(event.call), []).append(event)
    frames: list[Frame] = []
    for call in shown:
        seen = [*weights.get(call.module, []), *by_call.get(id(call), [])]
        seen.sort(key=lambda event: _ORDER[event.kind])
        tensors: dict[str, Summary] = {}
        for event in seen:
            name, summary = event.key.tensor, event.summary
            # Of several gradients with one name, keep the first that is not finite, else the first.
            if summary is not None and (
                name not in tensors or (tensors[name].is_finite and not summary.is_finite)
            ):
                tensors[name] = summary
        frames.append(Frame(call.module, call.kind, call.number, tensors, is_cause=call is blamed))
    return tuple(frames)


_ORDER: Final = {
    "input": 0,
    "weight": 1,
    "buffer": 1,
    "output": 2,
    "grad_output": 3,
    "grad_input": 4,
    "loss": 5,
}
