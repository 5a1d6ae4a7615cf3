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
from torch import Tensor, nn

from halfpeak.cli.progress import Silent
from halfpeak.cli.ranks import any_of
from halfpeak.cli.run_folder import RunFolder
from halfpeak.core.errors import ConfigError
from halfpeak.insight.history import History, Row, Sink
from halfpeak.recipes.base import Recipe
from halfpeak.recipes.device import environment
from halfpeak.recipes.loop import PATIENCE, Reporter
from halfpeak.recipes.optimizers import build_optimizer
from halfpeak.recipes.order import Order
from halfpeak.recipes.plan import Plan
from halfpeak.recipes.runner_job import Passes, PlanLrUpdaterHook, StepModel, optimizer_hook
from halfpeak.recipes.training import FORMAT, VERSION
from halfpeak.runner import (
    BaseRunner,
    DistSamplerSeedHook,
    EpochBasedRunner,
    Hook,
    IterBasedRunner,
    MMDistributedDataParallel,
    TextLoggerHook,
    allreduce_params,
    get_dist_info,
)
from halfpeak.runner.hooks.logger import EVAL_ITERS


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
        self.seconds = self._began = self._reported = 0.0
        self._scores: list[Tensor] = []
        self._history = History()
        self._reporter: Reporter = Silent()
        self._stop: Callable[[], bool] = lambda: False
        rank, ranks = get_dist_info()
        _seed(self.plan.seed)
        model = StepModel(self.recipe).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if rank > 0:
            _seed(self.plan.seed + rank)  # or every rank would drop out the same
        wrapped = MMDistributedDataParallel(model) if ranks > 1 else model
        self.runner = self._build(model, wrapped, settled.epochs, say)

    @property
    def step(self) -> int:
        """Steps so far, skipped ones included. A run that ended inside a window and was made longer has one more."""
        return self.runner.meta["step"]

    @property
    def taken(self) -> int:
        """Steps in which the optimizer moved. Waits for the device."""
        return self.runner.steps

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Load the run in the folder.

        Raises:
            ConfigError: its data or the number of processes have changed, or it is over.
        """
        before, ranks = meta.get("processes", 1), get_dist_info()[1]
        if before != ranks:
            raise ConfigError(
                f"the run was begun by {before} processes and is not continued by {ranks}; start as many as before"
            )
        if meta["fingerprint"] != self.recipe.fingerprint:
            raise ConfigError(
                f"the data of recipe {self.plan.recipe!r} changed since the run began; start a new run"
            )
        own = dict(self.runner.meta)
        self.runner.resume(self._folder.checkpoint)
        reached = meta.get("step", math.ceil(self.runner.iter / self.plan.accumulate))
        self.runner.meta.update({**own, "step": reached})
        if self.step >= (self.plan.steps or 0):
            raise ConfigError(f"the run in {self._folder.path} is over; write a larger --steps or --epochs")

    def run(self, sinks: Sequence[Sink], stop: Callable[[], bool], reporter: Reporter) -> bool:
        """Train to the end; False where ``stop`` ended it before, in whichever process it was asked."""
        self._history, self._stop, self._reporter = History(sinks, every=self.plan.log_every), stop, reporter
        try:
            self.runner.run([Passes(self.recipe, self.order)], [("train", 1)])
        except _Stopped:
            return False
        finally:
            self._history.close()
        return True

    def before_train_epoch(self, runner: BaseRunner) -> None:
        """Start the clock, which stands still in validations and checkpoints."""
        self._began = time.perf_counter()

    def after_train_iter(self, runner: BaseRunner) -> None:
        """Record the step, if it ends here."""
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
        runner.meta["step"] += 1
        epoch = round((runner.iter + 1) / self.order.batches, 4)
        rows = self._history.record({"step": self.step, "epoch": epoch, "lr": rate}, scalars)
        now = time.perf_counter()
        self.seconds, self._began = self.seconds + now - self._began, now
        overdue = not rows and self.seconds - self._reported > PATIENCE
        self._report(self._history.read() if overdue else rows)
        runner.defer(self._end_step)

    def state_dict(self) -> dict[str, Any]:
        """The time."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the time."""
        self.seconds = self._reported = state["seconds"]

    def _build(
        self, model: StepModel, wrapped: nn.Module, epochs: float | None, say: Callable[[str], None]
    ) -> BaseRunner:
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
            "processes": get_dist_info()[1],
            "step": 0,
        }
        runner = (EpochBasedRunner if by_epoch else IterBasedRunner)(
            wrapped,
            optimizer=build_optimizer(plan, model, steps_low=False),
            work_dir=str(self._folder.path),
            logger=_logger(say),
            meta=meta,
            **length,
        )
        self._text = TextLoggerHook(by_epoch=by_epoch, interval=plan.log_every)
        runner.register_training_hooks(
            PlanLrUpdaterHook(plan),
            optimizer_hook(plan),
            log_config={"hooks": [self._text]},
            custom_hooks_config=[DistSamplerSeedHook()] if by_epoch else None,
        )
        runner.register_hook(self, "LOW")
        return runner

    def _end_step(self) -> None:
        plan, step = self.plan, self.step
        over, stopped = self.runner.iter == self.runner.max_iters, any_of(self._stop(), self.device)
        validates = over or _is_due(step, plan.eval_every)
        saves = over or stopped or _is_due(step, plan.save_every)
        if validates or saves:
            self._report(self._history.read())
        if validates:
            self._validate()
        if saves:
            self._history.read()
            self.runner.write_checkpoint(self._folder.checkpoint, every_rank=True)
        self._began = time.perf_counter() if validates or saves else self._began
        if stopped and not over:
            raise _Stopped

    def _validate(self) -> None:
        model = self.runner.model
        model.eval()
        try:
            with torch.no_grad(), self.runner.validation_step():
                sums, count = self._sum_scores(model)
        finally:
            model.train()
        loss, accuracy = (sums[:2] / sums[2]).unbind()
        known, scalars = {"step": self.step}, {"validation_loss": loss, "validation_accuracy": accuracy}
        row = (self._history.record(known, scalars) or self._history.read())[-1]
        self._reporter.validated(row)
        self._log(row, count)

    def _sum_scores(self, model: Any) -> tuple[Tensor, int]:
        """Loss, accuracy and count over the held-out samples, averaged over the ranks that share them; and the batches."""
        (rank, ranks), count = get_dist_info(), 0
        sums = torch.zeros(3, device=self.device)
        for batch in self.recipe.validation():
            if count % ranks == rank:
                log_vars = model.val_step(batch, None)["log_vars"]
                loss = log_vars["loss"]
                sums += (
                    torch.stack([loss, log_vars["accuracy"], torch.ones_like(loss)]) * batch.targets.numel()
                )
            count += 1
        allreduce_params([sums])
        return sums, count

    def _log(self, row: Row, batches: int) -> None:
        """Let the text log have a validation, as from ``EvalHook``."""
        buffer = self.runner.log_buffer
        buffer.clear_output()
        scores = {name.removeprefix("validation_"): row[name] for name in row if name != "step"}
        buffer.output.update({EVAL_ITERS: batches, **scores})
        if self.runner.rank == 0:
            self._text.log(self.runner)
        buffer.clear_output()

    def _report(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        elapsed, self._reported = self.seconds - self._reported, self.seconds
        units = len(rows) * self.plan.batch * self.plan.accumulate * self.recipe.units
        self._reporter.rows(rows, units / max(elapsed, 1e-9))


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


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
