"""What a backward pass leaves in parameters that it is not for: of other optimizers, and of none that was prepared."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.torch_compat import untraced
from halfpeak.distributed.fsdp import drop_gradients, is_fully_sharded
from halfpeak.engine.gradients.accumulate import GradAccumulator, kernels_for, set_grads
from halfpeak.engine.gradients.backward import StashedGrads
from halfpeak.engine.gradients.params import ParamPairs
from halfpeak.engine.gradients.window import Scaled, after_backward, rearmed
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_none, gradients_of, is_in_bucket
from halfpeak.ops.shards import has_process_group, is_shard
from halfpeak.state.loss_scaler import LossScaler


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
        self._stashed: list[tuple[PreparedOptimizer, StashedGrads]] = []

    @untraced
    def stash(self, own: Iterable[Tensor]) -> None:
        """Before the backward pass: set aside what is there, but for the parameters that the pass is for."""
        seen = set(map(id, own)) if self._prepared else set[int]()
        for one in self._prepared:
            parameters = one.table().model_params
            keys = list(map(id, parameters))
            # This runs for every living engine in every pass, so the usual case (nothing shared, no gradient) is C loops.
            if len(set(keys)) != len(keys) or not seen.isdisjoint(keys):
                parameters = list({id(p): p for p in parameters if id(p) not in seen}.values())
            seen.update(keys)
            if any(map(is_in_bucket, gradients_of(parameters))):
                # The snapshot of a Scaled window knows gradients by identity, and copies will replace these.
                one.unscale_pending()
                one.disarm()
            self._stashed.append((one, StashedGrads(parameters)))

    def parameters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Those that the pass may reach, each with the gradient that was set aside."""
        return chain.from_iterable(stashed.pairs() for _, stashed in self._stashed)

    @untraced
    def rollback(self) -> None:
        """Everything as it was before :meth:`stash`; what has been written since is dropped."""
        for one, stashed in self._stashed:
            _put_back(one, stashed)
        self._stashed.clear()

    def refuse_unsynchronised(self) -> None:
        """After a backward pass that was not synchronised over the ranks.

        Raises:
            OrderError: it has reached the optimizers of another engine, whose gradients later passes would not reduce.
        """
        if any(not are_none(gradients_of(stashed.parameters)) for _, stashed in self._stashed):
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
            one, stashed = self._stashed.pop(0)
            fresh = gradients_of(stashed.parameters)
            if not (are_none(fresh) and stashed.is_empty):
                _put_back(one, stashed)
            if not are_none(fresh):
                found_inf = _add(one, stashed.parameters, fresh, scale)
                one.add_found_inf_elsewhere(scaler, found_inf)
                reached.append((one.optimizer, found_inf))
        return reached


def _put_back(one: PreparedOptimizer, stashed: StashedGrads) -> None:
    stashed.put_back()
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
        # Unscaled gradients are not added to scaled ones; they join the stashed ones of the window.
        accumulator.accumulate(own, window.stashed)
        unscaled = {id(p): p.grad for p in own.unmastered if p.grad is not None}
        set_grads(parameters, held)
        worst = torch.maximum(window.found_inf, found_inf)
        one.set_window(rearmed(window._replace(found_inf=worst, stashed={**window.stashed, **unscaled})))
    else:
        accumulator.accumulate(
            own, {id(p): grad for p, grad in zip(parameters, held, strict=True) if grad is not None}
        )
        one.set_window(after_backward(window, pairs, found_inf))
    return found_inf


class UnmanagedGrads:
    """Unscales the gradients that a scaled loss leaves in tensors that no prepared optimizer steps.

    Their own optimizer, which was not prepared, would step gradients 65,536 times too large. They take no part in
    ``found_inf`` and norms: an inf in one keeps no optimizer from stepping.

    They are the other parameters of the models, and what else the graph of the loss ends in: a criterion with weights, a
    network that was not prepared, inputs. It is walked in every pass: any loss may be the first to reach another tensor.

    Args:
        models: whose parameters are looked after.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._known_ids = {id(parameter) for model in self._models for parameter in model.parameters()}
        self._own: list[Tensor] = []
        self._may_walk = True
        self._ours = set[int]()  # the parameters of the models and of the optimizers, by id
        # Snapshots of what the search for them depends on: the parameters of the optimizers, and the _parameters and
        # _modules dicts of all modules, whose values may come, go and be replaced at any time.
        self._known_pairs: list[weakref.ref[ParamPairs]] = []
        self._tables: list[dict[str, Any]] = []
        self._values: list[object] = []
        # The unscaled gradients from before a backward pass, while ``.grad`` holds scaled ones.
        self._stashed = _NOTHING

    def add_model(self, model: nn.Module) -> None:
        """Look after one more model."""
        self._models.append(model)
        self._known_ids.update(map(id, model.parameters()))
        self._known_pairs = []

    @untraced
    def stash(self, pairs: list[ParamPairs], graph: Node | None) -> None:
        """Before a backward pass: set aside what is there, unless it waits scaled.

        Args:
            pairs: of every optimizer, to which its parameters are left.
            graph: of the loss, which may reach further; None where its scale is always 1.

        Raises:
            OrderError: the models were sharded after they were prepared.
        """
        before = self._stashed
        # If none has a gradient any more, zero_grad() was called in the middle of a window.
        waits = not are_none(gradients_of(before.parameters))
        waiting = dict(zip(map(id, before.parameters), before.grads, strict=True)) if waits else {}
        self._search(pairs)
        leaves = _leaves_of(graph) if graph is not None and self._may_walk else []
        if waits:
            leaves += before.parameters
        others = {id(leaf): leaf for leaf in leaves if id(leaf) not in self._ours}.values()
        self._stashed = StashedGrads([*self._own, *others], waiting)

    def parameters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Those that the pass may reach, each with the gradient that was set aside."""
        return self._stashed.pairs()

    @untraced
    def rollback(self) -> None:
        """Everything as it was before :meth:`stash`; what has been written since is dropped."""
        self._stashed.put_back()
        self._stashed = _NOTHING

    def drop(self) -> None:
        """:meth:`rollback`, and drop the gradients that FSDP2 holds inside the models, where optimizers do not see them."""
        self.rollback()
        if has_process_group():
            for model in self._models:
                drop_gradients(model)

    @untraced
    def accumulate(self, scale: Tensor) -> None:
        """Unscale the new gradients and add what was set aside."""
        stashed = self._stashed
        fresh = [(p, p.grad) for p in stashed.parameters if p.grad is not None]
        self.rollback()
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

    def _search(self, pairs: list[ParamPairs]) -> None:
        """Find the parameters again where those of an optimizer have changed, or those of a model."""
        # Held weakly, because some are of other engines, which may be gone by now.
        if _same(pairs, [known() for known in self._known_pairs]) and _same(
            _values(self._tables), self._values
        ):
            return
        stepped = {id(parameter) for own in pairs for parameter in own.model_params}
        own = {id(p): p for model in self._models for p in model.parameters()}
        modules = {id(module): module for model in self._models for module in model.modules()}.values()
        gone = self._known_ids & stepped - own.keys()
        if gone and (any(map(is_shard, own.values())) or any(map(is_fully_sharded, modules))):
            self._refuse_replaced(p for table in pairs for p in table.model_params if id(p) in gone)
        self._own = [parameter for key, parameter in own.items() if key not in stepped]
        self._ours = stepped | own.keys()
        # The gathered weights of shards are leaves, too, and their gradients are still to be reduced.
        self._may_walk = not any(map(is_shard, own.values())) and not any(map(is_fully_sharded, modules))
        self._known_pairs = [weakref.ref(own) for own in pairs]
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


_NOTHING: Final = StashedGrads([])


def _leaves_of(root: Node) -> list[Tensor]:
    """The tensors whose gradient a backward pass from ``root`` writes."""
    seen, stack, ends = {root}, [root], list[Node]()
    while stack:
        node = stack.pop()
        children = node.next_functions
        if not children:
            ends.append(node)
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return [node.variable for node in ends if type(node).__name__ == "AccumulateGrad"]  # type: ignore[attr-defined]


def _values(tables: Sequence[dict[str, Any]]) -> list[object]:
    """The values of the dicts in which modules hold parameters and layers. Read in every step, so in a loop that runs in C."""
    return list(chain.from_iterable(map(dict[str, Any].values, tables)))


def _same(now: Sequence[object], known: Sequence[object]) -> bool:
    return len(now) == len(known) and all(map(is_, now, known))
