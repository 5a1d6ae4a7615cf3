"""GradScaler: ``torch.amp.GradScaler`` with bounds on the scale, for gradients of every dtype on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfpeak.checkpoint.scaler_states import from_grad_scaler, read_config
from halfpeak.core.dtypes import largest
from halfpeak.core.errors import ClosureError, ConfigTypeError, LossScaleCollapse
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance, require_scale
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.ops import foreach
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.parts.found_inf import FoundInfReducer, Group
from halfpeak.parts.nonfinite import exhausted, nonfinite_names
from halfpeak.parts.step_hooks import take_closure, takes_found_inf


class GradScaler(torch.cuda.amp.GradScaler):
    """A ``torch.amp.GradScaler``: the same calls, numbers and ``state_dict``, with bounds on the scale.

    It is also a ``torch.cuda.amp.GradScaler``, the older class of the same calls, which ``isinstance`` in older code names.

    Where the scale and its factors are powers of two, every bit is torch's. Gradients of every dtype are unscaled in float32
    and rounded once. An optimizer without gradients is stepped. It scales without CUDA, too. Arguments before ``floor`` are
    torch's.

    Args:
        floor: the scale does not fall below it; None means 2**-14, or ``init_scale`` where that is lower.
        ceiling: the scale does not grow above it; None means the largest float32.
        patience: overflows in a row at the floor before :class:`~halfpeak.LossScaleCollapse`; None never raises.
        recovers: whether the scale soon grows again after a fall far below ``init_scale``.
        group: a process group whose ranks must skip together although their gradients are not reduced, or ``"world"``.

    Attributes:
        last: the result of the last :meth:`step`; None before the first.

    Raises:
        ConfigError: an argument is out of its range.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(weight.sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.last.stepped(), weight.tolist()
    (True, [0.5, 0.5])
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        floor: float | None = None,
        ceiling: float | None = None,
        patience: int | None = 100,
        recovers: bool = False,
        group: Group = None,
    ) -> None:
        if not isinstance(device, (str, torch.device)):
            raise ConfigTypeError(
                f"device={short_repr(device)} must be a device type; write GradScaler('cuda', init_scale=65536.0)"
            )
        init = require_scale("init_scale", init_scale)
        self._config = ScaleConfig(
            init=init,
            growth=growth_factor,
            backoff=backoff_factor,
            interval=growth_interval,
            floor=min(2.0**-14, init) if floor is None else floor,
            ceiling=largest(torch.float32) if ceiling is None else ceiling,
            patience=patience,
            recovers=recovers,
        )
        self._reducer = FoundInfReducer(group)
        self._stuck: Tensor | None = None
        self._stuck_on_host: AsyncScalar | None = None
        self.last: StepResult | None = None
        # Where there is no CUDA, torch's would disable itself for "cuda". That of torch.cuda.amp would warn.
        torch.amp.GradScaler.__init__(
            self, "cpu", init, growth_factor, backoff_factor, growth_interval, bool(enabled)
        )
        self._device = str(device)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients of every dtype; the ranks of the group get one ``found_inf``."""
        self._per_optimizer_states[id(optimizer)]["optimizer"] = optimizer
        with torch.no_grad():
            foreach.unscale_(
                [grad for parameter in params_of(optimizer) if (grad := parameter.grad) is not None],
                inv_scale,
                found_inf,
            )
        self._reducer.all_reduce_(found_inf)
        return {found_inf.device: found_inf}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless :meth:`unscale_` has, and step the optimizer, unless one is not finite.

        Waits for the device once, or never with an optimizer that takes ``found_inf``, such as
        ``torch.optim.AdamW(fused=True)``.

        Returns:
            What ``optimizer.step`` returned; None if it was not called.

        Raises:
            AssertionError: nothing has been scaled yet.
            ClosureError: there is a closure. It would see scaled gradients.
            RuntimeError: this optimizer has been stepped since the last :meth:`update`.
        """
        if not self._enabled:
            self.last = StepResult(torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32))
            return optimizer.step(*args, **kwargs)
        if take_closure((optimizer, *args), kwargs)[0] is not None:
            raise ClosureError(
                "GradScaler.step takes no closure, as in torch: the optimizer would read gradients that are still scaled; "
                "write engine = halfpeak.prepare(model, optimizer, 'O1') and engine.step(closure)"
            )
        scale = self._check_scale_growth_tracker("step")[0]
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if state["stage"] is OptState.UNSCALED:
            (found_inf,) = state["found_inf_per_device"].values()
            self.last = StepResult(found_inf, scale)
            if not self._kernel_may_skip(optimizer) and bool(found_inf):
                state["stage"] = OptState.STEPPED
                return None
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            state["stage"] = OptState.STEPPED  # or the next step would take its gradients for unscaled ones
            raise

    def _kernel_may_skip(self, optimizer: Optimizer) -> bool:
        """Whether torch's step may be called after an overflow; the first fused step of SGD leaves unwritten momentum."""
        return takes_found_inf(optimizer) or not getattr(optimizer, "_step_supports_amp_scaling", False)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what the optimizers' gradients held since the last update, or set it to ``new_scale``.

        Raises:
            ConfigError: ``new_scale`` is not a finite number above zero.
            LossScaleCollapse: gradients stay non-finite although the scale cannot fall. The model is unchanged.
        """
        if not self._enabled:
            return
        number = None if new_scale is None else require_scale("new_scale", float(new_scale))
        states = self._per_optimizer_states.values()
        found = [found_inf for state in states for found_inf in state["found_inf_per_device"].values()]
        try:
            if number is not None:
                self._scale = torch.full_like(self._check_scale_growth_tracker("update")[0], number)
            elif found:
                self._move_scale(torch.stack(found).max())
        finally:
            self._per_optimizer_states.clear()

    def _move_scale(self, found_inf: Tensor) -> None:
        scale, clean = self._check_scale_growth_tracker("update")
        growth, backoff, interval = self._growth_factor, self._backoff_factor, self._growth_interval
        rule = self._config = replace(self._config, growth=growth, backoff=backoff, interval=interval)
        stuck = torch.zeros_like(clean) if self._stuck is None else self._stuck
        state = ScaleState(scale, clean, torch.ones_like(clean), stuck)
        self._scale, self._growth_tracker, _, self._stuck = advance(rule, state, found_inf)
        # Read without waiting, so on an accelerator a step or two late.
        self._stuck_on_host = self._stuck_on_host or AsyncScalar(scale.device)
        self._stuck_on_host.push(self._stuck)
        patience = rule.patience
        if patience is not None and self._stuck_on_host.value >= patience and int(self._stuck) >= patience:
            raise self._collapse()

    def _collapse(self) -> LossScaleCollapse:
        named = (
            (f"param_groups[{g}]['params'][{i}]", parameter.grad)
            for state in self._per_optimizer_states.values()
            for g, group in enumerate(state["optimizer"].param_groups if "optimizer" in state else ())
            for i, parameter in enumerate(group["params"])
        )
        advice = "Lower the learning rate, clip, or use bfloat16"
        return exhausted(self.get_scale(), nonfinite_names(named), advice)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, of this class or of torch's. A disabled scaler ignores it.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        if self._enabled:
            from_grad_scaler(state_dict)
            read_config(state_dict, self._config)
            super().load_state_dict(dict(state_dict))
            self._stuck = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stuck": None, "_stuck_on_host": None, "last": None}
