"""Parts: prepared models and optimizers with everything that a training loop composes, and the hooks on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import DeviceCasts, OpCasts, casts_on
from halfpeak.casting.float8 import from_float8
from halfpeak.casting.suspend import resume
from halfpeak.core.errors import OrderError
from halfpeak.core.policy import Policy
from halfpeak.core.torch_compat import outside_inference_mode
from halfpeak.ops.unsharded import drop_unsharded_grads, is_fully_sharded, reduces_gradients, shards_in
from halfpeak.parts.batch_norm import BatchNormStats
from halfpeak.parts.checks import allow_copies
from halfpeak.parts.found_inf import is_multi_rank
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.pairs import Pairs
from halfpeak.parts.replicas import (
    LossComparison,
    broadcast_masters,
    check_built_after_casts,
    check_wrapped,
    is_in_no_sync,
)
from halfpeak.parts.tracing import watch_compiler
from halfpeak.parts.window import Window


@dataclass(kw_only=True, eq=False)
class Parts:
    """What :func:`halfpeak.engine.prepare.build` makes of models and optimizers.

    Attributes:
        policy: the dtype in which each thing is stored, computed and returned.
        models: converted in place.
        pairs: weights and masters.
        windows: the gradients of each optimizer between two of its steps.
        stats: the batch-norm statistics that a skipped step restores.
        casting: the scope in which operations are cast (O1, O4); None at other levels.
        op_casts: that scope if it is halfpeak's own, in which a backward pass recomputes; ``torch.autocast`` restores its own.
        device: of loss scales, counters and ``found_inf``.
        scalers: one loss scaler per loss; whoever composes the parts makes them.
        is_stepping: whether a step of an optimizer runs, which may step others inside. With ``amp`` it stays True after one
            that has raised, until the next has ended.
        is_replaying: whether forward passes are those of a tool and not of training; see :meth:`replay`.
        handles: of the hooks on models and optimizers.
        wrappers: the modules around models that were used; the first pass of one gives all ranks the masters of rank 0.
        reduces: by module in a parallel wrapper, whether the wrapper reduces the gradients of the coming backward pass over
            the ranks; False in ``no_sync``.
        comparison: of the losses of passes that were reduced over the ranks.
        thread: the thread that trains them.
        on_abort: called where an exception ends an open window.
    """

    policy: Policy
    models: tuple[nn.Module, ...]
    pairs: Pairs
    stats: BatchNormStats
    casting: OpCasts | DeviceCasts | None
    device: torch.device
    windows: list[Window] = field(default_factory=list[Window])
    scalers: list[LossScaler] = field(default_factory=list[LossScaler])
    is_stepping: bool = False
    is_replaying: bool = False
    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    wrappers: WeakSet[nn.Module] = field(default_factory=WeakSet[nn.Module])
    reduces: dict[nn.Module, bool] = field(default_factory=dict[nn.Module, bool])
    comparison: LossComparison = field(default_factory=LossComparison)
    thread: int = field(default_factory=threading.get_ident)
    on_abort: Callable[[], None] | None = None
    op_casts: OpCasts | None = field(init=False)

    def __post_init__(self) -> None:
        self.op_casts = self.casting if isinstance(self.casting, OpCasts) else None
        LIVE[self] = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return [window.optimizer for window in self.windows]

    @property
    def has_shards(self) -> bool:
        """Whether an optimizer steps a shard (``DTensor``)."""
        return any(window.has_shards for window in self.windows)

    def window_of(self, optimizer: Optimizer) -> Window:
        """The window of one of the optimizers.

        Raises:
            OrderError: it was not prepared with these parts.
        """
        for window in self.windows:
            if window.reference() is optimizer:
                return window
        raise OrderError(
            f"{type(optimizer).__name__} was not prepared by this engine; pass it to halfpeak.prepare"
        )

    def before_forward(self, model: nn.Module) -> None:
        """What the forward pre-hook of a model calls."""
        for optimizer in self.optimizers if self.op_casts is not None else ():
            resume(optimizer)  # a step that has suspended casts and raised is over
        if not self.is_replaying:
            self.agree_for_forward()
            if torch.is_grad_enabled():
                self._note_reduction(model)

    def agree_for_forward(self) -> None:
        """Before a forward pass: both sides agree, and batch-norm statistics written since a step are saved."""
        watch_compiler()
        self.agree(to_masters=False)
        self.stats.begin_forward()

    @outside_inference_mode
    @torch.no_grad()
    def agree(self, *, to_weights: bool = True, to_masters: bool = True) -> None:
        """Make weights, ``requires_grad`` and gradients the same on both sides, and take in parameters that were added.

        Args:
            to_weights: as of :meth:`~halfpeak.parts.pairs.Pairs.agree`.
            to_masters: as of :meth:`~halfpeak.parts.pairs.Pairs.agree`.

        Raises:
            ParameterError: a weight was moved or resized after its master was made.
            OrderError: gradients were written while they were scaled.
        """
        self._read_groups()
        self.pairs.agree(to_weights=to_weights, to_masters=to_masters)
        for window in self.windows:
            window.agree()

    def _read_groups(self) -> None:
        """Take in parameters that were added to the optimizers, or taken out."""
        if not all(window.is_current() for window in self.windows):
            self.pairs.adopt()
            for window in self.windows:
                window.read()

    def register_wrapper(self, wrapped: nn.Module) -> None:
        """When a module around a model is first used, check it, and give all ranks the masters of rank 0.

        Args:
            wrapped: a ``DistributedDataParallel`` or FSDP2 module, or the model itself.

        Raises:
            OrderError: the model was converted to low-precision weights after it was wrapped.
            ConfigError: the wrapper has an option that does not fit.
        """
        if wrapped not in self.wrappers:
            check_wrapped(wrapped)
            if isinstance(wrapped, DistributedDataParallel):
                check_built_after_casts(wrapped)
                broadcast_masters(self.pairs, wrapped)
            self.wrappers.add(wrapped)

    def _note_reduction(self, model: nn.Module) -> None:
        """In a forward pass with gradients, note whether DDP will reduce them over the ranks.

        It is noted for the wrapped module, which may have more parameters than the model.

        Raises:
            OrderError: the model was sharded, or made low-precision inside its wrapper, after it was prepared.
        """
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None:
            self.register_wrapper(wrapper)
            self.reduces[wrapper.module] = not is_in_no_sync(wrapper)
        if is_fully_sharded(model) and not self.has_shards:
            self._refuse_sharded_later(model)

    def _refuse_sharded_later(self, model: nn.Module) -> None:
        ids = frozenset[int]().union(*(window.ids for window in self.windows))
        if ids.isdisjoint(id(parameter) for parameter in model.parameters() if parameter.requires_grad):
            raise OrderError(
                "the model was sharded after it was prepared, so the optimizer holds parameters that are no longer part of it "
                "and would train nothing; call fully_shard first, build the optimizer, then prepare"
            )

    def local_ids(self) -> frozenset[int]:
        """The ids of parameters whose gradients the backward pass that begins now does not reduce over the ranks.

        DDP decides it in the forward pass, FSDP2 in the backward pass.
        """
        for model in self.models:
            is_reduced = reduces_gradients(model) if self.has_shards or is_fully_sharded(model) else None
            if is_reduced is not None:
                self.reduces[model] = is_reduced
        if all(self.reduces.values()):
            return frozenset()
        modules = (module for module, is_reduced in self.reduces.items() if not is_reduced)
        return frozenset(id(one) for module in modules for one in (*module.parameters(), *shards_in(module)))

    def has_gradients(self) -> bool:
        """Whether there is a gradient for the coming step."""
        return not all(window.is_empty() for window in self.windows)

    def unscale(self) -> None:
        """Make all gradients true, after :meth:`agree`.

        Raises:
            OrderError: they are not reduced over the ranks.
        """
        for window in self.windows:
            window.unscale()

    def unscale_reduced(self) -> None:
        """Make those gradients true that can be: all but those that the ranks have not reduced.

        Raises:
            OrderError: they were written while they were scaled.
        """
        for window in self.windows:
            window.agree()
            if window.held is not None and window.held.reduced:
                window.unscale()

    def found_inf(
        self, windows: Iterable[Window] | None = None, *, trusts_versions: bool = True
    ) -> torch.Tensor:
        """1 if these windows would step a gradient that is not finite; see :meth:`Window.found_inf`.  # f32[]"""
        # A script may reduce gradients by hand, and one rank may edit its shards alone, which no other rank sees.
        trusts_versions = trusts_versions and not is_multi_rank()
        found = torch.zeros((), dtype=torch.float32, device=self.device)
        for window in self.windows if windows is None else windows:
            found = torch.maximum(found, window.found_inf(found, trusts_versions=trusts_versions))
        return found

    def publish(self, window: Window) -> None:
        """Round the masters of one optimizer into their weights."""
        self.pairs.publish(window.indices)

    def abort(self) -> None:
        """Drop all gradients, and begin the window again."""
        for window in self.windows:
            window.drop()
        self._read_groups()
        for window in self.windows:
            window.drop()  # those of parameters that have joined
        if self.has_shards:
            for model in self.models:
                drop_unsharded_grads(model)
        if self.on_abort is not None:
            self.on_abort()

    @contextmanager
    def replay(self) -> Generator[None]:
        """Context for forward passes that are no training, such as those of :func:`halfpeak.diagnose`: casts are on."""
        before, self.is_replaying = self.is_replaying, True
        try:
            with casts_on(self.casting):
                yield
        finally:
            self.is_replaying = before

    def stats_of(self, stepped: Sequence[Window]) -> frozenset[int] | None:
        """The numbers of the models whose parameters these windows have; None if these are all windows."""
        if len(stepped) == len(self.windows):
            return None
        return self.stats.models_of(weight for window in stepped for weight in window.weights)

    def names_of(self, window: Window) -> list[str]:
        """The names of an optimizer's parameters in the models, in the order of its groups."""
        names = self.names()
        return [names.get(id(weight), f"parameter {i}") for i, weight in enumerate(window.weights)]

    def names(self, model: str = "models.") -> dict[int, str]:
        """The name of each parameter by ``id``; with several models it begins with their number."""
        several = len(self.models) > 1
        names: dict[int, str] = {}
        for number, one in enumerate(self.models):
            for name, parameter in one.named_parameters():
                names.setdefault(id(parameter), f"{model}{number}.{name}" if several else name)
        return names

    def release(self) -> None:
        """Put the weights back into the optimizers' groups, and give them gradients of their dtype."""
        LIVE.pop(self, None)
        self.pairs.release()
        for window in self.windows:
            window.release()

    def remove(self) -> None:
        """Remove every hook, and put the models' own parameters back into the optimizers. Models keep their dtypes."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if len(self.pairs):
            allow_copies(filter(None, (window.reference() for window in self.windows)))
        self.release()
        for model in self.models:
            from_float8(model, self.policy)


def gradients_once(stepped: Iterable[Window]) -> list[torch.Tensor]:
    """The gradients of some windows, each once: one that two of them share would count twice in a norm."""
    return list({id(grad): grad for window in stepped for grad in window.gradients()}.values())


LIVE: Final[WeakKeyDictionary[Parts, None]] = WeakKeyDictionary()
"""Everything that is prepared and alive, in the order in which it was made."""


def live_parts() -> list[Parts]:
    """What this thread trains."""
    here = threading.get_ident()
    return [parts for parts in list(LIVE) if parts.thread == here]
