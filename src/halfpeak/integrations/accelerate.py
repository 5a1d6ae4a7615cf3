"""An ``Accelerator`` with opt levels, and a gradient scaler, for Hugging Face accelerate 1.x."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import MappingProxyType, MethodType
from typing import Any, Final

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.levels import Level, LevelName
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.engine.grad_scaler import GradScaler
from halfpeak.integrations.engine_adapter import EngineAdapter
from halfpeak.ops.foreach import is_in_bucket
from halfpeak.optim.unwrap import unwrap

NOT_HERE: Final = {
    "accumulate": "accelerate accumulates gradients itself; write Accelerator(gradient_accumulation_steps=...)",
    "clip": "accelerate clips itself; write accelerator.clip_grad_norm_(model.parameters(), 1.0)",
    "num_losses": "accelerate does not tell which loss a backward pass is for; leave it out",
}
"""Options of :func:`halfpeak.prepare` that accelerate handles itself, with the advice to show for each."""

ADVICE: Final = "write model, optimizer = accelerator.prepare(model, optimizer), both in one call"


class AcceleratorScaler(GradScaler):
    """:class:`halfpeak.GradScaler` for accelerate's own ``Accelerator(mixed_precision="fp16")``.

    Assign it before ``prepare``: ``accelerator.scaler = AcceleratorScaler("cuda")``. accelerate considers a step
    skipped if ``optimizer.step`` was not called, so this scaler never lets a fused kernel do the skipping. Thus
    ``accelerator.optimizer_step_was_skipped`` is right with every optimizer, and schedulers wait.
    """

    def _kernel_may_skip(self, optimizer: Optimizer) -> bool:
        return False


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that trains at a level.

    Pass the models and optimizers that belong together to ``prepare`` in one call. After ``backward``, gradients are
    unscaled. ``save_state`` writes, and ``load_state`` reads, everything that a bitwise resume needs.

    Args:
        args: of ``accelerate.Accelerator``.
        level: of :func:`halfpeak.prepare`. At O1 and O4 the forward pass of a prepared model is cast and returns float32,
            as with accelerate's own ``mixed_precision``; a loss outside of it is cast in ``with accelerator.autocast():``.
        options: of :func:`halfpeak.prepare`, by name, except ``clip``, ``accumulate`` and ``num_losses``: accelerate's own.
        kwargs: of ``accelerate.Accelerator``, without ``mixed_precision``.

    Attributes:
        adapter: holds the engine, once there is one.
        scaler: the adapter, under the name by which accelerate and transformers save and load it.

    Raises:
        ConfigError: ``mixed_precision`` is not ``"no"``, the strategy shards or replaces the optimizer, or an option is
            unknown.
    """

    def __init__(
        self,
        *args: Any,
        level: LevelName | Level = "auto",
        options: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        self.adapter = EngineAdapter(level, options, refused=NOT_HERE, advice=ADVICE)
        super().__init__(*args, **{"mixed_precision": "no", **kwargs})
        if self.state.mixed_precision != "no":
            raise ConfigError(
                f"mixed_precision={self.state.mixed_precision!r} cannot be combined with level={short_repr(level)}, which sets "
                "the precision; leave mixed_precision (and fp16, bf16) out"
            )
        if self.distributed_type.value in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise ConfigError(
                f"a level cannot be used with {self.distributed_type.value}, which shards or replaces the optimizer; "
                "write accelerate.Accelerator(mixed_precision='bf16')"
            )
        self.scaler: Any = self.adapter

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Place and wrap as accelerate does; then prepare an engine for the models and optimizers among ``args``.

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
            self.adapter.connect(models, [unwrap(model) for model in models], optimizers)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place and wrap as accelerate does. At O1 and O4 the forward pass is cast and returns float32."""
        level = self.adapter.level  # "auto" is none that casts per operation
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        if level is not None and level.policy().per_op and is_new:
            _cast_forward(unwrap(model), self.adapter)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer so that its ``step`` is the engine's."""
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(prepared, EngineOptimizer):
            position = next(i for i, one in enumerate(self._optimizers) if one is prepared)
            prepared = EngineOptimizer(prepared.optimizer, prepared.device_placement, self.adapter)
            self._optimizers[position] = prepared
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide for accumulation, scale, run backward, and unscale the gradients."""
        with self.adapter.scaled(loss / self.gradient_accumulation_steps) as scaled:
            scaled.backward(**kwargs)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Generator[None]:  # type: ignore[override]
        """Reduce gradients in a backward pass of ``model`` although its forward pass ran under ``no_sync``."""
        parts = self.adapter.connected().parts
        before = parts.reduces
        with super().trigger_sync_in_backward(model):
            parts.reduces = {**before, getattr(model, "module", model): True}
            try:
                yield
            finally:
                parts.reduces = before

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """The casts of the level."""
        return self.adapter.forward()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The ``state_dict`` of a model as ``save_state`` and ``save_model`` write it."""
        state = super().get_state_dict(model, unwrap=unwrap)
        _unshare_storage(model, state)
        return state

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Restore a state that ``save_state`` wrote."""
        models = () if self.adapter.engine is None else self.adapter.engine.models
        with ExitStack() as stack:
            for model in models:
                stack.callback(model.register_state_dict_post_hook(_unshare_storage).remove)
            super().load_state(*args, **kwargs)


def _cast_forward(model: nn.Module, adapter: EngineAdapter) -> None:
    """Run the forward method of ``model`` with the casts of the level. ``unwrap_model(keep_fp32_wrapper=False)`` undoes it.

    A bound method, because a copy of the model, such as its average, then calls its own, without casts.
    """
    original = model.forward
    function = getattr(original, "__func__", None)

    @wraps(function or original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with adapter.forward() if self is model else nullcontext():
            output = original(*args, **kwargs) if function is None else function(self, *args, **kwargs)
        return convert_to_fp32(output)

    model._original_forward = original  # type: ignore[assignment]
    model.forward = MethodType(forward, model)


def _unshare_storage(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Copy values out of the flat buffers of a fused optimizer; tied weights stay tied.

    accelerate and safetensors treat values that share a storage as tied weights, and save and load only one of them.
    """
    copies: dict[Any, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and is_in_bucket(value):
            key = (value.data_ptr(), value.shape, value.stride())
            state[name] = copies.setdefault(key, value.clone())


class EngineOptimizer(AcceleratedOptimizer):
    """accelerate's optimizer wrapper, with the step of an engine.

    Attributes:
        last: the result of the last step; None before the first.
    """

    def __init__(self, optimizer: Optimizer, device_placement: bool, adapter: EngineAdapter) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=None)
        self.last: StepResult | None = None
        self._adapter = adapter

    def step(self, closure: Any = None) -> None:
        """Step or skip at the end of an accumulation window; else do nothing.

        Raises:
            OrderError: a later call of ``Accelerator.prepare`` was for other optimizers.
        """
        if self.gradient_state.sync_gradients:
            if self.optimizer not in self._adapter.connected().optimizers:
                raise OrderError(
                    f"{type(self.optimizer).__name__} was prepared in an earlier call of accelerator.prepare(), which a later "
                    "call has replaced; prepare everything in one call: "
                    "one, other, optimizer, other_optimizer = accelerator.prepare(one, other, optimizer, other_optimizer)"
                )
            self.last = self._adapter.step(self.optimizer, closure)
            self._is_overflow = not self.last.stepped()
