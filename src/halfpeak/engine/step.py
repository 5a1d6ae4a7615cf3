"""Step: the order of a training step.

::

    agree -> refuse -> unscale -> facts: found_inf and norm, over ranks -> decide -> clip -> step or skip -> publish masters
    -> loss scales, counters, statistics; gradients dropped

With an optimizer of :mod:`halfpeak.fused`, kernels measure, clip and step: :mod:`halfpeak.engine.fused_step`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from halfpeak.casting.suspend import disable_casts
from halfpeak.core.decide import Decision, LossFacts
from halfpeak.core.errors import LossScaleCollapse, OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import host_values
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.counters import Counters
from halfpeak.engine.fused_step import fused_step_of
from halfpeak.fused.decision import StepInputs
from halfpeak.ops import foreach
from halfpeak.ops.decide import decide
from halfpeak.parts.clip import ClipNorm, is_rank_local
from halfpeak.parts.closures import ScaledClosure
from halfpeak.parts.found_inf import FoundInfReducer, is_multi_rank
from halfpeak.parts.loss_scaler import LossScaler, is_unit
from halfpeak.parts.nonfinite import NonfiniteReport
from halfpeak.parts.parts import Parts, gradients_once
from halfpeak.parts.step_hooks import Closure, SkippedStep, passing_found_inf, takes_found_inf
from halfpeak.parts.window import Window, loss_facts


class Facts(NamedTuple):
    """What is known of the gradients of a step before it is decided.

    Attributes:
        found_inf: 1 if a gradient, or their norm, is not finite.  # f32[]
        norm: of all gradients together, before clipping; None if the clip needs none.  # f32[]
        losses: those whose passes have left something in these gradients.
        exist: whether there is a gradient to step.
        grads: true gradients, each once; none of a fused step.
        fused: what the kernels of a fused step read, wherever it is; else None.
    """

    found_inf: Tensor
    norm: Tensor | None
    losses: dict[LossScaler, LossFacts]
    exist: bool = True
    grads: Sequence[Tensor] = ()
    fused: StepInputs | None = None


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
        self._accumulates = every > 1
        self._clip_norm = config.clip if isinstance(config.clip, ClipNorm) else None
        self._fused = fused_step_of(parts, config.clip, reducer)
        self._zero = torch.zeros((), dtype=torch.float32, device=parts.device)

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
            facts, decision = self._plan(windows)
            result, collapse = self._report(facts, decision, windows)
            if decision.skip is not True:
                result = result._replace(grad_norm=self._clip(facts, decision))
            for window in windows if not has_closure else ():
                self._step(window, facts, decision)
        self._commit(facts, decision, windows)
        if collapse is not None:
            raise collapse
        return result._replace(scale=self.scalers[0].state.scale)

    def holds_gradients(self) -> bool:
        """Whether a pass holds its gradients, scaled, for the kernels of the step to read."""
        if self._fused is None or self._accumulates:
            return False
        # A script may reduce gradients by hand, of other losses on other ranks: true ones add up.
        is_mixed = len(self.scalers) > 1 and is_multi_rank() and not self.parts.reduces
        return not is_mixed and self._fused.reads_gradients_in_place()

    def _refuse(self, windows: Sequence[Window]) -> None:
        """Refuse gradients that must not be stepped.

        Raises:
            OrderError: the last backward pass did not reduce them over the ranks; or no pass went through the engine.
        """
        for window in windows:
            window.require_reduced(
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

    # The facts, and the decision.

    def _plan(self, windows: Sequence[Window]) -> tuple[Facts, Decision]:
        """Look at the gradients, and decide. Nothing has been changed yet but scaled gradients, which are true now or stay."""
        fused = None if self._fused is None else self._fused.inputs()
        if fused is not None and (decided := self._plan_on_device(fused, windows)) is not None:
            return decided
        facts, counters = self._facts(windows, fused), self.counters.now()
        decision = decide(
            facts.found_inf,
            list(facts.losses.values()),
            norm=facts.norm,
            max_norm=None if self._clip_norm is None else self._clip_norm.max_norm,
            counters=counters,
        )
        if not facts.exist:
            decision = decision._replace(num_steps=counters[0], num_skipped=counters[1])
        if not isinstance(decision.skip, bool) and not self._skip_by_themselves(windows):
            # In the usual case the only wait of a step; near the limit of a loss scale others follow.
            decision = decision._replace(skip=bool(decision.skip))
        return facts, decision

    def _skip_by_themselves(self, windows: Sequence[Window]) -> bool:
        """Whether the optimizers' kernels can read the decision, so that the host need not know it."""
        return self.report.num_stuck == 0 and all(takes_found_inf(window.optimizer) for window in windows)

    def _plan_on_device(self, fused: StepInputs, windows: Sequence[Window]) -> tuple[Facts, Decision] | None:
        """Decide by the kernels that measure, without the host; None if the host must take part.

        It must if ranks reduce ``found_inf``, if a loss scale is close to its limit, if several losses left gradients here, or
        if the step of another engine has moved the loss scale since the pass.
        """
        if self._fused is None or not self._fused.decides or self.report.num_stuck > 0 or self.report.is_near:
            return None
        losses = loss_facts(windows, self._zero, self.scalers)
        if len(losses) != 1:
            return None
        (loss,) = losses.values()
        if not (loss.counts and loss.first is loss.state.scale):
            return None
        known = self._fused.decide(fused, loss, self.counters)
        if known is None:
            return None
        on_host = host_values(known.found_inf)
        skip = known.found_inf if on_host is None else bool(on_host[0])
        norm = None if self._clip_norm is None else known.grad_norm
        facts = Facts(known.found_inf, norm, losses, fused=fused._replace(multiplier=known.multiplier))
        return facts, Decision(skip, 1.0, [known.scale_state], known.num_steps, known.num_skipped)

    def _facts(self, windows: Sequence[Window], fused: StepInputs | None) -> Facts:
        grads: list[Tensor] = []
        if fused is not None and self._fused is not None:
            found, norm = self._fused.measure(fused)
        else:
            for window in windows:
                window.unscale()
            grads, clip = gradients_once(windows), self._clip_norm
            norm = None if clip is None else self._norm(grads, windows, clip.norm_type)
            found = self.parts.found_inf(windows) if clip is None else self._zero
        # With group= every rank counts as having gradients, so that all ranks count the same steps.
        exist = fused is not None or bool(grads) or not self.reducer.is_local
        facts = Facts(found, norm, loss_facts(windows, found, self.scalers), exist, grads, fused)
        return facts if self.reducer.is_local else self._over_ranks(facts)

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

    def _report(
        self, facts: Facts, decision: Decision, windows: Sequence[Window]
    ) -> tuple[StepResult, LossScaleCollapse | None]:
        """What the step returns, and the error that it ends with if the loss scale cannot fall any more."""
        skip, like = decision.skip, self.scalers[0].state.scale
        found = skip if isinstance(skip, Tensor) else torch.full_like(like, float(skip))
        result = StepResult(found, found, facts.norm, has_gradients=facts.exist)
        if skip is not True:
            return result, None
        collapse = None
        if self.report.is_near:
            states = list(zip(facts.losses, decision.states, strict=True))
            collapse = self.report.error_if_exhausted(states, windows)
        return result._replace(grads=self.report.nonfinite_grads(windows)), collapse

    # The optimizers.

    def _clip(self, facts: Facts, decision: Decision) -> Tensor | None:
        """Clip the gradients; returns their norm before that."""
        if facts.fused is not None:  # its kernels clip as they read
            return facts.norm
        if self._clip_norm is None:
            return self.config.clip(facts.grads)
        coef = decision.coef
        if isinstance(coef, Tensor):
            foreach.scale_(facts.grads, coef)
        elif coef != 1:  # multiplying by one changes no bit
            foreach.scale_(facts.grads, torch.scalar_tensor(coef, dtype=torch.float32, device="cpu"))
        return facts.norm

    def _step(self, window: Window, facts: Facts, decision: Decision) -> None:
        """Step and publish; on a skip call the optimizer without gradients, or with ``found_inf`` for its kernels to read."""
        optimizer, skip = window.optimizer, decision.skip
        if facts.fused is not None and self._fused is not None:
            self._fused.step(facts.fused, decision)
        elif skip is True:
            skipped = SkippedStep(window)
            try:
                optimizer.step()
            finally:
                skipped.undo_counts()
        else:
            try:
                if skip is False:
                    optimizer.step()
                else:
                    with passing_found_inf(optimizer, skip):
                        optimizer.step()
            finally:  # what a step that raises has written, too
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
        self._commit(Facts(clean, None, losses), decision._replace(skip=False), [window])
        return StepResult(clean, self.scalers[0].state.scale)

    def _clip_of_closure(self, window: Window) -> None:
        """Clip a closure's gradients, which are finite and about to be used."""
        grads, clip = window.gradients(), self._clip_norm
        if clip is None:
            self.config.clip(grads)
        else:
            foreach.clip_to_norm_(grads, self._norm(grads, [window], clip.norm_type), clip.max_norm)

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

    def _commit(self, facts: Facts, decision: Decision, windows: Sequence[Window]) -> None:
        counters = self.counters
        for scaler, state in zip(facts.losses, decision.states, strict=True):
            scaler.state = state
        counters.num_steps, counters.num_skipped = decision.num_steps, decision.num_skipped
        counters.micro_step += 1
        self.parts.stats.end_step(decision.skip, self.parts.stats_of(windows))
        for window in self.parts.windows:
            if window in windows:
                window.drop()
            else:
                window.uncount(facts.losses)
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
