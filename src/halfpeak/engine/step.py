"""Step: the order of a training step, and its one decider.

::

    agree -> found_inf and norm of the gradients -> over ranks -> decide -> clip -> step or skip -> publish masters
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
from halfpeak.core.errors import OrderError
from halfpeak.core.schedule import ScaleState
from halfpeak.core.step_result import NonfiniteGrads, StepResult
from halfpeak.core.torch_compat import host_values
from halfpeak.engine.closures import ScaledClosure
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.counters import Counters
from halfpeak.engine.nonfinite import NonfiniteReport
from halfpeak.engine.parts import Parts, gradients_once
from halfpeak.engine.scale_updates import advanced, found_of_losses
from halfpeak.engine.step_hooks import (
    Closure,
    SkippedStep,
    hand_over_found_inf,
    take_back_found_inf,
    takes_found_inf,
)
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import DecisionInputs, StepInputs
from halfpeak.ops import foreach, reference
from halfpeak.ops.foreach import are_dense
from halfpeak.ops.shards import local_gradients
from halfpeak.state.clip import ClipNorm, is_by_norm, is_rank_local, limit_of_norm
from halfpeak.state.found_inf import FoundInfReducer, found_inf_of
from halfpeak.state.loss_scaler import LossScaler, is_unit
from halfpeak.state.scaled_pass import unscale_left
from halfpeak.state.stepped_params import SteppedParams


class Measured(NamedTuple):
    """What is known of the gradients of a step before it is decided.

    Attributes:
        found_inf: 1 if a gradient, or their norm, is not finite.  # f32[]
        norm: of all gradients together; None if the clip needs none.  # f32[]
        grads: those that the optimizers read in ``.grad``.
        fused: the inputs of a fused step, which reads its gradients where they are; else None.
        exist: whether there is a gradient to step.
    """

    found_inf: Tensor
    norm: Tensor | None
    grads: Sequence[Tensor]
    fused: StepInputs | None
    exist: bool


class Decision(NamedTuple):
    """Whether to step, and everything as it will be afterwards. Nothing has been changed yet.

    Attributes:
        skip: a bool if the host knows, else ``found_inf`` for kernels that skip by themselves.  # f32[] or bool
        result: what ``step`` returns.
        scales: the loss scalers that move, with their next states.
        num_steps: steps taken, this one included.     # i32[]
        num_skipped: steps skipped, this one included. # i32[]
        fused: the inputs of a fused step, with the multiplier that unscales and clips.
    """

    skip: Tensor | bool
    result: StepResult
    scales: list[tuple[LossScaler, ScaleState]]
    num_steps: Tensor
    num_skipped: Tensor
    fused: StepInputs | None = None


class Step:
    """Ends a window of backward passes: steps or skips, all of it or nothing.

    A step that raises leaves counters and loss scales as they were, and drops the window.

    Args:
        config: of the engine.
        parts: its models, optimizers and pairs.
        reducer: reduces ``found_inf`` over ranks.

    Attributes:
        counters: of micro-steps, steps and skips.
        scalers: one per loss.
        report: names gradients that are not finite.
        used: the loss scalers of the passes since the last step, in the order of their first use.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts,
        reducer: FoundInfReducer,
    ) -> None:
        self.counters = Counters(parts.device)
        self.used: dict[LossScaler, None] = {}
        self.config, self.parts, self.reducer = config, parts, reducer
        self.scalers, self._pairs = parts.scalers, parts.pairs
        self.report = NonfiniteReport(parts)
        self._max_norm = limit_of_norm(config.clip)

    def __call__(self, stepped: Sequence[SteppedParams]) -> StepResult:
        """End a micro-step, and the window if this was its last one; see :meth:`halfpeak.Engine.step`."""
        if not self.config.accumulation.is_boundary(self.counters.micro_step):
            self.counters.micro_step += 1
            scale = self.scalers[0].state.scale
            return StepResult(torch.zeros_like(scale), scale, boundary=False)
        self._pairs.agree()
        for params in stepped:
            if not params.gradients():
                params.forget()  # user code has dropped the window
        self.refuse_unstepped(stepped)
        with self.dropping_window_on_error(stepped), disable_casts():
            decision = self._decide(stepped)
            collapse = None
            if decision.skip is True and self.report.is_near:
                collapse = self.report.error_if_exhausted(decision.scales, stepped)
            for params in stepped:
                self._call(params, decision)
        self._commit(decision, stepped)
        if collapse is not None:
            raise collapse
        return decision.result._replace(scale=self.scalers[0].state.scale)

    def refuse_unstepped(self, stepped: Sequence[SteppedParams]) -> None:
        """Refuse gradients that must not be stepped.

        Raises:
            OrderError: the last backward pass did not reduce them over the ranks; they were written while they were scaled;
                or no pass went through the engine.
        """
        self.parts.refuse_no_sync(
            stepped, ", or let the engine enter no_sync where it is due: engine.forward(wrapped)"
        )
        left = self._pairs.left
        if left is not None:
            left.require_unwritten(list(map(_GRAD, self._pairs.optimizers[0].weights)))
        elif (
            not self.used
            and (self.config.accumulation.every > 1 or not all(map(is_unit, self.scalers)))
            and any(params.gradients() and not params.losses for params in stepped)
        ):
            raise OrderError(
                "no backward pass of this step went through halfpeak, so its loss was neither scaled nor divided for "
                "accumulation; write engine.backward(loss), or for a backward pass of your own "
                "`with engine.scaled(loss) as scaled: scaled.backward()`"
            )

    # The gradients: found_inf and norm.

    def _measure(self, stepped: Sequence[SteppedParams]) -> Measured:
        fused = self._fused_inputs(stepped)
        if fused is not None:
            squares, found_inf = _fused_optimizer(stepped).measure(fused)
            if self._pairs.left is not None:
                stepped[0].note(self._pairs.left.scaler, self._pairs.left.scale, found_inf)
            if self._max_norm is None:
                return Measured(found_inf, None, (), fused, exist=True)
            if not self.reducer.is_local:
                squares = squares + self.reducer.sum_powers(torch.zeros_like(squares), 2)
            norm = squares.sqrt()
            return Measured(torch.maximum(found_inf, _nonfinite(norm)), norm, (), fused, exist=True)
        unscale_left(self._pairs, self.parts.memory)
        grads = gradients_once(stepped)
        # With group= every rank counts as having gradients, so that all ranks count the same steps.
        exist = bool(grads) or not self.reducer.is_local
        clip = self.config.clip
        if isinstance(clip, ClipNorm):
            norm = self._norm(grads, stepped, clip.norm_type)
            return Measured(_nonfinite(norm), norm, grads, None, exist)
        return Measured(found_inf_of(stepped, self.parts.device), None, grads, None, exist)

    def _fused_inputs(self, stepped: Sequence[SteppedParams]) -> StepInputs | None:
        """The inputs of a fused step that reads its gradients where they are, scaled or not; None if it cannot."""
        params = stepped[0]
        if not self.may_leave(params):
            return None
        grads = list(map(_GRAD, params.weights))
        present = [grad for grad in grads if grad is not None]
        if not present or not are_dense(present):
            return None
        left = self._pairs.left
        if left is not None and len(left.grads) != len(grads):
            return None  # those of a group added since the pass are unscaled
        inverse = torch.ones_like(self.scalers[0].state.scale) if left is None else left.scale.reciprocal()
        return StepInputs(local_gradients(grads, params.weights), params.weights, inverse)

    def may_leave(self, params: SteppedParams) -> bool:
        """Whether the step reads the gradients of ``params`` where they are, so that a pass may leave them scaled."""
        if len(self._pairs.optimizers) != 1 or not is_by_norm(self.config.clip):
            return False
        optimizer = params.optimizer
        if not isinstance(optimizer, FusedOptimizer) or not reads_grads_itself(optimizer):
            return False
        return self.reducer.is_local or not any(map(is_rank_local, params.weights))

    def _norm(self, grads: list[Tensor], stepped: Sequence[SteppedParams], norm_type: float) -> Tensor:
        """The norm of all gradients; with ``group=`` over all ranks, where shared gradients count once.  # f32[]"""
        if self.reducer.is_local:
            return foreach.global_norm(grads, norm_type)
        local_ids = {
            id(weight.grad) for params in stepped for weight in params.weights if is_rank_local(weight)
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

    # The decision.

    def _decide(self, stepped: Sequence[SteppedParams]) -> Decision:
        on_device = self._decide_on_device(stepped)
        if on_device is not None:
            return on_device
        measured = self._measure(stepped)
        found_inf, scales = self._reduced(measured, stepped)
        skip: Tensor | bool = found_inf
        if self.report.num_stuck > 0 or not all(takes_found_inf(params.optimizer) for params in stepped):
            # In the usual case the only wait of a step; near the limit of a loss scale others follow.
            skip = bool(found_inf)
        elif (known := host_values(found_inf)) is not None:
            # A bool spares work: a kernel given found_inf counts a skipped step, then takes it back per parameter.
            skip = bool(known[0])
        nonfinite = self.report.nonfinite_grads(stepped) if skip is True else None
        norm, fused = (measured.norm, measured.fused) if skip is True else self._clip(measured)
        return self._decision(found_inf, skip, norm, scales, fused, nonfinite, exist=measured.exist)

    def _decide_on_device(self, stepped: Sequence[SteppedParams]) -> Decision | None:
        """Decide where the gradients of a fused step are, without the host; None if the host must take part.

        It must if ranks reduce ``found_inf``, if a loss scale is close to its limit, if several losses left gradients here, or
        if the step of another engine has moved the loss scale since the pass.
        """
        params = stepped[0]
        if (
            len(self.used) != 1
            or not self.reducer.is_local
            or self.report.num_stuck > 0
            or self.report.is_near
        ):
            return None
        (scaler,) = self.used
        if params.losses.keys() != {scaler} or params.losses[scaler].scale is not scaler.state.scale:
            return None
        inputs = self._fused_inputs(stepped)
        if inputs is None:
            return None
        counters = self.counters
        known = _fused_optimizer(stepped).decide(
            inputs,
            DecisionInputs(
                scaler.config,
                scaler.state,
                counters.num_steps,
                counters.num_skipped,
                params.losses[scaler].found_inf,
                self._max_norm,
            ),
        )
        if known is None:
            return None
        on_host = host_values(known.found_inf)
        skip = known.found_inf if on_host is None else bool(on_host[0])
        return Decision(
            skip,
            StepResult(
                known.found_inf,
                known.scale_state.scale,
                None if self._max_norm is None else known.grad_norm,
                grads=self.report.nonfinite_grads(stepped) if skip is True else None,
            ),
            [(scaler, known.scale_state)],
            known.num_steps,
            known.num_skipped,
            inputs._replace(multiplier=known.multiplier),
        )

    def _reduced(
        self, measured: Measured, stepped: Sequence[SteppedParams]
    ) -> tuple[Tensor, list[tuple[LossScaler, ScaleState]]]:
        """``found_inf`` of the step over the ranks, and the loss scalers that move, with their next states."""
        found_inf = measured.found_inf
        for params in stepped:
            found_inf = params.with_noted(found_inf)
        own, others = found_of_losses(found_inf, stepped, self.used)
        if not self.reducer.is_local:
            # Ranks may use losses in another order, or some not at all, and must reduce the same ones.
            unused = torch.full_like(found_inf, -1)
            found_inf, *of_losses = self.reducer.all_reduce_in_step(
                torch.stack([found_inf, *(own.get(scaler, unused) for scaler in self.scalers)]),
                self.counters.num_dropped,
                measured.norm,
            ).unbind()
            own = dict(zip(self.scalers, of_losses, strict=True))
        scales = [(scaler, advanced(scaler, found, stepped, counts=True)) for scaler, found in own.items()]
        scales += [
            (scaler, advanced(scaler, found, stepped, counts=False)) for scaler, found in others.items()
        ]
        return found_inf, scales

    def _clip(self, measured: Measured) -> tuple[Tensor | None, StepInputs | None]:
        """Clip the gradients, or the multiplier of a fused step; returns their norm before that and the fused inputs."""
        clip, norm, fused = self.config.clip, measured.norm, measured.fused
        if not isinstance(clip, ClipNorm):
            return (clip(measured.grads) if fused is None else None), fused
        assert norm is not None
        if fused is not None:
            return norm, fused._replace(
                multiplier=fused.multiplier * reference.clip_coef(norm, clip.max_norm)
            )
        foreach.clip_to_norm_(measured.grads, norm, clip.max_norm)
        return norm, None

    def _decision(
        self,
        found_inf: Tensor,
        skip: Tensor | bool,
        norm: Tensor | None,
        scales: list[tuple[LossScaler, ScaleState]],
        fused: StepInputs | None,
        nonfinite: NonfiniteGrads | None,
        *,
        exist: bool,
    ) -> Decision:
        num_steps, num_skipped = self.counters.after(skip) if exist else self.counters.now()
        result = StepResult(found_inf, found_inf, norm, has_gradients=exist, grads=nonfinite)
        return Decision(skip, result, scales, num_steps, num_skipped, fused)

    # The optimizers.

    def _call(self, params: SteppedParams, decision: Decision) -> None:
        """Call ``optimizer.step()``: on a skip without gradients, or with ``found_inf`` for its kernels to read."""
        optimizer, fused, skip = params.optimizer, decision.fused, decision.skip
        skipped = None
        try:
            if isinstance(optimizer, FusedOptimizer) and fused is not None:
                optimizer.set_step_inputs(fused)
                hand_over_found_inf(optimizer, skip)
            elif isinstance(skip, Tensor):
                hand_over_found_inf(optimizer, skip)
            elif skip:
                skipped = SkippedStep(params)
            optimizer.step()
        finally:
            take_back_found_inf(optimizer)
            if isinstance(optimizer, FusedOptimizer) and fused is not None:
                optimizer.set_step_inputs(None)
            if skipped is not None:
                skipped.undo_counts()
            elif fused is not None:
                self._pairs.record_published(params)  # the kernels have written the weights
            elif skip is not True:
                self._pairs.publish(params)

    def with_closure(self, params: SteppedParams, closure: Closure) -> StepResult:
        """A step whose optimizer calls a closure, each time until its gradients are finite."""
        wrapped = ScaledClosure(
            self.parts,
            params,
            closure,
            drops=True,
            accept=lambda: self._clip_of_closure(params),
            retry=lambda: self._retry_closure(params),
        )
        with self.dropping_window_on_error([params]):
            params.optimizer.step(wrapped)
            self._pairs.publish(params)
            found_inf = torch.zeros((), dtype=torch.float32, device=self.parts.device)
            scales = [(s, advanced(s, found_inf, [params], counts=True)) for s in self.used]
            decision = self._decision(found_inf, False, None, scales, None, None, exist=True)
        self._commit(decision, [params])
        return decision.result._replace(scale=self.scalers[0].state.scale)

    def _clip_of_closure(self, params: SteppedParams) -> None:
        """Clip a closure's gradients, which are finite and about to be used."""
        grads, clip = params.gradients(), self.config.clip
        if isinstance(clip, ClipNorm):
            foreach.clip_to_norm_(grads, self._norm(grads, [params], clip.norm_type), clip.max_norm)
        else:
            clip(grads)

    def _retry_closure(self, params: SteppedParams) -> None:
        """Lower the scale before a closure runs again because its gradients were not finite.

        Raises:
            LossScaleCollapse: the scale is static, or cannot fall any further.
        """
        one = torch.ones((), dtype=torch.float32, device=self.parts.device)
        found, _ = found_of_losses(one, [params], self.used)
        for scaler, found_inf in found.items():
            # Scales without an overflow stay, because no step is taken: two that grew and fell in turn would never end.
            if bool(found_inf):
                scaler.update(found_inf)
        self.report.poll()
        self.parts.stats.end_step(True)
        used = list(found) or self.scalers
        if not any(scaler.config.dynamic for scaler in used) or any(s.read_exhausted() for s in used):
            raise self.report.error([params])
        self.used.clear()

    def _commit(self, decision: Decision, stepped: Sequence[SteppedParams]) -> None:
        for scaler, state in decision.scales:
            scaler.state = state
        counters = self.counters
        counters.num_steps, counters.num_skipped = decision.num_steps, decision.num_skipped
        counters.micro_step += 1
        self.parts.stats.end_step(decision.skip, self.parts.stats_of(stepped))
        self.used.clear()
        self._pairs.drop_gradients(stepped)
        self.report.poll()

    @contextmanager
    def dropping_window_on_error(self, stepped: Sequence[SteppedParams]) -> Generator[None]:
        """If the body raises, drop the window: counters and scales stay, and masters that were written are published."""
        try:
            yield
        except BaseException:
            self._pairs.agree()
            self.drop_window(stepped)
            raise

    def drop_window(self, stepped: Iterable[SteppedParams]) -> None:
        """Drop all gradients and begin the window again."""
        self.counters.restart_window(self.config.accumulation.every)
        self.used.clear()
        self._pairs.drop_gradients(list(stepped))


def reads_grads_itself(optimizer: FusedOptimizer) -> bool:
    """Whether the step of a fused optimizer may read gradients outside of ``.grad`` and write the weights itself.

    False if a step hook of other code, or a subclass's own ``step``, may read gradients before it or write masters after it.
    """
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
    )
    ours = (str(getattr(hook, "__module__", "")).startswith("halfpeak.engine.") for hook in hooks)
    return type(optimizer).step.__module__.startswith("halfpeak.") and all(ours)


def _fused_optimizer(stepped: Sequence[SteppedParams]) -> FusedOptimizer:
    optimizer: Optimizer = stepped[0].optimizer
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def _nonfinite(norm: Tensor) -> Tensor:
    """1 if the norm is not finite.  # f32[]"""
    known = host_values(norm)
    if known is not None:
        return torch.scalar_tensor(float(not math.isfinite(known[0])), dtype=torch.float32, device="cpu")
    return (~torch.isfinite(norm)).to(torch.float32)


_GRAD: Final = attrgetter("grad")
