"""Engine: the object that a user trains with. The order of a step is in :mod:`halfpeak.engine.step`.

Longer than 500 lines because one class is the whole public interface, and half of the lines are docstrings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.casts import OpCasts, casts_on, is_casting
from halfpeak.casting.float8 import from_float8
from halfpeak.core.errors import ConfigError, ConfigTypeError, LossIdError, OrderError
from halfpeak.core.policy import Policy
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import refuse_inference_mode, traced_inline, untraced
from halfpeak.distributed.optimizer_state import OptimizerOverParams, refuse_access_by_params
from halfpeak.distributed.ranks import check_ranks
from halfpeak.distributed.replicas import (
    is_in_no_sync,
    note_reduction,
    register_wrapper,
    synchronising,
)
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.context import EngineContext
from halfpeak.engine.deepcopy import copy_parts
from halfpeak.engine.gradients.other_grads import UnmanagedGrads
from halfpeak.engine.gradients.window import (
    Empty,
    Pending,
    Scaled,
    Unscaled,
    after_user_backward,
    refuse_scaled_beside_unscaled,
)
from halfpeak.engine.graphs.compile import CompiledFunction, CompiledStep
from halfpeak.engine.graphs.cuda_graph import CapturedFunction, capture
from halfpeak.engine.memory_report import Memory, measure
from halfpeak.engine.model_hooks import hook_forward, hook_loads, hook_no_casts, owner_of
from halfpeak.engine.nonfinite import NonfiniteReport
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.engine.state_checks import check_window
from halfpeak.engine.state_dict import (
    load_loop_state,
    load_state,
    load_window,
    optimizer_states,
    save_loop_state,
    save_state,
    save_window,
)
from halfpeak.engine.step import OnFoundInf, TrainStep
from halfpeak.engine.step_hooks import hook_steps, prepared_of
from halfpeak.engine.step_record import StepRecord
from halfpeak.state.batch_norm import BatchNormStats
from halfpeak.state.found_inf import FoundInfReducer
from halfpeak.state.loss_scaler import LossScaler
from halfpeak.state.masters import Masters

P = ParamSpec("P")
R = TypeVar("R")

Optimizers = Iterable[Optimizer] | Optimizer | None
"""One optimizer, several optimizers, or None for all optimizers of the engine."""


AfterStep = Callable[["Engine", StepResult], None]
"""Called after every step; see :meth:`Engine.set_after_step`."""


class Engine:
    """Runs mixed-precision training steps. :func:`halfpeak.prepare` makes one.

    ::

        forward    turn casts on; reduce gradients over the ranks only in the last pass of an accumulation window
        backward   divide for accumulation, scale, backward, unscale into float32
        step       clip, then step or skip, and update the loss scale

    Of these, only ``step`` waits for the device: once, to learn whether to skip. It does not wait with an optimizer
    that takes ``found_inf`` itself, such as ``torch.optim.AdamW(fused=True)``.

    Attributes:
        context: the parts of the engine.
        compiled_step: the step of the compiled function that is running or being traced, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        masters: Masters,
        casting: AbstractContextManager[Any],
        reducer: FoundInfReducer,
        device: torch.device,
        handles: Iterable[RemovableHandle],
    ) -> None:
        scalers = [LossScaler(config.scale, device) for _ in range(config.num_losses)]
        stats = BatchNormStats(models if config.restore_buffers else ())
        record = StepRecord(stats, device)
        self._unmanaged = UnmanagedGrads(models)
        self._nonfinite_report = NonfiniteReport(models, scalers, config.policy)
        train_step = TrainStep(
            config, record, scalers, reducer, self._unmanaged, self._nonfinite_report, device
        )
        prepared = [
            PreparedOptimizer(optimizer, masters, models, device, num_optimizers=len(optimizers))
            for optimizer in optimizers
        ]
        self.context = context = EngineContext(
            config=config,
            models=tuple(models),
            prepared=prepared,
            masters=masters,
            scalers=scalers,
            record=record,
            stats=stats,
            train_step=train_step,
            casting=casting,
            device=device,
            handles=list(handles),
        )
        context.handles += [handle for one in prepared for handle in hook_steps(one, train_step)]
        context.handles += [hook_forward(model, self._before_forward) for model in models]
        if len(masters):
            context.handles += [
                one.register_state_dict_pre_hook(refuse_access_by_params) for one in optimizers
            ]
        context.handles += [handle for model in models for handle in hook_loads(model, stats)]
        # Casts for recomputation in backward(). Not torch.autocast, which would cast inside derivative formulas.
        self._recasting = casting if isinstance(casting, OpCasts) else None
        # Keeps the optimizers alive: user code may hold no reference, and PreparedOptimizer holds a weak one.
        self._optimizers = () if config.stepped_by == "caller" else tuple(optimizers)
        self._is_replaying = False
        self._steps_begun = 0
        self._after_step: AfterStep | None = None
        # Since the last step: was forward() entered; if not, did a model run without the casts of O1 and O4.
        self._has_forward = self._forward_uncast = False
        self.compiled_step: CompiledStep | None = None

    # Training.

    @contextmanager
    def forward(self, wrapped: nn.Module | None = None) -> Generator[None]:
        """Context for the forward pass and the loss: casts are on, and ``wrapped`` reduces gradients once per window.

        Inside a function that :func:`torch.compile` traces, the engine does not check whether other code wrote
        batch-norm statistics since the last step. If other code does, enter the context outside of the traced function.

        Args:
            wrapped: the ``DistributedDataParallel`` or FSDP2 module around the model, if there is one. Its gradients
                stay local and scaled until the last backward pass of the accumulation window.
        """
        config = self.context.config
        if wrapped is not None and not is_dynamo_compiling():
            accumulates = config.accumulation.every > 1
            register_wrapper(wrapped, self.context.wrappers, self.context.masters, accumulates=accumulates)
        with ExitStack() as stack:
            counts = not self._is_replaying
            if counts and not is_dynamo_compiling():
                # The model's forward hook does the same, but user code may call parts of the model directly.
                self.context.before_forward()
            stack.enter_context(casts_on(self.context.casting if config.policy.per_op else None))
            synchronised = counts and (
                wrapped is None
                or (config.accumulation.is_boundary(self.micro_step) and not is_in_no_sync(wrapped))
            )
            if counts:
                self.context.synchronised = synchronised
                self._has_forward, self._forward_uncast = True, False
            if wrapped is not None:
                stack.enter_context(synchronising(wrapped, synchronised))
            yield

    @contextmanager
    def replay(self) -> Generator[None]:
        """Context for forward passes outside of training: casts are on, and the engine ignores what its models do.

        For tools that run a batch again, such as :func:`halfpeak.diagnose`. The engine undoes nothing that the body
        writes. Inside, :meth:`forward` only casts; :meth:`backward`, :meth:`scaled` and :meth:`step` raise OrderError.
        """
        before, self._is_replaying = self._is_replaying, True
        try:
            with casts_on(self.context.casting if self.context.config.policy.per_op else None):
                yield
        finally:
            self._is_replaying = before

    @traced_inline
    def backward(
        self, loss: Tensor, *, loss_id: int = 0, optimizers: Optimizers = None, **kwargs: Any
    ) -> None:
        """Scale the loss, run backward, and accumulate the unscaled gradients.

        Args:
            loss: a scalar. With accumulation it is divided by the length of its window.
            loss_id: index of the loss scaler to use.
            optimizers: whose parameters get gradients; None means all. Parameters of the engine's other optimizers keep
                the gradients they have, even if the loss depends on them.
            kwargs: passed to ``Tensor.backward``, such as ``retain_graph=True``.

        Raises:
            ConfigTypeError: the loss is not a tensor.
            ConfigError: the loss is not a scalar, and ``gradient=`` is not given.
            OrderError: at O1 and O4, the forward pass was not inside :meth:`forward`, so nothing was cast.
        """
        if is_dynamo_compiling() and self.compiled_step is not None:
            self.compiled_step.backward(loss, loss_id, optimizers, kwargs)
        else:
            self._backward(loss, loss_id, optimizers, kwargs)

    @untraced
    def _backward(self, loss: Tensor, loss_id: int, optimizers: Optimizers, kwargs: Any) -> None:
        self._refuse_in_replay("backward()")
        if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(
                f"engine.backward takes the loss, a tensor, not {short_repr(loss)}; write engine.backward(loss)"
            )
        if loss.numel() != 1 and kwargs.get("gradient") is None:
            raise ConfigError(
                f"a loss of shape {tuple(loss.shape)} is not a scalar; write engine.backward(loss.mean()), or .sum()"
            )
        if self._forward_uncast:
            self._forward_uncast = False
            raise OrderError(
                f"the forward pass ran outside engine.forward(), so no operation was cast (level "
                f"{self.config.properties.opt_level}); write `with engine.forward(): loss = ...`"
            )
        divisor = self.context.config.accumulation.divisor(self.micro_step)
        if divisor != 1:
            loss = loss / divisor
        prepared = self._prepared_of(optimizers)
        # Activation checkpointing recomputes in the backward pass, and must cast as the forward pass did.
        with (
            casts_on(self._recasting),
            self.context.train_step.backward(
                loss,
                self.scaler(loss_id),
                prepared,
                delay=self.context.delays_unscaling,
                on_found_inf=None,
                preserved=[one for one in self.context.prepared if one not in prepared],
                unreduced=self.context.unreduced(prepared),
            ) as scaled,
        ):
            scaled.backward(**kwargs)

    def scaled(
        self,
        loss: Tensor,
        *,
        optimizers: Optimizers = None,
        loss_id: int = 0,
        delay: bool = False,
        on_found_inf: OnFoundInf | None = None,
    ) -> AbstractContextManager[Tensor]:
        """Context that yields the scaled loss for a backward pass in the body, and unscales the gradients afterwards.

        For callers that run the backward pass themselves: unlike :meth:`backward`, it neither divides for accumulation
        nor casts. If the body raises, gradients and state are restored. The exception is a window whose gradients wait
        scaled: it is dropped, because autograd may have added to them.

        Args:
            loss: any shape.
            optimizers: whose parameters get gradients in the body; None means all. They may belong to other engines.
            loss_id: index of the loss scaler to use.
            delay: leave the gradients scaled for a later pass, as ``no_sync`` of ``DistributedDataParallel`` requires.
            on_found_inf: called after a pass without ``delay``, with the scaler, the ``found_inf`` of the pass, and the
                other optimizers that got gradients. None keeps ``found_inf`` for the next step.

        Raises:
            OrderError: an optimizer was not prepared by any engine.
        """
        self._refuse_in_replay("scaled()")
        prepared = self.context.prepared if optimizers is None else _prepared_anywhere(optimizers)
        return self.context.train_step.backward(
            loss,
            self.scaler(loss_id),
            prepared,
            delay=delay,
            on_found_inf=on_found_inf,
            unreduced=self.context.unreduced(prepared),
        )

    @traced_inline
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        optimizers: Optimizers = None,
        keep_gradients: bool = False,
    ) -> StepResult:
        """End a micro-step; at the end of an accumulation window clip, step or skip, and update the loss scale.

        Drops the gradients of the window afterwards. Waits for the device once, or never with an optimizer that takes
        ``found_inf``.

        Args:
            closure: for optimizers such as LBFGS. It must run ``engine.backward(loss)`` and return the loss; it needs
                no ``zero_grad()``. If gradients of the window overflowed before, the step is skipped without calling it.
            optimizers: which to step; None means all. With accumulation all must be stepped together.
            keep_gradients: keep the gradients of parameters without a master. Gradients of masters are always dropped,
                and so are all gradients if the host knows that the step was skipped.

        Raises:
            OrderError: the last backward pass was delayed (``delay=True``, ``no_sync``), so its gradients are still
                scaled; or it was ``loss.backward()``, whose gradients never reach masters.
            OrderError: ``optimizers`` leaves some out, but accumulation counts the steps of all together.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more. The model is unchanged.
        """
        if is_dynamo_compiling() and self.compiled_step is not None:
            return self.compiled_step.step(optimizers, closure=closure, keep_gradients=keep_gradients)
        return self._step(closure, optimizers, keep_gradients=keep_gradients)

    @untraced
    def _step(
        self, closure: Callable[[], Any] | None, optimizers: Optimizers, *, keep_gradients: bool
    ) -> StepResult:
        self._refuse_in_replay("step()")
        refuse_inference_mode("engine.step()")
        self._has_forward = False
        prepared, every = self._prepared_of(optimizers), self.context.config.accumulation.every
        if every > 1 and len(prepared) < len(self.context.prepared):
            raise OrderError(
                f"with accumulate={every}, all {len(self.context.prepared)} optimizers must be stepped together; write "
                "engine.step() without optimizers=, or prepare an engine for each optimizer"
            )
        compares = self._count_for_check()
        try:
            result = self.context.train_step.step(prepared, closure, keep_gradients=keep_gradients)
        except Exception:
            if compares:
                self.check_ranks()  # Ranks that did not fail compare now, and would wait for this one.
            raise
        if compares:
            self.check_ranks()
        self.report(result)
        return result

    # The open window.

    def unscale_pending(self) -> Tensor:
        """Unscale and accumulate now the gradients that a backward pass left for the step of a fused optimizer.

        With other optimizers, every backward pass does so itself. Gradients that wait for a later pass of the window
        (``delay=True``) stay scaled.

        Returns:
            1 if a gradient of the window was not finite so far.  # f32[]
        """
        for one in self.context.prepared:
            one.unscale_pending()
        return self.found_inf

    def unscale(self) -> Tensor:
        """Unscale all gradients of the window into ``.grad`` of the tensors in ``group["params"]``.

        Call it before you read or change gradients. They may still be scaled: one optimizer of :mod:`halfpeak.fused`
        reads scaled gradients in its step, and a window over float32 weights is unscaled as a whole at its end.

        Returns:
            1 if one of them is not finite.  # f32[]

        Raises:
            OrderError: the last backward pass was delayed, so its gradients wait for the next; or user code edited
                gradients while they waited scaled.
        """
        prepared = self.context.prepared
        for one in prepared:
            one.unscale_pending()
        waiting = [one.window for one in prepared if isinstance(one.window, Scaled)]
        if waiting and self.context.is_reduced(prepared) and self.config.accumulation.every > 1:
            with self.context.train_step.backward(
                torch.zeros((), dtype=torch.float32, device=self.device),
                waiting[0].scaler,
                prepared,
                delay=False,
                on_found_inf=None,
            ):
                pass
        return self.context.train_step.checked_found_infs(self.context.prepared)[0]

    def adopt_scaled_grads(self, *, loss_id: int = 0) -> None:
        """Unscale the gradients of backward passes that the caller ran itself, on losses multiplied by :attr:`scale`.

        Call it once in a window, after its last pass: autograd adds scaled gradients to whatever ``.grad`` holds.

        Args:
            loss_id: index of the loss scaler whose scale was used.

        Raises:
            OrderError: the window has unscaled gradients already, and a pass has left scaled ones.
        """
        for one in self.context.prepared:
            if isinstance(one.window, Empty):
                one.window = after_user_backward(one.window, one.table().pairs, self.scaler(loss_id))
            elif isinstance(one.window, Unscaled):
                refuse_scaled_beside_unscaled(one.window)
        with self.scaled(torch.zeros((), dtype=torch.float32, device=self.device), loss_id=loss_id):
            pass

    def abort(self, optimizers: Optimizers = None) -> None:
        """Drop the gradients and the ``found_inf`` of the open window, which begins again. Scale and step counts stay.

        Call it after catching an exception. If the optimizer had already changed parameters, the interrupted step
        counts; otherwise the iteration has not happened.
        """
        self.context.train_step.abort(self._prepared_of(optimizers))

    @property
    def is_open(self) -> bool:
        """Whether the window holds gradients for the coming step."""
        return any(one.is_open for one in self.context.prepared)

    @property
    def has_scaled_grads(self) -> bool:
        """Whether gradients of the window wait scaled for a later backward pass."""
        return any(one.has_scaled_grads for one in self.context.prepared)

    @property
    def has_gradients(self) -> bool:
        """Whether any optimizer has a gradient to step."""
        return any(isinstance(one.window, Pending) or one.main_grads() for one in self.context.prepared)

    @property
    def found_inf(self) -> Tensor:
        """1 if a gradient of the open window was not finite, among those read so far.  # f32[]"""
        return torch.stack([one.found_inf for one in self.context.prepared]).max()

    def main_params(self) -> list[Tensor]:
        """The trainable tensors whose ``grad`` the optimizers read: masters, and parameters without a master."""
        return [pair.main for one in self.context.prepared for pair in one.pairs_to_step()]

    def main_grads(self) -> list[Tensor]:
        """The unscaled gradients of :meth:`main_params` that exist, after :meth:`unscale`.

        Raises:
            OrderError: as :meth:`unscale` does.
        """
        self.unscale()
        return [grad for one in self.context.prepared for grad in one.main_grads()]

    def is_skipping(self, optimizer: Optimizer) -> bool:
        """Inside a step hook of ``optimizer``: whether the host knows that the running step is skipped."""
        running = self._prepared_of(optimizer)[0].running
        return running is not None and running.found_inf is True

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state for a bitwise resume, as plain values and live tensors; callable between any two engine calls.

        Contains models (the masters' float32 values), optimizers, loss scalers, counters, batch-norm statistics, and
        the open accumulation window. Waits for the device.

        Raises:
            OrderError: user code edited gradients while they waited scaled; or a window is open over FSDP2 shards.
        """
        self.context.record.commit()
        return save_state(self.context)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        self.context.record.commit()
        load_state(self.context, state)

    def loop_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` without models and optimizers, for a loop of another library that saves these itself."""
        self.context.record.commit()
        return save_loop_state(self.context)

    def load_loop_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`loop_state_dict` gave. A static scale stays. If the state was saved without its
        window (None), the open window here stays, too.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        self.context.record.commit()
        load_loop_state(self.context, state)

    def state_dict_optimizers(self) -> list[Optimizer]:
        """Wrappers of the optimizers, for one call of a function of :mod:`torch.distributed.checkpoint.state_dict`.

        These functions look up optimizer state by model parameter, but the groups of the optimizers may hold masters.
        The model state contains the masters' values and the optimizer state the moments. Saved together with
        :meth:`loop_state_dict` (loss scale, counters, open window), they make a resume bitwise::

            model_state, optimizer_state = get_state_dict(model, engine.state_dict_optimizers())
            set_state_dict(model, engine.state_dict_optimizers(), model_state_dict=..., optim_state_dict=...)
        """
        return [
            OptimizerOverParams(one.optimizer, state, one.table().model_params)
            for one, state in zip(self.context.prepared, optimizer_states(self.context), strict=True)
        ]

    def window_state(self) -> dict[str, Any]:
        """The open window alone: its gradients, whether they are scaled, their ``found_inf``. Waits for the device."""
        self.context.record.commit()
        return save_window(self.context)

    def check_window_state(self, state: object) -> None:
        """Check what :meth:`load_window_state` would restore.

        Raises:
            StateError: it does not fit.
        """
        check_window(self.context, state)

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`window_state` gave.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        self.context.record.commit()
        load_window(self.context, state)

    def window_buffers(self) -> list[Tensor]:
        """The batch-norm statistics that a skipped step would restore; save them with :meth:`window_state`."""
        return self.context.stats.saved()

    def load_window_buffers(self, saved: Sequence[Tensor]) -> None:
        """Restore what :meth:`window_buffers` gave; for an entry of another size the current statistics are used."""
        self.context.stats.restore_saved(saved)

    def check_ranks(self) -> None:
        """Compare counters, loss scales and weights of all ranks; every rank must call it. Waits for the device.

        Weights and masters are compared by a hash of their bits. Shards are left out. With ``group=`` all weights are
        left out, because a parameter may exist on one rank only.

        Raises:
            RankMismatchError: on every rank, if one differs from rank 0; the message says which rank, and in what.
        """
        context = self.context
        record = context.record
        tensors: dict[str, Tensor] = {}
        if context.train_step.reducer.is_local:
            pairs = [pair for one in context.prepared for pair in one.table().all_pairs]
            names = [name for one in context.prepared for name in context.names_of(one)]
            for name, (parameter, main) in zip(names, pairs, strict=True):
                tensors |= (
                    {f"{name} (master)": main, name: parameter}
                    if main is not parameter
                    else {name: parameter}
                )
        check_ranks(
            {
                "engine.micro_step": self.micro_step,
                "engine.num_steps": int(record.num_steps),
                "engine.num_skipped": int(record.num_skipped),
                "passes dropped": record.num_dropped,
                **{f"the scale of loss {i}": self.read_scale(i) for i in range(len(context.scalers))},
            },
            tensors,
        )

    def add_model(self, model: nn.Module) -> None:
        """Add a model that was not prepared: after skips restore its batch-norm statistics and name its parameters."""
        context = self.context
        if all(known is not model for known in context.models):
            context.models = (*context.models, model)
            for one in context.prepared:
                one.models = context.models
            self._nonfinite_report.add_model(model)
            self._unmanaged.add_model(model)
            context.handles += [*hook_no_casts(model, self.policy), hook_forward(model, self._before_forward)]
            if self.config.restore_buffers:
                context.stats.add_model(model)
                context.handles += hook_loads(model, context.stats)

    def set_after_step(self, after_step: AfterStep, handles: Iterable[RemovableHandle] = ()) -> None:
        """Call ``after_step`` with the engine and the result after every step, instead of an earlier ``after_step``.

        Args:
            after_step: the new function. ``on_skip`` of :func:`halfpeak.prepare` sets one, too.
            handles: of hooks on models; :meth:`remove` removes them.
        """
        self._after_step = after_step
        self.context.handles += handles

    def report(self, result: StepResult) -> None:
        """Call the function of :meth:`set_after_step`; a captured CUDA graph calls this after each of its steps."""
        if self._after_step is not None:
            self._after_step(self, result)

    def memory(self) -> Memory:
        """The bytes held now, by purpose; see :class:`halfpeak.Memory`."""
        return measure(self.context)

    def remove(self) -> None:
        """Remove every hook from models and optimizers, and put the models' own parameters back into the optimizers.

        Models keep their converted dtypes and rounded values. The extra precision of the masters is lost, and so are
        gradients that are scaled or lie on masters. Save :meth:`state_dict` first to continue with another engine.
        """
        for handle in self.context.handles:
            handle.remove()
        for one in self.context.prepared:
            one.detach()
        for model in self.models:
            from_float8(model, self.policy)
        self.context.handles.clear()

    def __dir__(self) -> Iterable[str]:
        """The public names."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __repr__(self) -> str:
        """Level, device, scales and counters. Waits for the device."""
        scales = ", ".join(f"{scaler.read_scale():g}" for scaler in self.scalers)
        return (
            f"Engine({self.config.properties.opt_level}, {self.device}, scale={scales}, "
            f"num_steps={int(self.num_steps)}, num_skipped={int(self.num_skipped)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """An independent engine over copies of models and optimizers, in the same state, open window included.

        Learning-rate schedules and step hooks of user code are not copied.
        """
        self.context.record.commit()
        parts = copy_parts(self.context, memo)
        copied = type(self)(
            self.config,
            parts.models,
            parts.optimizers,
            masters=parts.masters,
            casting=self.casting,
            reducer=self.context.train_step.reducer,
            device=self.device,
            handles=parts.handles,
        )
        copied._after_step = deepcopy(self._after_step, memo)
        parts.copy_progress(self.context, copied.context)
        return copied

    def __reduce__(self) -> NoReturn:
        raise OrderError(
            "an engine cannot be pickled, because hooks connect it to its models and optimizers; save engine.state_dict(), or "
            "write copy.deepcopy(engine)"
        )

    # Whole steps as graphs.

    def compile(self, function: Callable[P, R], **options: Any) -> CompiledFunction[P, R]:
        """Compile a training function, from the forward pass to :meth:`step`, as one graph.

        ``torch.compile`` alone breaks the graph at ``engine.backward`` and ``engine.step``. Here one graph contains
        loss, scaled backward pass, and operators that run the engine's part in Python. Skips and changes of optimizers,
        hyper-parameters, schedules, scale or clip need no new trace. Tensors that the function returns are detached.

        Gradients go to the parameters that the optimizers step, and are dropped after the step. Inside the function
        nothing else may write weights. Batch-norm statistics are restored after a skip as usual.

        Args:
            function: calls :meth:`forward`, :meth:`backward` and :meth:`step`, any number of times.
            options: of ``torch.compile``; ``fullgraph`` is True by default.

        Raises:
            ConfigError: this torch cannot trace a backward pass, or there are several ranks. The message says what to write.

        Example:
            >>> import torch, halfpeak
            >>> model = torch.nn.Linear(4, 2)
            >>> engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O4")
            >>> def train_step(model, engine, x):
            ...     with engine.forward():
            ...         loss = model(x).float().square().mean()
            ...     engine.backward(loss)
            ...     return loss, engine.step()
            >>> train = engine.compile(train_step, backend="aot_eager")
            >>> loss, result = train(model, engine, torch.ones(3, 4))
            >>> result.stepped()
            True
        """
        return CompiledFunction(self, function, options)

    def capture(self, loss_function: Callable[..., Tensor], *inputs: Tensor) -> CapturedFunction:
        """Capture forward, backward and step as one CUDA graph: a training step is then one launch.

        The engine must be on a CUDA device, with one optimizer of :mod:`halfpeak.fused`, one loss, no accumulation, and
        a clip by the 2-norm or none. Three warm-up iterations run first. When this returns, model, optimizer, loss
        scale, batch-norm statistics and random generators are as before. The model and the loss function must do the
        same work in every step; see ``torch.cuda.graph``.

        Args:
            loss_function: computes the loss from the inputs.
            inputs: examples, with the shapes and dtypes of all later inputs.

        Returns:
            A function of inputs that trains one step and returns the loss and its :class:`~halfpeak.StepResult`.

        Raises:
            ConfigError: a graph cannot hold this engine's configuration. The message says what to write.
            OrderError: a window is open.
        """
        # Warm-up iterations change nothing and are not reported.
        after_step, self._after_step = self._after_step, None
        try:
            return capture(self, loss_function, inputs)
        finally:
            self._after_step = after_step

    # Read-only access; only read_scale waits for the device.

    @property
    def config(self) -> EngineConfig:
        """The configuration."""
        return self.context.config

    @property
    def policy(self) -> Policy:
        """In which dtype each thing is stored, computed and returned."""
        return self.config.policy

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The prepared models."""
        return self.context.models

    @property
    def model(self) -> nn.Module:
        """The model, where there is exactly one.

        Raises:
            OrderError: there are several; use :attr:`models`.
        """
        if len(self.models) != 1:
            raise OrderError(f"this engine has {len(self.models)} models; write engine.models[i]")
        return self.models[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return self.context.optimizers

    @property
    def masters(self) -> Masters:
        """The float32 copies that the optimizers step."""
        return self.context.masters

    @property
    def casting(self) -> AbstractContextManager[Any]:
        """The re-entrant scope in which operations are cast (O1, O4); at other levels a null context."""
        return self.context.casting

    @property
    def scalers(self) -> list[LossScaler]:
        """One loss scaler per loss."""
        return self.context.scalers

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler with index ``loss_id``; negative indices count from the end.

        Raises:
            LossIdError: there is no such scaler.
        """
        scalers = self.context.scalers
        if not -len(scalers) <= loss_id < len(scalers):
            raise LossIdError(
                f"loss_id={short_repr(loss_id)} with num_losses={len(scalers)}; write a loss_id below num_losses, or "
                f"prepare with num_losses={loss_id + 1 if loss_id >= 0 else -loss_id}"
            )
        return scalers[loss_id]

    @property
    def device(self) -> torch.device:
        """The device of the scalars of a step, such as ``found_inf`` and the loss scale."""
        return self.context.device

    @property
    def micro_step(self) -> int:
        """Completed calls of :meth:`step`, counted since the beginning of the run."""
        return self.context.record.micro_step

    @property
    def num_steps(self) -> Tensor:
        """Steps in which the optimizers moved.  # i32[]"""
        return self.context.record.num_steps

    @property
    def num_skipped(self) -> Tensor:
        """Steps that were skipped because a gradient was not finite.  # i32[]"""
        return self.context.record.num_skipped

    @property
    def scale(self) -> Tensor:
        """The scale of loss 0.  # f32[]"""
        return self.scalers[0].state.scale

    def read_scale(self, loss_id: int = 0) -> float:
        """The loss scale as a number. Waits for the device."""
        return self.scalers[loss_id].read_scale()

    if not TYPE_CHECKING:  # A type checker reports the names of earlier releases.

        def __getattr__(self, name: str) -> Any:
            """Look up the present name of an attribute that was renamed."""
            if name not in _RENAMED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            present = _RENAMED[name]
            warnings.warn(f"engine.{name} is called engine.{present}", DeprecationWarning, stacklevel=2)
            return getattr(self, present)

    def _before_forward(self, model: nn.Module) -> None:
        """Before the forward pass of a model: let the engine catch up, and note whether casts are missing."""
        if not self._is_replaying:
            self.context.before_forward()
            context = self.context
            note_reduction(model, context.reduces, context.wrappers, context.masters)
            if not self._has_forward and self.config.policy.per_op and torch.is_grad_enabled():
                self._forward_uncast = not is_casting(self.device.type)

    def _count_for_check(self) -> bool:
        """Count a new step; return whether to compare ranks after it. Failed steps count: every rank began them."""
        every = self.context.config.check_ranks
        if every is None or not self.context.config.accumulation.is_boundary(self.micro_step):
            return False
        self._steps_begun += 1
        return self._steps_begun % every == 0

    def _refuse_in_replay(self, call: str) -> None:
        if self._is_replaying:
            raise OrderError(
                f"engine.{call} was called inside engine.replay(), which only runs forward passes; return the loss and "
                "remove this call"
            )

    def _prepared_of(self, optimizers: Optimizers) -> list[PreparedOptimizer]:
        """The :class:`PreparedOptimizer` of each given optimizer, each once, in their order; None means all.

        Raises:
            OrderError: an optimizer was not prepared by this engine, or the engine has no optimizer.
        """
        prepared = self.context.prepared
        if optimizers is None:
            if not prepared:
                raise OrderError(
                    "this engine was prepared without an optimizer; pass one to halfpeak.prepare"
                )
            return prepared
        wanted = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        known = {id(one.optimizer): one for one in prepared}
        for optimizer in wanted:
            if id(optimizer) not in known:
                raise OrderError(
                    f"{type(optimizer).__name__} was not prepared by this engine; pass it to halfpeak.prepare"
                )
        return list({id(optimizer): known[id(optimizer)] for optimizer in wanted}.values())


_RENAMED: Final = {
    "plan": "config",
    "index": "micro_step",
    "taken": "num_steps",
    "skipped": "num_skipped",
    "has_open_window": "is_open",
}
"""The present names of attributes, by their names in earlier releases."""


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that prepared a model, or None."""
    owner = owner_of(model)
    return owner if isinstance(owner, Engine) else None


def _prepared_anywhere(optimizers: Iterable[Optimizer] | Optimizer) -> list[PreparedOptimizer]:
    found: list[PreparedOptimizer] = []
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        prepared = prepared_of(optimizer)
        if prepared is None:
            raise OrderError(f"{type(optimizer).__name__} was not prepared; pass it to halfpeak.prepare")
        found.append(prepared)
    return found
