"""One backward pass as a transaction: stash the earlier gradients, then accumulate the new ones, or roll back."""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from halfpeak.core.torch_compat import untraced
from halfpeak.engine.gradients.accumulate import GradAccumulator, kernels_for, set_grads
from halfpeak.engine.gradients.params import ParamPairs
from halfpeak.engine.gradients.window import (
    NOTHING_STASHED,
    Empty,
    GradSnapshot,
    Scaled,
    Unscaled,
    Window,
    after_backward,
    after_backward_for_fused,
    after_delayed_backward,
    scale_for_backward,
)
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.ops import foreach
from halfpeak.ops.foreach import are_dense, are_none, gradients_of, is_in_bucket
from halfpeak.state.loss_scaler import LossScaler, is_unit


class GradMode(enum.Enum):
    """What a backward pass does with its gradients, chosen before it begins."""

    ACCUMULATE = "unscale them and add them to the unscaled gradients of the window"
    LEAVE_SCALED = "leave them scaled for a later pass of the window to add to"
    LEAVE_FOR_STEP = "leave them scaled for the step of a fused optimizer to read"


class StashedGrads:
    """Gradients that are removed from ``.grad`` for a backward pass, so that autograd does not add to them.

    Args:
        parameters: the owners of the gradients.
        waiting: gradients stashed earlier, by ``id`` of parameters whose ``.grad`` waits scaled and stays in place.

    Attributes:
        grads: the stashed gradients.
        is_empty: whether every stashed gradient is None.
    """

    __slots__ = ("grads", "is_empty", "parameters")

    def __init__(
        self, parameters: list[Tensor], waiting: Mapping[int, Tensor | None] = NOTHING_STASHED
    ) -> None:
        self.parameters, self.grads = parameters, gradients_of(parameters)
        self.is_empty = are_none(self.grads)
        if waiting or not self.is_empty:
            for index, parameter in enumerate(parameters):
                if id(parameter) in waiting:
                    self.grads[index] = waiting[id(parameter)]
                else:
                    self.grads[index], parameter.grad = _detached_from_bucket(self.grads[index]), None
            self.is_empty = are_none(self.grads)

    def put_back(self) -> None:
        """Restore the stashed gradients. What was written to ``.grad`` since is dropped."""
        set_grads(self.parameters, self.grads)

    def items(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Each parameter with its stashed gradient."""
        return zip(self.parameters, self.grads, strict=True)

    def by_id(self) -> dict[int, Tensor]:
        """The stashed gradients, by ``id`` of the parameter."""
        return {id(parameter): grad for parameter, grad in self.items() if grad is not None}


def _detached_from_bucket(grad: Tensor | None) -> Tensor | None:
    """The gradient, or a copy if it is part of a DDP bucket, which the next backward pass would overwrite."""
    return grad.clone() if grad is not None and is_in_bucket(grad) else grad


class WaitingGrads:
    """Stashes waiting gradients during a delayed backward pass, and adds the new ones to them in float32.

    Autograd would add in the low dtype and lose digits with every pass. Here each ``.grad`` is the float32 sum of all
    passes, rounded. The last pass, which may reduce gradients over ranks, lets autograd add to that ``.grad``.

    Args:
        parameters: low-precision parameters, before the pass.
        sums: of earlier passes, by ``id`` of the parameter.  # f32[...]
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Mapping[int, Tensor]) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for parameter in parameters:
            grad = parameter.grad
            # A sparse gradient, or one with a graph, stays in place for autograd to add to.
            if grad is not None and are_dense([grad]):
                self._held.append((parameter, grad, sums.get(id(parameter))))
                parameter.grad = None

    def put_back_sums(self, like: Tensor) -> dict[int, Tensor]:
        """After the pass: restore the stashed gradients, with the new ones added.

        Args:
            like: a scalar on the device of the gradients.

        Returns:
            The new sums, of parameters that several passes have reached.  # f32[...]
        """
        sums: dict[int, Tensor] = {}
        added: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, held, total in self._held:
            fresh, parameter.grad = parameter.grad, held
            if fresh is not None and not are_dense([fresh]):
                parameter.grad = held + fresh
                continue
            if fresh is not None:
                total = held.float() if total is None else total
                added.append((total, fresh, held))
            if total is not None:
                sums[id(parameter)] = total
        if added:
            totals, grads, rounded = zip(*added, strict=True)
            foreach.accumulate_(totals, grads, torch.ones_like(like), torch.zeros_like(like))
            foreach.copy_cast_(rounded, totals)
        return sums


class BackwardScope:
    """Stashes the gradients from before a backward pass, and accumulates or keeps the new ones by :class:`GradMode`.

    ::

        begin     stash model.grad, unless it waits scaled
        (backward: autograd writes model.grad, scaled)
        finish    by mode: main.grad += model.grad / scale, in the dtype of the main parameter;
                  or leave model.grad scaled for a later pass, or for the step; the gradients of an optimizer that wait
                  to be reduced over the ranks, and to which this pass has added nothing, wait on
        rollback  restore model.grad

    A parameter of several optimizers is accumulated once.

    Args:
        prepared: the optimizers whose parameters get gradients.
        delayed: those of them whose gradients stay scaled for a later pass.
        unreduced: those of them whose gradients this pass does not reduce over the ranks.

    Attributes:
        pairs: the parameters of each optimizer.
        all_pairs: the parameters of all optimizers, each once.
        is_delayed: whether the gradients of all of them stay scaled.
        has_begun: whether :meth:`begin` succeeded.
        found_inf: 1 if one of the new gradients is not finite.  # f32[]
        reached: after :meth:`finish`, the optimizers that got gradients. An overflow does not skip the others.
    """

    def __init__(
        self,
        prepared: Sequence[PreparedOptimizer],
        delayed: Collection[PreparedOptimizer],
        unreduced: Collection[PreparedOptimizer],
    ) -> None:
        self._prepared, self._delayed, self._unreduced = prepared, delayed, unreduced
        self.is_delayed = len(delayed) == len(prepared)
        self.pairs: list[ParamPairs] = []
        self._windows: list[Window] = []
        self.all_pairs: ParamPairs = _NO_PAIRS
        self._stashed: list[StashedGrads] = []
        self._adds_to_scaled = False
        self._waiting: dict[PreparedOptimizer, WaitingGrads] = {}
        self._local: dict[PreparedOptimizer, GradSnapshot] = {}
        self.has_begun = False
        self._is_done = False
        self.found_inf = torch.zeros_like(prepared[0].found_inf)
        self.reached = prepared

    @untraced
    def begin(self, scaler: LossScaler) -> Tensor:
        """Stash the gradients, unless they wait scaled, and return the factor of the loss.  # f32[]

        Raises:
            OrderError: gradients wait under another loss scaler or another scale.
        """
        seen: set[int] = set()
        for prepared in self._prepared:
            self._windows.append(prepared.window)
            pairs = prepared.begin_backward()
            self.pairs.append(pairs)
            if len(self._prepared) > 1:
                pairs = ParamPairs(pair for pair in pairs if id(pair.model) not in seen)
                seen.update(id(pair.model) for pair in pairs)
            self.all_pairs = ParamPairs([*self.all_pairs, *pairs]) if self.all_pairs else pairs
            if isinstance(prepared.window, Scaled):
                self._adds_to_scaled = True
                if prepared in self._delayed:
                    self._waiting[prepared] = WaitingGrads(pairs.low_params, prepared.window.sums)
                elif prepared.window.is_local:
                    self._local[prepared] = GradSnapshot(pairs.model_params)
            else:
                self._stashed.append(StashedGrads(pairs.model_params))
        scale = scale_for_backward([prepared.window for prepared in self._prepared], scaler)
        self.has_begun = True
        return scale

    def reachable(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The parameters of the pass, each with None, then the stashed ones, each with its stashed gradient."""
        passed = ((parameter, None) for parameter in self.all_pairs.model_params)
        return chain(passed, *(stashed.items() for stashed in self._stashed))

    def mode(self, *, fused_step_reads: bool) -> GradMode:
        """Choose what happens to the new gradients, except those of optimizers that are delayed.

        Args:
            fused_step_reads: whether the step can read scaled gradients. It can if this pass is the window's only one.
        """
        if self.is_delayed:
            return GradMode.LEAVE_SCALED
        begins_window = not any(one.is_open for one in self._prepared) and all(
            s.is_empty for s in self._stashed
        )
        return GradMode.LEAVE_FOR_STEP if fused_step_reads and begins_window else GradMode.ACCUMULATE

    @untraced
    def finish(self, mode: GradMode, scaler: LossScaler, scale: Tensor) -> None:
        """After the backward pass: by ``mode``, accumulate its gradients or leave them scaled.

        Args:
            scaler: the owner of ``scale``.
            scale: the factor of the loss.  # f32[]
        """
        if mode is GradMode.LEAVE_FOR_STEP and self._leave_for_step(scaler, scale):
            return
        self._is_done = True
        untouched = [
            one
            for one, before in self._local.items()
            if before.has_grads_without_graph() and before.unchanged()
        ]
        if len(self._prepared) > 1:
            self.reached = [
                one
                for one, own in zip(self._prepared, self.pairs, strict=True)
                if one not in untouched and not are_none(gradients_of(own.model_params))
            ]
        waiting = {*self._delayed, *untouched}
        stashed = self._all_stashed()
        if waiting:
            self._leave_scaled(waiting, stashed, scaler, scale)
        if len(waiting) < len(self._prepared):
            self._accumulate(waiting, stashed, scale)

    @untraced
    def rollback(self) -> bool:
        """Undo :meth:`begin`; False if autograd may have added to waiting gradients, or :meth:`finish` changed any."""
        if self._is_done or (self.has_begun and self._adds_to_scaled):
            return False
        for stashed in self._stashed:
            stashed.put_back()
        # After an exception in begin(), self._windows and self.pairs may be shorter than self._prepared.
        for prepared, before, _ in zip(self._prepared, self._windows, self.pairs, strict=False):
            if isinstance(prepared.window, Scaled):
                prepared.set_window(prepared.window)
            elif isinstance(prepared.window, Unscaled):
                prepared.set_window(prepared.window.with_sentinel_of(before))
        return True

    def _leave_scaled(
        self,
        waiting: Container[PreparedOptimizer],
        stashed: Mapping[int, Tensor],
        scaler: LossScaler,
        scale: Tensor,
    ) -> None:
        for prepared, pairs in zip(self._prepared, self.pairs, strict=True):
            if prepared in self._local and prepared in waiting:
                assert isinstance(prepared.window, Scaled)
                prepared.set_window(prepared.window)
            elif prepared in waiting:
                own = {id(p): stashed[id(p)] for p in pairs.unmastered if id(p) in stashed}
                held = self._waiting.get(prepared)
                sums = {} if held is None else held.put_back_sums(self.found_inf)
                is_local = prepared in self._unreduced
                prepared.set_window(
                    after_delayed_backward(
                        prepared.window, pairs, scaler, scale, own, sums, is_local=is_local
                    )
                )

    def _leave_for_step(self, scaler: LossScaler, scale: Tensor) -> bool:
        """Leave the gradients for the step; False, without changes, if there are none that a fused kernel can read."""
        snapshot = GradSnapshot(self.all_pairs.model_params)
        if not snapshot.has_grads_without_graph():
            return False
        self._is_done = True
        (prepared,) = self._prepared
        assert isinstance(prepared.window, Empty)
        prepared.window = after_backward_for_fused(
            prepared.window, self.pairs[0], snapshot, scale, self.found_inf, unit=is_unit(scaler)
        )
        return True

    def _accumulate(
        self, waiting: Collection[PreparedOptimizer], stashed: dict[int, Tensor], scale: Tensor
    ) -> None:
        done = [(one, own) for one, own in zip(self._prepared, self.pairs, strict=True) if one not in waiting]
        pairs = self.all_pairs
        if waiting:
            wanted = {id(pair.model) for _, own in done for pair in own}
            pairs = ParamPairs(pair for pair in pairs if id(pair.model) in wanted)
        for prepared, _ in done:
            if isinstance(prepared.window, Scaled):
                stashed.update(prepared.window.stashed)
        kernels = kernels_for([prepared.optimizer for prepared, _ in done], pairs.main_params)
        # The optimizers of one engine share a buffer pool. Optimizers of several engines do not, so they use none.
        buffers = done[0][0].masters.grad_buffers
        if any(prepared.masters.grad_buffers is not buffers for prepared, _ in done):
            buffers = None
        accumulator = GradAccumulator(scale.reciprocal(), self.found_inf, kernels, buffers)
        accumulator.accumulate(pairs, stashed)
        for prepared, own in done:
            found_inf = self.found_inf if prepared in self.reached else torch.zeros_like(self.found_inf)
            prepared.set_window(after_backward(prepared.window, own, found_inf))

    def _all_stashed(self) -> dict[int, Tensor]:
        return {key: grad for one in self._stashed if not one.is_empty for key, grad in one.by_id().items()}


_NO_PAIRS: Final = ParamPairs()
