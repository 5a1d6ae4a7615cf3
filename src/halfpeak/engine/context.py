"""EngineContext: what an engine is made of, for the functions that save, copy, report or compile it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.step_result import StepResult
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.gradients.window import Scaled, Unscaled
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.engine.step import TrainStep
from halfpeak.engine.step_record import StepRecord
from halfpeak.state.batch_norm import BatchNormStats
from halfpeak.state.loss_scaler import LossScaler
from halfpeak.state.masters import Masters


@dataclass(kw_only=True, slots=True)
class EngineContext:
    """The parts of an engine.

    Attributes:
        config: what it was asked to do.
        models: the prepared models.
        prepared: one per optimizer.
        masters: the float32 copies that the optimizers step.
        scalers: one loss scaler per loss.
        record: counters, and what a step has decided and not yet applied.
        stats: the running statistics that a skipped step puts back.
        train_step: the order of a step.
        casting: the scope in which operations are cast (O1, O4); elsewhere a null context.
        device: where the scalars of a step live.
        handles: of the hooks on the models.
        synchronised: whether gradients of the last forward pass are reduced over the ranks by its backward pass.
        reduces: by model, whether its ``DistributedDataParallel`` was outside of ``no_sync`` when it last computed.
    """

    config: EngineConfig
    models: tuple[nn.Module, ...]
    prepared: list[PreparedOptimizer]
    masters: Masters
    scalers: list[LossScaler]
    record: StepRecord
    stats: BatchNormStats
    train_step: TrainStep
    casting: AbstractContextManager[Any]
    device: torch.device
    handles: list[RemovableHandle]
    synchronised: bool = True
    reduces: dict[nn.Module, bool] = field(default_factory=dict[nn.Module, bool])

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return [one.optimizer for one in self.prepared]

    @property
    def holds_local_grads(self) -> bool:
        """Whether gradients of the open window are those of this rank alone."""
        return not self.is_reduced(self.prepared) and any(
            isinstance(one.window, Scaled) for one in self.prepared
        )

    def names_of(self, prepared: PreparedOptimizer) -> list[str]:
        """What the parameters of an optimizer are called in the models, in the order of its groups."""
        several = len(self.models) > 1
        names = {
            id(p): f"models.{i}.{name}" if several else name
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters()
        }
        return [
            names.get(id(pair.model), f"parameter {i}") for i, pair in enumerate(prepared.table().all_pairs)
        ]

    def catch_up(self) -> None:
        """Before a forward pass: finish an interrupted step if it has changed anything, and follow writes to masters.

        An evaluation in another thread than the one that trains computes with the weights as they are: publishing masters
        there would write weights between a forward pass here and its backward pass.
        """
        trains = {one.thread for one in self.prepared}
        if not torch.is_grad_enabled() and threading.get_ident() not in trains:
            alive = {thread.ident for thread in threading.enumerate()}
            if trains & alive:  # one that has ended has no pass open
                return
        for one in self.prepared:
            one.finish_if_mutated()
        if not any(one.running is not None for one in self.prepared):
            self.record.apply_pending()
        self.masters.agree_on_requires_grad()
        self.masters.follow_masters()
        self.stats.begin_forward()

    def is_reduced(self, prepared: Iterable[PreparedOptimizer]) -> bool:
        """Whether the coming backward pass reduces the gradients of all parameters of these optimizers over the ranks."""
        if not self.synchronised or all(self.reduces.values()):
            return self.synchronised
        unreduced = (model for model, is_reduced in self.reduces.items() if not is_reduced)
        local = {id(parameter) for model in unreduced for parameter in model.parameters()}
        return not any(id(p) in local for one in prepared for p in one.window_pairs().model_params)

    def delays_unscaling(self, prepared: Iterable[PreparedOptimizer]) -> bool:
        """Whether gradients of the coming backward pass stay scaled for a later one of the window.

        They must where they are not reduced over the ranks yet. They can where the weights are float32 and one scale holds
        for the whole window: then autograd itself adds them up, until somebody reads or changes gradients of the window, for
        which they are unscaled.
        """
        config = self.config
        inside = not config.accumulation.is_boundary(self.record.micro_step)
        fp32_weights = config.policy.param in (None, torch.float32) and not self.masters.accumulates_fp32
        is_read = any(isinstance(one.window, Unscaled) for one in self.prepared)
        return not self.is_reduced(prepared) or (
            inside and fp32_weights and config.num_losses == 1 and not is_read
        )


class StepEngine(Protocol):
    """The part of :class:`halfpeak.Engine` that graphs of whole steps call."""

    context: EngineContext
    compiled_step: Any

    def forward(self) -> AbstractContextManager[None]:
        """The forward pass and the loss."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Scale the loss, run backward, unscale."""
        ...

    def step(self, *, optimizers: Iterable[Optimizer] | None = None) -> StepResult:
        """Step or skip."""
        ...

    def report(self, result: StepResult) -> None:
        """Report a step."""
        ...

    def scaled(
        self,
        loss: Tensor,
        *,
        optimizers: Iterable[Optimizer] | None = None,
        loss_id: int = 0,
        delay: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """The scaled loss, for a backward pass in the body."""
        ...
