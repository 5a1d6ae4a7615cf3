"""The engine behind the half-precision hooks: a model with casts or a low one, made ready for a runner."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.levels import Properties, resolve
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.checks import check_models, check_optimizers, wrapper_of
from halfpeak.engine.engine import Engine
from halfpeak.engine.plan import Plan
from halfpeak.engine.prepare import build
from halfpeak.optim.wrapped import check_can_convert, has_shards, reconnect, unwrap
from halfpeak.parts.clip import Clip
from halfpeak.parts.verdict import Verdict
from halfpeak.runner.fp16_model import Mode, is_decorated, wrap_fp16_model


def build_fp16_engine(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    mode: Mode,
    dtype: torch.dtype,
    scale: ScaleConfig,
    clip: Clip,
    verdict: Verdict,
) -> Engine:
    """Make model and optimizer ready. A refused call leaves them as they were.

    Args:
        model: may be wrapped in ``DistributedDataParallel``.
        optimizer: with ``mode="master"`` its groups hold float32 masters afterwards.
        mode: see :func:`~halfpeak.runner.fp16_model.wrap_fp16_model`.
        dtype: the low dtype.
        scale: how the loss scale moves.
        clip: what limits the gradients.
        verdict: how ranks agree on skipping.

    Raises:
        ParameterError: a model or optimizer that cannot be prepared.
    """
    inner = unwrap(model)
    if mode == "autocast":
        plan = Plan(properties=Properties(), policy=Policy(), scale=scale, clip=clip)
        engine = build(plan, [inner], [optimizer], verdict=verdict)
        wrap_fp16_model(inner, mode=mode, dtype=dtype)
        return engine
    check_can_convert(model)
    properties = resolve("O2" if dtype is torch.float16 else "O5")
    policy = properties.policy(norms="all")
    exact = [(parameter, parameter.data) for parameter in inner.parameters()]
    if is_decorated(inner):
        # The decorators cast at the places the model chose, so nothing may be cast at its boundary.
        policy = Policy(masters=True)
        check_models([inner], policy)
        check_optimizers([optimizer], [inner])
        wrap_fp16_model(inner, mode=mode, dtype=dtype)
    plan = Plan(properties=properties, policy=policy, scale=scale, clip=clip)
    engine = build(plan, [inner], [optimizer], verdict=verdict)
    for parameter, value in exact:
        engine.masters.take(parameter, value)
    if not is_decorated(inner):
        engine.handles += suspend_autocast(inner, engine.device.type)
    reconnect(model)
    return engine


def suspend_autocast(model: nn.Module, device_type: str) -> list[RemovableHandle]:
    """Switch autocast off inside the model's ``forward``, which casts at its boundary and stores what it computes in.

    >>> model = nn.Linear(2, 1)
    >>> handles = suspend_autocast(model, "cpu")
    >>> with torch.autocast("cpu"):
    ...     inside, outside = model(torch.ones(1, 2)).dtype, torch.relu(model.weight @ torch.ones(2)).dtype
    >>> inside, outside
    (torch.float32, torch.bfloat16)
    """
    pause = _Pause(device_type)
    return [
        model.register_forward_pre_hook(pause.begin, prepend=True),
        model.register_forward_hook(pause.end, always_call=True),
    ]


class _Pause:
    """The two ends of a stretch without autocast; stretches nest. Plain flags, because a compiled model runs its hooks."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._before: list[bool] = []

    def begin(self, module: nn.Module, args: object) -> None:
        self._before.append(torch.is_autocast_enabled(self._device_type))
        torch.set_autocast_enabled(self._device_type, False)

    def end(self, module: nn.Module, args: object, output: object) -> None:
        if self._before:  # else an earlier hook raised before the stretch began
            torch.set_autocast_enabled(self._device_type, self._before.pop())


def reduces_itself(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether somebody else reduces the gradients over the ranks: DDP or FSDP around the model, or sharded parameters."""
    names = ("DistributedDataParallel", "FullyShardedDataParallel")
    while True:
        if (wrapper_of(model) or "").endswith(names):
            return True
        inner = next(iter(model.children()), model) if wrapper_of(model) else model
        if inner is model:
            return has_shards(optimizer)
        model = inner
