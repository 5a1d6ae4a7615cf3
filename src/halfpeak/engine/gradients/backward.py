"""One backward pass as a transaction over the gradients that were there before, and what becomes of the new ones."""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.torch_compat import untraced
from halfpeak.distributed.fsdp import drop_gradients, is_fully_sharded
from halfpeak.engine.gradients.accumulate import GradAccumulator, kernels_for
from halfpeak.engine.gradients.params import ParamPairs
from halfpeak.engine.gradients.waiting import WaitingGrads
from halfpeak.engine.gradients.window import (
    NOTHING_STASHED,
    Empty,
    Scaled,
    Unscaled,
    Window,
    after_backward,
    after_delayed_backward,
    is_unit,
    left_for_step,
    rearmed,
    rewatched,
    scale_for_backward,
)
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_none, gradients_of
from halfpeak.ops.shards import has_process_group, is_shard
from halfpeak.state.loss_scaler import LossScaler


class GradMode(enum.Enum):
    """What a backward pass does with its gradients, chosen before it begins."""

    ACCUMULATE = "unscale them and add them to the unscaled gradients of the window"
    LEAVE_SCALED = "leave them scaled for a later pass of the window to add to"
    LEAVE_FOR_STEP = "leave them scaled for the step of a fused optimizer to read"


class BackwardScope:
    """Stashes the gradients that are there before a backward pass, and takes care of those it leaves.

    ::

        begin       set model.grad aside, unless it waits scaled
        (backward: autograd writes model.grad, scaled)
        accumulate  main.grad += model.grad / scale, in the dtype of the main parameter
        leave       leave model.grad scaled for a later pass, or for the step
        rollback    model.grad as it was before

    A parameter of several optimizers is accumulated once.

    Args:
        prepared: the optimizers whose parameters get gradients.

    Attributes:
        pairs: the parameters of each optimizer.
        all_pairs: those of all, each once.
        has_begun: whether the backward pass has.
        found_inf: 1 if one of the new gradients is not finite.  # f32[]
    """

    def __init__(self, prepared: Sequence[PreparedOptimizer]) -> None:
        self._prepared = prepared
        self.pairs: list[ParamPairs] = []
        self._windows: list[Window] = []
        self.all_pairs: ParamPairs = _NO_PAIRS
        self._held: list[tuple[Tensor, Tensor | None]] = []
        self._holds_any = False
        self._adds_to_scaled = False
        self._waiting: dict[PreparedOptimizer, WaitingGrads] = {}
        self.has_begun = False
        self._is_done = False
        self.found_inf = torch.zeros_like(prepared[0].found_inf)

    @untraced
    def begin(self, scaler: LossScaler, *, delay: bool) -> Tensor:
        """Set aside what is there, unless it waits scaled; returns what the loss is multiplied by.  # f32[]

        Args:
            scaler: of the loss.
            delay: whether the new gradients wait, too.

        Raises:
            OrderError: gradients wait that another loss scaler has scaled.
        """
        seen: set[int] = set()
        for prepared in self._prepared:
            self._windows.append(prepared.window)
            pairs = prepared.pairs_for_backward()
            self.pairs.append(pairs)
            if len(self._prepared) > 1:
                pairs = ParamPairs(pair for pair in pairs if id(pair.model) not in seen)
                seen.update(id(pair.model) for pair in pairs)
            self.all_pairs = ParamPairs([*self.all_pairs, *pairs]) if self.all_pairs else pairs
            if isinstance(prepared.window, Scaled):
                self._adds_to_scaled = True
                if delay:
                    self._waiting[prepared] = WaitingGrads(pairs.low_params, prepared.window.sums)
            else:
                self._stash(pairs.model_params)
        scale = scale_for_backward([prepared.window for prepared in self._prepared], scaler)
        self.has_begun = True
        return scale

    def _stash(self, parameters: list[Tensor]) -> None:
        grads = gradients_of(parameters)
        if are_none(grads):
            self._held += zip(parameters, grads, strict=True)
            return
        self._holds_any = True
        self._held += zip(parameters, map(detached_from_bucket, grads), strict=True)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter.grad = None

    def mode(self, *, delay: bool, fused_step_reads: bool) -> GradMode:
        """What becomes of the gradients.

        Args:
            delay: whether they must stay scaled.
            fused_step_reads: whether the step can read them, where the window has no others.
        """
        if delay:
            return GradMode.LEAVE_SCALED
        begins_window = not self._holds_any and all(not prepared.is_open for prepared in self._prepared)
        return GradMode.LEAVE_FOR_STEP if fused_step_reads and begins_window else GradMode.ACCUMULATE

    def finish(self, mode: GradMode, scaler: LossScaler, scale: Tensor) -> None:
        """The backward pass is over: do with its gradients what was chosen.

        Args:
            mode: of :meth:`mode`.
            scaler: whose scale it is.
            scale: what the loss was multiplied by.  # f32[]
        """
        if mode is GradMode.LEAVE_SCALED:
            self._leave_scaled(scaler, scale)
        elif mode is GradMode.LEAVE_FOR_STEP and self._are_plain():
            self._leave_for_step(scaler, scale)
        else:
            self._accumulate(scale)

    @untraced
    def rollback(self) -> bool:
        """Undo :meth:`begin`; False where that cannot be: waiting gradients were added to, or new ones accumulated."""
        if self._is_done or (self.has_begun and self._adds_to_scaled):
            return False
        for parameter, grad in self._held:
            parameter.grad = grad
        # Those that :meth:`begin` came to.
        for prepared, before, _ in zip(self._prepared, self._windows, self.pairs, strict=False):
            if isinstance(prepared.window, Scaled):
                prepared.set_window(rearmed(prepared.window))
            elif isinstance(prepared.window, Unscaled):
                prepared.set_window(rewatched(prepared.window, before))
        return True

    @untraced
    def _leave_scaled(self, scaler: LossScaler, scale: Tensor) -> None:
        self._is_done = True
        for prepared, pairs in zip(self._prepared, self.pairs, strict=True):
            own = set(map(id, pairs.model_params))
            stashed = {
                id(parameter): grad
                for parameter, grad in self._held
                if grad is not None and id(parameter) in own and prepared.masters.of(parameter) is None
            }
            waiting = self._waiting.get(prepared)
            sums = {} if waiting is None else waiting.put_back(self.found_inf)
            prepared.set_window(after_delayed_backward(prepared.window, pairs, scaler, scale, stashed, sums))

    @untraced
    def _leave_for_step(self, scaler: LossScaler, scale: Tensor) -> None:
        self._is_done = True
        (prepared,) = self._prepared
        assert isinstance(prepared.window, Empty)
        prepared.window = left_for_step(
            prepared.window, self.pairs[0], scale, self.found_inf, unit=is_unit(scaler)
        )

    @untraced
    def _accumulate(self, scale: Tensor) -> None:
        self._is_done = True
        stashed = NOTHING_STASHED
        if self._holds_any or self._adds_to_scaled:
            held = self._held if self._holds_any else ()
            stashed = {id(parameter): grad for parameter, grad in held if grad is not None}
            for prepared in self._prepared:
                if isinstance(prepared.window, Scaled):
                    stashed.update(prepared.window.stashed)
        kernels = kernels_for([prepared.optimizer for prepared in self._prepared], self.all_pairs.main_params)
        # One pool of buffers for all; the optimizers of two runs have two.
        buffers = self._prepared[0].masters.grad_buffers
        if any(prepared.masters.grad_buffers is not buffers for prepared in self._prepared):
            buffers = None
        accumulator = GradAccumulator(scale.reciprocal(), self.found_inf, kernels, buffers)
        accumulator.accumulate(self.all_pairs, stashed)
        for prepared, pairs in zip(self._prepared, self.pairs, strict=True):
            prepared.set_window(after_backward(prepared.window, pairs, self.found_inf))

    def _are_plain(self) -> bool:
        """Whether there are new gradients, and all are dense and have no graph."""
        grads = [grad for grad in gradients_of(self.all_pairs.model_params) if grad is not None]
        return bool(grads) and not any(map(_HAS_GRAPH, grads)) and not any(map(_IS_SPARSE, grads))


_NO_PAIRS: Final = ParamPairs()
_HAS_GRAPH: Final = attrgetter("requires_grad")
_IS_SPARSE: Final = attrgetter("is_sparse")


@contextmanager
def preserving_grads_of(
    others: Sequence[PreparedOptimizer], prepared: Sequence[PreparedOptimizer]
) -> Generator[None]:
    """Leave ``others`` the gradients they have in a backward pass that is for ``prepared``.

    A generator's loss also writes gradients into the discriminator, scaled, where they would be taken for its own.
    """
    if not others:
        yield
        return
    wanted = {id(pair.model) for one in prepared for pair in one.pairs()}
    parameters = [pair.model for one in others for pair in one.pairs() if id(pair.model) not in wanted]
    held = [(parameter, detached_from_bucket(parameter.grad)) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad


def detached_from_bucket(grad: Tensor | None) -> Tensor | None:
    """A gradient that the coming backward pass does not write over: one that lies in a bucket of DDP's is copied."""
    if grad is None or grad.is_sparse or grad.untyped_storage().nbytes() == grad.nbytes:
        return grad
    return grad.clone()


class OtherGrads:
    """Unscales what a loss leaves in the parameters of optimizers that its backward pass is not for.

    A generator's loss reaches the discriminator, which an engine of its own trains: there the gradients add up as they do in
    plain torch, in that engine's window. One that is not finite skips the step of the optimizer that would read it, and with
    that step the scale of the loss falls: where such gradients are dropped instead, they change nothing.

    Args:
        prepared: the other optimizers, of whatever engine.
    """

    def __init__(self, prepared: Sequence[PreparedOptimizer]) -> None:
        self._prepared = prepared
        self._stashed: list[tuple[PreparedOptimizer, list[Tensor], list[Tensor | None]]] = []

    @untraced
    def stash(self, own: Iterable[Tensor]) -> None:
        """Before the backward pass: set aside what is there, but for the parameters that the pass is for."""
        seen = set(map(id, own))
        for one in self._prepared:
            parameters = one.table().model_params
            keys = list(map(id, parameters))
            # Every engine that is alive is asked in every pass, so what is usual, nothing shared and no gradient, runs in C.
            if len(set(keys)) != len(keys) or not seen.isdisjoint(keys):
                parameters = list({id(p): p for p in parameters if id(p) not in seen}.values())
            seen.update(keys)
            grads = gradients_of(parameters)
            if not are_none(grads):
                taken = list(map(detached_from_bucket, grads))
                if not all(map(is_, taken, grads)):
                    # A window that waits scaled knows its gradients by identity, and copies have replaced them.
                    one.unscale_pending()
                    one.disarm()
                    taken = list(map(detached_from_bucket, gradients_of(parameters)))
                grads = taken
                _put(parameters, [None] * len(parameters))
            self._stashed.append((one, parameters, grads))

    @untraced
    def rollback(self) -> None:
        """Everything as it was before :meth:`stash`; what has been written since is dropped."""
        for one, parameters, grads in self._stashed:
            _put_back(one, parameters, grads)
        self._stashed.clear()

    def refuse_unsynchronised(self) -> None:
        """After a backward pass that was not synchronised over the ranks.

        Raises:
            OrderError: it has reached the optimizers of another engine, whose gradients later passes would not reduce.
        """
        if any(not are_none(gradients_of(parameters)) for _, parameters, _ in self._stashed):
            raise OrderError(
                "a loss has reached parameters that another engine trains in a backward pass that is not synchronised over "
                "the ranks; write halfpeak.prepare([model, other], [optimizer, other_optimizer]) for networks that one "
                "loss trains, or freeze the other network for this loss"
            )

    @untraced
    def accumulate(self, scaler: LossScaler, scale: Tensor) -> list[tuple[Optimizer, Tensor]]:
        """Unscale the new gradients and add what was set aside. An optimizer that got none is left as it was.

        Args:
            scaler: whose scale it is.
            scale: what the loss was multiplied by.  # f32[]

        Returns:
            The optimizers that got gradients, each with 1 if one of them is not finite.  # f32[]
        """
        reached: list[tuple[Optimizer, Tensor]] = []
        while self._stashed:
            one, parameters, grads = self._stashed.pop(0)
            fresh = gradients_of(parameters)
            if not (are_none(fresh) and are_none(grads)):
                _put_back(one, parameters, grads)
            if not are_none(fresh):
                found_inf = _add(one, parameters, fresh, scale)
                one.add_found_inf_elsewhere(scaler, found_inf)
                reached.append((one.optimizer, found_inf))
        return reached


def _put(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def _put_back(one: PreparedOptimizer, parameters: list[Tensor], grads: list[Tensor | None]) -> None:
    _put(parameters, grads)
    window = one.window
    if isinstance(window, Scaled) and not window.snapshot.holders:
        one.set_window(rearmed(window))


def _add(
    one: PreparedOptimizer, parameters: list[Tensor], fresh: list[Tensor | None], scale: Tensor
) -> Tensor:
    """Unscale gradients of a backward pass and add them to those of the window; whether one is not finite.  # f32[]"""
    one.recover()
    pairs = one.pairs_for_backward()
    window, found_inf = one.window, torch.zeros_like(one.found_inf)
    held = gradients_of(parameters)
    _put(parameters, fresh)
    wanted = set(map(id, parameters))
    own = ParamPairs(pair for pair in pairs if id(pair.model) in wanted)
    accumulator = GradAccumulator(
        scale.reciprocal().to(found_inf.device),
        found_inf,
        kernels_for([one.optimizer], own.main_params),
        one.masters.grad_buffers,
    )
    if isinstance(window, Scaled):
        # Nothing unscaled is added to what waits scaled: it joins what was set aside for that.
        accumulator.accumulate(own, window.stashed)
        unscaled = {id(p): p.grad for p in own.unmastered if p.grad is not None}
        _put(parameters, held)
        worst = torch.maximum(window.found_inf, found_inf)
        one.set_window(rearmed(replace(window, found_inf=worst, stashed={**window.stashed, **unscaled})))
    else:
        accumulator.accumulate(
            own, {id(p): grad for p, grad in zip(parameters, held, strict=True) if grad is not None}
        )
        one.set_window(after_backward(window, pairs, found_inf))
    return found_inf


class UnmanagedGrads:
    """Unscales the gradients that a scaled loss leaves in parameters of the models that the engine does not step.

    Their own optimizer, which was not prepared, would step gradients 65,536 times too large. They take no part in
    ``found_inf`` and norms: an inf in one keeps no optimizer from stepping.

    Args:
        models: whose parameters are looked after.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._known_ids = {id(parameter) for model in self._models for parameter in model.parameters()}
        self._found: list[Tensor] = []
        # Snapshots of what the search for them depends on: the parameters of the optimizers, and the _parameters and
        # _modules dicts of all modules, whose values may come, go and be replaced at any time.
        self._known_pairs: list[ParamPairs] = []
        self._tables: list[dict[str, Any]] = []
        self._values: list[object] = []
        # Unscaled gradients from before, for as long as scaled ones lie in their place.
        self._stashed: list[Tensor | None] | None = None

    def add_model(self, model: nn.Module) -> None:
        """Look after one more model."""
        self._models.append(model)
        self._known_ids.update(map(id, model.parameters()))
        self._known_pairs = []

    @untraced
    def stash(self, pairs: list[ParamPairs]) -> None:
        """Before a backward pass: set aside what is there, unless it waits scaled.

        Args:
            pairs: of every optimizer, to which its parameters are left.

        Raises:
            OrderError: the models were sharded after they were prepared.
        """
        # Where none is left, somebody has called zero_grad() in the middle of a window.
        waits = self._stashed is not None and any(grad is not None for grad in gradients_of(self._found))
        stashed = dict(zip(map(id, self._found), self._stashed or (), strict=False)) if waits else {}
        self._search(pairs)
        self._stashed = [stashed[id(p)] if id(p) in stashed else _taken_off(p) for p in self._found]

    @untraced
    def rollback(self) -> None:
        """Everything as it was before :meth:`stash`; what has been written since is dropped."""
        for parameter, grad in zip(self._found, self._stashed or (), strict=False):
            parameter.grad = grad
        self._stashed = None

    def drop(self) -> None:
        """:meth:`rollback`, and drop what the models hold of the window out of the optimizers' sight."""
        self.rollback()
        if has_process_group():
            for model in self._models:
                drop_gradients(model)

    @untraced
    def accumulate(self, scale: Tensor) -> None:
        """Unscale the new gradients and add what was set aside."""
        fresh = [(p, p.grad) for p in self._found if p.grad is not None]
        before = {id(p): grad for p, grad in zip(self._found, self._stashed or (), strict=False)}
        self.rollback()
        if not fresh:
            return
        inv_scale, unused = scale.reciprocal(), torch.zeros_like(scale)
        foreach.unscale_([grad for _, grad in fresh if not grad.requires_grad], inv_scale, unused)
        for parameter, grad in fresh:
            if grad.requires_grad:
                (grad,) = reference.unscaled([grad], [grad.dtype], inv_scale, unused)
            total = before[id(parameter)]
            parameter.grad = grad if total is None else total + grad

    def _search(self, pairs: list[ParamPairs]) -> None:
        """Find the parameters again where those of an optimizer have changed, or those of a model."""
        if _same(pairs, self._known_pairs) and _same(_values(self._tables), self._values):
            return
        stepped = {id(parameter) for own in pairs for parameter in own.model_params}
        own = {id(p): p for model in self._models for p in model.parameters()}
        modules = {id(module): module for model in self._models for module in model.modules()}.values()
        gone = self._known_ids & stepped - own.keys()
        if gone and (any(map(is_shard, own.values())) or any(map(is_fully_sharded, modules))):
            self._refuse_replaced(p for table in pairs for p in table.model_params if id(p) in gone)
        self._found = [parameter for key, parameter in own.items() if key not in stepped]
        self._known_pairs = pairs
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._values = _values(self._tables)

    def _refuse_replaced(self, gone: Iterable[Tensor]) -> None:
        """FSDP2 has shards and gathered weights take turns in a model; only shards that came later replace plain parameters.

        Raises:
            OrderError: they did, so nothing would move the model.
        """
        if not all(map(is_shard, gone)):
            raise OrderError(
                "the model was sharded after it was prepared, so the optimizer holds parameters that are no longer part of "
                "it and would move nothing; call fully_shard or parallelize_module first, build the optimizer, then prepare"
            )


def _taken_off(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = detached_from_bucket(parameter.grad), None
    return grad


def _values(tables: Sequence[dict[str, Any]]) -> list[object]:
    """Parameters and layers by which a model is asked for its parameters. Read in every step, so in a loop that runs in C."""
    return list(chain.from_iterable(map(dict[str, Any].values, tables)))


def _same(now: Sequence[object], known: Sequence[object]) -> bool:
    return len(now) == len(known) and all(map(is_, now, known))
