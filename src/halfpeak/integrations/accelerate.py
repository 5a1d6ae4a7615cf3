"""Levels and a loss scale inside Hugging Face accelerate 1.x."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError
from halfpeak.core.outcome import StepResult
from halfpeak.integrations.grad_scaler import GradScaler
from halfpeak.integrations.holder import EngineHolder, scaled
from halfpeak.optim.wrapped import unwrap
from halfpeak.parts.verdict import is_multi_rank

NOT_HERE: Final = {
    "accumulate": "accelerate counts the backward passes of a step: write Accelerator(gradient_accumulation_steps=...)",
    "clip": "accelerate clips: write accelerator.clip_grad_norm_(model.parameters(), 1.0)",
    "num_losses": "accelerate does not say which loss a backward pass is of; leave it out",
}
"""Options of :func:`halfpeak.prepare` that are accelerate's business."""

ADVICE: Final = "write model, optimizer = accelerator.prepare(model, optimizer), both in one call"


class AcceleratorScaler(GradScaler):
    """:class:`halfpeak.GradScaler` for an ``Accelerator(mixed_precision="fp16")`` of accelerate's own.

    Assign it before ``prepare``: ``accelerator.scaler = AcceleratorScaler("cuda")``. accelerate takes a step for skipped if
    ``optimizer.step`` was not called, so this scaler never leaves it to a fused kernel to skip:
    ``accelerator.optimizer_step_was_skipped`` is right with every optimizer, and schedulers wait.
    """

    def _may_skip_itself(self, optimizer: Optimizer) -> bool:
        return False


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that trains at a level.

    ``prepare`` takes the models and optimizers that belong together in one call. Clipping by ``clip_grad_norm_`` and
    ``clip_grad_value_`` reaches the masters of the parameters it is given. ``save_state`` and ``load_state`` hold
    everything that a bitwise resume needs.

    Args:
        args: of ``accelerate.Accelerator``.
        level: ``"O0"`` to ``"O5"``. At O1 and O4 operations are cast inside ``with accelerator.autocast():``.
        options: of :func:`halfpeak.prepare`, but for what accelerate does itself (``clip``, ``accumulate``).
        kwargs: of ``accelerate.Accelerator``, without ``mixed_precision``.

    Attributes:
        holder: the engine, once there is one.
        scaler: what accelerate and transformers save and load of it.

    Raises:
        ConfigError: ``mixed_precision`` is not ``"no"``, the strategy shards or replaces the optimizer, or an option is
            unknown.
    """

    def __init__(
        self, *args: Any, level: str = "O2", options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.holder = EngineHolder(level, options or {}, NOT_HERE)
        super().__init__(*args, **{"mixed_precision": "no", **kwargs})
        if self.state.mixed_precision != "no":
            raise ConfigError(
                f"mixed_precision={self.state.mixed_precision!r} next to level={level!r}; leave mixed_precision (and fp16, "
                "bf16) out"
            )
        if self.distributed_type.value in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise ConfigError(
                f"a level cannot be used with {self.distributed_type.value}, which shards or replaces the optimizer; "
                "write accelerate.Accelerator(mixed_precision='bf16')"
            )
        self.scaler: Any = self.holder

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Place and wrap, as ever; then convert the models and optimizers among ``args``.

        Raises:
            ConfigError: optimizers without their models.
        """
        prepared = super().prepare(*args, device_placement=device_placement)
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        models = [one for one in found if isinstance(one, nn.Module)]
        optimizers = [one.optimizer for one in found if isinstance(one, AcceleratedOptimizer)]
        if optimizers and not models:
            raise ConfigError(f"an optimizer was prepared without its model; {ADVICE}")
        if optimizers:
            self.holder.connect(models, [unwrap(model) for model in models], optimizers)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """An optimizer whose ``step`` is the engine's."""
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(prepared, EngineOptimizer):
            position = next(i for i, one in enumerate(self._optimizers) if one is prepared)
            prepared = EngineOptimizer(prepared.optimizer, prepared.device_placement, self.holder)
            self._optimizers[position] = prepared
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide for accumulation, scale, run backward, and take the gradients in, true-sized."""
        engine = self.holder.connected(ADVICE)
        delay = is_multi_rank() and not self.sync_gradients
        with scaled(engine, loss / self.gradient_accumulation_steps, engine.lanes, delay=delay) as product:
            product.backward(**kwargs)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """The casts of the level."""
        return self.holder.forward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the true-sized gradients that the optimizers will read; returns their norm before that."""
        return super().clip_grad_norm_(self._stepped(parameters), max_norm, norm_type)  # type: ignore[arg-type]

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the true-sized gradients that the optimizers will read."""
        super().clip_grad_value_(self._stepped(parameters), clip_value)

    def _stepped(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        masters = self.holder.connected(ADVICE).masters
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return [parameter if (master := masters.of(parameter)) is None else master for parameter in given]


class EngineOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer, whose ``step`` is an engine's.

    Attributes:
        last: what the last step did; None before the first.
    """

    def __init__(self, optimizer: Optimizer, device_placement: bool, holder: EngineHolder) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=None)
        self.last: StepResult | None = None
        self._holder = holder

    def step(self, closure: Any = None) -> None:
        """Step or skip where accumulation ends; else nothing."""
        if self.gradient_state.sync_gradients:
            self.last = self._holder.step(self._holder.connected(ADVICE), self.optimizer, closure)
            self._is_overflow = not self.last.stepped()
