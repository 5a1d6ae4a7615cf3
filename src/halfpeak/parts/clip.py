"""Gradient clipping on the device: by the norm of all gradients, or by value."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import known_fields
from halfpeak.core.short_repr import short_repr
from halfpeak.ops import foreach


class Clip(Protocol):
    """A callable that limits true gradients in place and may return their norm, which becomes ``StepResult.grad_norm``.

    An engine computes :class:`ClipNorm` itself: over the ranks of ``group=``, and the 2-norm also in the kernels of
    ``halfpeak.fused`` and in a CUDA graph. It calls any other clip once in a step, unless the host knows that the step is
    skipped (and after each call of a closure), with the gradients on this rank of all optimizers of the step. On an accelerator
    they may not be finite, and reading a number of them waits. Shards are ``DTensor``: ``ops/foreach.py`` reduces their norms
    over ranks.
    """

    def __call__(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Clip ``grads`` in place; return their norm before that, or None."""
        ...


@known_fields
@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Source: Pascanu, Mikolov and Bengio, 2013 (arXiv:1211.5063).

    Raises:
        ConfigError: ``max_norm`` is not above zero, or ``norm_type`` is not above zero.

    >>> import torch
    >>> grads = [torch.tensor([3.0, 4.0])]
    >>> ClipNorm(max_norm=1.0)(grads)
    tensor(5.)
    >>> grads[0].norm() <= 1.0
    tensor(True)
    """

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm, allow_inf=True)
        _require_positive("norm_type", self.norm_type, allow_inf=True)

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """Clip in place; return the norm before that.  # f32[]"""
        return foreach.clip_norm_(grads, self.max_norm, self.norm_type)


@known_fields
@dataclass(frozen=True, slots=True)
class ClipValue:
    """Clamp every gradient element to ``[-value, value]``.

    Raises:
        ConfigError: ``value`` is not a finite number above zero.
    """

    value: float

    def __post_init__(self) -> None:
        _require_positive("value", self.value, allow_inf=False)

    def __call__(self, grads: Sequence[Tensor]) -> None:
        """Clamp in place. The norm is not computed."""
        foreach.clamp_(grads, self.value)


@dataclass(frozen=True, slots=True)
class NoClip:
    """Leave gradients as they are."""

    def __call__(self, grads: Sequence[Tensor]) -> None:
        """Do nothing."""


def is_rank_local(parameter: Tensor) -> bool:
    """Whether other ranks do not have this parameter: Megatron and DeepSpeed mark experts by ``allreduce = False``.

    >>> import torch
    >>> expert = torch.nn.Parameter(torch.ones(2))
    >>> expert.allreduce = False
    >>> is_rank_local(expert)
    True
    """
    return not getattr(parameter, "allreduce", True)


def limit_of_norm(clip: Clip) -> float | None:
    """The largest 2-norm that a clip allows; None if it limits something else.

    >>> limit_of_norm(ClipNorm(max_norm=1.0)), limit_of_norm(ClipValue(value=1.0))
    (1.0, None)
    """
    return clip.max_norm if isinstance(clip, ClipNorm) and clip.norm_type == 2 else None


def is_by_norm(clip: Clip) -> bool:
    """Whether a clip needs only the sum of squares of the gradients, or nothing."""
    return isinstance(clip, NoClip) or limit_of_norm(clip) is not None


def parse_clip(clip: Clip | float | None) -> Clip:
    """The clip that an argument means: for a number a :class:`ClipNorm` with that ``max_norm``, for None no clipping.

    Raises:
        ConfigError: the number is not above zero.
        ConfigTypeError: the argument cannot clip.

    >>> parse_clip(1.0)
    ClipNorm(max_norm=1.0, norm_type=2.0)
    """
    if clip is None:
        return NoClip()
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):
        try:
            return ClipNorm(max_norm=clip)
        except ConfigError:
            raise ConfigError(
                f"clip={short_repr(clip)} must be a number above zero, the largest norm; write clip=1.0, or leave it out"
            ) from None
    if not callable(clip) or isinstance(clip, type):
        raise ConfigTypeError(
            f"clip={short_repr(clip)} must be None, a number, ClipNorm(max_norm=1.0) or ClipValue(value=0.5)"
        )
    return clip


def _require_positive(name: str, value: object, *, allow_inf: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = number and (0 < value <= sys.float_info.max or (allow_inf and value == math.inf))  # type: ignore[operator]
    if not fits:
        raise ConfigError(
            f"{name}={short_repr(value)} must be a {'' if allow_inf else 'finite '}number above zero; write {name}=1.0"
        )
