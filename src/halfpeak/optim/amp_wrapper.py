"""AmpOptimWrapper: torch's own autocast and a loss scale. Compatible with mmengine 0.10.7, on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.checkpoint.scaler_states import from_grad_scaler, to_grad_scaler
from halfpeak.core.dtypes import LOW, NAMES
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.engine import Engine
from halfpeak.optim import resume_state
from halfpeak.optim.arguments import require_flag
from halfpeak.optim.base import is_optimizer
from halfpeak.optim.loss_scale import parse_loss_scale
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.state.found_inf import FoundInfReducer
from halfpeak.state.grad_scaler_attrs import GradScalerAttrs
from halfpeak.state.loss_scaler import LossScaler

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AmpOptimWrapper(OptimWrapper):
    """Per-operation casts by ``torch.autocast`` and, for float16, a loss scale.

    The casts are for the device of the model in :meth:`optim_context`. bfloat16 has the range of float32 and gets no
    scale, unless ``loss_scale`` is a number or a dict.

    Args:
        loss_scale: ``"dynamic"``, a number (a static scale), or a dict: ``GradScaler``'s keys ``init_scale``,
            ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled``, keys of mmcv's ``LossScaler``, or
            keys of :class:`~halfpeak.ScaleConfig`.
        dtype: dtype of autocast, by name or as a dtype; None means bfloat16 on a CPU and float16 elsewhere.
        use_fsdp: all ranks agree on skipping a step, because gradients are shards. FSDP2 does not need it.
        kwargs: of :class:`OptimWrapper`; ``optimizer`` is required.

    Raises:
        ConfigError: a value out of range, an unknown dtype or key.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16")
        >>> with wrapper.optim_context(model):
        ...     output = model(torch.ones(4, 2))
        >>> output.dtype
        torch.bfloat16
        >>> wrapper.update_params(output.float().mean())
    """

    _KEYS = ("loss_scaler", resume_state.RESUME_KEY)

    def __init__(
        self,
        loss_scale: float | str | Mapping[str, Any] = "dynamic",
        dtype: torch.dtype | str | None = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        self.cast_dtype = _parse_cast_dtype(dtype)
        self._scale_config = parse_loss_scale(loss_scale)
        self._is_default = isinstance(loss_scale, str)
        require_flag("use_fsdp", use_fsdp)
        try:
            self._agreement = FoundInfReducer("world" if use_fsdp else None)
        except ConfigError:
            raise ConfigError(
                "use_fsdp=True needs torch.distributed; call torch.distributed.init_process_group first, or leave use_fsdp out"
            ) from None
        self._device_type: str | None = None
        self._given_scaler: Any = None
        self._is_scaled_by_caller = False
        super().__init__(**require_optimizer(kwargs, type(self)))

    @property
    def loss_scaler(self) -> Any:
        """The wrapper's loss scaler, as a ``torch.amp.GradScaler``; or the scaler that user code has set.

        User code may set any object with ``scale``, ``unscale_``, ``step`` and ``update``. The wrapper then calls it as
        mmengine does, and it alone decides which steps are skipped. None restores the wrapper's own scaler. After
        ``second.loss_scaler = first.loss_scaler`` both wrappers call one ``torch.amp.GradScaler``.

        Raises:
            ConfigTypeError: the object lacks one of these methods.
        """
        return WrapperScaler(self) if self._given_scaler is None else self._given_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: Any) -> None:
        methods = ("scale", "unscale_", "step", "update")
        lacks = [name for name in methods if not callable(getattr(scaler, name, None))]
        if scaler is not None and lacks:
            raise ConfigTypeError(
                f"loss_scaler={short_repr(scaler)} has no {lacks[0]}(); set a GradScaler, or an object with the methods "
                f"{', '.join(methods)}"
            )
        if isinstance(scaler, WrapperScaler):
            scaler = scaler.share(self)
        if self._engine is not None:
            self._engine.abort()
            self._engine.remove()
            self._engine = None
        self._given_scaler = scaler

    @property
    def _scale_update_param(self) -> float | None:
        """The argument of ``loss_scaler.update``: a static scale, or None."""
        config = self._scale_config
        return None if config is None or config.dynamic else config.init

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """As :meth:`OptimWrapper.step`."""
        self._unscale_for_caller()
        super().step(None if closure is None else partial(self._evaluate, closure), **kwargs)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._unscale_for_caller()
        return loss

    def _unscale_for_caller(self) -> None:
        """Unscale the gradients of a loss that an override of :meth:`backward` scaled with :attr:`loss_scaler`."""
        if self._is_scaled_by_caller:
            self.loss_scaler.unscale_(self.optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As :meth:`OptimWrapper.load_state_dict`; also loads the state of a scaler that user code has set."""
        super().load_state_dict(state_dict)
        if self._given_scaler is not None and state_dict.get("loss_scaler"):
            self._given_scaler.load_state_dict(state_dict["loss_scaler"])

    @property
    def _is_watched(self) -> bool:
        return self._given_scaler is None and super()._is_watched

    def _unwatched_scaler(self) -> Any:
        """Return the scaler that user code has set, or torch's own for an optimizer that is not torch's."""
        if self._given_scaler is None:
            self._given_scaler = self._torch_scaler()
        return self._given_scaler

    def _torch_scaler(self) -> torch.amp.GradScaler:
        config = self._scale_config or ScaleConfig()
        return torch.amp.GradScaler(
            self._device(), config.init, config.growth, config.backoff, config.interval, self._has_scaler()
        )

    def _backward_unwatched(self, loss: Tensor, kwargs: Mapping[str, Any]) -> None:
        self._unwatched_scaler().scale(loss).backward(**kwargs)

    def _unscale_unwatched(self) -> None:
        self._unwatched_scaler().unscale_(self.optimizer)

    def _step_unwatched(self, kwargs: Mapping[str, Any]) -> None:
        scaler = self._unwatched_scaler()
        scaler.step(self.optimizer, **kwargs)
        scaler.update(self._scale_update_param)

    def _config(self) -> EngineConfig:
        scale = self._scale_config if self._has_scaler() else None
        return replace(super()._config(), scale=scale or ScaleConfig.static())

    def _has_scaler(self) -> bool:
        """Whether losses are scaled: float16 needs it; bfloat16 and wider only with an explicit ``loss_scale``."""
        return self._scale_config is not None and not (
            self._is_default and self._low_dtype() is not torch.float16
        )

    def _reducer(self) -> FoundInfReducer:
        return super()._reducer() if self._agreement.is_local else self._agreement

    def _casting(self) -> AbstractContextManager[Any]:
        # One scope per forward pass, so that no cached cast outlives its weight. Backward runs outside, as torch asks.
        dtype = self._low_dtype()
        return torch.autocast(self._device(), dtype) if dtype in LOW else nullcontext()

    def _prepare(self, model: nn.Module) -> None:
        parameter = next(iter(model.parameters()), None)
        if parameter is not None:
            self._device_type = parameter.device.type
        super()._prepare(model)

    def _device(self) -> str:
        first: Tensor = self.optimizer.param_groups[0]["params"][0]
        return self._device_type or first.device.type

    def _low_dtype(self) -> torch.dtype:
        return self.cast_dtype or (torch.bfloat16 if self._device() == "cpu" else torch.float16)

    def _extra_state(self) -> dict[str, Any]:
        state = super()._extra_state()
        if self._given_scaler is not None:
            state["loss_scaler"] = self._given_scaler.state_dict()
        elif "loss_scaler" not in state and self._is_watched:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def _check_state(self, state: Mapping[str, Any]) -> None:
        saved = require_mapping(state.get("loss_scaler", {}), "the entry 'loss_scaler' of the state")
        if saved:
            from_grad_scaler(saved)
        super()._check_state(state)

    def _restore(self, engine: Engine, state: Mapping[str, Any]) -> None:
        scaler = engine.scalers[0]
        if state.get("loss_scaler") and scaler.config.dynamic:
            scaler.load_translated(from_grad_scaler(state["loss_scaler"]))


class WrapperScaler(GradScalerAttrs):
    """A wrapper's loss scaler as a ``torch.amp.GradScaler``, for overrides of ``backward`` and ``step`` that call it.

    ::

        scale(loss).backward()   gradients wait scaled, until unscale_ or a step
        unscale_                 the engine unscales them
        step                     the optimizer steps, or skips, and the scale moves
        update                   sets a scale that is given; otherwise nothing is left to do
    """

    def __init__(self, wrapper: AmpOptimWrapper) -> None:
        self._wrapper = wrapper
        self._scaler = wrapper._ready().scalers[0]
        self._enabled = wrapper._has_scaler()

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor in a list or tuple, by the scale."""
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        self._wrapper._is_scaled_by_caller = True
        return self._scaler.scale(outputs) if self._enabled else outputs

    def share(self, other: AmpOptimWrapper) -> torch.amp.GradScaler | None:
        """The scaler that ``other`` and this wrapper use from now on; None for the wrapper itself."""
        if other is self._wrapper:
            return None
        shared = self._wrapper._torch_scaler()
        shared.load_state_dict(self.state_dict())
        self._wrapper.loss_scaler = shared
        return shared

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients. A second call changes nothing.

        Raises:
            ConfigError: another wrapper has the optimizer.
        """
        if optimizer is not self._wrapper.optimizer:
            raise ConfigError(
                f"the loss scaler of a wrapper takes only that wrapper's optimizer, not another {type(optimizer).__name__}; "
                "for one scaler in two wrappers, write second.loss_scaler = first.loss_scaler"
            )
        engine = self._wrapper._ready()
        if self._wrapper._is_scaled_by_caller:
            self._wrapper._is_scaled_by_caller = False
            engine.adopt_scaled_grads()
        engine.unscale()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`unscale_`, then ``optimizer.step``, which skips if a gradient is not finite."""
        self.unscale_(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale, if ``new_scale`` is given. Otherwise do nothing, because the step has moved the scale."""
        if new_scale is not None:
            self._scaler.set_scale(float(new_scale))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of ``GradScaler``. A static scale keeps its value.

        Raises:
            StateError: it is not a state of ``GradScaler``. Nothing was loaded.
        """
        self._wrapper._check_state({"loss_scaler": state_dict})
        self._wrapper._restore(self._wrapper._ready(), {"loss_scaler": state_dict})

    def state_dict(self) -> dict[str, Any]:
        """Return the state in ``GradScaler``'s format; if nothing is scaled, a new scaler's. Waits for the device."""
        if self._enabled:
            return to_grad_scaler(self._scaler.state_dict(), self._scaler.config)
        rule = self._wrapper._scale_config
        return {} if rule is None else to_grad_scaler(LossScaler(rule).state_dict(), rule)


def require_optimizer(kwargs: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return ``kwargs``, the keywords of the base wrapper; ConfigTypeError if they have no optimizer.

    The first positional argument of these wrappers is not the optimizer.
    """
    if not is_optimizer(kwargs.get("optimizer")):
        raise ConfigTypeError(f"{cls.__name__} needs optimizer=...; write {cls.__name__}(optimizer=SGD(...))")
    return kwargs


def _parse_cast_dtype(dtype: object) -> torch.dtype | None:
    if dtype is None or dtype in _DTYPES:
        return dtype  # type: ignore[return-value]
    names = {name: value for name, value in NAMES.items() if value in _DTYPES}
    if isinstance(dtype, str) and dtype in names:
        return names[dtype]
    raise ConfigError(
        f"dtype={short_repr(dtype)} must be None, one of {', '.join(map(str, _DTYPES))}, or one of the names "
        f"{', '.join(names)}"
    )
