"""``halfpeak train --runner``: the same job through ``EpochBasedRunner`` or ``IterBasedRunner`` and its hooks."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfpeak.cli.run_folder import RunFolder
from halfpeak.core.errors import ConfigError
from halfpeak.insight.history import History, Sink
from halfpeak.recipes.base import Recipe
from halfpeak.recipes.device import environment
from halfpeak.recipes.optimizers import build_optimizer
from halfpeak.recipes.order import Order
from halfpeak.recipes.plan import Plan
from halfpeak.recipes.runner_job import Passes, PlanLrUpdaterHook, StepModel, optimizer_hook
from halfpeak.recipes.training import FORMAT, VERSION
from halfpeak.runner import BaseRunner, DistSamplerSeedHook, EpochBasedRunner, Hook, IterBasedRunner


class Settled(NamedTuple):
    """A plan with everything that it leaves open decided, and what it is about.

    Attributes:
        epochs: the length in epochs, if it was given so.
        reason: why this level, where nobody asked for one.
    """

    plan: Plan
    recipe: Recipe
    order: Order
    device: torch.device
    epochs: float | None
    reason: str | None


class _Stopped(Exception):
    """Somebody asked the run to end."""


class RunnerJob(Hook):
    """A run through a runner, and the hook of it that records, validates, saves and stops where a step ends.

    Attributes:
        plan: the settings.
        seconds: time spent in training iterations.
    """

    def __init__(self, settled: Settled, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.plan, self.recipe, self.order, self.device = settled[:4]
        self._folder = folder
        self.seconds = self._began = 0.0
        self._scores: list[Tensor] = []
        self._history = History()
        self._stop: Callable[[], bool] = lambda: False
        random.seed(self.plan.seed)
        torch.manual_seed(self.plan.seed)
        model = StepModel(self.recipe).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.runner = self._build(model, settled.epochs, say)

    @property
    def step(self) -> int:
        """Steps so far, skipped ones included."""
        return math.ceil(self.runner.iter / self.plan.accumulate)

    @property
    def taken(self) -> int:
        """Steps in which the optimizer moved. Waits for the device."""
        return self.runner.steps

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Load the run in the folder.

        Raises:
            ConfigError: its data have changed, or it is over.
        """
        if meta["fingerprint"] != self.recipe.fingerprint:
            raise ConfigError(
                f"the data of recipe {self.plan.recipe!r} changed since the run began; start a new run"
            )
        own = dict(self.runner.meta)
        self.runner.resume(self._folder.checkpoint)
        self.runner.meta.update(own)
        if self.step >= (self.plan.steps or 0):
            raise ConfigError(f"the run in {self._folder.path} is over; write a larger --steps or --epochs")

    def run(self, sinks: Sequence[Sink], stop: Callable[[], bool]) -> bool:
        """Train to the end; False where ``stop`` ended it before."""
        self._history, self._stop = History(sinks, every=self.plan.log_every), stop
        try:
            self.runner.run([Passes(self.recipe, self.order)], [("train", 1)])
        except _Stopped:
            return False
        finally:
            self._history.close()
        return True

    def before_train_iter(self, runner: BaseRunner) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def after_train_iter(self, runner: BaseRunner) -> None:
        """Record the step, if it ends here."""
        self.seconds += time.perf_counter() - self._began
        log_vars, result = runner.outputs["log_vars"], runner.step_result
        self._scores.append(torch.stack([log_vars["loss"], log_vars["accuracy"]]))
        if result is None or not result.boundary:
            return
        loss, accuracy = torch.stack(self._scores).mean(0).unbind()
        self._scores.clear()
        scalars = {
            "loss": loss,
            "accuracy": accuracy,
            "loss_scale": result.scale,
            "skipped": result.found_inf,
        }
        if result.grad_norm is not None:
            scalars["grad_norm"] = result.grad_norm
        rate = self.runner.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        step = runner.iter // self.plan.accumulate + 1
        epoch = round((runner.iter + 1) / self.order.batches, 4)
        self._history.record({"step": step, "epoch": epoch, "lr": rate}, scalars)
        runner.defer(self._end_step)

    def state_dict(self) -> dict[str, Any]:
        """The time."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the time."""
        self.seconds = state["seconds"]

    def _build(self, model: StepModel, epochs: float | None, say: Callable[[str], None]) -> BaseRunner:
        plan, by_epoch = self.plan, self.plan.runner == "epoch"
        length = (
            {"max_epochs": int(epochs or 0)}
            if by_epoch
            else {"max_iters": (plan.steps or 0) * plan.accumulate}
        )
        # In epochs, so that a resumed run counts in them again.
        kept = replace(plan, steps=None, epochs=epochs) if by_epoch else plan
        self.kept = replace(kept, output=str(self._folder.path))
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "plan": self.kept.values(),
            "fingerprint": self.recipe.fingerprint,
            "environment": environment(self.device),
        }
        runner = (EpochBasedRunner if by_epoch else IterBasedRunner)(
            model,
            optimizer=build_optimizer(plan, model, steps_low=False),
            work_dir=str(self._folder.path),
            logger=_logger(say),
            meta=meta,
            **length,
        )
        log = {"interval": plan.log_every, "hooks": [{"type": "TextLoggerHook", "by_epoch": by_epoch}]}
        runner.register_training_hooks(
            PlanLrUpdaterHook(plan),
            optimizer_hook(plan),
            log_config=log,
            custom_hooks_config=[DistSamplerSeedHook()] if by_epoch else None,
        )
        runner.register_hook(self, "LOW")
        return runner

    def _end_step(self) -> None:
        plan, step = self.plan, self.step
        over, stopped = self.runner.iter == self.runner.max_iters, self._stop()
        if over or _is_due(step, plan.eval_every):
            self._validate()
        if over or stopped or _is_due(step, plan.save_every):
            self._history.read()
            self.runner.write_checkpoint(self._folder.checkpoint)
        if stopped and not over:
            raise _Stopped

    def _validate(self) -> None:
        model = self.runner.model
        model.eval()
        try:
            with torch.no_grad(), self.runner.validation_step():
                total = torch.zeros(3, device=self.device)
                for batch in self.recipe.validation():
                    log_vars = model.val_step(batch, None)["log_vars"]
                    loss = log_vars["loss"]
                    row = torch.stack([loss, log_vars["accuracy"], torch.ones_like(loss)])
                    total += row * batch.targets.numel()
        finally:
            model.train()
        loss, accuracy = (total[:2] / total[2]).unbind()
        self._history.record({"step": self.step}, {"validation_loss": loss, "validation_accuracy": accuracy})


class _Lines(logging.Handler):
    """Says what a runner logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage().expandtabs(4))


def _logger(say: Callable[[str], None]) -> logging.Logger:
    """A logger of this run alone: one that logging knows by name would keep the handlers of earlier runs."""
    logger = logging.Logger("halfpeak.train", logging.INFO)
    logger.addHandler(_Lines(say))
    return logger


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
