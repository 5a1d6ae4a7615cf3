"""Training: a run in progress, with its step, its validation, and the state that resumes it bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import CheckpointError, ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import Schema, require, require_count, require_number, unfit
from halfpeak.diagnosis.skips import DiagnosingWatch
from halfpeak.distributed.fsdp import fully_shard
from halfpeak.distributed.launched import ALONE, Ranks, parts, whole
from halfpeak.ops.async_scalar import AsyncCopy
from halfpeak.parts import random_state
from halfpeak.recipes.base import Batch, Recipe, Score, mean_score, score
from halfpeak.recipes.device import environment
from halfpeak.recipes.optimizers import build_optimizer, learning_rate
from halfpeak.recipes.precision import build_engine, level_of
from halfpeak.recipes.sampler import BatchSampler
from halfpeak.recipes.settings import CHANGEABLE, TrainConfig

FORMAT = "halfpeak.train"
VERSION = 1


class Step(NamedTuple):
    """The results of one step: numbers that are on the host, and scalars that are still on the device."""

    known: dict[str, Any]
    scalars: dict[str, Tensor]


class Training:
    """The state of a run, and the methods that advance it.

    A step depends on the configuration, the data and :meth:`state_dict` only: the seed and the step number give the
    batches, and the number of steps that were not skipped gives the learning rate. ``found_inf`` of a step is copied to
    the host asynchronously, and read when the next backward pass has been launched. So the learning rate is exact, and
    the device does not idle.

    Attributes:
        step: steps begun so far, skipped ones included.
        num_steps: steps that were not skipped; the last step counts after its ``found_inf`` was read.
        seconds: time spent in training steps; the loop adds to it.
        parameters: number of elements of the model's parameters.

    Args:
        config: the settings. A batch is divided among the ranks, so the training is the same on any number of ranks.
        device: of this rank.

    Raises:
        ConfigError: the batch size is no multiple of the number of ranks, or ``shard`` has no process group.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        sampler: BatchSampler,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        _check_ranks(config, ranks)
        self.config, self.recipe, self.device, self.ranks = config, recipe, device, ranks
        self._sampler = sampler
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        self.model = recipe.model().to(device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if config.shard:
            fully_shard(self.model, level_of(config))
        policy = level_of(config).policy()
        steps_low = policy.param in LOW and not policy.masters
        self.optimizer = build_optimizer(config, self.model, steps_low=steps_low)
        on_skip = DiagnosingWatch(lambda: Path(self.config.output or ".")) if config.diagnose else "warn"
        self._engine = build_engine(config, self.model, self.optimizer, on_skip=on_skip)
        self._wrapped: nn.Module | None = self.model if config.shard else None
        if ranks.count > 1 and not config.shard:
            self._wrapped = DistributedDataParallel(self.model)
        self.step = self.num_steps = 0
        self.seconds = 0.0
        self._found_inf: AsyncCopy | None = None

    def advance(self) -> Step:
        """Take one step."""
        first = self.step * self.config.accumulate
        mean = self._backward([
            self.recipe.batch(self._sampler.indices(first + i)[self.ranks.rank :: self.ranks.count])
            for i in range(self.config.accumulate)
        ])  # fmt: skip
        self._count_last()
        rate = learning_rate(self.config, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        result = self._engine.step()
        self._found_inf = AsyncCopy(result.found_inf)
        self.step += 1
        scalars = {**mean._asdict(), "loss_scale": result.scale, "skipped": result.found_inf}
        if result.grad_norm is not None:
            scalars["grad_norm"] = result.grad_norm
        epoch = round(self.step * self.config.accumulate / self._sampler.batches, 4)
        return Step({"step": self.step, "epoch": epoch, "lr": rate}, scalars)

    def validate(self) -> Step:
        """Compute loss and accuracy on the held-out data. Every rank evaluates all of it."""
        model = self.model
        self.ranks.copy_buffers(model)
        model.eval()
        try:
            with torch.no_grad(), self._engine.forward():
                total = torch.zeros(3, device=self.device)
                for inputs, targets in self.recipe.validation():
                    of_batch = score(model(inputs), targets)
                    total += torch.stack([*of_batch, torch.ones_like(of_batch.loss)]) * targets.numel()
        finally:
            model.train()
        loss, accuracy = (total[:2] / total[2]).unbind()
        return Step({"step": self.step}, {"validation_loss": loss, "validation_accuracy": accuracy})

    def state_dict(self) -> dict[str, Any]:
        """The state that resumes the run on any number of ranks. All ranks must call this. Waits for the device."""
        self._count_last()
        self.ranks.copy_buffers(self.model)
        return {
            "format": FORMAT,
            "version": VERSION,
            "plan": self.config.values(),
            "fingerprint": self.recipe.fingerprint,
            "environment": self.environment(),
            "step": self.step,
            "taken": self.num_steps,
            "seconds": self.seconds,
            "driver": whole(self._engine.state_dict()),
            "random": random_state.capture([torch.device(self.device.type)]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called.

        Args:
            state: as :func:`require_checkpoint` returns it.

        Raises:
            ConfigError: the configuration differs in a setting that the parameters depend on, or the data has changed.
            StateError: a part is missing or invalid, or does not fit the model, the optimizer or the random generators.
        """
        require_same(state["plan"], self.config)
        _check_parts(state)
        if state.get("fingerprint") != self.recipe.fingerprint:
            raise ConfigError(
                f"the data of recipe {short_repr(self.config.recipe)} changed since the run began; start a new run"
            )
        calls = random_state.parse(state["random"])
        self._engine.load_state_dict(parts(state["driver"], self._engine.state_dict()))
        self.step, self.num_steps, self.seconds = state["step"], state["taken"], state["seconds"]
        self._found_inf = None
        for put_back in calls:
            put_back()

    def environment(self) -> dict[str, str]:
        """The environment on which the last bits of a result depend, beside the program."""
        shards = ", which hold shards" if self.config.shard else ""
        return {**environment(self.device), "number of processes": f"{self.ranks.count}{shards}"}

    def _backward(self, batches: Sequence[Batch]) -> Score:
        """Run forward and backward of every batch of one step; keep their mean gradient, return their mean score."""
        scores: list[Score] = []
        for number, batch in enumerate(batches):
            if number:
                self._engine.step()  # inside an accumulation window, this only ends the previous micro-step
            with self._engine.forward(self._wrapped):
                of_batch = score((self._wrapped or self.model)(batch.inputs), batch.targets)
            self._engine.backward(of_batch.loss)
            scores.append(Score(of_batch.loss.detach(), of_batch.accuracy))
        return Score(*self.ranks.mean(torch.stack(mean_score(scores))).unbind())

    def _count_last(self) -> None:
        """Count the last step, if it was not skipped."""
        if self._found_inf is not None:
            self.num_steps += float(self._found_inf.read()) == 0
            self._found_inf = None


def require_same(saved: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse to resume a run with changed settings.

    Raises:
        ConfigError: names every changed setting that is not in :data:`~halfpeak.recipes.settings.CHANGEABLE`.
    """
    now = config.values()
    changed = [
        f"{name} was {short_repr(saved.get(name))} and is {value!r}"
        for name, value in now.items()
        if name not in CHANGEABLE and saved.get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"this run cannot be continued with other settings: {'; '.join(changed)}. Leave them out, or start a new run"
        )


def require_checkpoint(state: Mapping[str, Any], source: object) -> Mapping[str, Any]:
    """Return ``state`` if it is a result of :meth:`Training.state_dict`.

    Raises:
        CheckpointError: ``state`` is something else, or has another version.
    """
    if state.get("format") != FORMAT or not isinstance(state.get("plan"), dict):
        raise CheckpointError(f"{source} is not a checkpoint of 'halfpeak train'")
    version = state.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{source} has version {short_repr(version)}; this halfpeak reads version {VERSION}"
        )
    return state


def _check_parts(state: Mapping[str, Any]) -> None:
    counts: dict[str, Schema] = {"step": require_count, "taken": require_count, "seconds": _require_seconds}
    parts: dict[str, Schema] = {"driver": Mapping, "random": Mapping, "environment": {str: str}}
    require(state, "state", {**counts, **parts, object: ...})


def _require_seconds(value: object, what: str) -> None:
    if require_number(value, what, least=0.0) == math.inf:
        raise unfit(value, what, "finite")


def _check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    if config.batch % ranks.count:
        raise ConfigError(
            f"batch={config.batch} cannot be divided among {ranks.count} processes; write a multiple of {ranks.count}, or "
            f"start a number of processes that divides {config.batch}"
        )
    if config.shard and not ranks.has_group:
        raise ConfigError(
            "shard=True needs a process group; start the run with torchrun -m halfpeak train, or write --shard false"
        )
