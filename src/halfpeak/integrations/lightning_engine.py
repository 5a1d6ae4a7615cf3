"""An engine inside a precision plugin of Lightning 2.x, whichever of its packages the plugin is of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor, nn

from halfpeak.core.outcome import StepResult
from halfpeak.engine.engine import Engine
from halfpeak.integrations.holder import EngineHolder, scaled
from halfpeak.optim.wrapped import unwrap

NOT_HERE: Final = {
    "accumulate": "Lightning counts the backward passes of a step: write Trainer(accumulate_grad_batches=...)",
    "clip": "Lightning clips: write Trainer(gradient_clip_val=...), or fabric.clip_gradients(...)",
    "num_losses": "Lightning does not say which loss a backward pass is of; leave it out",
}
"""Options of :func:`halfpeak.prepare` that are Lightning's business."""

PRECISIONS: Final = {
    "O0": "32-true",
    "O1": "16-mixed",
    "O2": "16-true",
    "O3": "16-true",
    "O4": "bf16-mixed",
    "O5": "bf16-true",
}
"""What Lightning calls what comes nearest to a level. It shows the name and estimates sizes with it."""


class EnginePlugin:
    """What both plugins do: enter the casts of a level, run its backward passes, save its state.

    Args:
        level: ``"O0"`` to ``"O5"``; see :data:`halfpeak.LEVELS`.
        options: of :func:`halfpeak.prepare`, but for what Lightning does itself (``clip``, ``accumulate``).

    Raises:
        ConfigError: an unknown level or option, or one that is Lightning's business.
    """

    def __init__(self, level: str = "O2", **options: Any) -> None:
        self.holder = EngineHolder(level, options, NOT_HERE)
        self.precision: Any = PRECISIONS[self.holder.level]
        self._wrapper: nn.Module | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine, while there is one."""
        return self.holder.engine

    @property
    def last(self) -> StepResult | None:
        """What the last step did; None before the first."""
        return self.holder.last

    def _connected(self) -> Engine:
        return self.holder.connected("write precision.connect(model, optimizer) after fabric.setup")

    def forward_context(self) -> AbstractContextManager[Any]:
        """The casts of the level."""
        return self.holder.forward()

    def _scaled(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        engine = self._connected()
        delay = not getattr(self._wrapper, "require_backward_grad_sync", True)
        return scaled(engine, loss, engine.lanes, delay=delay)

    def state_dict(self) -> dict[str, Any]:
        """Loss scales, counters and the open window; Lightning saves model and optimizers, which speak float32."""
        return self.holder.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        self.holder.load_state_dict(state_dict)


def innermost(model: nn.Module) -> nn.Module:
    """The module inside Fabric's wrapper and those of torch."""
    return unwrap(getattr(model, "_forward_module", model))
