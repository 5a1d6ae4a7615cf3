"""Translates a configuration for the engine: the level with overrides, the loss scale, the clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.dtypes import parse_dtype
from halfpeak.core.levels import Level, get_level
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import prepare
from halfpeak.ops import foreach
from halfpeak.parts.clip import Clip, ClipNorm, ClipValue, NoClip
from halfpeak.recipes.settings import TrainConfig


def build_engine(config: TrainConfig, model: nn.Module, optimizer: Optimizer, *, on_skip: Any) -> Engine:
    """Build the engine of a run; see :func:`halfpeak.prepare` for ``on_skip``."""
    return prepare(
        model,
        optimizer,
        level_of(config),
        # Bounds and pace of a dynamic loss scale. The level decides whether the scale is dynamic.
        scale=ScaleConfig(
            init=config.init_loss_scale,
            interval=config.loss_scale_interval,
            floor=config.min_loss_scale,
            ceiling=config.max_loss_scale,
            recovers=True,
        ),
        accumulate=config.accumulate,
        clip=MeasuredClip(_clip(config)),
        float8=config.float8,
        on_skip=on_skip,
    )


def level_of(config: TrainConfig) -> Level:
    """The level with its overrides.

    Raises:
        ConfigError: an unknown level, or an override that makes no sense at it.
    """
    return get_level(config.level).replace(
        cast_model_type=_dtype(config.cast_model_type),
        keep_batchnorm_fp32=config.keep_batchnorm_fp32,
        master_weights=config.master_weights,
        loss_scale=config.loss_scale,
        cast_model_outputs=_dtype(config.cast_model_outputs),
    )


@dataclass(frozen=True, slots=True)
class MeasuredClip:
    """Clips by ``clip`` and always returns the norm before clipping, so that a run without clipping reports it, too."""

    clip: Clip

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of ``grads`` before they were clipped in place.  # f32[]"""
        if isinstance(self.clip, ClipNorm):
            return self.clip(grads)
        norm = foreach.global_norm(grads)
        self.clip(grads)
        return norm


def _clip(config: TrainConfig) -> Clip:
    if config.clip_value:
        return ClipValue(value=config.clip_value)
    return ClipNorm(max_norm=config.clip_norm) if config.clip_norm else NoClip()


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else parse_dtype(name)
