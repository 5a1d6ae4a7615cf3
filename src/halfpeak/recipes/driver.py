"""Driver: who drives a step. The loop knows this protocol only, so other APIs can take the engine's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.dtypes import parse_dtype
from halfpeak.core.levels import Properties, resolve
from halfpeak.core.outcome import StepResult
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.prepare import prepare
from halfpeak.ops import foreach
from halfpeak.parts.clip import Clip, ClipNorm, ClipValue, NoClip
from halfpeak.recipes.base import Batch, Recipe, Score
from halfpeak.recipes.plan import Plan


class Driver(Protocol):
    """Runs the two halves of a step, and holds all state that a step changes."""

    @property
    def model(self) -> nn.Module:
        """The model as it is called."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose learning rate the loop sets between the two halves."""
        ...

    def backward(self, batches: Sequence[Batch]) -> Score:
        """Forward and backward of every batch of one step; their mean gradient is kept, their mean score returned."""
        ...

    def step(self) -> StepResult:
        """Step the optimizer, or skip when a gradient was not finite."""
        ...

    def forward(self) -> AbstractContextManager[object]:
        """The casts in which the model is to be called outside of a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that a step changes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        ...


class NativeDriver:
    """Drives the engine of :func:`halfpeak.prepare` directly."""

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        self._recipe = recipe
        self._engine = prepare(
            model,
            optimizer,
            plan.level,
            **overrides(plan),
            cast_model_outputs=_dtype(plan.cast_model_outputs),
            scale=scale_config(plan),
            accumulate=plan.accumulate,
            clip=Watched(_clip(plan)),
        )
        self.model = model
        self.optimizer = optimizer

    def backward(self, batches: Sequence[Batch]) -> Score:
        """Every batch but the last ends in a call of the engine's ``step`` that only closes its backward pass."""
        scores: list[Score] = []
        for number, batch in enumerate(batches):
            if number:
                self._engine.step()
            with self._engine.forward():
                score = self._recipe.score(self.model(batch.inputs), batch.targets)
            self._engine.backward(score.loss)
            scores.append(Score(score.loss.detach(), score.accuracy))
        return mean(scores)

    def step(self) -> StepResult:
        """The engine's step at the boundary of the window."""
        return self._engine.step()

    def forward(self) -> AbstractContextManager[object]:
        """The engine's casts."""
        return self._engine.forward()

    def state_dict(self) -> dict[str, Any]:
        """The engine's state: model, optimizer, scaler, counters."""
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the engine's state."""
        self._engine.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class Watched:
    """Clip as asked, and return the norm before that in every case: a run without clipping shows it too."""

    clip: Clip

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of ``grads`` before they were clipped in place.  # f32[]"""
        if isinstance(self.clip, ClipNorm):
            return self.clip(grads)
        norm = foreach.global_norm(grads)
        self.clip(grads)
        return norm


def overrides(plan: Plan) -> dict[str, Any]:
    """The properties that the plan sets otherwise than its level does; None where it leaves them alone."""
    return {
        "cast_model_type": _dtype(plan.cast_model_type),
        "keep_batchnorm_fp32": plan.keep_batchnorm_fp32,
        "master_weights": plan.master_weights,
        "loss_scale": plan.loss_scale,
    }


def properties(plan: Plan) -> Properties:
    """What the plan's level and overrides mean.

    Raises:
        ConfigError: an unknown level, or an override that makes no sense at it.
    """
    return resolve(plan.level, **overrides(plan))


def scale_config(plan: Plan) -> ScaleConfig:
    """The bounds and pace of the loss scale; whether it moves at all is the level's business."""
    return ScaleConfig(
        init=plan.init_loss_scale,
        interval=plan.loss_scale_interval,
        floor=plan.min_loss_scale,
        ceiling=plan.max_loss_scale,
    )


def mean(scores: Sequence[Score]) -> Score:
    """The mean of scores of equally large batches, on the device."""
    return Score(*(torch.stack(list(column)).mean() for column in zip(*scores, strict=True)))


def _clip(plan: Plan) -> Clip:
    if plan.clip_value:
        return ClipValue(value=plan.clip_value)
    return ClipNorm(max_norm=plan.clip_norm) if plan.clip_norm else NoClip()


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else parse_dtype(name)
