"""Step: the order of a training step.

::

    agree -> refuse -> unscale -> facts: found_inf and norm, over ranks -> decide -> clip -> step or skip -> publish masters
    -> loss scales, counters, statistics; gradients dropped
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfpeak.casting.suspend import disable_casts
from halfpeak.core.decide import Decision, LossFacts
from halfpeak.core.errors import LossScaleCollapse, OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import host_values
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.counters import Counters
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import DecisionInputs, StepInputs
from halfpeak.ops import foreach
from halfpeak.ops.decide import decide
from halfpeak.ops.foreach import can_stay
from halfpeak.ops.shards import local_gradients
from halfpeak.parts.clip import ClipNorm, NoClip, is_by_norm, is_rank_local, limit_of_norm
from halfpeak.parts.closures import ScaledClosure
from halfpeak.parts.found_inf import FoundInfReducer
from halfpeak.parts.loss_scaler import LossScaler, is_unit
from halfpeak.parts.nonfinite import NonfiniteReport
from halfpeak.parts.parts import Parts, gradients_once
from halfpeak.parts.step_hooks import (
    Closure,
    SkippedStep,
    hand_over_found_inf,
    is_own_hook,
    take_back_found_inf,
    takes_found_inf,
)
from halfpeak.parts.window import Window, loss_facts


class Facts(NamedTuple):
    """What is known of the gradients of a step before it is decided.

    Attributes:
        found_inf: 1 if a gradient, or their norm, is not finite.  # f32[]
        norm: of all gradients together; None if the clip needs none.  # f32[]
        losses: those whose passes have left something in these gradients.
        fused: the inputs of a fused step, which reads its gradients where they are; else None.
        exist: whether there is a gradient to step.
    """

    found_inf: Tensor
    norm: Tensor | None
    losses: dict[LossScaler, LossFacts]
    fused: StepInputs | None
    exist: bool


class Plan(NamedTuple):
    """What a step will do. Nothing has been changed yet.

    Attributes:
        decision: whether to step, and everything as it will be afterwards.
        norm: of all gradients before clipping, or None.  # f32[]
        losses: those of ``decision.states``, in their order.
        fused: the inputs of a fused step, with the multiplier that unscales and clips; else None.
        exist: whether there is a gradient to step.
    """

    decision: Decision
    norm: Tensor | None
    losses: list[LossScaler]
    fused: StepInputs | None
    exist: bool


class Step:
    """Ends a window of backward passes: steps or skips, all of it or nothing.

    A step that raises leaves counters and loss scales as they were, and drops the window.

    Args:
        config: of the engine.
        parts: its models, optimizers and windows.
        reducer: reduces ``found_inf`` over ranks.

    Attributes:
        counters: of micro-steps, steps and skips.
        scalers: one per loss.
        report: names gradients that are not finite.
    """

    def __init__(self, config: EngineConfig, parts: Parts, reducer: FoundInfReducer) -> None:
        self.counters = counters = Counters(parts.device)
        self.config, self.parts, self.reducer = config, parts, reducer
        self.scalers = parts.scalers
        self.report = NonfiniteReport(parts)
        every = config.accumulation.every
        parts.on_abort = lambda: counters.restart_window(every)
        self._max_norm = limit_of_norm(config.clip)
        self._accumulates = every > 1
        self._zero = torch.zeros((), dtype=torch.float32, device=parts.device)
        self._may_leave = len(parts.windows) == 1 and is_by_norm(config.clip)

    def __call__(self, windows: Sequence[Window], *, has_closure: bool = False) -> StepResult:
        """End a micro-step, and the window if this was its last one; see :meth:`halfpeak.Engine.step`.

        Args:
            windows: of the optimizers to step.
            has_closure: whether the optimizer steps by a closure alone, so that a skip does not call it.
        """
        if not self.config.accumulation.is_boundary(self.counters.micro_step):
            self.counters.micro_step += 1
            scale = self.scalers[0].state.scale
            return StepResult(torch.zeros_like(scale), scale, boundary=False)
        self.parts.agree()
        self._refuse(windows)
        with self.dropping_window_on_error(windows), disable_casts():
            plan = self._plan_on_device(windows) or self._plan(windows)
            result, collapse = self._report(plan, windows)
            if plan.decision.skip is not True:
                plan, norm = self._clip(plan, windows)
                result = result._replace(grad_norm=norm)
            for window in windows if not has_closure else ():
                self._call(window, plan)
        self._commit(plan, windows)
        if collapse is not None:
            raise collapse
        return result._replace(scale=self.scalers[0].state.scale)

    def _refuse(self, windows: Sequence[Window]) -> None:
        """Refuse gradients that must not be stepped.

        Raises:
            OrderError: the last backward pass did not reduce them over the ranks; or no pass went through the engine.
        """
        for window in windows:
            window.refuse_unreduced(
                ", or let the engine enter no_sync where it is due: engine.forward(wrapped)"
            )
        if any(window.losses or window.held for window in self.parts.windows):
            return
        scales = self._accumulates or not all(map(is_unit, self.scalers))
        if scales and not all(window.is_empty() for window in windows):
            raise OrderError(
                "no backward pass of this step went through halfpeak, so its loss was neither scaled nor divided for "
                "accumulation; write engine.backward(loss), or for a backward pass of your own "
                "`with engine.scaled(loss) as scaled: scaled.backward()`"
            )

    # The facts.

    def _facts(self, windows: Sequence[Window]) -> Facts:
        fused = self._fused_inputs(windows)
        if fused is not None:
            squares, found = _fused_optimizer(windows).measure(fused)
            norm = None
            if self._max_norm is not None:
                if not self.reducer.is_local:
                    squares = squares + self.reducer.sum_powers(torch.zeros_like(squares), 2)
                norm = squares.sqrt()
            return self._over_ranks(
                Facts(found, norm, loss_facts(windows, found, self.scalers), fused, exist=True)
            )
        for window in windows:
            window.unscale()
        norm, clip = None, self.config.clip
        if isinstance(clip, ClipNorm):
            norm = self._norm(gradients_once(windows), windows, clip.norm_type)
            found = self._zero
        else:
            found = self.parts.found_inf(windows)
        # With group= every rank counts as having gradients, so that all ranks count the same steps.
        exist = not (self.reducer.is_local and all(window.is_empty() for window in windows))
        return self._over_ranks(Facts(found, norm, loss_facts(windows, found, self.scalers), None, exist))

    def _fused_inputs(self, windows: Sequence[Window]) -> StepInputs | None:
        """The inputs of a fused step that reads its gradients where they are, scaled or not; None if it cannot."""
        if not (self._may_leave and windows and self.may_leave(windows[0])):
            return None
        window = windows[0]
        grads = list(map(_GRAD, window.weights))
        present = [grad for grad in grads if grad is not None]
        if not present or not can_stay(present):
            return None
        held = window.held
        inverse = torch.ones_like(self.scalers[0].state.scale) if held is None else held.scale.reciprocal()
        return StepInputs(local_gradients(grads, window.weights), window.weights, inverse)

    def may_leave(self, window: Window) -> bool:
        """Whether the step reads the gradients of ``window`` where they are, so that a pass may leave them scaled."""
        if not self._may_leave:
            return False
        optimizer = window.optimizer
        if not isinstance(optimizer, FusedOptimizer) or not reads_grads_itself(optimizer):
            return False
        return self.reducer.is_local or not any(map(is_rank_local, window.weights))

    def _norm(self, grads: list[Tensor], windows: Sequence[Window], norm_type: float) -> Tensor:
        """The norm of all gradients; with ``group=`` over all ranks, where shared gradients count once.  # f32[]"""
        if self.reducer.is_local:
            return foreach.global_norm(grads, norm_type).to(self.parts.device)
        local_ids = {
            id(weight.grad) for window in windows for weight in window.weights if is_rank_local(weight)
        }
        of_shared, of_local = (
            foreach.global_norm([g for g in grads if (id(g) in local_ids) == local], norm_type).to(
                self.parts.device
            )
            for local in (False, True)
        )
        over_ranks = self.reducer.sum_powers(of_local, norm_type)
        if norm_type != math.inf:
            over_ranks = over_ranks ** (1 / norm_type)
        return torch.linalg.vector_norm(torch.stack([of_shared, over_ranks]), norm_type)

    def _over_ranks(self, facts: Facts) -> Facts:
        """The same for all ranks that step together, which may have used other losses, or the same in another order."""
        if self.reducer.is_local:
            return facts
        found, unused = facts.found_inf, torch.full_like(facts.found_inf, -1)
        if facts.norm is not None:
            found = torch.maximum(found, (~torch.isfinite(facts.norm)).to(found))
        known = facts.losses
        found, *of_losses = self.reducer.all_reduce_in_step(
            torch.stack([found, *(known[s].found if s in known else unused for s in self.scalers)]),
            self.counters.num_dropped,
            facts.norm,
        ).unbind()
        losses = {
            scaler: known.get(
                scaler, LossFacts(scaler.config, scaler.state, scaler.state.scale, unused)
            )._replace(found=noted)
            for scaler, noted in zip(self.scalers, of_losses, strict=True)
        }
        return facts._replace(found_inf=found, losses={**known, **losses})

    # The decision.

    def _plan(self, windows: Sequence[Window]) -> Plan:
        facts, clip, counters = self._facts(windows), self.config.clip, self.counters.now()
        max_norm = clip.max_norm if isinstance(clip, ClipNorm) else None
        decision = decide(
            facts.found_inf,
            list(facts.losses.values()),
            norm=facts.norm,
            max_norm=max_norm,
            counters=counters,
        )
        if not facts.exist:
            decision = decision._replace(num_steps=counters[0], num_skipped=counters[1])
        if not isinstance(decision.skip, bool) and not self._skip_by_themselves(windows):
            # In the usual case the only wait of a step; near the limit of a loss scale others follow.
            decision = decision._replace(skip=bool(decision.skip))
        return Plan(decision, facts.norm, list(facts.losses), facts.fused, facts.exist)

    def _skip_by_themselves(self, windows: Sequence[Window]) -> bool:
        """Whether the optimizers' kernels can read the decision, so that the host need not know it."""
        return self.report.num_stuck == 0 and all(takes_found_inf(window.optimizer) for window in windows)

    def _plan_on_device(self, windows: Sequence[Window]) -> Plan | None:
        """Decide by the kernels of a fused optimizer, without the host; None if the host must take part.

        It must if ranks reduce ``found_inf``, if a loss scale is close to its limit, if several losses left gradients here, or
        if the step of another engine has moved the loss scale since the pass.
        """
        if (
            not (self._may_leave and self.reducer.is_local)
            or self.report.num_stuck > 0
            or self.report.is_near
        ):
            return None
        inputs = self._fused_inputs(windows)
        if inputs is None:
            return None
        counters = self.counters
        losses = loss_facts(windows, torch.zeros_like(inputs.multiplier), self.scalers)
        if len(losses) != 1:
            return None
        ((scaler, loss),) = losses.items()
        if not (loss.counts and loss.first is loss.state.scale):
            return None
        known = _fused_optimizer(windows).decide(
            inputs,
            DecisionInputs(
                loss.config, loss.state, counters.num_steps, counters.num_skipped, loss.found, self._max_norm
            ),
        )
        if known is None:
            return None
        on_host = host_values(known.found_inf)
        skip = known.found_inf if on_host is None else bool(on_host[0])
        decision = Decision(skip, 1.0, [known.scale_state], known.num_steps, known.num_skipped)
        norm = None if self._max_norm is None else known.grad_norm
        return Plan(decision, norm, [scaler], inputs._replace(multiplier=known.multiplier), exist=True)

    def _report(self, plan: Plan, windows: Sequence[Window]) -> tuple[StepResult, LossScaleCollapse | None]:
        """What the step returns, and the error that it ends with if the loss scale cannot fall any more."""
        skip = plan.decision.skip
        like = self.scalers[0].state.scale
        found = skip if isinstance(skip, Tensor) else torch.full_like(like, float(skip))
        result = StepResult(found, found, plan.norm, has_gradients=plan.exist)
        if skip is not True:
            return result, None
        collapse = None
        if self.report.is_near:
            states = list(zip(plan.losses, plan.decision.states, strict=True))
            collapse = self.report.error_if_exhausted(states, windows)
        return result._replace(grads=self.report.nonfinite_grads(windows)), collapse

    # The optimizers.

    def _clip(self, plan: Plan, windows: Sequence[Window]) -> tuple[Plan, Tensor | None]:
        """Clip the gradients, or the multiplier of a fused step; returns the norm before that, too."""
        clip, coef, fused = self.config.clip, plan.decision.coef, plan.fused
        if fused is not None:
            if not (isinstance(coef, float) and coef == 1.0):
                plan = plan._replace(fused=fused._replace(multiplier=fused.multiplier * coef))
            return plan, plan.norm
        if isinstance(clip, NoClip):
            return plan, None
        grads = gradients_once(windows)
        if not isinstance(clip, ClipNorm):
            return plan, clip(grads)
        if isinstance(coef, Tensor):
            foreach.scale_(grads, coef)
        elif coef != 1:  # multiplying by one changes no bit
            foreach.scale_(grads, torch.scalar_tensor(coef, dtype=torch.float32, device="cpu"))
        return plan, plan.norm

    def _call(self, window: Window, plan: Plan) -> None:
        """Call ``optimizer.step()``: on a skip without gradients, or with ``found_inf`` for its kernels to read."""
        optimizer, fused, skip = window.optimizer, plan.fused, plan.decision.skip
        fused = fused if isinstance(optimizer, FusedOptimizer) else None
        skipped = None
        try:
            if fused is not None:
                optimizer.set_step_inputs(fused)  # type: ignore[union-attr]
                hand_over_found_inf(optimizer, skip)
            elif isinstance(skip, Tensor):
                hand_over_found_inf(optimizer, skip)
            elif skip:
                skipped = SkippedStep(window)
            optimizer.step()
        finally:
            take_back_found_inf(optimizer)
            if fused is not None:
                optimizer.set_step_inputs(None)  # type: ignore[union-attr]
            if skipped is not None:
                skipped.undo_counts()
            elif fused is not None:
                self.parts.pairs.record_published(window.indices)  # the kernels have written the weights
            elif skip is not True:
                self.parts.publish(window)

    def with_closure(self, window: Window, closure: Closure) -> StepResult:
        """A step whose optimizer calls a closure, each time until its gradients are finite."""
        wrapped = ScaledClosure(
            self.parts,
            window,
            closure,
            drops=True,
            accept=lambda: self._clip_of_closure(window),
            retry=lambda: self._retry_closure(window),
        )
        with self.dropping_window_on_error([window]):
            window.optimizer.step(wrapped)
            self.parts.publish(window)
            clean = torch.zeros_like(self._zero)
            losses = loss_facts([window], clean, self.scalers)
            decision = decide(clean, list(losses.values()), counters=self.counters.now())
            plan = Plan(decision._replace(skip=False), None, list(losses), None, exist=True)
        self._commit(plan, [window])
        return StepResult(clean, self.scalers[0].state.scale)

    def _clip_of_closure(self, window: Window) -> None:
        """Clip a closure's gradients, which are finite and about to be used."""
        grads, clip = window.gradients(), self.config.clip
        if isinstance(clip, ClipNorm):
            foreach.clip_to_norm_(grads, self._norm(grads, [window], clip.norm_type), clip.max_norm)
        else:
            clip(grads)

    def _retry_closure(self, window: Window) -> None:
        """Lower the scale before a closure runs again because its gradients were not finite.

        Scales without an overflow stay, because no step is taken: two that grew and fell in turn would never end.

        Raises:
            LossScaleCollapse: the scale is static, or cannot fall any further.
        """
        overflow = torch.ones((), dtype=torch.float32, device=self.parts.device)
        losses = loss_facts([window], overflow, self.scalers)
        facts = [loss._replace(counts=False) for loss in losses.values()]
        states = decide(overflow, facts, counters=self.counters.now()).states
        for scaler, state in zip(losses, states, strict=True):
            scaler.state = state
        self.report.poll()
        self.parts.stats.end_step(True)
        used = [scaler for scaler in losses if scaler in self.scalers] or self.scalers
        if not any(scaler.config.dynamic for scaler in used) or any(s.read_exhausted() for s in used):
            raise self.report.error([window])

    def _commit(self, plan: Plan, windows: Sequence[Window]) -> None:
        decision, counters = plan.decision, self.counters
        for scaler, state in zip(plan.losses, decision.states, strict=True):
            scaler.state = state
        counters.num_steps, counters.num_skipped = decision.num_steps, decision.num_skipped
        counters.micro_step += 1
        self.parts.stats.end_step(decision.skip, self.parts.stats_of(windows))
        for window in self.parts.windows:
            if window in windows:
                window.drop()
            else:
                window.uncount(plan.losses)
        self.report.poll()

    @contextmanager
    def dropping_window_on_error(self, windows: Sequence[Window]) -> Generator[None]:
        """If the body raises, drop the window: counters and scales stay, and masters that were written are published."""
        try:
            yield
        except BaseException:
            self.parts.pairs.agree()
            self.drop_window(windows)
            raise

    def drop_window(self, windows: Iterable[Window]) -> None:
        """Drop the gradients of some windows, and begin the window again."""
        self.counters.restart_window(self.config.accumulation.every)
        for window in windows:
            window.drop()


def reads_grads_itself(optimizer: FusedOptimizer) -> bool:
    """Whether the step of a fused optimizer may read gradients outside of ``.grad`` and write the weights itself.

    False if a step hook of other code, or a subclass's own ``step``, may read gradients before it or write masters after it.
    """
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
    )
    return type(optimizer).step.__module__.startswith("halfpeak.") and all(map(is_own_hook, hooks))


def _fused_optimizer(windows: Sequence[Window]) -> FusedOptimizer:
    optimizer: Optimizer = windows[0].optimizer
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


_GRAD: Final = attrgetter("grad")
