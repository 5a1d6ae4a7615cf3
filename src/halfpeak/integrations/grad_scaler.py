"""GradScaler: the interface of ``torch.amp.GradScaler`` as of torch 2.13, without its traps, on every device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.tree import map_tree
from halfpeak.checkpoint.scaler_states import from_grad_scaler, read_config
from halfpeak.core.dtypes import largest
from halfpeak.core.errors import ClosureError, ConfigError, ConfigTypeError, LossScaleCollapse, OrderError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.schedule import ScaleConfig, require_scale
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.engine.step_call import (
    hand_over_found_inf,
    take_back_found_inf,
    take_closure,
    takes_found_inf,
)
from halfpeak.ops import foreach, reference
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.state.found_inf import FoundInfReducer, Group
from halfpeak.state.grad_scaler_attrs import GradScalerAttrs
from halfpeak.state.loss_scaler import LossScaler


class GradScaler(GradScalerAttrs):
    """A drop-in for ``torch.amp.GradScaler``: the same calls, the same numbers, the same ``state_dict``.

    ::

        scale(loss)        the loss in float32 or wider, times the scale
        unscale_           gradients / scale, once: a second call changes nothing
        step               unscale_, then the optimizer steps, or is not called
        update             the scale moves by the overflows that the steps since the last update found

    Differences, where torch raises, never recovers or is silently wrong:

    - Gradients that a scaled backward pass adds after ``unscale_`` are unscaled as they arrive.
    - A window that was dropped (by an exception, or ``zero_grad``) has no effect on the next one.
    - An optimizer without gradients is stepped, and does not change the scale.
    - float16, complex and sparse gradients are unscaled in float32 and rounded once. A gradient that two optimizers
      share is unscaled once. The number of devices that found an overflow does not matter.
    - Closures work: a closure whose gradients overflow is called again at a lower scale.
    - The scale has a floor and a ceiling, and gradients that never become finite raise.

    Args:
        device: accepted as in torch. The scale follows the first loss to its device.
        init_scale: the first scale.
        growth_factor: factor after ``growth_interval`` updates without overflow. Powers of two are exact.
        backoff_factor: factor after an overflow.
        growth_interval: updates without overflow before the scale grows.
        enabled: False makes every call pass through.
        floor: the scale does not fall below it; None means 2**-14, or ``init_scale`` where that is lower.
        ceiling: the scale does not grow above it; None means the largest float32.
        patience: overflows in a row at the floor before :class:`~halfpeak.LossScaleCollapse`; None never raises.
        group: a process group whose ranks must skip together although their gradients are not reduced, or ``"world"``.

    Attributes:
        last: the result of the last :meth:`step`; None before the first.

    Raises:
        ConfigError: an argument is out of its range.

    Example:
        >>> import torch, halfpeak
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = halfpeak.GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.unscale_(optimizer)
        >>> scaler.unscale_(optimizer)
        >>> weight.grad
        tensor([1., 1.])
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
        group: Group = None,
    ) -> None:
        try:
            self._device = torch.device("" if isinstance(device, int) else device).type
        except (RuntimeError, TypeError):
            raise ConfigTypeError(
                f"device={short_repr(device)} must be a device type; write GradScaler('cuda', init_scale=65536.0)"
            ) from None
        init = require_scale("init_scale", init_scale)
        config = ScaleConfig(
            init=init,
            growth=growth_factor,
            backoff=backoff_factor,
            interval=growth_interval,
            floor=min(2.0**-14, init) if floor is None else floor,
            ceiling=largest(torch.float32) if ceiling is None else ceiling,
            patience=patience,
        )
        self._enabled = bool(enabled)
        self._scaler = LossScaler(config)
        self._reducer = FoundInfReducer(group)
        self.last: StepResult | None = None
        self._begin_window()

    def _begin_window(self) -> None:
        self._scalings = 0
        self._unscaled: dict[Optimizer, UnscaledGrads] = {}
        self._found: list[Tensor] = []
        self._arrival_hooks: list[RemovableHandle] = []
        self._stuck: AsyncScalar | None = None

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor in a list, tuple, dict or iterable, by the scale, in float32 or wider.

        Raises:
            ConfigTypeError: ``outputs`` is something else.
        """
        return map_outputs(outputs, self._scaled) if self._enabled else outputs

    def _scaled(self, output: Tensor) -> Tensor:
        if not self._scalings:
            self._scaler.to(output.device)
        self._scalings += 1
        scaled = self._scaler.scale(output)
        if scaled.requires_grad and not torch.compiler.is_compiling():
            scaled.register_hook(partial(self._enter_backward, self._scaler.state.scale))
        return scaled

    def _enter_backward(self, scale: Tensor, _: Tensor) -> None:
        """At the start of a scaled backward pass: unscale gradients that it adds to unscaled ones as they arrive."""
        self._leave_backward()
        for optimizer, unscaled in list(self._unscaled.items()):
            if unscaled.is_dropped():
                del self._unscaled[optimizer]
            elif not unscaled.has_stepped:
                self._arrival_hooks += unscaled.unscale_arrivals(scale.reciprocal())
        if self._arrival_hooks:
            torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        for handle in self._arrival_hooks:
            handle.remove()
        self._arrival_hooks.clear()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, unless they are unscaled already. Does not wait for the device.

        Raises:
            OrderError: there are gradients, but this scaler never scaled a loss.
        """
        if self._enabled:
            self._ensure_unscaled(optimizer)

    def _ensure_unscaled(self, optimizer: Optimizer) -> UnscaledGrads:
        unscaled = self._unscaled.get(optimizer)
        if unscaled is not None and unscaled.is_current():
            return unscaled
        if not self._scalings and gradients(optimizer):
            raise OrderError(
                "this scaler has scaled no loss, so these gradients are not scaled; write scaler.scale(loss).backward()"
            )
        known = [grad for other in self._unscaled.values() if other.is_current() for grad in other.grads]
        unscaled = UnscaledGrads(optimizer, self._scaler.state.scale.reciprocal(), known)
        self._unscaled[optimizer] = unscaled
        return unscaled

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless a gradient is not finite; :attr:`last` tells whether it stepped.

        Waits for the device once, or never with an optimizer that takes ``found_inf``, such as
        ``torch.optim.AdamW(fused=True)``.

        Args:
            args: for ``optimizer.step``, like kwargs. A closure among them calls ``scaler.scale(loss).backward()``.

        Returns:
            What ``optimizer.step`` returned; None if it was not called.

        Raises:
            ClosureError: the closure did not scale its loss.
            LossScaleCollapse: the closure's gradients stay non-finite although the scale cannot fall.
        """
        if not self._enabled:
            self.last = StepResult(torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32))
            return optimizer.step(*args, **kwargs)
        closure, rebuild = take_closure((optimizer, *args), kwargs)
        if closure is not None:
            (_, *args), kwargs = rebuild(partial(self._evaluate, optimizer, closure))  # type: ignore[assignment]
            result = optimizer.step(*args, **kwargs)
            unscaled, found_inf = self._ensure_unscaled(optimizer), torch.zeros_like(self._scaler.state.scale)
        else:
            unscaled = self._ensure_unscaled(optimizer)
            found_inf = unscaled.found_inf_at_step()
            self._reducer.all_reduce_(found_inf)
            result = self._step(optimizer, found_inf, args, kwargs)
        self.last = StepResult(found_inf, self._scaler.state.scale)
        if (unscaled.grads or not self._reducer.is_local) and not unscaled.is_counted:
            self._found.append(found_inf)
        unscaled.mark_stepped()
        return result

    def _step(self, optimizer: Optimizer, found_inf: Tensor, args: Any, kwargs: Any) -> Any:
        if self._may_skip_itself(optimizer):
            hand_over_found_inf(optimizer, found_inf)
            try:
                return optimizer.step(*args, **kwargs)
            finally:
                take_back_found_inf(optimizer)
        return None if bool(found_inf) else optimizer.step(*args, **kwargs)

    def _may_skip_itself(self, optimizer: Optimizer) -> bool:
        return takes_found_inf(optimizer)

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call a closure until its gradients are finite, lowering the scale in between."""
        while True:
            before = self._scalings
            self._unscaled.pop(optimizer, None)
            loss = closure()
            if self._scalings == before:
                raise ClosureError(
                    "the closure did not scale its loss, so dividing its gradients would be wrong; write "
                    "scaler.scale(loss).backward() inside the closure"
                )
            found_inf = self._ensure_unscaled(optimizer).found_inf.clone()
            self._reducer.all_reduce_(found_inf)
            if not bool(found_inf):
                return loss
            self._scaler.update(found_inf)
            if self._scaler.read_exhausted():
                raise self._collapse()
            optimizer.zero_grad()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by the overflows found since the last update, or set it to ``new_scale``.

        Raises:
            ConfigError: ``new_scale`` is not one finite number above zero.
            LossScaleCollapse: gradients stay non-finite although the scale cannot fall. The model is unchanged.
        """
        if not self._enabled:
            return
        self._leave_backward()
        waiting = [t for t in self._unscaled.values() if not t.has_stepped]
        collapse = None
        if new_scale is not None:
            self._scaler.set_scale(read_number(new_scale))
        else:
            found = self._found + [t.found_inf for t in waiting if t.grads and not t.is_counted]
            if found:
                self._scaler.update(torch.stack([one.to(found[0].device) for one in found]).max())
                collapse = self._collapse() if self._is_exhausted() else None
        self._found.clear()
        for unscaled in waiting:
            unscaled.mark_counted()
        self._unscaled = {unscaled.optimizer: unscaled for unscaled in waiting if not unscaled.is_dropped()}
        if collapse is not None:
            raise collapse

    def _is_exhausted(self) -> bool:
        """Whether the patience is used up. Reads a count already on the host, so that a good step does not wait."""
        patience, stuck = self._scaler.config.patience, self._scaler.state.stuck
        if patience is None:
            return False
        self._stuck = self._stuck or AsyncScalar(stuck.device)
        self._stuck.push(stuck)
        return self._stuck.value >= patience and self._scaler.read_exhausted()

    def _collapse(self) -> LossScaleCollapse:
        names = tuple(name for unscaled in self._unscaled.values() for name in unscaled.nonfinite_names())
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return LossScaleCollapse(
            f"gradients stay non-finite at a loss scale of {self._scaler.read_scale():g}, which cannot fall any further. "
            f"Not finite: {shown or 'no gradient that is still there'}. Lower the learning rate, clip, or use bfloat16",
            names,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, or torch's. A disabled scaler ignores it.

        A disabled scaler saves ``{}``, which holds no scale: an enabled scaler then keeps its own scale and warns.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        if not self._enabled:
            return
        if isinstance(state_dict, Mapping) and not state_dict:
            warnings.warn(
                "the state is that of a disabled GradScaler and holds no scale; this one keeps its own",
                stacklevel=2,
            )
            return
        numbers = from_grad_scaler(state_dict)
        self._scaler.config = read_config(state_dict, self._scaler.config)
        self._scaler.load_translated(numbers)
        self._unscaled.clear()
        self._found.clear()

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:  # type: ignore[override]
        """Return ``found_inf`` of an optimizer's gradients. Ranks that step together may reduce it in place."""
        unscaled = self._unscaled.get(optimizer)
        return {} if unscaled is None else {unscaled.found_inf.device: unscaled.found_inf}

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:  # type: ignore[override]
        """Return ``found_inf`` of the gradients as they are, for an optimizer that unscales them itself."""
        return {self._scale.device: UnscaledGrads(optimizer, torch.ones_like(self._scale), ()).found_inf}

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the open window, because a copy begins a new window."""
        window = ("_scalings", "_unscaled", "_found", "_arrival_hooks", "_stuck", "last")
        return {name: value for name, value in self.__dict__.items() if name not in window}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.last = None
        self._begin_window()


class UnscaledGrads:
    """The gradients of one optimizer from the moment they are divided by the scale until they are dropped.

    Args:
        inv_scale: the factor that unscales gradients.  # f32[]
        already: gradients that are unscaled already, because another optimizer shares them.

    Attributes:
        optimizer: the optimizer that has the gradients.
        grads: the gradients that were unscaled here, or already.
        found_inf: 1 if one of the gradients, or one that arrived since, was not finite, and the loss scale has not been
            updated with it yet.  # f32[]
        has_stepped: whether the optimizer has stepped with the gradients.
        is_counted: whether the loss scale has been updated with all of the gradients.
    """

    def __init__(self, optimizer: Optimizer, inv_scale: Tensor, already: Iterable[Tensor]) -> None:
        self.optimizer = optimizer
        self.grads = gradients(optimizer)
        self.found_inf = torch.zeros_like(inv_scale)
        self.has_stepped = False
        self.is_counted = False
        self._counted_inf: Tensor | None = None
        self._versions: list[int] = []
        done = {id(grad) for grad in already}
        with torch.no_grad():
            # A gradient that two optimizers share is unscaled once, and checked for both.
            foreach.check_([grad for grad in self.grads if id(grad) in done], self.found_inf)
            fresh = [grad for grad in self.grads if id(grad) not in done]
            foreach.unscale_(fresh, inv_scale, self.found_inf)

    def mark_counted(self) -> None:
        """Note that the loss scale was updated with ``found_inf``. Gradients that arrive later count anew."""
        found = self.found_inf
        self._counted_inf = found if self._counted_inf is None else torch.maximum(self._counted_inf, found)
        self.found_inf = torch.zeros_like(self.found_inf)
        self.is_counted = True

    def found_inf_at_step(self) -> Tensor:
        """Return 1 if a step must be skipped, else 0, as a new tensor.  # f32[]"""
        if self._counted_inf is None:
            return self.found_inf.clone()
        # update() came before step(). Gradients that were zeroed in between have no overflow any more.
        still = torch.zeros_like(self.found_inf)
        foreach.check_(gradients(self.optimizer), still)
        self._counted_inf = torch.minimum(self._counted_inf, still)
        return torch.maximum(self._counted_inf, self.found_inf)

    def mark_stepped(self) -> None:
        """Note that the optimizer has stepped with the gradients that it has now."""
        self.has_stepped = True
        self.grads = gradients(self.optimizer)
        self._versions = [grad._version for grad in self.grads]

    def is_dropped(self) -> bool:
        """Whether the optimizer has no gradients any more, so that the next ones begin a new window."""
        return not gradients(self.optimizer)

    def is_current(self) -> bool:
        """Whether the gradients that the optimizer has now are unscaled."""
        if not self.has_stepped:
            return True
        now = gradients(self.optimizer)
        return len(now) == len(self.grads) and all(
            grad is known and grad._version == version
            for grad, known, version in zip(now, self.grads, self._versions, strict=True)
        )

    def unscale_arrivals(self, inv_scale: Tensor) -> list[RemovableHandle]:
        """Unscale each gradient that a backward pass adds as it arrives, until the handles are removed.

        The hooks are on autograd's accumulation into ``.grad``, so they do not affect ``torch.autograd.grad``.
        """

        def unscale(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            self.is_counted = False
            return tuple(
                None
                if grad is None
                else reference.unscaled([grad], [grad.dtype], inv_scale, self.found_inf)[0]
                for grad in arrived
            )

        return [
            get_gradient_edge(parameter).node.register_prehook(unscale)
            for parameter in params_of(self.optimizer)
            if parameter.requires_grad
        ]

    def nonfinite_names(self) -> tuple[str, ...]:
        """Where in ``optimizer.param_groups`` the gradients are not finite. Waits for the device."""
        return tuple(
            f"param_groups[{g}]['params'][{i}]"
            for g, group in enumerate(self.optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
            if parameter.grad is not None and not foreach.all_finite([parameter.grad])
        )


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters, each once."""
    grads = (parameter.grad for parameter in params_of(optimizer))
    return list({id(grad): grad for grad in grads if grad is not None}.values())


def map_outputs(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to a tensor, or to each tensor in a list, tuple, dict or other iterable. Containers keep their type.

    >>> import torch
    >>> map_outputs((torch.ones(1), [torch.ones(1)]), torch.neg)
    (tensor([-1.]), [tensor([-1.])])

    Raises:
        ConfigTypeError: ``outputs`` is something else.
    """
    if isinstance(outputs, Tensor):
        return change(outputs)
    if isinstance(outputs, Mapping):
        return map_tree(outputs, lambda leaf: map_outputs(leaf, change))
    if isinstance(outputs, (list, tuple)):
        parts = [map_outputs(value, change) for value in outputs]
        return outputs._make(parts) if hasattr(outputs, "_make") else type(outputs)(parts)  # type: ignore[union-attr]
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
        return (map_outputs(value, change) for value in outputs)
    raise ConfigTypeError(
        f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}; write scaler.scale(loss)"
    )


def read_number(scale: float | Tensor) -> float:
    """Return a new scale as a number. Waits for the device if the scale is a tensor.

    Raises:
        ConfigError: the scale is not one finite number above zero.
    """
    if not isinstance(scale, Tensor):
        return require_scale("new_scale", scale)
    if scale.numel() != 1 or scale.requires_grad:
        raise ConfigError(
            f"new_scale={short_repr(scale)} must be a float or a tensor of one element without requires_grad; write "
            "new_scale=65536.0"
        )
    return float(scale)
