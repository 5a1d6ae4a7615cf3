"""Parts: prepared models and optimizers with everything that a training loop composes, and the hooks on them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import OpCasts, casts_on
from halfpeak.casting.float8 import from_float8
from halfpeak.core.errors import OrderError
from halfpeak.core.policy import Policy
from halfpeak.distributed.replicas import note_reduction
from halfpeak.engine.checks import allow_copies
from halfpeak.state.batch_norm import BatchNormStats
from halfpeak.state.grad_buffers import GradBufferPool
from halfpeak.state.loss_scaler import LossScaler
from halfpeak.state.pairs import Pairs
from halfpeak.state.stepped_params import SteppedParams
from halfpeak.state.tracing import watch_compiler


@dataclass(kw_only=True, eq=False)
class Parts:
    """What :func:`halfpeak.engine.prepare.build` makes of models and optimizers.

    Attributes:
        policy: the dtype in which each thing is stored, computed and returned.
        models: converted in place.
        pairs: weights, masters and their gradients.
        stats: the batch-norm statistics that a skipped step restores.
        casting: the scope in which operations are cast (O1, O4); at other levels a null context.
        memory: for the float32 gradients of masters, or None.
        device: of loss scales, counters and ``found_inf``.
        scalers: one loss scaler per loss; whoever composes the parts makes them.
        is_replaying: whether forward passes are those of a tool and not of training; see :meth:`replay`.
        handles: of the hooks on models and optimizers.
        wrappers: the modules around models that were used; the first pass of one gives all ranks the masters of rank 0.
    """

    policy: Policy
    models: tuple[nn.Module, ...]
    pairs: Pairs
    stats: BatchNormStats
    casting: AbstractContextManager[Any]
    memory: GradBufferPool | None
    device: torch.device
    scalers: list[LossScaler] = field(default_factory=list[LossScaler])
    is_replaying: bool = False
    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    wrappers: WeakSet[nn.Module] = field(default_factory=WeakSet[nn.Module])

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return [params.optimizer for params in self.pairs.optimizers]

    def before_forward(self, model: nn.Module) -> None:
        """What the forward pre-hook of a model calls."""
        if not self.is_replaying:
            self.agree()
            note_reduction(model, self.wrappers, self.pairs)

    def agree(self) -> None:
        """Before a forward pass: weights, masters and gradients agree, and statistics written since a step are saved."""
        watch_compiler()
        self.pairs.agree(to_masters=False)
        self.stats.begin_forward()

    @contextmanager
    def replay(self) -> Generator[None]:
        """Context for forward passes that are no training, such as those of :func:`halfpeak.diagnose`: casts are on."""
        before, self.is_replaying = self.is_replaying, True
        try:
            with casts_on(self.casting if self.policy.per_op else None):
                yield
        finally:
            self.is_replaying = before

    def recasting(self) -> OpCasts | None:
        """The casts for recomputation in a backward pass; ``torch.autocast`` restores its own."""
        return self.casting if isinstance(self.casting, OpCasts) else None

    def stats_of(self, stepped: Sequence[SteppedParams]) -> frozenset[int] | None:
        """The numbers of the models whose parameters these optimizers have; None if these are all optimizers."""
        if len(stepped) == len(self.pairs.optimizers):
            return None
        return self.stats.models_of(weight for params in stepped for weight in params.weights)

    def refuse_no_sync(self, stepped: Iterable[SteppedParams], advice: str = "") -> None:
        """Refuse the step of gradients that each rank has for itself.

        Args:
            stepped: the optimizers of the step.
            advice: what else to write, as the end of the message.

        Raises:
            OrderError: the last backward pass did not reduce them over the ranks.
        """
        local = self.pairs.no_sync_ids
        if self.pairs.unsharded_scale is not None or any(
            id(weight) in local and weight.grad is not None
            for params in stepped
            if local
            for weight in params.weights
        ):
            raise OrderError(
                "the last backward pass of the window ran under no_sync, or with delay_unscale, so its gradients are not "
                f"reduced over the ranks; run the last pass outside of no_sync{advice}"
            )

    def names_of(self, params: SteppedParams) -> list[str]:
        """The names of an optimizer's parameters in the models, in the order of its groups."""
        names = self.names()
        return [names.get(id(weight), f"parameter {i}") for i, weight in enumerate(params.weights)]

    def names(self, model: str = "models.") -> dict[int, str]:
        """The name of each parameter by ``id``; with several models it begins with their number."""
        several = len(self.models) > 1
        names: dict[int, str] = {}
        for number, one in enumerate(self.models):
            for name, parameter in one.named_parameters():
                names.setdefault(id(parameter), f"{model}{number}.{name}" if several else name)
        return names

    def remove(self) -> None:
        """Remove every hook, and put the models' own parameters back into the optimizers. Models keep their dtypes."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if len(self.pairs):
            allow_copies(filter(None, (params.reference() for params in self.pairs.optimizers)))
        self.pairs.release()
        for model in self.models:
            from_float8(model, self.policy)


def gradients_once(stepped: Iterable[SteppedParams]) -> list[torch.Tensor]:
    """The gradients of some optimizers, each once: one that two of them share would count twice in a norm."""
    return list({id(grad): grad for params in stepped for grad in params.gradients()}.values())
