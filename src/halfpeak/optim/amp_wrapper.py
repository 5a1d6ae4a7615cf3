"""AmpOptimWrapper: torch's own autocast and a loss scale. Compatible with mmengine 0.10.7, on every device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from halfpeak.casting.casts import disable_casts
from halfpeak.checkpoint.scaler_states import from_grad_scaler
from halfpeak.core.dtypes import LOW, NAMES
from halfpeak.core.errors import ClosureError, ConfigError, ConfigTypeError
from halfpeak.core.keywords import keywords_of, unknown_key
from halfpeak.core.schedule import NO_FLOOR, require_scale
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_number, require_mapping
from halfpeak.engine.grad_scaler import GradScaler
from halfpeak.optim.arguments import require_flag
from halfpeak.optim.base import is_optimizer
from halfpeak.optim.metrics_sink import current_logger
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.parts.found_inf import FoundInfReducer

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AmpOptimWrapper(OptimWrapper):
    """Per-operation casts by ``torch.autocast`` and, for float16, a loss scale by a ``GradScaler``.

    bfloat16 has the range of float32 and gets no scale, unless ``loss_scale`` is a number or a dict. A step whose gradients are
    not finite is skipped, with and without a scale.

    Args:
        loss_scale: ``"dynamic"``, a number (a static scale), or a dict of arguments of :class:`halfpeak.GradScaler`.
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
        ...     loss = model(torch.ones(4, 2)).float().mean()
        >>> wrapper.update_params(loss)
    """

    def __init__(
        self,
        loss_scale: float | str | Mapping[str, Any] = "dynamic",
        dtype: torch.dtype | str | None = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**base_keywords(kwargs, type(self)))
        self.cast_dtype = _parse_cast_dtype(dtype)
        self._scaler_options = _parse_loss_scale(loss_scale)
        self._is_default_scale = isinstance(loss_scale, str)
        self._scale_update_param = float(loss_scale) if is_number(loss_scale) else None
        require_flag("use_fsdp", use_fsdp)
        try:
            self._agreement = FoundInfReducer("world" if use_fsdp else None)
        except ConfigError:
            raise ConfigError(
                "use_fsdp=True needs torch.distributed; call torch.distributed.init_process_group first, or leave use_fsdp out"
            ) from None
        self._loss_scaler: Any = None
        self._device_type: str | None = None
        self._is_told_of_casts = False

    @property
    def loss_scaler(self) -> Any:
        """The wrapper's :class:`halfpeak.GradScaler`, or the scaler that user code has set.

        User code may set any object with ``scale``, ``unscale_``, ``step`` and ``update``, such as the scaler of another
        wrapper. It alone decides which steps are skipped. Setting a scaler drops the gradients of an open window.

        Raises:
            ConfigTypeError: the object lacks one of these methods.
        """
        if self._loss_scaler is None:
            group = None if self._agreement.is_local else "world"
            options = {**self._scaler_options, "enabled": self._needs_scale()}
            self._loss_scaler = GradScaler(self._devices()[-1], group=group, **options)
        return self._loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: Any) -> None:
        methods = ("scale", "unscale_", "step", "update")
        lacks = [name for name in methods if not callable(getattr(scaler, name, None))]
        if lacks:
            raise ConfigTypeError(
                f"loss_scaler={short_repr(scaler)} has no {lacks[0]}(); set a GradScaler, or an object with the methods "
                f"{', '.join(methods)}"
            )
        self.zero_grad()
        self._loss_scaler = scaler

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss, run backward, and count one backward pass. Gradients stay scaled until :meth:`step`."""
        if not self._is_told_of_casts:
            self._is_told_of_casts = True
            current_logger().warning(
                "AmpOptimWrapper casts operations only inside optim_context, which was never entered, so the model computes "
                "in its own dtype; write `with wrapper.optim_context(model): loss = model(...)`"
            )
        # User code may call this inside optim_context, and torch asks for a backward pass without autocast.
        with ExitStack() as scopes:
            for device_type in self._devices():
                scopes.enter_context(torch.autocast(device_type, enabled=False))
            super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Unscale and clip if ``clip_grad`` was given, let the scaler step or skip, then let it move the scale.

        As :meth:`OptimWrapper.step`, which takes the step where nothing is scaled. A scaler takes no closure, as in torch.
        """
        scaler = self.loss_scaler
        is_torchs = isinstance(scaler, torch.amp.GradScaler)
        if is_torchs and not (scaler.is_enabled() and (closure or self._has_window())):
            super().step(closure, **kwargs)
            return
        if closure is not None:
            raise ClosureError(
                "a loss scale takes no closure, as in torch: the optimizer would read gradients that are still scaled; write "
                "dtype='bfloat16', ApexOptimWrapper, or halfpeak.prepare(model, optimizer, 'O1') and engine.step(closure)"
            )
        with disable_casts():
            self._require_reduced()
            self._norm = None
            found_inf = None if isinstance(scaler, GradScaler) else self._found_inf()
            try:
                if self.clip_grad_kwargs:
                    scaler.unscale_(self.optimizer)
                    self._clip_grad()
                scaler.step(self.optimizer, **kwargs)
            except BaseException:
                if is_torchs:
                    scaler.update(scaler.get_scale())  # it refuses a second step between two updates
                raise
            scaler.update(self._scale_update_param)
            self._end_step(self.loss_scaler.last.found_inf if found_inf is None else found_inf)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Generator[None]:
        """Run the forward pass of ``model`` under autocast, and under ``no_sync`` inside an accumulation window."""
        self._is_told_of_casts = True
        parameter = next(model.parameters(), None)
        if parameter is not None:
            self._device_type = parameter.device.type
        # One scope per forward pass, so that no cached cast outlives its weight. Backward runs outside, as torch asks.
        with super().optim_context(model), ExitStack() as scopes:
            for device_type in self._devices():
                scopes.enter_context(_autocast(device_type, self._dtype_on(device_type)))
            yield

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`OptimWrapper.state_dict`, with the state of the scaler; where dtypes need none, a new scaler's."""
        saved = self.loss_scaler.state_dict()
        if not saved and self._is_default_scale:
            saved = GradScaler().state_dict()  # mmengine's scaler refuses the empty state of a disabled one
        return {**super().state_dict(), "loss_scaler": saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As :meth:`OptimWrapper.load_state_dict`. A static scale keeps its value."""
        self.check_state_dict(state_dict)
        if state_dict.get("loss_scaler") and self._scale_update_param is None:
            self.loss_scaler.load_state_dict(dict(state_dict["loss_scaler"]))
        super().load_state_dict(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :meth:`OptimWrapper.check_state_dict`."""
        super().check_state_dict(state_dict)
        saved = require_mapping(state_dict.get("loss_scaler") or {}, "the entry 'loss_scaler' of the state")
        if saved and isinstance(self.loss_scaler, torch.amp.GradScaler):
            from_grad_scaler(saved)

    # Devices and dtypes.

    def _devices(self) -> list[str]:
        """The device types of a forward pass: the parameters', and the accelerator to which FSDP moves them from the CPU."""
        own = self._device_type or next((p.device.type for p in self._parameters()), "cpu")
        return ["cpu", "cuda"] if own == "cpu" and torch.cuda.is_available() else [own]

    def _dtype_on(self, device_type: str) -> torch.dtype:
        return self.cast_dtype or (torch.bfloat16 if device_type == "cpu" else torch.float16)

    def _needs_scale(self) -> bool:
        """Whether losses are scaled: float16 needs it; bfloat16 and wider only with an explicit ``loss_scale``."""
        is_half = torch.float16 in map(self._dtype_on, self._devices())
        return self._scaler_options.get("enabled", True) and (is_half or not self._is_default_scale)

    # The scale.

    def _loss_scale(self) -> Tensor | float:
        scaler = self.loss_scaler
        if not isinstance(scaler, torch.amp.GradScaler):
            return 1.0
        scale: Tensor | None = getattr(scaler, "_scale", None)
        return scaler.get_scale() if scale is None else scale  # get_scale() would wait for a tensor

    def _found_inf(self) -> Tensor:
        found_inf = super()._found_inf()
        self._agreement.all_reduce_(found_inf)
        return found_inf


@contextmanager
def _autocast(device_type: str, dtype: torch.dtype) -> Generator[None]:
    """``torch.autocast`` in any floating dtype; for a CPU torch's constructor takes only float16 and bfloat16."""
    scope = torch.autocast(device_type, dtype if dtype in LOW else torch.bfloat16)
    with scope:
        if dtype not in LOW:
            torch.set_autocast_dtype(scope.device, dtype)
        yield


def base_keywords(kwargs: dict[str, Any], cls: type) -> dict[str, Any]:
    """The keywords of the base wrapper, of which these always skip; ConfigTypeError if ``kwargs`` have no optimizer.

    The first positional argument of these wrappers is not the optimizer.
    """
    if not is_optimizer(kwargs.get("optimizer")):
        raise ConfigTypeError(f"{cls.__name__} needs optimizer=...; write {cls.__name__}(optimizer=SGD(...))")
    if kwargs.get("skip_nonfinite", True) is not True:
        raise ConfigError(
            f"skip_nonfinite={short_repr(kwargs['skip_nonfinite'])}: {cls.__name__} always skips a step whose gradients are "
            "not finite; leave it out, or write OptimWrapper"
        )
    return {**kwargs, "skip_nonfinite": True}


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


def _parse_loss_scale(loss_scale: object) -> dict[str, Any]:
    """The arguments of a ``GradScaler`` that an argument ``loss_scale`` means."""
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        options: dict[str, Any] = {}
    elif isinstance(loss_scale, Mapping):
        options = {str(key): value for key, value in loss_scale.items()}
    elif is_number(loss_scale):
        options = {"init_scale": require_scale("loss_scale", loss_scale)}
    else:
        raise ConfigTypeError(
            f"loss_scale must be of type float, int or dict, or 'dynamic', not {short_repr(loss_scale)}; write loss_scale=512.0"
        )
    allowed = [name for name in keywords_of(GradScaler).names if name not in ("device", "group")]
    for key in options:
        if key not in allowed:
            raise ConfigTypeError(unknown_key("loss_scale", key, allowed))
    require_flag("enabled", options.get("enabled", True))
    try:
        options = {
            "floor": NO_FLOOR,
            "ceiling": max(2.0**24, require_scale("init_scale", options.get("init_scale", 1.0))),
            **options,
        }
        GradScaler(**options)
    except ConfigError as error:
        raise ConfigError(f"loss_scale={short_repr(loss_scale)}: {error}") from None
    return options
