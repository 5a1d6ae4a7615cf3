"""What the optimizer hooks ask of a runner and of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.clipping import parse_clip_grad
from halfpeak.parts.clip import Clip

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


def require_optimizer(runner: BaseRunner, hook: object) -> Optimizer:
    """The runner's optimizer.

    Raises:
        ConfigTypeError: it has none, several, or a wrapper.
    """
    optimizer: Any = runner.optimizer
    name = type(hook).__name__
    if isinstance(optimizer, BaseOptimWrapper):
        raise ConfigTypeError(
            f"{name} cannot step a {type(optimizer).__name__}, which clips, accumulates and steps by itself; write "
            "optimizer_config=dict(type='OptimWrapperHook')"
        )
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, Mapping):
        raise ConfigTypeError(
            f"{name} steps one optimizer, and the runner has {', '.join(map(repr, optimizer))}; step them in the model's "
            "train_step and write optimizer_config=None"
        )
    raise ConfigTypeError(
        f"{name} needs a torch.optim.Optimizer in runner.optimizer, not {type(optimizer).__name__}; pass optimizer=..."
    )


def require_loss(runner: BaseRunner) -> Tensor:
    """The loss that ``train_step`` returned.

    Raises:
        ConfigTypeError: there is none, or it is not a tensor.
    """
    outputs: Any = runner.outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor):
        raise ConfigTypeError(
            f"train_step must return dict(loss=<tensor>, ...), and its loss is {type(loss).__name__}; write "
            "return dict(loss=loss, num_samples=len(batch))"
        )
    return loss


def parse_grad_clip(grad_clip: Mapping[str, Any] | None) -> Clip:
    """What ``grad_clip=dict(max_norm=35, norm_type=2)`` means.

    Raises:
        ConfigTypeError: not a dict, or a flag that is not one.
        ConfigError: empty, an unknown key, or a value out of range.

    >>> parse_grad_clip(dict(max_norm=35.0))
    ClipNorm(max_norm=35.0, norm_type=2.0)
    """
    try:
        return parse_clip_grad(grad_clip)
    except ConfigError as error:
        # The wrappers call the same dict by another name.
        raise type(error)(str(error).replace("clip_grad", "grad_clip")) from None


def require_flag(name: str, value: object) -> bool:
    """A bool.

    Raises:
        ConfigTypeError: anything else.
    """
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{name}={value!r} must be True or False")
    return value
