"""EngineContext: the parts of an engine, for the functions that save, copy, report on or compile it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

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
        prepared: one per optimizer.
        masters: the float32 copies that the optimizers step.
        scalers: one loss scaler per loss.
        record: the counters, and the commit of a step that is decided but not yet applied.
        stats: the batch-norm statistics that a skipped step restores.
        casting: the scope in which operations are cast (O1, O4); at other levels a null context.
        device: of the scalars of a step.
        handles: of the hooks on models and optimizers.
        synchronised: whether the backward pass of the last ``engine.forward()`` reduces gradients over the ranks.
        reduces: by model, whether its ``DistributedDataParallel`` was outside of ``no_sync`` in its last forward pass.
        wrappers: the modules around models that were used: the first pass of one gives all ranks the masters of rank 0.
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
    wrappers: WeakSet[nn.Module] = field(default_factory=WeakSet[nn.Module])

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return [one.optimizer for one in self.prepared]

    @property
    def holds_local_grads(self) -> bool:
        """Whether gradients of the open window are not reduced over the ranks yet."""
        return any(isinstance(one.window, Scaled) and one.window.is_local for one in self.prepared)

    def names_of(self, prepared: PreparedOptimizer) -> list[str]:
        """The names of an optimizer's parameters in the models, in the order of its groups."""
        several = len(self.models) > 1
        names = {
            id(p): f"models.{i}.{name}" if several else name
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters()
        }
        return [
            names.get(id(pair.model), f"parameter {i}") for i, pair in enumerate(prepared.table().all_pairs)
        ]

    def before_forward(self) -> None:
        """Before a forward pass: finish an interrupted step if it changed anything, and publish masters written since.

        Does nothing for an evaluation in another thread than the training thread: publishing masters there would write
        weights between a forward pass of the training thread and its backward pass.
        """
        trains = {one.thread for one in self.prepared}
        if not torch.is_grad_enabled() and threading.get_ident() not in trains:
            alive = {thread.ident for thread in threading.enumerate()}
            if trains & alive:  # A thread that has ended has no backward pass open.
                return
        for one in self.prepared:
            self.train_step.finish_if_mutated(one)
        if not any(one.running is not None for one in self.prepared):
            self.record.commit()
        self.masters.agree_on_requires_grad()
        self.masters.publish_written()
        self.stats.begin_forward()

    def is_reduced(self, prepared: Iterable[PreparedOptimizer]) -> bool:
        """Whether the coming backward pass reduces the gradients of all parameters of ``prepared`` over the ranks."""
        if not self.synchronised or all(self.reduces.values()):
            return self.synchronised
        unreduced = (model for model, is_reduced in self.reduces.items() if not is_reduced)
        local = {id(parameter) for model in unreduced for parameter in model.parameters()}
        return not any(id(p) in local for one in prepared for p in one.pairs_now().model_params)

    def unreduced(self, prepared: Sequence[PreparedOptimizer]) -> Sequence[PreparedOptimizer]:
        """Those of ``prepared`` whose gradients the coming backward pass does not reduce over the ranks."""
        return () if self.is_reduced(prepared) else [one for one in prepared if not self.is_reduced([one])]

    @property
    def delays_unscaling(self) -> bool:
        """Whether gradients of the coming backward pass may stay scaled, although it reduces them over the ranks.

        They may inside a window over float32 weights with one loss scale: autograd itself adds them up, until other code
        reads or edits gradients, which unscales them.
        """
        config = self.config
        inside = not config.accumulation.is_boundary(self.record.micro_step)
        fp32_weights = config.policy.param in (None, torch.float32) and not self.masters.accumulates_fp32
        is_read = any(isinstance(one.window, Unscaled) for one in self.prepared)
        return inside and fp32_weights and config.num_losses == 1 and not is_read


class StepEngine(Protocol):
    """The part of :class:`halfpeak.Engine` that compiled and captured steps call."""

    context: EngineContext
    compiled_step: Any

    def forward(self) -> AbstractContextManager[None]:
        """Context for the forward pass and the loss."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Scale the loss, run backward, unscale."""
        ...

    def step(self, *, optimizers: Iterable[Optimizer] | None = None) -> StepResult:
        """Step or skip."""
        ...

    def report(self, result: StepResult) -> None:
        """Call the engine's after-step function."""
        ...

    def scaled(
        self,
        loss: Tensor,
        *,
        optimizers: Iterable[Optimizer] | None = None,
        loss_id: int = 0,
        delay: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """Context that yields the scaled loss for a backward pass in the body."""
        ...
