"""``apex.contrib.optimizers.FP16_Optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfpeak.amp.fp16_loss_scalers import DynamicLossScaler, LossScaler
from halfpeak.amp.messages import maybe_print
from halfpeak.amp.optimizers.fed import FedForm
from halfpeak.core.errors import ClosureError, ConfigError, StateError


class FP16_Optimizer:
    """Low parameters with float32 masters, for an optimizer of ``apex.contrib.optimizers``.

    The optimizer's groups hold the masters afterwards. Its step reads the model's low gradients as they are, scaled, and
    writes the model's low parameters. A step whose gradients are not finite is skipped.

    Args:
        init_optimizer: an optimizer whose ``step`` takes ``grads`` and ``output_params``.
        static_loss_scale: the scale, unless ``dynamic_loss_scale``.
        dynamic_loss_scale: start at 2**16, double after 1000 clean steps, halve on overflow, but not below 1.
        dynamic_loss_args: refused.
        verbose: print a line for each skipped step.

    Raises:
        ConfigError: another optimizer; ``dynamic_loss_args``.
    """

    def __init__(
        self,
        init_optimizer: FedForm,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, FedForm):
            raise ConfigError(
                f"apex.contrib.optimizers.FP16_Optimizer steps optimizers of apex.contrib.optimizers, not "
                f"{type(init_optimizer).__name__}; use apex.fp16_utils.FP16_Optimizer for it"
            )
        if dynamic_loss_args is not None:
            raise ConfigError(
                "dynamic_loss_args is not taken here; use apex.fp16_utils.FP16_Optimizer for it"
            )
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        self.verbose = verbose
        self.overflow = False
        self._scaler = DynamicLossScaler(2.0**16) if dynamic_loss_scale else LossScaler(static_loss_scale)
        self._steps = 0
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self.fp16_groups.append(list(group["params"]))
            self.fp32_groups.append([parameter.detach().float().clone() for parameter in group["params"]])
            group["params"] = self.fp32_groups[-1]

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self._scaler.cur_scale

    @property
    def loss_scale(self) -> float:
        """The same."""
        return self._scaler.cur_scale

    @property
    def state(self) -> Any:
        """The optimizer's."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Drop the gradients of the model's parameters, or zero them."""
        for parameter in (parameter for group in self.fp16_groups for parameter in group):
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def backward(self, loss: Tensor) -> None:
        """Run backward from the loss, in float32, times the scale."""
        (loss.float() * self.cur_scale).backward()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step, or skip if a gradient is not finite; then move the scale.

        Raises:
            ClosureError: a closure.
        """
        if closure is not None:
            raise ClosureError(
                "apex.contrib.optimizers.FP16_Optimizer takes no closure; use apex.fp16_utils for one"
            )
        grads = [[parameter.grad for parameter in group] for group in self.fp16_groups]
        norms = [_norm([grad for grad in group if grad is not None]) for group in grads]
        self.overflow = not all(bool(norm.isfinite()) for norm in norms)
        if self.overflow:
            if self.verbose:
                maybe_print(
                    f"Gradient overflow.  Skipping step {self._steps} at loss scale {self.cur_scale}",
                    verbosity=1,
                )
        else:
            self.optimizer.step(
                grads=grads, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=norms
            )
        self._scaler.update_scale(self.overflow)
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The scale, the masters, and the state of the optimizer."""
        state: dict[str, Any] = {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self._steps,
        }
        if isinstance(self._scaler, DynamicLossScaler):
            state["last_overflow_iter"] = self._scaler.last_overflow_iter
            state["scale_factor"] = self._scaler.scale_factor
            state["scale_window"] = self._scaler.scale_window
        state["optimizer_state_dict"] = self.optimizer.state_dict()
        state["fp32_groups"] = self.fp32_groups
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave. The model's own parameters are left to the model's state.

        Raises:
            StateError: the masters have other shapes. Nothing was loaded.
        """
        saved = [[tensor.shape for tensor in group] for group in state_dict["fp32_groups"]]
        if saved != [[tensor.shape for tensor in group] for group in self.fp32_groups]:
            raise StateError(
                "fp32_groups has other shapes than the masters; load the state of this model's optimizer"
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        if self.dynamic_loss_scale:
            factor, window = state_dict["scale_factor"], state_dict["scale_window"]
            scaler = DynamicLossScaler(2.0**16, factor, window)
            scaler.cur_iter = state_dict["cur_iter"]
            scaler.last_overflow_iter = state_dict["last_overflow_iter"]
            self._scaler = scaler
        else:
            self._scaler = LossScaler(state_dict["cur_scale"])
        self._scaler.cur_scale = state_dict["cur_scale"]
        self._steps = state_dict["cur_iter"]
        for masters, values in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)


def _norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([grad.float().norm() for grad in grads]))
