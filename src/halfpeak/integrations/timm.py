"""A loss scaler for timm's training loop, called like its ``NativeScaler`` and ``ApexScaler``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.engine.engine import Engine
from halfpeak.integrations.engine_adapter import engine_state
from halfpeak.parts.clip import ClipNorm, ClipValue, NoClip


class LossScaler:
    """``loss_scaler(loss, optimizer, ...)`` over an engine, at any level: backward, clip, step.

    In timm's script set ``amp_autocast = engine.forward`` and ``loss_scaler = LossScaler(engine)``.

    Args:
        engine: made by :func:`halfpeak.prepare`, without ``accumulate`` and ``clip``: timm accumulates and clips itself.

    Attributes:
        last: the result of the last step; None before the first.

    Raises:
        ConfigError: the engine accumulates or clips itself.

    Example:
        >>> import torch, halfpeak
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_scaler = LossScaler(halfpeak.prepare(model, optimizer, "O5"))
        >>> loss_scaler(model(torch.ones(4, 2)).mean(), optimizer, clip_grad=1.0, parameters=model.parameters())
        >>> loss_scaler.last.stepped()
        True
    """

    state_dict_key = "halfpeak"

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise ConfigTypeError(
                f"{type(engine).__name__} is not an engine; write LossScaler(halfpeak.prepare(model, optimizer, 'O2'))"
            )
        config = engine.config
        if config.accumulation.every != 1:
            raise ConfigError(
                f"the engine has accumulate={config.accumulation.every}, but timm accumulates itself; leave accumulate= out "
                "of halfpeak.prepare"
            )
        if not isinstance(config.clip, NoClip):
            raise ConfigError(
                f"the engine has clip={short_repr(config.clip)}, but timm clips itself; leave clip= out of halfpeak.prepare, "
                "and write loss_scaler(loss, optimizer, clip_grad=1.0)"
            )
        self.engine = engine
        self.last: StepResult | None = None

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run one backward pass and, if it ends a window, one step.

        Args:
            loss: a scalar, already divided for accumulation.
            optimizer: an optimizer of the engine.
            clip_grad: limit of the norm, of each element, or of the ratio of gradient to weight; None does not clip.
            clip_mode: ``"norm"``, ``"value"`` or ``"agc"``.
            parameters: model parameters to clip; None means all that the optimizer steps.
            create_graph: for optimizers that differentiate the gradient.
            need_update: False if more backward passes follow before the step.

        Raises:
            ConfigError: an unknown ``clip_mode``. Nothing was changed.
        """
        if clip_mode not in ("norm", "value", "agc"):
            raise ConfigError(f"clip_mode={short_repr(clip_mode)} must be 'norm', 'value' or 'agc'")
        with self.engine.scaled(loss, optimizers=optimizer) as scaled:
            scaled.backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self.engine.unscale()
                given = params_of(optimizer) if parameters is None else parameters
                # Adaptive clipping compares gradients with weights, so it gets the float32 ones.
                _clip([self.engine.pairs.main_of(one) for one in given], clip_grad, clip_mode)
            self.last = self.engine.step(optimizers=optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Loss scales, counters and the open window; timm saves the model and the optimizer, in float32.

        A window with gradients not yet reduced over the ranks is left out with a warning: timm writes one file for all.
        """
        return engine_state(self.engine)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        self.engine.load_loop_state_dict(state_dict)


def _clip(parameters: list[Tensor], limit: float, mode: str) -> None:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if mode == "agc":
        from timm.utils.agc import adaptive_clip_grad  # type: ignore[import-not-found, unused-ignore]

        adaptive_clip_grad(parameters, limit)
    elif mode == "norm":
        ClipNorm(max_norm=limit)(grads)
    else:
        ClipValue(value=limit)(grads)
