"""diagnose: find the module that made a loss or a gradient non-finite, and whether float32 is finite there."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import OpCasts, casts_on
from halfpeak.casting.float8 import without_float8
from halfpeak.casting.modules import convert_network, hook_boundary, hook_kept, is_prepared
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.levels import resolve
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import require_scale
from halfpeak.core.wrappers import uncompiled
from halfpeak.engine.diagnosis.advice import suggestion_for
from halfpeak.engine.diagnosis.replay import Float32, stand_ins, undisturbed
from halfpeak.engine.diagnosis.report import Diagnosis, Frame, Reason, Where
from halfpeak.engine.diagnosis.trace import Event, Key, Summary, Trace, Tracer
from halfpeak.engine.engine import Engine, engine_of
from halfpeak.state.loss_scaler import scale_loss

Closure = Callable[[], Tensor]
"""Computes and returns the loss of the batch in question."""

AROUND = 4
"""How many calls before and after the guilty one a report shows."""

MOST_TRIED = 8
"""The largest number of tensors with minus infinity that are tried as the cause, by a replay each."""

SMALLEST_EXPONENT = -14
"""Of the loss scales tried, as in :class:`~halfpeak.ScaleConfig`: a smaller scale makes gradients of 1 subnormal."""


def diagnose(
    run: Engine | nn.Module, closure: Closure, *, level: str = "O0", scale: float | None = None
) -> Diagnosis:
    """Replay a batch and name the first module that makes a tensor non-finite, and what to do about it.

    Forward and backward pass run as in training, under the same loss scale, and once more in float32 from the masters.
    If float32 is finite there, the cause is an overflow, else a fault. Everything is restored, even if the closure
    raises: weights, gradients, the open window, batch-norm statistics, random generators, loss scale and counters.

    Takes a few passes and the memory of two copies of the weights, one in float32. Compiled models run uncompiled, and
    ranks do not wait for each other.

    Args:
        run: an engine, or a model that any front end has prepared; or a model that was not prepared, which is converted
            for the time of the call.
        closure: returns the loss, the same in every call. It calls neither ``backward`` nor ``step``; casts are on.
        level: the opt level to try, for a model that was not prepared.
        scale: the factor of the loss; None for the current loss scale, which a skip has lowered.

    Returns:
        A :class:`Diagnosis`: ``print`` it, or ``save`` it. Its ``where`` is None if everything is finite.

    Raises:
        ConfigTypeError: ``run`` is no engine or module, or the closure returns no scalar tensor.
        OrderError: the model's engine has been deleted.

    Example:
        >>> import torch, halfpeak
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> _ = torch.nn.init.constant_(model[0].weight, 200.0)
        >>> x = torch.full((2, 4), 100.0)
        >>> found = halfpeak.diagnose(model, lambda: model(x).mean(), level="O2")
        >>> found.where, found.module, found.tensor, found.reason
        ('forward', '0', 'output[0]', 'overflow')
    """
    if isinstance(run, Engine):
        subject = _of_engine(run)
    elif isinstance(run, nn.Module):
        model = _unwrapped(run)
        engine = engine_of(model)
        subject = _of_model(model, level) if engine is None else _of_engine(engine)
    else:
        raise ConfigTypeError(
            f"{type(run).__name__} is neither an engine nor a module; write halfpeak.diagnose(engine, closure)"
        )
    if scale is not None:
        subject = replace(subject, scale=torch.full_like(subject.scale, require_scale("scale", scale)))
    with undisturbed(subject.models) as rewind:
        replay = _Replay(subject, closure, rewind)
        low = replay.trace()
        if low.is_finite:
            return Diagnosis(frames=_frames(low, None))
        wide = replay.trace(float32=True)
        return _conclude(low, wide, replay)


@dataclass(frozen=True)
class _Subject:
    """The models to replay, and how they train.

    Attributes:
        level: the opt level; empty if another front end than ``prepare`` takes the steps.
        scale: the factor of the loss.
        value: returns the float32 value of a parameter.
        computing: returns the context of a forward pass as in training.
    """

    models: Sequence[nn.Module]
    policy: Policy
    level: str
    scale: Tensor
    value: Callable[[nn.Parameter], Tensor]
    computing: Callable[[], AbstractContextManager[Any]]


def _of_engine(engine: Engine) -> _Subject:
    config = engine.config
    divisor = config.accumulation.divisor(engine.micro_step)
    by_prepare = config.stepped_by == "engine"

    def value(parameter: nn.Parameter) -> Tensor:
        known = engine.masters.fp32_value(parameter)
        return parameter if known is None else known

    return _Subject(
        engine.models,
        engine.policy,
        (config.properties.opt_level or "") if by_prepare else "",
        engine.scale / divisor,
        value,
        engine.replay,
    )


def _of_model(model: nn.Module, level: str) -> _Subject:
    if is_prepared(model):
        raise OrderError(
            f"this {type(model).__name__} was prepared; write halfpeak.diagnose(engine, closure)"
        )
    properties = resolve(level)
    policy = properties.policy()

    @contextmanager
    def computing() -> Generator[None]:
        handles: list[RemovableHandle] = []
        try:
            if policy.param is not None:
                convert_network(model, policy.param, policy.norms)
            handles += [*hook_boundary(model, policy), *hook_kept(model, policy)]
            with casts_on(OpCasts(policy.compute) if policy.per_op and policy.compute is not None else None):
                yield
        finally:
            for handle in handles:
                handle.remove()

    scale = properties.scale_config(None).start(next((p.device for p in model.parameters()), None)).scale
    return _Subject([model], policy, level, scale, _itself, computing)


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of ``torch.compile`` and ``DistributedDataParallel``."""
    inner: Any = uncompiled(model)
    while type(inner).__name__ == "DistributedDataParallel":
        inner = uncompiled(inner.module)
    return inner


class _Replay:
    """Runs the closure as in training or in float32, each time from the same random numbers."""

    def __init__(self, subject: _Subject, closure: Closure, rewind: Callable[[], None]) -> None:
        self.subject = subject
        self._closure = closure
        self._rewind = rewind

    def trace(self, *, float32: bool = False, unmasked: Key | None = None) -> Trace:
        """Run forward and backward, as in training or in float32, and return the trace.

        Args:
            float32: compute everything in float32. If the closure raises, which casts of its own may cause, the trace
                ends there.
            unmasked: an input or output of a module whose non-finite elements are replaced by ones.
        """

        def unmask(key: Key, tensor: Tensor) -> Tensor:
            return torch.where(tensor.isfinite(), tensor, 1.0) if key == unmasked else tensor

        with self._running(float32=float32) as models:
            tracer = Tracer(models, replace=unmask if unmasked else None)
            with tracer.watching():
                try:
                    loss = self._loss()
                    tracer.see_loss(loss)
                    if bool(loss.detach().isfinite().all()):
                        tracer.backward(scale_loss(loss, self.subject.scale))
                except Exception:
                    if not float32:
                        raise
            return tracer.finish()

    def fits(self, exponent: int) -> bool:
        """Whether all gradients of weights are finite under a loss scale of 2**exponent."""
        with self._running() as models:
            scale_loss(self._loss(), torch.full_like(self.subject.scale, 2.0**exponent)).backward()
            grads = [p.grad for model in models for p in model.parameters() if p.grad is not None]
            return all(bool(grad.isfinite().all()) for grad in grads)

    @contextmanager
    def _running(self, *, float32: bool = False) -> Generator[Sequence[nn.Module]]:
        subject = self.subject
        self._rewind()
        with ExitStack() as stack:
            value = subject.value if float32 else _itself
            stack.enter_context(stand_ins(subject.models, value, dtype=torch.float32 if float32 else None))
            stack.enter_context(torch.enable_grad())
            if float32:
                stack.enter_context(without_float8(subject.models, subject.policy))
                stack.enter_context(Float32())
            stack.enter_context(subject.computing())
            yield subject.models

    def _loss(self) -> Tensor:
        loss: Any = self._closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigTypeError(f"the closure returned {shown}; it must return the loss, a scalar tensor")
        return loss


class _Suspect(NamedTuple):
    """The blamed event, and the place that the report names."""

    where: Where
    module: str
    tensor: str
    event: Event


def _conclude(low: Trace, wide: Trace, replay: _Replay) -> Diagnosis:
    suspect = _suspect(low, wide, replay)
    inside = _wide_events(suspect, wide)
    if inside:
        reason, value = _reason(inside)
    else:  # The float32 run did not reach this event, because the closure raised on casts of its own.
        summary, value = suspect.event.summary, math.nan
        is_nan = summary is not None and summary.nan
        is_half = summary is not None and summary.dtype == "float16"
        reason = "nan" if is_nan else "overflow" if is_half else "inf"
    in_backward = suspect.where == "backward" and reason == "overflow"
    found = Diagnosis(
        where=suspect.where,
        module=suspect.module,
        tensor=suspect.tensor,
        reason=reason,
        value=value,
        largest_scale=_largest_scale(replay) if in_backward else None,
        frames=_frames(low, suspect.event),
    )
    advice = suggestion_for(found, suspect.event, replay.subject.policy, replay.subject.level)
    return replace(found, suggestion=advice)


def _suspect(low: Trace, wide: Trace, replay: _Replay) -> _Suspect:
    """The first non-finite event, except harmless ones."""
    bad = [event for event in low.events if not event.is_finite]
    if wide.is_finite:  # Events that are non-finite even in this run are harmless, such as masks.
        harmless = {event.key for event in wide.events if not event.is_finite}
        bad = [event for event in bad if event.key not in harmless]
    plain = [event for event in bad if not event.is_mask_like]
    plain.sort(key=lambda event: event.is_gradient)
    if not plain:
        # A gradient of a weight is not finite, but no event explains it.
        return _Suspect("backward", "", "grad_output[0]", low.loss or low.events[-1])
    first = plain[0]
    origin = None if first.is_gradient else _origin(first, bad, replay)
    return _blame(origin or first)


def _origin(first: Event, bad: Sequence[Event], replay: _Replay) -> Event | None:
    """The mask-like event that caused ``first``, or None. Found by replays, because a softmax may remove a mask."""
    before = bad[: next(index for index, event in enumerate(bad) if event is first)]
    tensors = {event.data: event for event in reversed(before) if event.is_mask_like}
    for event in list(reversed(tensors.values()))[:MOST_TRIED]:
        tried = replay.trace(float32=True, unmasked=event.key).find(first.key)
        if tried is not None and tried.is_finite:
            return event
    return None


def _blame(event: Event) -> _Suspect:
    key, kind = event.key, event.kind
    if kind == "loss":
        return _Suspect("loss", "", "loss", event)
    if kind in ("weight", "buffer"):
        return _Suspect("weight", key.module, key.tensor, event)
    if kind == "output":
        return _Suspect("forward", key.module, key.tensor, event)
    if kind == "input":
        parent = None if event.call is None else event.call.parent
        if parent is None:
            return _Suspect("input", key.module, key.tensor, event)
        child = key.module.removeprefix(f"{parent.module}.") if parent.module else key.module
        return _Suspect("forward", parent.module, f"{child}.{key.tensor}", event)
    return _Suspect("backward", key.module, key.tensor, event)


def _wide_events(suspect: _Suspect, wide: Trace) -> list[Event]:
    event = suspect.event
    if suspect.where != "backward":
        found = wide.find(event.key)
        return [] if found is None else [found]
    if event.call is None:
        return [e for e in wide.events if e.key == event.key and e.is_gradient]
    inside = wide.gradients_of(event.key.module, event.key.call)
    same = [e for e in inside if e.key.tensor == event.key.tensor and e.operation == event.operation]
    # Only the first: later events in the call may be its consequences.
    return same[:1] or inside


def _reason(events: Sequence[Event]) -> tuple[Reason, float]:
    summaries = [event.summary for event in events if event.summary is not None]
    if any(summary.nan for summary in summaries):
        return "nan", math.nan
    if any(not summary.is_finite for summary in summaries):
        return "inf", math.inf
    return "overflow", max((summary.largest for summary in summaries), default=0.0)


def _largest_scale(replay: _Replay) -> float | None:
    """The largest power of two under which every gradient is finite; None if there is none."""
    below, above = SMALLEST_EXPONENT - 1, math.ceil(math.log2(float(replay.subject.scale)))
    while above - below > 1:
        middle = (above + below) // 2
        if replay.fits(middle):
            below = middle
        else:
            above = middle
    return None if below < SMALLEST_EXPONENT else 2.0**below


def _frames(trace: Trace, guilty: Event | None) -> tuple[Frame, ...]:
    """The guilty call and its neighbours in order of execution, among the calls without calls inside."""
    calls = [call for call in trace.calls if not call.recomputed]
    parents = {id(call.parent) for call in calls}
    blamed = None if guilty is None else guilty.call
    if guilty is not None and blamed is None:
        blamed = next(
            (call for call in calls if call.module == guilty.key.module and guilty.key.module), None
        )
    shown = [call for call in calls if call is blamed or id(call) not in parents]
    if guilty is not None:
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
        frames.append(Frame(call.module, call.kind, call.number, tensors, is_guilty=call is blamed))
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
