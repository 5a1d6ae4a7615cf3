"""WrapperDriver: the same run through an optimizer wrapper, as code written for OpenMMLab drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from halfpeak.core.dtypes import parse_dtype
from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.outcome import StepResult
from halfpeak.insight.suitable import Advice
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, ScalarHistory
from halfpeak.recipes.base import Batch, Recipe, Score
from halfpeak.recipes.driver import Driver, NativeDriver, mean, overrides
from halfpeak.recipes.plan import Plan, defaults

_LEVELS: Final = {"optim": ("O0",), "amp": ("O1", "O4")}
_AMP_DTYPES: Final = {"O1": "float16", "O4": "bfloat16"}
_MODEL: Final = ("cast_model_type", "cast_model_outputs", "keep_batchnorm_fp32", "master_weights")
_PACE: Final = ("init_loss_scale", "loss_scale_interval")
_BOUNDS: Final = ("min_loss_scale", "max_loss_scale")
_UNKNOWN: Final = {"optim": (*_MODEL, "loss_scale", *_PACE, *_BOUNDS), "amp": _MODEL, "apex": _PACE}
"""The settings that a wrapper has no argument for."""


class WrapperDriver:
    """Drives ``OptimWrapper``, ``AmpOptimWrapper`` or ``ApexOptimWrapper``."""

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        self._recipe = recipe
        self._wrapper = _wrap(plan, optimizer)
        self.model = model
        self.optimizer = optimizer

    def backward(self, batches: Sequence[Batch]) -> Score:
        """One backward pass of the wrapper for every batch."""
        scores: list[Score] = []
        for batch in batches:
            with self._wrapper.optim_context(self.model):
                score = self._recipe.score(self.model(batch.inputs), batch.targets)
            self._wrapper.backward(self._wrapper.scale_loss(score.loss))
            scores.append(Score(score.loss.detach(), score.accuracy))
        return mean(scores)

    def step(self) -> StepResult:
        """The wrapper's step at the end of the window."""
        self._wrapper.step()
        self._wrapper.zero_grad()
        result = self._wrapper.last_result
        if result is None:
            raise OrderError("the wrapper took no step")
        return result

    def forward(self) -> AbstractContextManager[object]:
        """The wrapper's casts."""
        return self._wrapper.optim_context(self.model)

    def state_dict(self) -> dict[str, Any]:
        """The states of model and wrapper."""
        return {"model": self.model.state_dict(), "wrapper": self._wrapper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of model and wrapper."""
        self.model.load_state_dict(state["model"])
        self._wrapper.load_state_dict(state["wrapper"])


def drive(plan: Plan, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> Driver:
    """The driver that a plan asks for."""
    kind = NativeDriver if plan.wrapper is None else WrapperDriver
    return kind(plan, recipe, model, optimizer)


def suited(plan: Plan, advice: Advice) -> Advice:
    """The level that the plan's wrapper can take, nearest to the one that suits the device.

    >>> from halfpeak.recipes.catalog import draft
    >>> suited(draft({"wrapper": "amp"}), Advice("O5", "bfloat16 is fast")).level
    'O4'
    """
    if plan.wrapper == "optim":
        return Advice("O0", "an OptimWrapper trains in float32")
    if plan.wrapper == "amp":
        return advice._replace(level="O4" if advice.level == "O5" else "O1")
    return advice


def check_wrapper(plan: Plan) -> None:
    """Check that the plan's wrapper can do what the plan says.

    Raises:
        ConfigError: a level that it does not have, or a setting that it has no argument for.
    """
    if plan.wrapper is None:
        return
    levels = _LEVELS.get(plan.wrapper, ())
    if levels and plan.level not in (*levels, "auto"):
        raise ConfigError(
            f"wrapper={plan.wrapper!r} cannot run at level={plan.level!r}; write level={' or '.join(map(repr, levels))}, or "
            "wrapper='apex', which has every level"
        )
    for name in _UNKNOWN[plan.wrapper]:
        value = getattr(plan, name)
        if value != defaults()[name]:
            raise ConfigError(f"wrapper={plan.wrapper!r} has no argument for {name}={value!r}; leave it out")


def _wrap(plan: Plan, optimizer: Optimizer) -> OptimWrapper:
    common: dict[str, Any] = {
        "optimizer": optimizer,
        "accumulative_counts": plan.accumulate,
        "clip_grad": clip_grad(plan),
        "sink": ScalarHistory(limit=1),
    }
    if plan.wrapper == "optim":
        return OptimWrapper(**common)
    if plan.wrapper == "amp":
        return AmpOptimWrapper(_amp_scale(plan), _AMP_DTYPES[plan.level], **common)
    output = plan.cast_model_outputs
    return ApexOptimWrapper(
        plan.level,
        min_loss_scale=plan.min_loss_scale,
        max_loss_scale=plan.max_loss_scale,
        cast_model_outputs=None if output is None else parse_dtype(output),
        **overrides(plan),
        **common,
    )


def clip_grad(plan: Plan) -> dict[str, Any]:
    """The plan's clipping as wrappers and optimizer hooks take it."""
    if plan.clip_value:
        return {"type": "value", "clip_value": plan.clip_value}
    # An infinite limit clips nothing and shows the norm.
    return {"max_norm": plan.clip_norm or float("inf")}


def _amp_scale(plan: Plan) -> float | str | dict[str, Any]:
    if isinstance(plan.loss_scale, float) or (plan.loss_scale is None and plan.level == "O4"):
        return plan.loss_scale or "dynamic"
    return {
        "init": plan.init_loss_scale,
        "interval": plan.loss_scale_interval,
        "floor": plan.min_loss_scale,
        "ceiling": plan.max_loss_scale,
    }
