"""Loss scales of mmcv 1.7.2: for training loops of user code, for a hook, and the argument ``loss_scale=`` of hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.checkpoint.scaler_states import from_mmcv
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, StateError
from halfpeak.core.keywords import unknown_key
from halfpeak.core.schedule import NO_FLOOR, ScaleConfig, require_scale
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_number
from halfpeak.ops import foreach
from halfpeak.parts import loss_scaler
from halfpeak.parts.parts import Parts

MMCV_RULE: Final = ScaleConfig(init=2.0**32, interval=1000, floor=1.0, ceiling=2.0**32)
"""The constants of mmcv's ``LossScaler``, and a ceiling, which mmcv does not have."""

TORCH_RULE: Final = ScaleConfig(floor=NO_FLOOR)
"""The constants of ``torch.amp.GradScaler``, and a ceiling, which torch does not have."""

_NAMES: Final = {
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
    "scale_window": "interval",
}


class LossScaler:
    """A dynamic or static loss scale. It reads gradients but changes none.

    ::

        overflow   scale = max(scale / scale_factor, 1)
        clean      after scale_window clean updates in a row: scale = scale * scale_factor

    Args:
        init_scale: the initial scale.
        mode: ``"dynamic"``, or ``"static"`` for a constant scale.
        scale_factor: the factor by which the scale grows and falls.
        scale_window: the number of clean updates in a row before the scale grows.

    Raises:
        ConfigError: an unknown mode, or a value out of range.

    >>> scaler = LossScaler(init_scale=8.0)
    >>> scaler.update_scale(overflow=True)
    >>> scaler.loss_scale, scaler.last_overflow_iter, scaler.cur_iter
    (4.0, 0, 1)
    """

    def __init__(
        self,
        init_scale: float = 2**32,
        mode: str = "dynamic",
        scale_factor: float = 2.0,
        scale_window: int = 1000,
    ) -> None:
        given = {
            "init_scale": init_scale,
            "mode": mode,
            "scale_factor": scale_factor,
            "scale_window": scale_window,
            # float32's largest power of two, because the loop that uses this class bounds the scale itself
            "ceiling": 2.0**127,
        }
        self._start(parse_loss_scale(given, MMCV_RULE) or MMCV_RULE)

    def _start(self, config: ScaleConfig) -> None:
        self.scaler = loss_scaler.LossScaler(config)
        self.mode = "dynamic" if config.dynamic else "static"
        self.scale_factor = config.growth
        self.scale_window = config.interval
        self.cur_iter = 0
        self.last_overflow_iter = -1

    @property
    def cur_scale(self) -> float:
        """The current scale. Waits for the device."""
        return self.scaler.read_scale()

    @property
    def loss_scale(self) -> float:
        """The current scale. Waits for the device."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any element of a gradient of ``params`` is not finite. Waits for the device."""
        return not foreach.all_finite([param.grad for param in params if param.grad is not None])

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Update the scale after a step that overflowed or not. A static scale stays the same and counts nothing."""
        found_inf = (
            overflow if isinstance(overflow, Tensor) else torch.tensor(float(overflow), dtype=torch.float32)
        )
        self.scaler.update(found_inf)
        self.count(bool(overflow))

    def count(self, overflow: bool) -> None:
        """Count an update. A static scale counts nothing."""
        if self.mode == "dynamic":
            if overflow:
                self.last_overflow_iter = self.cur_iter
            self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """The state, with mmcv's six keys. Waits for the device."""
        return self.state_with(self.cur_scale)

    def state_with(self, scale: float) -> dict[str, Any]:
        """:meth:`state_dict`, for a caller that knows the scale."""
        return {
            "cur_scale": scale,
            "cur_iter": self.cur_iter,
            "mode": self.mode,
            "last_overflow_iter": self.last_overflow_iter,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the scale and the rule that :meth:`state_dict` returned.

        Raises:
            StateError: a key is missing or unknown, or a value is out of range. Nothing was loaded.
        """
        numbers = from_mmcv(state_dict)
        try:
            rule = {key: state_dict[key] for key in ("mode", "scale_factor", "scale_window")}
            restored = LossScaler(init_scale=numbers["scale"], **rule)
        except KeyError as error:
            raise StateError(
                f"the state of a LossScaler has no {error}; pass what its state_dict() returned"
            ) from None
        except ConfigError as error:
            raise StateError(f"{error}; nothing was loaded") from None
        self._start(restored.scaler.config)
        self._restore(state_dict, numbers["scale"])

    def _restore(self, state: Mapping[str, Any], scale: float) -> None:
        """Take the counts of a state of mmcv's ``LossScaler`` or of a ``GradScaler``, and ``scale``; the rule stays."""
        numbers = from_mmcv(state)
        self.scaler.load_translated({**numbers, "scale": scale})
        self.cur_iter = state.get("cur_iter", numbers["clean"])
        self.last_overflow_iter = state.get("last_overflow_iter", -1)


class HookLossScaler(LossScaler):
    """The loss scale of an :class:`~halfpeak.runner.Fp16OptimizerHook`, as ``hook.loss_scaler``.

    An ``after_train_iter`` of user code may use it in either order of mmcv. Gradients are then scaled, also for other
    code that looks at them, from its ``backward()`` until they are divided or unscaled::

        of mmcv's documentation                        of mmcv 1.7.2, in the words of a GradScaler
        (loss * scaler.loss_scale).backward()          scaler.scale(loss).backward()
        hook.copy_grads_to_fp32(model, weights)        scaler.unscale_(optimizer)
        overflow = scaler.has_overflow(weights)        hook.clip_grads(model.parameters())
        divide, clip, optimizer.step()                 scaler.step(optimizer)
        hook.copy_params_to_fp16(model, weights)       scaler.update()
        scaler.update_scale(overflow)

    Args:
        config: the rule of the scale.
    """

    _parts: Parts | None = None
    _found_inf: Tensor | None = None

    def __init__(self, config: ScaleConfig) -> None:
        self._start(config)

    def enter_run(self, parts: Parts, saved: Mapping[str, Any] | None) -> None:
        """Move to the device of a run, and restore a saved scale. A static scale keeps its configured value.

        Args:
            parts: of the hook.
            saved: a state of mmcv's ``LossScaler`` or of a ``GradScaler``, or None.

        Raises:
            StateError: ``saved`` is neither. Nothing was loaded.
        """
        if saved:
            self._restore(saved, from_mmcv(saved)["scale"] if self.mode == "dynamic" else self.cur_scale)
        self.scaler.to(parts.device)
        self._parts, parts.scalers = parts, [self.scaler]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the scale and the rule that :meth:`state_dict` returned; see :meth:`LossScaler.load_state_dict`."""
        super().load_state_dict(state_dict)
        if self._parts is not None:
            self.enter_run(self._parts, None)

    def get_scale(self) -> float:
        """The current scale, under the name that ``GradScaler`` has for it. Waits for the device."""
        return self.cur_scale

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiply a loss by the scale."""
        return loss_scaler.scale_loss(outputs, self.scaler.state.scale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in float32. A second call before :meth:`update` changes nothing.

        Raises:
            OrderError: the run has not begun, or ``optimizer`` is not that of the run.
        """
        if self._found_inf is not None:
            return
        if self._parts is None:
            raise OrderError(
                "the hook's loss_scaler unscales gradients only in a run; call runner.run() first"
            )
        scale, window = self.scaler.state.scale, self._parts.window_of(optimizer)
        self._parts.agree()
        self._found_inf = torch.zeros_like(scale)
        with torch.no_grad():
            foreach.unscale_(window.gradients(), scale.reciprocal(), self._found_inf)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`unscale_`, then ``optimizer.step`` unless a gradient is not finite. Waits for the device."""
        self.unscale_(optimizer)
        if self._parts is None or self._found_inf is None or bool(self._found_inf):
            return None
        result = optimizer.step(*args, **kwargs)
        self._parts.pairs.publish()
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Set the scale to ``new_scale`` if it is given; otherwise update it by what :meth:`unscale_` found.

        Raises:
            OrderError: no gradients have been unscaled since the last call.
        """
        found_inf, self._found_inf = self._found_inf, None
        if new_scale is not None:
            self.scaler.set_scale(float(new_scale))
        elif found_inf is None:
            raise OrderError(
                "update() follows unscale_(optimizer) or step(optimizer); call one of them first"
            )
        else:
            self.update_scale(found_inf)


def parse_loss_scale(loss_scale: object, rule: ScaleConfig = TORCH_RULE) -> ScaleConfig | None:
    """Return the rule for ``loss_scale``; ``rule`` gives missing constants. None for ``dict(enabled=False)``.

    Args:
        loss_scale: ``"dynamic"``; a number, which is a static scale; or a dict with keys of mmcv's ``LossScaler``
            (``init_scale``, ``mode``, ``scale_factor``, ``scale_window``), of torch's ``GradScaler``, or of
            :class:`~halfpeak.ScaleConfig`.

    Raises:
        ConfigTypeError: anything else, or an unknown key.
        ConfigError: a value out of range.

    >>> parse_loss_scale({"init_scale": 512.0, "scale_factor": 4.0}, MMCV_RULE)
    ScaleConfig(init=512.0, dynamic=True, growth=4.0, backoff=0.25, interval=1000, ...)
    >>> parse_loss_scale({"enabled": False})
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return rule
    if isinstance(loss_scale, Mapping):
        return _parse_dict(loss_scale, rule)
    if not is_number(loss_scale):
        raise ConfigTypeError(
            f"loss_scale must be of type float, int or dict, or 'dynamic', not {short_repr(loss_scale)}; write "
            "loss_scale='dynamic' or loss_scale=512.0"
        )
    return ScaleConfig.static(require_scale("loss_scale", loss_scale))


def _parse_dict(given: Mapping[str, Any], rule: ScaleConfig) -> ScaleConfig | None:
    own = [field.name for field in fields(ScaleConfig)]
    allowed = [*_NAMES, "mode", "scale_factor", "enabled", *own]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in allowed:
            raise ConfigTypeError(unknown_key("loss_scale", key, allowed))
        if key == "mode":
            if value not in ("dynamic", "static"):
                raise ConfigError(f"mode={short_repr(value)} in loss_scale must be 'dynamic' or 'static'")
            values["dynamic"] = value == "dynamic"
        elif key == "scale_factor":
            values["growth"] = require_scale("scale_factor", value)
            values["backoff"] = 1 / values["growth"]
        elif key == "enabled":
            if not isinstance(value, bool):
                raise ConfigTypeError(f"enabled={short_repr(value)} in loss_scale must be True or False")
        else:
            values[_NAMES.get(key, key)] = value
    try:
        config = _with_bounds(rule, values)
    except ConfigError as error:
        raise ConfigError(f"loss_scale={short_repr(dict(given))}: {error}") from None
    return config if given.get("enabled", True) else None


def _with_bounds(rule: ScaleConfig, values: Mapping[str, Any]) -> ScaleConfig:
    """Return ``rule`` with ``values``; an initial scale out of bounds moves the bounds that ``values`` does not set."""
    config = replace(rule, **values)
    bounds = {"floor": min(config.floor, config.init), "ceiling": max(config.ceiling, config.init)}
    return replace(config, **{name: bound for name, bound in bounds.items() if name not in values})
