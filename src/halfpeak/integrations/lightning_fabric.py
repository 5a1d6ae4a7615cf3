"""The part of Fabric's precision plugin that is the same in ``lightning`` and in ``lightning_fabric``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfpeak.core.outcome import StepResult
from halfpeak.integrations.lightning_engine import EnginePlugin, innermost


class FabricPlugin(EnginePlugin):
    """An engine for what ``fabric.setup`` returned."""

    def connect(self, model: Any, *optimizers: Any) -> None:
        """Convert a model and its optimizers after ``fabric.setup``, which shows neither to the plugin together.

        Args:
            model: what ``fabric.setup`` returned; or a list of such models.
            optimizers: likewise.
        """
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        raw = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        wrappers = [getattr(one, "_forward_module", one) for one in models]
        self.holder.connect(wrappers, [innermost(one) for one in models], raw)
        self._wrapper = wrappers[0]

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss and take the gradients in, true-sized."""
        with self._scaled(tensor) as scaled:
            scaled.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> StepResult:
        """Step or skip; what happened is what ``optimizer.step()`` returns.

        Args:
            optimizer: the bare optimizer.
            kwargs: ``closure``, which calls ``fabric.backward(loss)``.
        """
        return self.holder.step(self._connected(), optimizer, kwargs.get("closure"))

    def teardown(self) -> None:
        """Fabric tears nothing down while its objects are in use."""
