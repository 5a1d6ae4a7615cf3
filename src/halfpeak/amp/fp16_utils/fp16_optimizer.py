"""``apex.fp16_utils.FP16_Optimizer`` as of apex 25.04: an optimizer with float32 masters and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.amp.delegation import delegated
from halfpeak.amp.fp16_utils.loss_scaler import dynamic_config
from halfpeak.amp.master_groups import MasterGroups
from halfpeak.amp.scaler import LossScaler, lower_scales
from halfpeak.core.errors import ConfigError, LossScaleCollapse, OrderError
from halfpeak.core.messages import overflow_line
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import SCALER_STATE, ScaleConfig, require_scale
from halfpeak.core.state_checks import NotRequired, Schema, copied, require
from halfpeak.engine.state_checks import check_optimizer
from halfpeak.ops import foreach
from halfpeak.parts import loss_scaler
from halfpeak.parts.build import build
from halfpeak.parts.clip import ClipNorm
from halfpeak.parts.closures import ScaledClosure
from halfpeak.parts.nonfinite import NonfiniteReport
from halfpeak.parts.remainder_store import remainder_store_of
from halfpeak.parts.scaled_pass import ScaledPass
from halfpeak.parts.step_hooks import Closure, hook_steps
from halfpeak.parts.window import Window


class FP16_Optimizer(MasterGroups):
    """Steps float32 masters of the low-precision (float16 or bfloat16) parameters of an optimizer, and scales the loss.

    ::

        backward    the pass: unscaled float32 gradients are added to those of model and masters, which share them. Then the
                    scale moves
        step        the masters, and round them into the model; or skip, if a gradient is not finite. Gradients stay
        zero_grad   zero or drop them, and forget what the passes have found

    Args:
        init_optimizer: its groups hold the masters afterwards.
        static_loss_scale: the scale, unless ``dynamic_loss_scale``.
        dynamic_loss_scale: start at 2**16, double after 2000 steps without overflow, halve on overflow.
        dynamic_loss_args: other values for a dynamic scale: ``init_scale``, ``scale_factor``, ``scale_window``,
            ``min_loss_scale``, ``max_loss_scale``.
        verbose: print a line for each skipped step.

    Raises:
        ConfigError: a scale is out of range, ``dynamic_loss_args`` has an unknown key, or the optimizer has no masters.

    Example:
        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=128.0)
        >>> optimizer.backward(model(torch.ones(3, 4).half()).float().square().mean())
        >>> norm = optimizer.clip_master_grads(1.0)
        >>> optimizer.step()
        >>> optimizer.overflow
        False
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        scale = (
            dynamic_config(dynamic_loss_args or {})
            if dynamic_loss_scale
            else ScaleConfig.static(require_scale("static_loss_scale", static_loss_scale))
        )
        if remainder_store_of(init_optimizer) is not None:
            raise ConfigError(
                f"{type(init_optimizer).__name__} stores remainders instead of the float32 masters that FP16_Optimizer "
                "steps; use halfpeak.prepare, or make the optimizer without master="
            )
        self._parts = build(Policy(masters=True), [], [init_optimizer], looks_at_each_pass=True)
        self._parts.scalers = [loss_scaler.LossScaler(scale, self._parts.device)]
        self.loss_scaler = LossScaler(self._parts.scalers[0])
        """The loss scaler, under the names of ``apex.amp.scaler``."""
        super().__init__(init_optimizer, self._parts.pairs)
        (self._window,) = self._parts.windows
        self._parts.handles += hook_steps(self._window, self)
        self._last_overflow = False
        self.verbose = verbose

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Scale the loss, run backward, add the unscaled gradients to those from before, and move the scale.

        Args:
            loss: a scalar.
            update_master_grads: False leaves the scale to :meth:`update_master_grads`. Gradients are unscaled at once.
            retain_graph: as in ``Tensor.backward``.
        """
        with ScaledPass(self._parts, loss, self.loss_scaler.part) as scaled_pass:
            scaled_pass.loss.backward(retain_graph=retain_graph)
        self._move_scale(scaled_pass.learned.values(), delay=not update_master_grads)

    def update_master_grads(self) -> None:
        """Unscale what ``(loss * optimizer.loss_scale).backward()`` has left, and move the scale.

        After :meth:`backward` there is nothing left to unscale.
        """
        learned = {}
        if not self._window.losses:
            part, scale = self.loss_scaler.part, self.loss_scaler.part.state.scale
            self._window.hold({part: scale}, scale, reduced=True)
            learned = self._window.unscale()
        self._move_scale([learned], delay=False)

    def _move_scale(self, learned: Iterable[Mapping[loss_scaler.LossScaler, Tensor]], *, delay: bool) -> None:
        """Move the scale by what a pass has found, in the gradients of every optimizer that it has reached."""
        scaler, found = self.loss_scaler, torch.zeros_like(self.loss_scaler.found_inf)
        for by_loss in learned:
            found = torch.maximum(found, by_loss.get(scaler.part, found).to(found.device))
        scaler.take(found, delay=delay)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model, or skip. Gradients stay until :meth:`zero_grad`.

        Args:
            closure: computes the loss, calls :meth:`backward` on it and returns it. While gradients overflow, the scale
                falls and the closure is called again.

        Returns:
            What the optimizer returns: with a closure, its first loss without an overflow; None if the step is skipped.

        Raises:
            OrderError: a backward pass of the caller's own has left its gradients scaled.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more.
        """
        self._parts.agree(to_weights=False)
        window, result = self._window, None
        if closure is None and not (window.losses or window.is_closed or self._is_zero()):
            raise OrderError(
                "no backward pass of this step went through the optimizer, so its gradients are still scaled; write "
                "optimizer.backward(loss), or optimizer.update_master_grads() before step()"
            )
        self._last_overflow = closure is None and self.overflow  # waits for the device
        if closure is not None:
            wrapped = ScaledClosure(
                self._parts, window, closure, drops=False, accept=lambda: None, retry=self._retry_closure
            )
            wrapped.replace_overflow()
            result = self.optimizer.step(wrapped)
        elif self._last_overflow:
            if self.loss_scaler.part.read_exhausted():
                self._end(NonfiniteReport(self._parts).error([window]))
            if self.verbose:
                print(overflow_line(0, self.loss_scale, dynamic=self.dynamic_loss_scale))
        else:
            result = self.optimizer.step()
        window.agree()
        window.close()
        return result

    def _retry_closure(self) -> None:
        """A closure's gradients were not finite, and it runs again: its pass has lowered the scale.

        Raises:
            LossScaleCollapse: the scale is static, or cannot fall any further.
        """
        collapse = lower_scales(self._parts, self._window, [self.loss_scaler])
        if collapse is not None:
            self._end(collapse)

    def _end(self, error: LossScaleCollapse) -> NoReturn:
        self.zero_grad(set_grads_to_None=True)
        raise error

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero or drop the gradients of model and masters, and forget what the passes have found.

        Args:
            set_grads_to_None: True drops them.
        """
        if set_grads_to_None:
            self._window.drop()
            return
        self._parts.agree(to_weights=False)
        for grad in self._window.gradients():
            grad.zero_()
        self._window.agree()
        self._window.close()

    def _is_zero(self) -> bool:
        """Whether all gradients are zero: scaled or not, they are the same. Waits for the device."""
        return not bool(foreach.global_norm(self._window.gradients()) != 0)

    def before_step(self, window: Window, closure: Closure | None) -> None:
        """Before the step of the optimizer inside: model and masters agree."""
        self._parts.agree()
        self._parts.is_stepping = True

    def after_step(self, window: Window) -> None:
        """After the step of the optimizer inside: round the masters into the model."""
        self._parts.is_stepping = False
        self._parts.publish(window)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor | float:
        """Clip the unscaled gradients by their norm and return the norm; after an overflow only return -1."""
        clip = ClipNorm(max_norm=max_norm, norm_type=norm_type)
        return -1 if self.overflow else clip(self._window.gradients())

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The unscaled gradients per group and parameter (None where there is none); None after an overflow."""
        if self.overflow:
            print("Gradients are not finite, so they are not shown")
            return None
        return [
            [None if parameter.grad is None else parameter.grad.detach() for parameter in group["params"]]
            for group in self.param_groups
        ]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group to the optimizer and make masters for it."""
        self.optimizer.add_param_group(group)
        self._parts.agree()

    @property
    def overflow(self) -> bool:
        """Whether a gradient, or without gradients one of the last step, is not finite. Waits for the device."""
        if self._window.is_empty():
            return self._last_overflow
        return bool(self._parts.found_inf())

    @property
    def loss_scale(self) -> float:
        """The loss scale; can be set. Waits for the device."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    dynamic_loss_scale: bool = delegated("loss_scaler.dynamic")
    """Whether the scale moves."""

    state: Any = delegated("optimizer.state")
    """The optimizer's state, by master."""

    param_groups: list[dict[str, Any]] = delegated("optimizer.param_groups")
    """The optimizer's groups, which hold the masters."""

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, masters and loss scale, as plain values and live tensors, without gradients.

        The keys are apex's; ``loss_scaler`` is a dict of numbers, where apex put the object itself.
        """
        return {
            "loss_scaler": self.loss_scaler.part.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, and round the masters into the model.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        groups = self.fp32_from_fp16_groups
        schema: Schema = {
            "loss_scaler": SCALER_STATE,
            "dynamic_loss_scale": bool,
            "overflow": NotRequired(bool),
            "optimizer_state_dict": partial(check_optimizer, self.optimizer),
            "fp32_from_fp16": groups,
            object: ...,
        }
        require(state_dict, "state", schema)
        scaler = self.loss_scaler.part
        scale = scaler.parse(state_dict["loss_scaler"])
        # torch's load_state_dict keeps the tensors that it is given.
        optimizer = copied(state_dict["optimizer_state_dict"], "optimizer_state_dict")
        self.optimizer.load_state_dict(optimizer)
        self.zero_grad(set_grads_to_None=True)
        with torch.no_grad():
            for group, values in zip(groups, state_dict["fp32_from_fp16"], strict=True):
                for master, value in zip(group, values, strict=True):
                    master.copy_(value)
        self._pairs.publish()
        scaler.config = replace(scaler.config, dynamic=state_dict["dynamic_loss_scale"])
        scaler.state = scale
        scaler.set_scale(state_dict["loss_scaler"]["scale"])
        self._last_overflow = state_dict.get("overflow", False)

    def __getstate__(self) -> NoReturn:
        raise OrderError(
            "FP16_Optimizer cannot be pickled or copied; save state_dict() and load it into a new one"
        )
