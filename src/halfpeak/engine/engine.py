"""Engine: the object that a user trains with. The order of a pass is in :mod:`halfpeak.parts.scaled_pass`, that of a step in
:mod:`halfpeak.engine.step`.

Longer than 500 lines because a user finds here everything that an engine does, and little else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from halfpeak.casting.casts import casts_on, is_casting
from halfpeak.casting.dtype_errors import explain
from halfpeak.core.errors import ClosureError, ConfigError, ConfigTypeError, OrderError
from halfpeak.core.policy import Policy
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import refuse_inference_mode, traced_inline, untraced
from halfpeak.distributed.optimizer_state import OptimizerOverParams
from halfpeak.distributed.ranks import check_ranks
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.cuda_graph import CapturedFunction, CapturedStep, capture, withhold
from halfpeak.engine.memory_report import Memory, measure
from halfpeak.engine.state_dict import (
    load_loop_state,
    load_state,
    optimizer_states,
    save_loop_state,
    save_state,
)
from halfpeak.engine.step import Step
from halfpeak.parts.checks import DataWrites, LoopCalls
from halfpeak.parts.clip import is_rank_local
from halfpeak.parts.found_inf import FoundInfReducer
from halfpeak.parts.loss_scaler import LossScaler, scaler_of
from halfpeak.parts.model_hooks import hook_forward, owner_of, refuse_engine_state
from halfpeak.parts.pairs import Pairs
from halfpeak.parts.parts import Parts
from halfpeak.parts.replicas import is_in_no_sync, needs_first_reduction, synchronising
from halfpeak.parts.scaled_pass import ScaledPass, refuse_in_pass
from halfpeak.parts.step_hooks import is_hooked, refuse_steps
from halfpeak.parts.validation import check_float32_weights
from halfpeak.parts.window import Window

Optimizers = Iterable[Optimizer] | Optimizer | None
"""One optimizer, several optimizers, or None for all optimizers of the engine."""

AfterStep = Callable[["Engine", StepResult], None]
"""Called after every step of an engine, with its result."""


class Engine:
    """Runs mixed-precision training steps. :func:`halfpeak.prepare` makes one.

    ::

        forward    turn casts on; reduce gradients over the ranks only in the last pass of an accumulation window
        backward   divide for accumulation, scale, backward, unscale into float32
        step       clip, then step or skip, and update the loss scale

    Of these, only ``step`` waits for the device: once, to learn whether to skip. It does not wait with an optimizer
    that takes ``found_inf`` itself, such as ``torch.optim.AdamW(fused=True)``.

    Attributes:
        config: the configuration.
        parts: the prepared models and optimizers.
        train_step: the order of a step, with the counters.
    """

    def __init__(self, config: EngineConfig, parts: Parts, *, reducer: FoundInfReducer) -> None:
        self.config, self.parts = config, parts
        parts.scalers = [LossScaler(config.scale, parts.device) for _ in range(config.num_losses)]
        self.train_step = Step(config, parts, reducer)
        # Keeps the optimizers alive: user code may hold no reference, and pairs hold a weak one.
        self._optimizers = parts.optimizers
        self._after_step: list[AfterStep] = []
        self._data_writes = DataWrites(parts.pairs)
        self._calls = LoopCalls(config.accumulation.every, config.num_losses)
        self._steps_begun = 0
        # Since the last step: was forward() entered to train; if not, did a model run without the casts of O1 and O4.
        self._has_forward = self._forward_uncast = False
        parts.handles += [
            handle for window in parts.windows for handle in refuse_steps(window, self._refuse_step)
        ]
        parts.handles += [hook_forward(model, self._before_forward) for model in parts.models]
        parts.handles += map(refuse_engine_state, parts.models)

    # Training.

    @contextmanager
    def forward(self, wrapped: nn.Module | None = None) -> Generator[None]:
        """Context for the forward pass and the loss: casts are on, and ``wrapped`` reduces gradients once per window.

        Args:
            wrapped: the ``DistributedDataParallel`` or FSDP2 module around the model, if there is one. Its gradients
                stay local until the last backward pass of the accumulation window.
        """
        config, parts = self.config, self.parts
        counts = not parts.is_replaying and not is_dynamo_compiling()
        with ExitStack() as stack:
            if counts:
                if torch.is_grad_enabled():  # an evaluation says nothing of the coming backward pass
                    self._has_forward, self._forward_uncast = True, False
                # The model's forward hooks do the same, but user code may call parts of the model directly.
                parts.agree_for_forward()
            if wrapped is not None and counts:
                parts.register_wrapper(wrapped)
                reduces = config.accumulation.is_boundary(self.micro_step) or needs_first_reduction(wrapped)
                reduces = reduces and not is_in_no_sync(wrapped)
                parts.reduces = dict.fromkeys(parts.models, reduces)
                stack.enter_context(synchronising(wrapped, reduces))
            stack.enter_context(casts_on(parts.casting))
            try:
                yield
            except Exception as error:
                if counts:
                    explain(error, parts.models, config.policy)
                raise

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
        self._backward(loss, loss_id, optimizers, kwargs)

    @untraced
    def _backward(self, loss: Tensor, loss_id: int, optimizers: Optimizers, kwargs: Any) -> None:
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
        divisor = self.config.accumulation.divisor(self.micro_step)
        loss = loss if divisor == 1 else loss / divisor
        try:
            with self.scaled(loss, loss_id=loss_id, optimizers=optimizers) as scaled:
                scaled.backward(**kwargs)
        except Exception as error:
            explain(error, self.parts.models, self.config.policy)
            raise

    @contextmanager
    def scaled(self, loss: Tensor, *, loss_id: int = 0, optimizers: Optimizers = None) -> Generator[Tensor]:
        """Context that yields the scaled loss for a backward pass in the body, and unscales the gradients afterwards.

        For callers that run the backward pass themselves: unlike :meth:`backward`, it does not divide for accumulation. If
        the body raises, gradients and state are as before it; under FSDP2 the window begins again.

        Args:
            loss: any shape.
            loss_id: index of the loss scaler to use.
            optimizers: whose parameters get gradients in the body; see :meth:`backward`.
        """
        self._refuse_in_replay("backward()")
        parts, scaler, chosen = self.parts, self.scaler(loss_id), self._windows_of(optimizers)
        one = ScaledPass(
            parts,
            loss,
            scaler,
            keep=[window for window in parts.windows if window not in chosen],
            holds=self.train_step.holds_gradients(),
            notes_nonfinite_loss=self.train_step.reducer.reaches_all_ranks,
        )
        # FSDP2 has the gradients of a window's earlier passes where nothing else finds them.
        is_first = not (parts.has_shards or parts.has_gradients())
        # Activation checkpointing recomputes in the backward pass, and must cast as the forward pass did.
        with casts_on(parts.op_casts), one:
            try:
                yield one.loss
            except BaseException:
                self.train_step.counters.num_dropped += 1
                raise
        self._calls.end_pass(was_first=is_first)

    @traced_inline
    def step(self, closure: Callable[[], Any] | None = None, *, optimizers: Optimizers = None) -> StepResult:
        """End a micro-step; at the end of an accumulation window clip, step or skip, and update the loss scale.

        Drops the gradients of the window afterwards. Waits for the device once, or never with an optimizer that takes
        ``found_inf``.

        Args:
            closure: for optimizers such as LBFGS. It must run ``engine.backward(loss)`` and return the loss; it needs
                no ``zero_grad()``. If gradients of the window overflowed before, the step is skipped without calling it.
            optimizers: which to step; None means all. With accumulation all must be stepped together.

        Raises:
            OrderError: the last backward pass ran under ``no_sync``; or no backward pass went through the engine; or
                ``optimizers`` leaves some out, but accumulation counts the steps of all together.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more. The model is unchanged.
        """
        return self._step(closure, optimizers)

    @untraced
    def _step(self, closure: Callable[[], Any] | None, optimizers: Optimizers) -> StepResult:
        self._refuse_in_replay("step()")
        refuse_inference_mode("engine.step()")
        self._has_forward = False
        windows, every = self._windows_of(optimizers), self.config.accumulation.every
        if not windows:
            raise OrderError("this engine was prepared without an optimizer; pass one to halfpeak.prepare")
        if every > 1 and len(windows) < len(self.parts.windows):
            raise OrderError(
                f"with accumulate={every}, all {len(self.parts.windows)} optimizers must be stepped together; write "
                "engine.step() without optimizers=, or prepare an engine for each optimizer"
            )
        self._calls.begin_step()
        compares = self._count_for_check()
        self.parts.is_stepping = True
        try:
            if self._data_writes.is_due():
                self._check_dtypes()
            self._data_writes.compare()
            result = self.train_step(windows) if closure is None else self._step_with(closure, windows)
            self._data_writes.sample()
        except Exception:
            if compares:
                self.check_ranks()  # Ranks that did not fail compare now, and would wait for this one.
            self._check_dtypes()  # or torch's error says that two dtypes differ
            raise
        finally:
            self.parts.is_stepping = False
        if compares:
            self.check_ranks()
        self._calls.end_step(result, self._optimizers)
        self.tell(result)
        return result

    def _step_with(self, closure: Callable[[], Any], windows: list[Window]) -> StepResult:
        every = self.config.accumulation.every
        if every != 1 or len(windows) != 1:
            raise ClosureError(
                f"engine.step(closure) needs accumulate=1 and one optimizer; here accumulate={every} and there are "
                f"{len(windows)} optimizers"
            )
        self.parts.agree()
        self.parts.unscale()
        found_inf = self.parts.found_inf(windows)
        self.train_step.reducer.all_reduce_(found_inf)
        if bool(found_inf):
            return self.train_step(windows, has_closure=True)
        return self.train_step.with_closure(windows[0], closure)

    # The open window.

    def unscale(self) -> Tensor:
        """Unscale all gradients of the window. Call it before you read or change gradients.

        Only an optimizer of :mod:`halfpeak.fused` that clips in its own step has scaled ones between backward and step.

        Returns:
            1 if one of them is not finite.  # f32[]

        Raises:
            OrderError: gradients were changed while they were scaled.
        """
        self.parts.agree(to_weights=False)
        self.parts.unscale()
        return self.parts.found_inf()

    def abort(self, optimizers: Optimizers = None) -> None:
        """Drop the gradients of the open window, which begins again. Scale and step counts stay.

        Call it after catching an exception.
        """
        self.parts.pairs.agree()
        if optimizers is None:
            self.parts.abort()
        else:
            self.train_step.drop_window(self._windows_of(optimizers))

    @property
    def is_open(self) -> bool:
        """Whether there are gradients for the coming step."""
        return self.parts.has_gradients()

    def main_params(self) -> list[Tensor]:
        """The trainable tensors that the optimizers step: masters, and parameters without one."""
        mains = (main for window in self.parts.windows for main in window.mains)
        return [main for main in mains if main.requires_grad]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state for a bitwise resume, as plain values and live tensors; callable between any two engine calls.

        Contains models (the masters' float32 values), optimizers, loss scalers, counters, batch-norm statistics, and
        the open accumulation window. Waits for the device.

        Raises:
            OrderError: gradients were changed while they were scaled; or those of an open window are not reduced over the
                ranks, or lie in buffers of FSDP2.
        """
        return save_state(self.train_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        load_state(self.train_step, state)

    def loop_state_dict(self, *, window: bool = True) -> dict[str, Any]:
        """:meth:`state_dict` without models and optimizers, for a loop of another library that saves these itself.

        Args:
            window: False leaves the open accumulation window out.
        """
        return save_loop_state(self.train_step, window=window)

    def load_loop_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`loop_state_dict` gave. A static scale stays. If the state was saved without its
        window (None), the open window here stays, too.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        load_loop_state(self.train_step, state)

    def state_dict_optimizers(self) -> list[Optimizer]:
        """Wrappers of the optimizers, for one call of a function of :mod:`torch.distributed.checkpoint.state_dict`.

        These functions look up optimizer state by model parameter, but the groups of the optimizers may hold masters.
        The model state contains the masters' values and the optimizer state the moments. Saved together with
        :meth:`loop_state_dict` (loss scale, counters, open window), they make a resume bitwise::

            model_state, optimizer_state = get_state_dict(model, engine.state_dict_optimizers())
            set_state_dict(model, engine.state_dict_optimizers(), model_state_dict=..., optim_state_dict=...)
        """
        self.parts.agree()
        return [
            OptimizerOverParams(window.optimizer, state, window.weights)
            for window, state in zip(self.parts.windows, optimizer_states(self.optimizers), strict=True)
        ]

    def check_ranks(self) -> None:
        """Compare counters, loss scales and weights of all ranks, as ``check_ranks=`` of :func:`halfpeak.prepare` does.

        Every rank must call it. Waits for the device. Shards are left out, and parameters that only one rank has:
        ``parameter.allreduce = False``.

        Raises:
            RankMismatchError: on every rank, if one differs from rank 0; the message says which rank, and in what.
        """
        tensors: dict[str, Tensor] = {}
        for window in self.parts.windows:
            for name, weight, main in zip(
                self.parts.names_of(window), window.weights, window.mains, strict=True
            ):
                if not is_rank_local(weight):
                    tensors |= {name: weight} if weight is main else {f"{name} (master)": main, name: weight}
        check_ranks(
            {
                "engine.micro_step": self.micro_step,
                "engine.num_steps": int(self.num_steps),
                "engine.num_skipped": int(self.num_skipped),
                "passes or windows dropped": self.train_step.counters.num_dropped,
                **{f"the scale of loss {i}": self.read_scale(i) for i in range(len(self.scalers))},
            },
            tensors,
        )

    def memory(self) -> Memory:
        """The bytes held now, by purpose; see :class:`halfpeak.Memory`."""
        return measure(self.train_step)

    def remove(self) -> None:
        """Remove every hook from models and optimizers, and put the models' own parameters back into the optimizers.

        Models keep their converted dtypes and rounded values. The extra precision of the masters is lost. Save
        :meth:`state_dict` first to continue with another engine.
        """
        self.parts.remove()

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
            OrderError: a window is open; or an earlier loss is still referenced: ``del loss``.
        """

        def iterate(places: Sequence[Tensor], withheld: bool) -> CapturedStep:
            with self.forward():
                loss = loss_function(*places)
            self.backward(loss)
            if withheld:
                withhold(self.train_step)
            return CapturedStep(loss.detach(), self.step())

        # Warm-up iterations change nothing and are not reported.
        told, self._after_step = self._after_step, []
        try:
            return capture(self.train_step, iterate, inputs, self.tell)
        finally:
            self._after_step = told

    # For tools.

    def call_after_step(self, after_step: AfterStep) -> None:
        """Call a function with the engine and the result after every step."""
        self._after_step.append(after_step)

    def tell(self, result: StepResult) -> None:
        """Call the functions of :meth:`call_after_step`."""
        for after_step in self._after_step:
            after_step(self, result)

    # Read-only access; only read_scale waits for the device.

    @property
    def pairs(self) -> Pairs:
        """Weights and their float32 masters."""
        return self.parts.pairs

    @property
    def policy(self) -> Policy:
        """In which dtype each thing is stored, computed and returned."""
        return self.config.policy

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The prepared models."""
        return self.parts.models

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
        return list(self._optimizers)

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler with index ``loss_id``; negative indices count from the end.

        Raises:
            LossIdError: there is no such scaler.
        """
        return scaler_of(self.scalers, loss_id, "halfpeak.prepare")

    @property
    def scalers(self) -> list[LossScaler]:
        """One loss scaler per loss."""
        return self.parts.scalers

    @property
    def device(self) -> torch.device:
        """The device of the scalars of a step, such as ``found_inf`` and the loss scale."""
        return self.parts.device

    @property
    def micro_step(self) -> int:
        """Completed calls of :meth:`step`, counted since the beginning of the run."""
        return self.train_step.counters.micro_step

    @property
    def num_steps(self) -> Tensor:
        """Steps in which the optimizers moved.  # i32[]"""
        return self.train_step.counters.num_steps

    @property
    def num_skipped(self) -> Tensor:
        """Steps that were skipped because a gradient was not finite.  # i32[]"""
        return self.train_step.counters.num_skipped

    @property
    def scale(self) -> Tensor:
        """The scale of loss 0.  # f32[]"""
        return self.scalers[0].state.scale

    def read_scale(self, loss_id: int = 0) -> float:
        """The loss scale as a number. Waits for the device."""
        return self.scalers[loss_id].read_scale()

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

    if not TYPE_CHECKING:  # for which an engine cannot be unpacked
        # Unpacking calls it; with __iter__ an engine would be an Iterable, and be taken for a list of models.
        def __getitem__(self, index: int) -> NoReturn:
            raise ConfigTypeError(
                "halfpeak.prepare returns one object, and changes model and optimizer in place; write "
                "`engine = halfpeak.prepare(model, optimizer, ...)`"
            )

    def __reduce__(self) -> NoReturn:
        raise OrderError(
            "an engine can be neither copied nor pickled, because hooks connect it to its models and optimizers; build a "
            "second model, optimizer and engine, and write second.load_state_dict(engine.state_dict())"
        )

    # The hooks of models and optimizers.

    def _before_forward(self, model: nn.Module) -> None:
        self.parts.before_forward(model)
        is_training = torch.is_grad_enabled() and not self.parts.is_replaying
        if is_training and self.config.policy.per_op and not self._has_forward:
            self._forward_uncast = not is_casting(self.device.type)

    def _refuse_step(self, window: Window, has_closure: bool) -> None:
        """Refuse an ``optimizer.step()`` of user code that would step gradients past the engine."""
        if self.parts.is_stepping:
            return
        # torch's get_state_dict takes a step at a learning rate of 0 to create moments, and an error would leave that rate.
        rates = [group.get("lr") for group in window.optimizer.param_groups]
        if not has_closure and all(isinstance(rate, (int, float, Tensor)) and not rate for rate in rates):
            return
        refuse_in_pass("optimizer.step()")
        self.parts.agree()  # user code may have dropped the gradients on the model's side
        if has_closure or not window.is_empty():
            raise OrderError(
                "optimizer.step() was called on an optimizer that an engine steps, so nothing would look for overflows or move "
                "the loss scale; write engine.step(), or engine.step(closure) for an optimizer with a closure (LBFGS, SAM)"
            )

    def _check_dtypes(self) -> None:
        """Refuse weights that ``model.half()`` has made low after ``prepare``, at a level that makes no masters of them."""
        if not self.config.policy.may_step_low:
            check_float32_weights(self.models, self._optimizers)

    def _count_for_check(self) -> bool:
        """Count a new step; return whether to compare ranks after it. Failed steps count: every rank began them."""
        every = self.config.check_ranks
        if every is None or not self.config.accumulation.is_boundary(self.micro_step):
            return False
        self._steps_begun += 1
        return self._steps_begun % every == 0

    def _refuse_in_replay(self, call: str) -> None:
        if self.parts.is_replaying:
            raise OrderError(
                f"engine.{call} was called inside the closure of halfpeak.diagnose, which only computes the loss; return "
                "the loss and remove this call"
            )

    def _windows_of(self, optimizers: Optimizers) -> list[Window]:
        """The window of each given optimizer, each once; None means all.

        Raises:
            OrderError: an optimizer was not prepared by this engine.
        """
        if optimizers is None:
            return self.parts.windows
        wanted = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        return list(dict.fromkeys(map(self.parts.window_of, wanted)))


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that prepared a model, or None."""
    owner = owner_of(model)
    return owner if isinstance(owner, Engine) else None


def is_prepared(optimizer: Optimizer) -> bool:
    """Whether an optimizer was prepared."""
    return is_hooked(optimizer)
