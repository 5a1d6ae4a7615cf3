"""Unscale gradients that a backward pass leaves in other parameters: of other prepared optimizers, or of none."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.torch_compat import graph_leaves, untraced
from halfpeak.distributed.fsdp import HeldGradients, drop_gradients, is_fully_sharded
from halfpeak.engine.gradients.accumulate import GradAccumulator, kernels_for, set_grads
from halfpeak.engine.gradients.backward import StashedGrads
from halfpeak.engine.gradients.params import ParamPairs
from halfpeak.engine.gradients.window import Scaled, after_backward
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.engine.step_record import ForeignLoss
from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_none, gradients_of, is_in_bucket
from halfpeak.ops.shards import has_process_group, is_shard
from halfpeak.state.loss_scaler import LossScaler
from halfpeak.state.masters import Masters


class OtherGrads:
    """Unscales the gradients that a loss leaves in parameters of optimizers outside its backward pass.

    A generator's loss reaches the discriminator, which another engine trains. As in plain torch, the gradients add up
    there, in that engine's window. A non-finite one skips the step that reads it, and that step lowers the scale of the
    generator's loss. If user code drops the gradients before the step, the scale does not change.

    Args:
        prepared: the other optimizers, of any engine.
        preserved: further ones, whose parameters keep the gradients they have. What the loss leaves there is dropped.

    Attributes:
        counted: see :class:`~halfpeak.engine.step_record.ForeignLoss`; None if no other optimizer got gradients.  # f32[]
    """

    def __init__(
        self, prepared: Sequence[PreparedOptimizer], preserved: Sequence[PreparedOptimizer] = ()
    ) -> None:
        self._prepared, self._preserved = prepared, preserved
        self.counted: Tensor | None = None
        self._stashed: list[tuple[PreparedOptimizer, StashedGrads]] = []
        self._kept = _NOTHING
        # Of ``prepared``, then of ``preserved``.
        self._held: list[HeldGradients] = []

    @untraced
    def stash(self, own: Iterable[Tensor]) -> None:
        """Before the backward pass: stash the gradients, except of ``own``, the parameters of the pass."""
        if not (self._prepared or self._preserved):
            return
        seen = set(map(id, own))
        self._held = [_hold(one, seen) for one in (*self._prepared, *self._preserved)]
        kept = (p for one in self._preserved for p in one.pairs_now().model_params)
        self._kept = StashedGrads([p for p in kept if id(p) not in seen])
        for one in self._prepared:
            parameters = one.table().model_params
            keys = list(map(id, parameters))
            # Runs for every living engine in every pass, so the usual case (nothing shared, no gradient) loops in C.
            if len(set(keys)) != len(keys) or not seen.isdisjoint(keys):
                parameters = list({id(p): p for p in parameters if id(p) not in seen}.values())
            seen.update(keys)
            if any(map(is_in_bucket, gradients_of(parameters))):
                # StashedGrads copies gradients out of buckets, but the snapshot of a Scaled window compares identity.
                one.unscale_pending()
                one.remove_sentinel()
            self._stashed.append((one, StashedGrads(parameters)))

    def reachable(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The parameters that the pass may reach, each with its stashed gradient."""
        return chain.from_iterable(stashed.items() for _, stashed in self._stashed)

    @untraced
    def rollback(self) -> None:
        """Undo :meth:`stash`. What was written to the gradients since is dropped."""
        for one, stashed in self._stashed:
            _put_back(one, stashed)
        self._stashed.clear()

    def put_back_kept(self) -> None:
        """At the end of the pass: restore the gradients of preserved optimizers, and those that FSDP2 holds."""
        self._kept.put_back()
        # The last first: of a parameter of two optimizers, the first has set the gradients aside.
        for held in reversed(self._held):
            held.put_back()

    def refuse_unreduced(self, masters: Masters, *, is_reduced: bool) -> None:
        """After a backward pass, refuse gradients that are not reduced over the ranks and that zero_grad() may not reach.

        Args:
            masters: of the engine of the pass.
            is_reduced: whether the pass reduced gradients.

        Raises:
            OrderError: FSDP2 holds some, or a pass that did not reduce has reached parameters of another engine. Later passes
                would not reduce them, or unscale them by another scale.
        """
        foreign = (stashed.parameters for one, stashed in self._stashed if one.masters is not masters)
        if any(held.have_new() for held in self._held[: len(self._prepared)]) or (
            not is_reduced and any(not are_none(gradients_of(parameters)) for parameters in foreign)
        ):
            raise OrderError(
                "a backward pass whose gradients are not reduced over the ranks has reached parameters that another engine "
                "trains; write halfpeak.prepare([model, other], [optimizer, other_optimizer]) for networks that one "
                "loss trains, or freeze the other network for this loss"
            )

    @untraced
    def accumulate(
        self, scaler: LossScaler, scale: Tensor, *, is_reduced: bool
    ) -> list[tuple[Optimizer, Tensor]]:
        """Unscale the new gradients and add the stashed ones. Optimizers without new gradients stay unchanged.

        Args:
            scaler: the owner of ``scale``.
            scale: the factor of the loss.  # f32[]
            is_reduced: whether the pass reduced gradients over the ranks.

        Returns:
            The optimizers with new gradients, each with 1 if one of its new gradients is not finite.  # f32[]
        """
        reached: list[tuple[Optimizer, Tensor]] = []
        while self._stashed:
            one, stashed = self._stashed.pop(0)
            fresh = gradients_of(stashed.parameters)
            if not (are_none(fresh) and stashed.is_empty):
                _put_back(one, stashed)
            if not are_none(fresh):
                found_inf = _add(one, stashed.parameters, fresh, scale)
                if self.counted is None:
                    self.counted = torch.zeros_like(scale)
                one.foreign_losses.append(ForeignLoss(scaler, found_inf, self.counted, is_reduced))
                reached.append((one.optimizer, found_inf))
        return reached


def _hold(one: PreparedOptimizer, own: Container[int]) -> HeldGradients:
    """Set aside the gradients of an optimizer that FSDP2 holds, except of the parameters ``own``, by ``id``."""
    shards = (p for p in one.table().model_params if is_shard(p)) if has_process_group() else ()
    wanted = {id(p) for p in shards if id(p) not in own}
    return HeldGradients(one.models if wanted else (), wanted)


def _put_back(one: PreparedOptimizer, stashed: StashedGrads) -> None:
    stashed.put_back()
    window = one.window
    if isinstance(window, Scaled) and not window.snapshot.holders:
        one.set_window(window)


def _add(
    one: PreparedOptimizer, parameters: list[Tensor], fresh: list[Tensor | None], scale: Tensor
) -> Tensor:
    """Unscale ``fresh`` and add it to the window's gradients; returns 1 if one of ``fresh`` is not finite.  # f32[]"""
    pairs = one.begin_backward()
    window, found_inf = one.window, torch.zeros_like(one.found_inf)
    held = gradients_of(parameters)
    set_grads(parameters, fresh)
    wanted = set(map(id, parameters))
    own = ParamPairs(pair for pair in pairs if id(pair.model) in wanted)
    accumulator = GradAccumulator(
        scale.reciprocal().to(found_inf.device),
        found_inf,
        kernels_for([one.optimizer], own.main_params),
        one.masters.grad_buffers,
    )
    if isinstance(window, Scaled):
        # Unscaled gradients cannot be added to scaled ones, so they join the stashed gradients of the window.
        accumulator.accumulate(own, window.stashed)
        unscaled = {id(p): p.grad for p in own.unmastered if p.grad is not None}
        set_grads(parameters, held)
        worst = torch.maximum(window.found_inf, found_inf)
        one.set_window(window._replace(found_inf=worst, stashed={**window.stashed, **unscaled}))
    else:
        accumulator.accumulate(
            own, {id(p): grad for p, grad in zip(parameters, held, strict=True) if grad is not None}
        )
        one.set_window(after_backward(window, pairs, found_inf))
    return found_inf


class UnmanagedGrads:
    """Unscales the gradients that a scaled loss leaves in tensors that no prepared optimizer steps.

    An optimizer that was not prepared may step these tensors, and its updates would be 65,536 times too large. The
    gradients do not count in ``found_inf`` and norms: an inf in one skips no step.

    They are the other parameters of the models and all other leaves of the loss's graph: a criterion with weights, a
    network that was not prepared, inputs. Every pass walks the graph, because any loss may be the first to reach a
    leaf.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._ids_when_prepared = {
            id(parameter) for model in self._models for parameter in model.parameters()
        }
        self._unmanaged: list[Tensor] = []
        self._may_walk = True
        self._managed_ids = set[int]()  # the parameters of the models and of the optimizers, by id
        # Snapshots of the inputs of _search: the optimizers' parameters, and the _parameters and _modules dicts of all
        # modules, because user code may add, remove and replace their values at any time.
        self._known_pairs: list[weakref.ref[ParamPairs]] = []
        self._module_dicts: list[dict[str, Any]] = []
        self._module_values: list[object] = []
        # Unscaled gradients from before a backward pass, while ``.grad`` holds scaled gradients: of parameters and of inputs.
        self._stashed = self._inputs = _NOTHING

    def add_model(self, model: nn.Module) -> None:
        """Add one more model."""
        self._models.append(model)
        self._ids_when_prepared.update(map(id, model.parameters()))
        self._known_pairs = []

    @untraced
    def stash(self, pairs: list[ParamPairs], graph: Node | None) -> None:
        """Before a backward pass: stash the gradients, except ones of parameters that wait scaled.

        Args:
            pairs: of every optimizer; their parameters are left out.
            graph: of the loss, to walk for further leaves; None if the loss scale is always 1.

        Raises:
            OrderError: the models were sharded after they were prepared.
        """
        before = self._stashed
        # If no parameter has a gradient any more, user code called zero_grad() inside the window.
        waits = not are_none(gradients_of(before.parameters))
        waiting = dict(zip(map(id, before.parameters), before.grads, strict=True)) if waits else {}
        self._search(pairs)
        leaves = graph_leaves(graph) if graph is not None and self._may_walk else []
        if waits:
            leaves += before.parameters
        others = {id(leaf): leaf for leaf in leaves if id(leaf) not in self._managed_ids}.values()
        parameters = [leaf for leaf in others if isinstance(leaf, nn.Parameter)]
        self._stashed = StashedGrads([*self._unmanaged, *parameters], waiting)
        self._inputs = StashedGrads([leaf for leaf in others if not isinstance(leaf, nn.Parameter)])

    def reachable(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The parameters that the pass may reach, each with its stashed gradient."""
        return chain(self._stashed.items(), self._inputs.items())

    @untraced
    def rollback(self) -> None:
        """Undo :meth:`stash`. What was written to the gradients since is dropped."""
        self._stashed.put_back()
        self._inputs.put_back()
        self._stashed = self._inputs = _NOTHING

    def abort(self) -> None:
        """:meth:`rollback`, and drop the gradients inside FSDP2's modules, which no optimizer reaches."""
        self.rollback()
        if has_process_group():
            for model in self._models:
                drop_gradients(model)

    @untraced
    def accumulate(self, scale: Tensor, *, delay: bool) -> None:
        """Unscale the new gradients and add the stashed ones.

        With ``delay`` those of parameters stay scaled, because later passes may reduce them over the ranks. Those of inputs
        do not: user code reads them after each pass, as adversarial training does.
        """
        inputs, self._inputs = self._inputs, _NOTHING
        _accumulate(inputs, scale)
        if not delay:
            stashed, self._stashed = self._stashed, _NOTHING
            _accumulate(stashed, scale)

    def _search(self, pairs: list[ParamPairs]) -> None:
        """Find the unmanaged parameters again if the parameters of an optimizer or a model have changed."""
        # Weak references: some belong to other engines, which may have been deleted.
        if _same(pairs, [known() for known in self._known_pairs]) and _same(
            _values(self._module_dicts), self._module_values
        ):
            return
        stepped = {id(parameter) for own in pairs for parameter in own.model_params}
        of_models = {id(p): p for model in self._models for p in model.parameters()}
        modules = {id(module): module for model in self._models for module in model.modules()}.values()
        gone = self._ids_when_prepared & stepped - of_models.keys()
        if gone and (any(map(is_shard, of_models.values())) or any(map(is_fully_sharded, modules))):
            self._refuse_replaced(p for own in pairs for p in own.model_params if id(p) in gone)
        self._unmanaged = [parameter for key, parameter in of_models.items() if key not in stepped]
        self._managed_ids = stepped | of_models.keys()
        # The gathered weights of shards are leaves, too, but their gradients are not yet reduced.
        self._may_walk = not any(map(is_shard, of_models.values())) and not any(
            map(is_fully_sharded, modules)
        )
        self._known_pairs = [weakref.ref(own) for own in pairs]
        self._module_dicts = [table for module in modules for table in (module._parameters, module._modules)]
        self._module_values = _values(self._module_dicts)

    def _refuse_replaced(self, gone: Iterable[Tensor]) -> None:
        """Refuse a model that was sharded after it was prepared. FSDP2 itself only swaps shards for gathered weights.

        Raises:
            OrderError: one of ``gone`` is no shard, so the optimizer would move parameters outside of the model.
        """
        if not all(map(is_shard, gone)):
            raise OrderError(
                "the model was sharded after it was prepared, so the optimizer holds parameters that are no longer part of "
                "it and would train nothing; call fully_shard or parallelize_module first, build the optimizer, then prepare"
            )


_NOTHING: Final = StashedGrads([])


def _accumulate(stashed: StashedGrads, scale: Tensor) -> None:
    """Unscale the gradients that a pass has left in the owners of ``stashed``, and add the stashed ones."""
    fresh = [(p, p.grad) for p in stashed.parameters if p.grad is not None]
    stashed.put_back()
    if not fresh:
        return
    before = stashed.by_id()
    inv_scale, unused = scale.reciprocal(), torch.zeros_like(scale)
    foreach.unscale_([grad for _, grad in fresh if not grad.requires_grad], inv_scale, unused)
    for parameter, grad in fresh:
        if grad.requires_grad:
            (grad,) = reference.unscaled([grad], [grad.dtype], inv_scale, unused)
        total = before.get(id(parameter))
        parameter.grad = grad if total is None else total + grad


def _values(tables: Sequence[dict[str, Any]]) -> list[object]:
    """The values of the dicts in which modules hold parameters and layers. Runs in every pass, so it loops in C."""
    return list(chain.from_iterable(map(dict[str, Any].values, tables)))


def _same(now: Sequence[object], known: Sequence[object]) -> bool:
    return len(now) == len(known) and all(map(is_, now, known))
