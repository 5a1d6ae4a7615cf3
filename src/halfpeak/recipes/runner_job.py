"""The parts of a run through ``halfpeak.runner``: model with steps, loader, schedule and optimizer hook of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from halfpeak.core.errors import ConfigError
from halfpeak.recipes.base import Batch, Recipe
from halfpeak.recipes.optimizers import learning_rate
from halfpeak.recipes.order import Order
from halfpeak.recipes.plan import Plan, defaults
from halfpeak.recipes.wrapper_driver import clip_grad
from halfpeak.runner import (
    BaseRunner,
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    LrUpdaterHook,
    OptimizerHook,
    allreduce_params,
    get_dist_info,
)

_FP16: Final[dict[str, dict[str, Any]]] = {
    "O1": {"mode": "autocast", "dtype": "float16"},
    "O2": {"mode": "master", "dtype": "float16"},
    "O4": {"mode": "autocast", "dtype": "bfloat16"},
    "O5": {"mode": "master", "dtype": "bfloat16"},
}
_STATIC: Final = ("O4", "O5")
_MODEL: Final = ("cast_model_type", "cast_model_outputs", "keep_batchnorm_fp32", "master_weights")
_SCALE: Final = ("loss_scale", "init_loss_scale", "loss_scale_interval", "min_loss_scale", "max_loss_scale")


class StepModel(nn.Module):
    """A recipe's model with the two methods that a runner calls."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self.net = recipe.model()

    def forward(self, inputs: Any) -> Any:
        """What the model says about ``inputs``."""
        return self.net(inputs)

    def train_step(self, data: Batch, optimizer: object) -> dict[str, Any]:
        """Loss and accuracy of a batch; what is logged is the mean over the ranks, which share the batch evenly."""
        outputs = self.val_step(data, optimizer)
        means = torch.stack([*outputs["log_vars"].values()])
        allreduce_params([means])
        loss, accuracy = means.unbind()
        return {**outputs, "log_vars": {"loss": loss, "accuracy": accuracy}}

    def val_step(self, data: Batch, optimizer: object) -> dict[str, Any]:
        """The same of a held-out batch, on this rank alone."""
        score = self._recipe.score(self(data.inputs), data.targets)
        log_vars = {"loss": score.loss.detach(), "accuracy": score.accuracy}
        return {"loss": score.loss, "log_vars": log_vars, "num_samples": len(data.inputs)}


class Passes:
    """The loader of a runner: each pass gives the batches of one epoch of an :class:`Order`, or this rank's share of them.

    It is its own sampler, because whoever begins a pass tells the sampler its number.
    """

    def __init__(self, recipe: Recipe, order: Order) -> None:
        self._recipe, self._order, self._epoch = recipe, order, 0

    @property
    def sampler(self) -> Passes:
        """Who is told the number of the pass."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass, from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._order.batches

    def __iter__(self) -> Iterator[Batch]:
        first, (rank, ranks) = self._epoch * self._order.batches, get_dist_info()
        for number in range(first, first + self._order.batches):
            yield self._recipe.batch(self._order.indices(number)[rank::ranks])


class PlanLrUpdaterHook(LrUpdaterHook):
    """The plan's schedule, by real steps."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(by_epoch=False)
        self._plan = plan

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate of the step that this iteration is a part of."""
        return learning_rate(self._plan, runner.scheduled_iter // self._plan.accumulate)


def check_ranks(plan: Plan, ranks: int) -> None:
    """Check that the batches of a plan can be shared evenly.

    Raises:
        ConfigError: they cannot, or there is no runner to do it.
    """
    if ranks > 1 and plan.runner is None:
        raise ConfigError(
            f"{ranks} processes need a runner to train together; write --runner epoch, or start one process"
        )
    if plan.batch % ranks:
        fitting = max(plan.batch - plan.batch % ranks, ranks)
        raise ConfigError(
            f"batch={plan.batch} cannot be shared evenly by {ranks} processes; write --batch {fitting}"
        )


def check_runner(plan: Plan) -> None:
    """Check that a runner can do what the plan says.

    Raises:
        ConfigError: a wrapper beside it, a level or a length that it does not have, or a setting that its optimizer hook
            has no argument for.
    """
    if plan.runner is None:
        return
    name = f"runner={plan.runner!r}"
    if plan.wrapper is not None:
        raise ConfigError(f"{name} and wrapper={plan.wrapper!r} exclude each other; give one")
    if plan.level == "O3":
        raise ConfigError(
            f"{name} cannot run at level='O3': its hooks keep float32 weights or masters; write level='O2', or leave runner out"
        )
    for setting in (*_MODEL, *(_SCALE if plan.level == "O0" else ())):
        value = getattr(plan, setting)
        if value != defaults()[setting]:
            raise ConfigError(f"{name} has no argument for {setting}={value!r} at {plan.level}; leave it out")
    if plan.runner == "epoch" and (plan.epochs is None or not plan.epochs.is_integer()):
        given = f"steps={plan.steps!r}" if plan.epochs is None else f"epochs={plan.epochs!r}"
        raise ConfigError(
            f"runner='epoch' counts whole epochs, not {given}; write epochs=2, or runner='iter'"
        )


def optimizer_hook(plan: Plan) -> OptimizerHook:
    """The hook that trains at the plan's level.

    >>> from halfpeak.recipes.catalog import draft
    >>> optimizer_hook(draft({"runner": "iter", "level": "O5"})).mode
    'master'
    """
    clip, every = clip_grad(plan), plan.accumulate
    if plan.level == "O0":
        if every > 1:
            return GradientCumulativeOptimizerHook(every, grad_clip=clip)
        return OptimizerHook(clip)
    arguments: dict[str, Any] = {"grad_clip": clip, "loss_scale": _scale(plan), **_FP16[plan.level]}
    if every > 1:
        return GradientCumulativeFp16OptimizerHook(every, **arguments)
    return Fp16OptimizerHook(**arguments)


def _scale(plan: Plan) -> float | dict[str, Any]:
    if isinstance(plan.loss_scale, float):
        return plan.loss_scale
    if plan.loss_scale is None and plan.level in _STATIC:
        return 1.0
    return {
        "init": plan.init_loss_scale,
        "interval": plan.loss_scale_interval,
        "floor": plan.min_loss_scale,
        "ceiling": plan.max_loss_scale,
    }
