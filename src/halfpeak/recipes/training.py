"""Training: a run in progress. One step of it, its validation, and the state that continues it bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import CheckpointError, ConfigError
from halfpeak.recipes.base import Recipe, Score
from halfpeak.recipes.device import environment, random_state, set_random_state
from halfpeak.recipes.driver import Driver, NativeDriver, properties
from halfpeak.recipes.late import Late
from halfpeak.recipes.optimizers import build_optimizer, learning_rate, set_learning_rate
from halfpeak.recipes.order import Order
from halfpeak.recipes.plan import FREE, Plan

FORMAT = "halfpeak.train"
VERSION = 1

DriverFactory = Callable[[Plan, Recipe, nn.Module, Optimizer], Driver]


class Step(NamedTuple):
    """What one step gave: numbers that are on the host, and scalars that are still on the device."""

    known: dict[str, Any]
    scalars: dict[str, Tensor]


class Training:
    """The state of a run and how it moves.

    What a step computes depends on the plan, the data and :meth:`state_dict`, and on nothing else: batches follow from
    (seed, step), the learning rate from the number of real steps. The verdict of a step is read while the device works
    on the next one, so the rate follows real steps exactly and nobody waits for an idle device.

    Attributes:
        step: steps begun so far, skipped ones included.
        taken: steps in which the optimizer moved.
        seconds: time spent in training steps; whoever drives the run adds to it.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        order: Order,
        device: torch.device,
        drive: DriverFactory = NativeDriver,
    ) -> None:
        self.plan, self.recipe, self.order, self.device = plan, recipe, order, device
        random.seed(plan.seed)
        torch.manual_seed(plan.seed)
        model = recipe.model().to(device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        policy = properties(plan).policy()
        steps_low = policy.param in LOW and not policy.masters
        self.driver = drive(plan, recipe, model, build_optimizer(plan, model, steps_low=steps_low))
        self.step = self.taken = 0
        self.seconds = 0.0
        self._verdict: Late | None = None

    def advance(self) -> Step:
        """Take one step."""
        first = self.step * self.plan.accumulate
        batches = [self.recipe.batch(self.order.indices(first + i)) for i in range(self.plan.accumulate)]
        score = self.driver.backward(batches)
        self._settle()
        rate = learning_rate(self.plan, self.taken)
        set_learning_rate(self.driver.optimizer, rate)
        result = self.driver.step()
        self._verdict = Late(result.found_inf)
        self.step += 1
        scalars = {**score._asdict(), "loss_scale": result.scale, "skipped": result.found_inf}
        if result.grad_norm is not None:
            scalars["grad_norm"] = result.grad_norm
        epoch = round(self.step * self.plan.accumulate / self.order.batches, 4)
        return Step({"step": self.step, "epoch": epoch, "lr": rate}, scalars)

    def validate(self) -> Step:
        """Loss and accuracy on the held-out data."""
        model = self.driver.model
        model.eval()
        try:
            with torch.no_grad(), self.driver.forward():
                total = torch.zeros(3, device=self.device)
                for inputs, targets in self.recipe.validation():
                    score: Score = self.recipe.score(model(inputs), targets)
                    total += (
                        torch.stack([score.loss, score.accuracy, torch.ones_like(score.loss)])
                        * targets.numel()
                    )
        finally:
            model.train()
        loss, accuracy = (total[:2] / total[2]).unbind()
        return Step({"step": self.step}, {"validation_loss": loss, "validation_accuracy": accuracy})

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues the run. Waits for the device."""
        self._settle()
        return {
            "format": FORMAT,
            "version": VERSION,
            "plan": self.plan.values(),
            "fingerprint": self.recipe.fingerprint,
            "environment": environment(self.device),
            "step": self.step,
            "taken": self.taken,
            "seconds": self.seconds,
            "driver": self.driver.state_dict(),
            "random": random_state(self.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called.

        Raises:
            ConfigError: the plan differs in a setting that the parameters depend on, or the data are others.
        """
        require_same(state["plan"], self.plan)
        if state["fingerprint"] != self.recipe.fingerprint:
            raise ConfigError(
                f"the data of recipe {self.plan.recipe!r} changed since the run began; start a new run"
            )
        self.driver.load_state_dict(state["driver"])
        self.step, self.taken, self.seconds = state["step"], state["taken"], state["seconds"]
        self._verdict = None
        set_random_state(state["random"], self.device)

    def _settle(self) -> None:
        """Count the last step, if it was not skipped."""
        if self._verdict is not None:
            self.taken += self._verdict.read() == 0
            self._verdict = None


def require_same(saved: Mapping[str, Any], plan: Plan) -> None:
    """Refuse to continue a run under other settings than those it began with.

    Raises:
        ConfigError: names every setting that differs and is not in :data:`~halfpeak.recipes.plan.FREE`.
    """
    now = plan.values()
    changed = [
        f"{name} was {saved.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if name not in FREE and saved.get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"this run cannot be continued with other settings: {'; '.join(changed)}. Leave them out, or start a new run"
        )


def require_checkpoint(state: Mapping[str, Any], source: object) -> Mapping[str, Any]:
    """Return ``state`` if it is one of :meth:`Training.state_dict`.

    Raises:
        CheckpointError: it is something else, or of another version.
    """
    if state.get("format") != FORMAT or not isinstance(state.get("plan"), dict):
        raise CheckpointError(f"{source} is not a checkpoint of 'halfpeak train'")
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{source} has version {state.get('version')!r}; this halfpeak reads version {VERSION}"
        )
    return state
