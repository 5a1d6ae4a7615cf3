"""What a diagnosis replays: the models with the way in which they train, and what a replay can change in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import OpCasts, casts_on
from halfpeak.casting.float8 import without_float8
from halfpeak.casting.inputs import CastInputs
from halfpeak.casting.modules import (
    CastOutput,
    compute_in_fp32,
    convert_network,
    holds_constants,
    hook_boundary,
    hook_kept,
    is_prepared,
    kept_by_user,
    resume_casts,
    suspend_casts,
)
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.levels import resolve
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import require_scale
from halfpeak.core.wrappers import wrapper_of
from halfpeak.diagnosis.replay import Computing, stand_ins
from halfpeak.diagnosis.trace import Key, Trace, Tracer
from halfpeak.engine.engine import Engine
from halfpeak.ops.shards import is_shard
from halfpeak.parts.loss_scaler import scale_loss
from halfpeak.parts.model_hooks import owner_of
from halfpeak.parts.parts import Parts

Closure = Callable[[], Tensor]
"""Computes and returns the loss of the batch in question."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The models to replay, and how they train.

    Attributes:
        level: the opt level; empty if another API than ``prepare`` takes the steps.
        scale: the factor of the loss.
        is_dynamic: whether the loss scale moves.
        casting: returns the context of a forward pass as in training.
        value: returns the float32 value of a parameter.
        is_converted: whether the models have the policy's dtypes and hooks.
    """

    models: Sequence[nn.Module]
    policy: Policy
    level: str
    scale: Tensor
    is_dynamic: bool
    casting: Callable[[], AbstractContextManager[Any]]
    value: Callable[[nn.Parameter], Tensor]
    is_converted: bool

    @property
    def can_convert(self) -> bool:
        """Whether a replay can try other policies. It cannot with shards and float8 layers, which it does not convert."""
        shards = any(is_shard(parameter) for model in self.models for parameter in model.parameters())
        return not shards and self.policy.float8 is None

    @contextmanager
    def computing(self, policy: Policy) -> Generator[None]:
        """Context of a forward pass as in training, but with this policy."""
        with ExitStack() as stack:
            if policy is not self.policy or not self.is_converted:
                stack.enter_context(_without_casts(self.models))
                stack.enter_context(_converted(self.models, policy))
            stack.enter_context(self.casting())
            if policy.per_op and policy.compute is not None and policy.compute is not self.policy.compute:
                stack.enter_context(casts_on(OpCasts(policy.compute)))
            yield


def subject_of(run: object, level: str, scale: float | None) -> Subject:
    """The models of an engine, or a model, prepared or not, and how they train.

    Args:
        level: for a model that was not prepared.
        scale: the factor of the loss; None for the current loss scale.

    Raises:
        ConfigTypeError: ``run`` is no engine or module.
        OrderError: the model's engine has been deleted.
    """
    owner: Any = run
    if isinstance(run, nn.Module):
        while wrapper_of(owner) is not None:
            owner = owner._orig_mod if hasattr(owner, "_orig_mod") else owner.module
        owner = owner_of(owner) or owner
    if isinstance(owner, Engine):
        engine = owner
        subject = _of_parts(engine.parts, engine.config.properties.opt_level or "")
        subject = replace(
            subject, scale=subject.scale / engine.config.accumulation.divisor(engine.micro_step)
        )
    elif isinstance(owner, Parts):
        subject = _of_parts(owner, "")
    elif isinstance(owner, nn.Module):
        subject = _of_model(owner, level)
    else:
        raise ConfigTypeError(
            f"{type(run).__name__} is neither an engine nor a module; write halfpeak.diagnose(engine, closure)"
        )
    if scale is None:
        return subject
    return replace(subject, scale=torch.full_like(subject.scale, require_scale("scale", scale)))


def _of_parts(parts: Parts, level: str) -> Subject:
    def value(parameter: nn.Parameter) -> Tensor:
        known = parts.pairs.float32_value(parameter)
        return parameter if known is None else known

    scaler = parts.scalers[0] if parts.scalers else None
    return Subject(
        models=parts.models,
        policy=parts.policy,
        level=level,
        scale=torch.ones((), device=parts.device) if scaler is None else scaler.state.scale,
        is_dynamic=scaler is not None and scaler.config.dynamic,
        casting=parts.replay,
        value=value,
        is_converted=True,
    )


def _of_model(model: nn.Module, level: str) -> Subject:
    if is_prepared(model):
        raise OrderError(
            f"this {type(model).__name__} was prepared; write halfpeak.diagnose(engine, closure)"
        )
    properties = resolve(level)
    policy, config = properties.policy(), properties.scale_config(None)
    if policy.param in LOW:
        policy = replace(policy, keep_fp32=(holds_constants,))  # as prepare does
    casts = OpCasts(policy.compute) if policy.per_op and policy.compute is not None else None
    return Subject(
        models=[model],
        policy=policy,
        level=level,
        scale=config.start(next((p.device for p in model.parameters()), None)).scale,
        is_dynamic=config.dynamic,
        casting=lambda: casts_on(casts),
        value=_itself,
        is_converted=False,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is different in a replay from the training.

    Attributes:
        dtype: in which everything is computed that would be in a low dtype, in user code too.
        policy: in place of the models' own.
        loss_fp32: whether the models return float32, and all outside of them is computed in float32.
        scale: the loss scale; None for that of the training.
        unmasked: inputs, outputs and buffers of modules whose non-finite elements are replaced by ones.
    """

    dtype: torch.dtype | None = None
    policy: Policy | None = None
    loss_fp32: bool = False
    scale: float | None = None
    unmasked: frozenset[Key] = frozenset()


AS_TRAINED = Change()
FLOAT32 = Change(dtype=torch.float32)


class Replay:
    """Runs the closure as in training or with a change, each time from the same random numbers."""

    def __init__(self, subject: Subject, closure: Closure, rewind: Callable[[], None]) -> None:
        self.subject = subject
        self._closure = closure
        self._rewind = rewind

    def trace(self, change: Change = AS_TRAINED) -> Trace:
        """Run forward and backward and return the trace.

        With a change it ends where the closure raises, because casts of its own may not fit the change.
        """

        def unmask(key: Key, tensor: Tensor) -> Tensor:
            return torch.where(tensor.isfinite(), tensor, 1.0) if key in change.unmasked else tensor

        models, scale = self.subject.models, self.subject.scale
        self._rewind()
        with ExitStack() as stack:
            outside = self._enter(change, stack)
            tracer = Tracer(models, replace=unmask if change.unmasked else None)
            stack.enter_context(tracer.watching())
            try:
                loss = self._loss()
                tracer.see_loss(loss)
                if outside is not None:
                    outside.is_active = False
                if bool(loss.detach().isfinite().all()):
                    factor = scale if change.scale is None else torch.full_like(scale, change.scale)
                    # torch.autocast, unlike halfpeak's own casts, is for the forward pass alone.
                    with torch.autocast(scale.device.type, enabled=False):
                        tracer.backward(scale_loss(loss, factor))
            except Exception:
                if change == AS_TRAINED:
                    raise
            return tracer.finish()

    def _enter(self, change: Change, stack: ExitStack) -> Computing | None:
        """Enter the contexts of a change; returns the one that acts outside of the models, if there is one."""
        subject, policy, dtype = self.subject, change.policy or self.subject.policy, change.dtype
        if change.policy is not None:
            dtype = torch.float32  # The models are converted from it.
        stack.enter_context(
            stand_ins(subject.models, subject.value if dtype is not None else _itself, dtype=dtype)
        )
        stack.enter_context(torch.enable_grad())
        if change.dtype is not None:
            stack.enter_context(without_float8(subject.models, policy))
            stack.enter_context(Computing(change.dtype))
        stack.enter_context(subject.computing(policy))
        handles: list[RemovableHandle] = []
        stack.callback(lambda: [handle.remove() for handle in handles])
        for model in subject.models if change.policy else ():
            for module in kept_by_user(model, policy.keep_fp32):
                handles += compute_in_fp32(module)
        if not change.loss_fp32:
            return None
        outside = stack.enter_context(Computing(torch.float32))

        def switch(on: bool) -> Callable[..., None]:
            return lambda *_: setattr(outside, "is_active", on)

        for model in subject.models:
            handles.append(model.register_forward_pre_hook(switch(False), prepend=True))
            handles.append(model.register_forward_hook(CastOutput(torch.float32)))
            handles.append(model.register_forward_hook(switch(True), always_call=True))
        return outside

    def _loss(self) -> Tensor:
        loss: Any = self._closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigTypeError(f"the closure returned {shown}; it must return the loss, a scalar tensor")
        return loss


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter


@contextmanager
def _without_casts(models: Sequence[nn.Module]) -> Generator[None]:
    """Run the body without the hooks by which modules cast."""
    tables: list[tuple[Any, dict[int, Any]]] = []
    try:
        for model in models:
            for module in model.modules():
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    tables.append((hooks, dict(hooks)))
                    for key, hook in tables[-1][1].items():
                        if isinstance(hook, CastInputs | CastOutput) or hook in (suspend_casts, resume_casts):
                            del hooks[key]
        yield
    finally:
        for hooks, before in tables:
            hooks.clear()
            hooks.update(before)


@contextmanager
def _converted(models: Sequence[nn.Module], policy: Policy) -> Generator[None]:
    """Run the body with models that have the dtypes and hooks of a policy; the dtypes stay."""
    handles: list[RemovableHandle] = []
    try:
        for model in models:
            if policy.param is not None:
                convert_network(model, policy.param, policy.norms, policy.keep_fp32)
            handles += [*hook_boundary(model, policy), *hook_kept(model, policy)]
        yield
    finally:
        for handle in handles:
            handle.remove()
