"""``apex.contrib.optimizers``: optimizers whose ``step`` takes low-precision gradients, and an ``FP16_Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfpeak.amp.delegation import delegated
from halfpeak.amp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from halfpeak.amp.optimizers.apex import FusedLAMB as ApexLAMB
from halfpeak.amp.optimizers.apex import FusedSGD as ApexSGD
from halfpeak.amp.optimizers.internal_masters import no_amsgrad
from halfpeak.core.errors import ClosureError, ConfigError, OrderError, StateError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from halfpeak.fused.rules.base import Rule
from halfpeak.ops.foreach import gradients_of

Lists: TypeAlias = Iterable[Tensor | None] | Sequence[Sequence[Tensor | None]]
"""The tensors of the only group, or one list of tensors per group."""


@dataclass(frozen=True, slots=True)
class ContribAdamRule(Rule):
    """Adam with the bias corrections in the step size, the Adam paper's more efficient form; decay outside the moments.

    ::

        m  <- beta1 * m + (1 - beta1) * g
        v  <- beta2 * v + (1 - beta2) * g * g
        s   = lr * sqrt(1 - beta2**t) / (1 - beta1**t)
        w  <- w - s * (m / (sqrt(v) + eps) + decay * w)

    Attributes:
        inside: divide by ``sqrt(v + eps)``.
        correct: False makes ``s = lr``.
    """

    inside: bool = False
    correct: bool = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        size = group["lr"] * ((1 - beta2**step) ** 0.5 / (1 - beta1**step) if self.correct else 1.0)
        return (beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], group["weight_decay"], size)

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        beta1, gain1, beta2, gain2, eps, decay, size = constants
        first = slots[0] * beta1 + grad * gain1
        second = slots[1] * beta2 + grad * grad * gain2
        root = (second + eps).sqrt() if self.inside else second.sqrt() + eps
        return weight - size * (first / root + weight * decay), first, second


class ContribStep(FusedOptimizer):
    """A fused optimizer whose groups hold float32 masters, and whose ``step`` takes gradients and low parameters."""

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Lists | None = None,
        output_params: Lists | None = None,
        scale: float = 1.0,
        grad_norms: Sequence[Tensor | float] | None = None,
    ) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
            grads: a list of gradients for each group, or one list for the only group. An entry of None means the
                parameter's own gradient.
            output_params: parameters that get the new values, rounded; in the same form.
            scale: divisor of the gradients.
            grad_norms: the norm of the scaled gradients of each group, for groups with a ``max_grad_norm``.

        Raises:
            ConfigError: lists and groups have different lengths; a ``max_grad_norm`` without a norm.
        """
        if self._step_inputs is not None:  # set by an engine that takes this step
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = params_of(self)
        given = _in_order("grads", grads, self.param_groups)
        outputs = _in_order("output_params", output_params, self.param_groups)
        pairs = zip(given, gradients_of(params), strict=True)
        read = [grad if grad is not None else other for grad, other in pairs]
        model_params = [
            output if output is not None else param for output, param in zip(outputs, params, strict=True)
        ]
        multipliers = self._multipliers(scale, grad_norms)
        for multiplier in dict.fromkeys(multipliers):
            chosen = [
                grad if own == multiplier else None for grad, own in zip(read, multipliers, strict=True)
            ]
            self.set_step_inputs(
                StepInputs(chosen, model_params, torch.tensor(multiplier, dtype=torch.float32))
            )
            try:
                super().step()
            finally:
                self.set_step_inputs(None)
        return loss

    def _multipliers(self, scale: float, norms: Sequence[Tensor | float] | None) -> list[float]:
        """Return the factor for the gradient of each parameter: it unscales and clips."""
        found: list[float] = []
        for number, group in enumerate(self.param_groups):
            limit = group.get("max_grad_norm", 0.0)
            if limit and norms is None:
                raise ConfigError(
                    f"max_grad_norm={short_repr(limit)} needs step(grad_norms=...); wrap the optimizer in "
                    "apex.contrib.optimizers.FP16_Optimizer, which passes them"
                )
            clip = (float(norms[number]) / scale + 1e-6) / limit if limit and norms is not None else 1.0
            found += [1.0 / (scale * max(clip, 1.0))] * len(group["params"])
        return found


class FusedAdam(ContribStep):
    """Adam in its older form; see :class:`ContribAdamRule`. ``step`` takes gradients and low parameters.

    State per parameter: ``step``, ``exp_avg``, ``exp_avg_sq``. The other arguments are those of ``apex.optimizers.FusedAdam``.

    Args:
        eps: added to the root of the second moment, or inside it.
        eps_inside_sqrt: add ``eps`` inside the root.
        max_grad_norm: the largest norm of a group's gradients; 0 does not clip. Needs ``grad_norms`` in ``step``.
        use_mt: no effect here.
        amp_scale_adjustment: no effect here; apex had removed the code that reads it by 25.04.

    Raises:
        ConfigError: ``amsgrad``; a value is out of its range.
    """

    copied = ("eps_mode",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        no_amsgrad(amsgrad)
        self.eps_mode = 0 if eps_inside_sqrt else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any]) -> ContribAdamRule:
        return ContribAdamRule(inside=self.eps_mode == 0, correct=bool(group["bias_correction"]))


class FusedSGD(ContribStep, ApexSGD):
    """SGD with momentum whose ``step`` takes gradients and low parameters; the arguments are ``apex.optimizers.FusedSGD``'s.

    Raises:
        ConfigError: a value is out of its range.
    """

    def step(
        self, closure: Callable[[], Any] | None = None, grads: Lists | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """See :class:`ContribStep`.

        Raises:
            OrderError: no ``grads``.
        """
        if grads is None:
            raise OrderError(
                "apex.contrib.optimizers.FusedSGD needs step(grads=...); wrap it in "
                "apex.contrib.optimizers.FP16_Optimizer, which passes them, or use apex.optimizers.FusedSGD"
            )
        return super().step(closure, grads, *args, **kwargs)


class FusedLAMB(ApexLAMB):
    """LAMB with the trust ratio for every parameter, with or without weight decay.

    The arguments are those of ``apex.optimizers.FusedLAMB`` without ``use_nvlamb``.

    Raises:
        ConfigError: ``amsgrad``; a value is out of its range.
    """

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, use_nvlamb=True, **kwargs)


class FP16_Optimizer:
    """Give an optimizer of ``apex.contrib.optimizers`` float32 masters, and scale the loss.

    The optimizer's groups hold the masters afterwards. Its step reads the model's low, still scaled gradients and writes
    the model's low parameters. A step whose gradients are not finite is skipped.

    Args:
        init_optimizer: an optimizer whose ``step`` takes ``grads`` and ``output_params``.
        static_loss_scale: the scale, unless ``dynamic_loss_scale``.
        dynamic_loss_scale: start at 2**16, double after 1000 clean steps, halve on overflow, but not below 1.
        dynamic_loss_args: not supported; raises ConfigError.
        verbose: print a line for each skipped step.

    Raises:
        ConfigError: ``init_optimizer`` has no such ``step``; ``dynamic_loss_args``.
    """

    def __init__(
        self,
        init_optimizer: ContribStep,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, ContribStep):
            raise ConfigError(
                f"apex.contrib.optimizers.FP16_Optimizer takes optimizers of apex.contrib.optimizers, not "
                f"{type(init_optimizer).__name__}; use apex.fp16_utils.FP16_Optimizer for it"
            )
        if dynamic_loss_args is not None:
            raise ConfigError(
                "dynamic_loss_args is not supported here; leave it out, or use apex.fp16_utils.FP16_Optimizer"
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

    cur_scale = loss_scale = delegated("_scaler.cur_scale")
    """The loss scale."""

    state = delegated("optimizer.state")
    param_groups = delegated("optimizer.param_groups")

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
            ClosureError: a closure was given.
        """
        if closure is not None:
            raise ClosureError(
                "apex.contrib.optimizers.FP16_Optimizer takes no closure; use apex.fp16_utils.FP16_Optimizer"
            )
        grads = [[parameter.grad for parameter in group] for group in self.fp16_groups]
        norms = [_grad_norm([grad for grad in group if grad is not None]) for group in grads]
        self.overflow = not all(bool(norm.isfinite()) for norm in norms)
        if self.overflow:
            if self.verbose:
                print(f"Gradient overflow.  Skipping step {self._steps} at loss scale {self.cur_scale}")
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
        """Load what :meth:`state_dict` returned. The model's own parameters are not changed; load the model's state too.

        Raises:
            StateError: the masters' shapes differ. Nothing was loaded.
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


def _grad_norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack([grad.float().norm() for grad in grads]))


def _in_order(name: str, lists: Lists | None, groups: Sequence[dict[str, Any]]) -> list[Tensor | None]:
    sizes = [len(group["params"]) for group in groups]
    if lists is None:
        return [None] * sum(sizes)
    given: list[Any] = list(lists)
    by_group = given if given and isinstance(given[0], (list, tuple)) else [given]
    if [len(one) for one in by_group] != sizes:
        raise ConfigError(
            f"{name} has lists of {[len(one) for one in by_group]} tensors, but the groups have {sizes} parameters; pass one "
            "list for each group"
        )
    return [tensor for one in by_group for tensor in one]
