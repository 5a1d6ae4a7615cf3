"""An ``Accelerator`` with opt levels, and a gradient scaler, for Hugging Face accelerate 1.x."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any, Final

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SCALER_NAME, convert_to_fp32, is_compiled_module
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.levels import Level, LevelName
from halfpeak.core.short_repr import short_repr
from halfpeak.core.step_result import StepResult
from halfpeak.core.wrappers import wrapper_of
from halfpeak.distributed.fsdp import fully_shard
from halfpeak.engine.grad_scaler import GradScaler
from halfpeak.integrations.engine_adapter import EngineAdapter
from halfpeak.ops.foreach import is_in_bucket
from halfpeak.ops.unsharded import is_fully_sharded
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
        ConfigError: ``mixed_precision`` is not ``"no"``, the strategy replaces the optimizer (DeepSpeed, Megatron) or flattens
            parameters (FSDP1), a setting of the FSDP plugin cannot be followed, or an option is unknown.
    """

    def __init__(
        self,
        *args: Any,
        level: LevelName | Level = "auto",
        options: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        self.adapter = EngineAdapter(level, options, refused=NOT_HERE, advice=ADVICE)
        # Before accelerate makes its state, which the process keeps.
        _check_mixed_precision(kwargs.get("mixed_precision"), level)
        super().__init__(*args, **{"mixed_precision": "no", **kwargs})
        _check_mixed_precision(self.state.mixed_precision, level)
        if self.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise ConfigError(
                f"a level cannot be used with {self.distributed_type.value}, which replaces the optimizer; "
                "write accelerate.Accelerator(mixed_precision='bf16')"
            )
        if self.distributed_type.value == "FSDP":
            _check_plugin(self.state.fsdp_plugin, self.parallelism_config)
        self.scaler: Any = self.adapter

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Place and wrap as accelerate does; then prepare an engine for the models and optimizers among ``args``.

        With FSDP2 the model is sharded by :func:`halfpeak.distributed.fully_shard`, in the parts that the plugin chooses.

        Raises:
            ConfigError: optimizers without their models.
            OrderError: with FSDP2, an optimizer with state for parameters that are not shards.
        """
        with ExitStack() as stack:
            sharded = self._shard(args, stack) if self.is_fsdp2 else []
            prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer, parameters in sharded:
            for group, given in zip(optimizer.param_groups, parameters, strict=True):
                group["params"] = given
        found = prepared if isinstance(prepared, (list, tuple)) else (prepared,)
        models = [one for one in found if isinstance(one, nn.Module)]
        for model in models if sharded else ():
            _cast_forward(model, self.adapter)
        optimizers = [one.optimizer for one in found if isinstance(one, AcceleratedOptimizer)]
        if optimizers and not models:
            raise ConfigError(f"an optimizer was prepared without its model; {ADVICE}")
        if optimizers:
            self.adapter.connect(models, [unwrap(model) for model in models], optimizers)
        return prepared

    def _shard(self, given: Sequence[Any], stack: ExitStack) -> list[tuple[Optimizer, list[list[Tensor]]]]:
        """Shard the model and put its shards into the groups of the optimizers; accelerate takes a sharded model as it is.

        Args:
            given: to ``prepare``.
            stack: restores the settings of the plugin that accelerate must not follow once more.

        Returns:
            Each optimizer, with the shards of its groups. accelerate finds parameters by their memory, and gives a group one
            empty shard in place of another.
        """
        models = [one for one in given if isinstance(one, nn.Module)]
        optimizers = [one for one in given if isinstance(one, Optimizer)]
        if len(models) != 1 or not optimizers:
            return []  # accelerate has an error for that
        (model,), level = models, self.adapter.level_for(models)
        if not is_fully_sharded(unwrap(model)):
            for optimizer in optimizers:
                if optimizer.state:
                    raise OrderError(
                        f"{type(optimizer).__name__} has state for parameters that are not sharded yet; load a saved state "
                        "after accelerator.prepare(model, optimizer), or build the optimizer after "
                        "halfpeak.distributed.fully_shard(model, level)"
                    )
            plugin: Any = self.state.fsdp_plugin
            plugin.set_auto_wrap_policy(model)
            if plugin.activation_checkpointing:
                fsdp2_apply_ac(self, model)
                plugin.activation_checkpointing = False
                stack.callback(setattr, plugin, "activation_checkpointing", True)
            whole = dict(model.named_parameters(remove_duplicate=False))
            self._shard_model(model, level)
            shards = dict(model.named_parameters(remove_duplicate=False))
            of_whole = {parameter: shards[name] for name, parameter in whole.items()}
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["params"] = [of_whole.get(one, one) for one in group["params"]]
        return [(one, [list(group["params"]) for group in one.param_groups]) for one in optimizers]

    def _shard_model(self, model: nn.Module, level: Level) -> None:
        plugin: Any = self.state.fsdp_plugin
        parallelism: Any = self.parallelism_config
        is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
        blocks = [name for name, module in model.named_modules() if name and is_block and is_block(module)]
        mesh = self.torch_device_mesh
        fully_shard(
            model,
            level,
            mesh=None if mesh is None else mesh[tuple(parallelism.fsdp_dim_names)],
            blocks=blocks,
            reshard_after_forward=plugin.reshard_after_forward,
            offload=plugin.cpu_offload,
            keep_fp32=self.adapter.keep_fp32,
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place and wrap as accelerate does. At O1 and O4 the forward pass is cast and returns float32."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        _cast_forward(prepared, self.adapter)
        return prepared

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
            if isinstance(model, DistributedDataParallel):  # as accelerate does
                parts.reduces = {**before, model.module: True}
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
            if self.is_fsdp2:
                # Before it loads optimizers, accelerate would load the scaler as torch's GradScaler.
                self.scaler = None
                stack.callback(setattr, self, "scaler", self.adapter)
                stack.callback(self.register_load_state_pre_hook(self._load_scaler).remove)
            super().load_state(*args, **kwargs)

    def _load_scaler(self, models: Sequence[nn.Module], folder: str) -> None:
        self.adapter.load_state_dict(torch.load(Path(folder, SCALER_NAME), weights_only=True))


def _check_mixed_precision(given: Any, level: LevelName | Level) -> None:
    name = str(getattr(given, "value", given))
    if name not in ("no", "None"):
        same = {"fp16": "'O2' (or 'O1')", "bf16": "'O5' (or 'O4')"}.get(name)
        raise ConfigError(
            f"mixed_precision={name!r} cannot be combined with level={short_repr(level)}, which sets the precision; leave "
            "mixed_precision (and fp16, bf16) out"
            + (f", and write level={same} for the same dtype" if same else "")
        )


def _check_plugin(plugin: Any, parallelism: Any) -> None:
    """Check that a level can shard a model as accelerate's plugin says.

    Raises:
        ConfigError: FSDP1, or a setting that :func:`halfpeak.distributed.fully_shard` cannot follow.
    """
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "FSDP1 flattens the parameters, which a level cannot follow; write FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if plugin.mixed_precision_policy is not None:
        raise ConfigError(
            "mixed_precision_policy= of FullyShardedDataParallelPlugin is what the level gives; leave it out"
        )
    given = [name for name in ("cpu_ram_efficient_loading", "ignored_modules") if getattr(plugin, name)]
    given += [name for name in ("tp_size", "cp_size", "sp_size") if getattr(parallelism, name, 1) > 1]
    if given:
        raise ConfigError(
            f"{given[0]}= cannot be combined with a level; leave it out. If you need it, shard the model yourself, without "
            "auto_wrap_policy: halfpeak.distributed.fully_shard(model, level), then the optimizer, then "
            "accelerator.prepare(model, optimizer)"
        )


def _cast_forward(prepared: nn.Module, adapter: EngineAdapter) -> None:
    """At O1 and O4, run the forward method of a model with the casts of the level, once.

    A compiled model is cast around what is compiled, because the compiler cannot leave a context in which the graph has been
    broken, as the hooks of FSDP2 break it. Where nothing is compiled, ``unwrap_model(keep_fp32_wrapper=False)`` undoes it.

    A bound method, because a copy of the model, such as its average, then calls its own, without casts.
    """
    level = adapter.level  # "auto" is none that casts per operation
    model: Any = prepared
    while not is_compiled_module(model) and wrapper_of(model) is not None:
        model = model.module
    if level is None or not level.policy().per_op or getattr(model.forward, "_casts", False):
        return
    original = model.forward
    function = getattr(original, "__func__", None)

    @wraps(function or original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with adapter.forward() if self is model else nullcontext():
            output = original(*args, **kwargs) if function is None else function(self, *args, **kwargs)
        return convert_to_fp32(output)

    if not is_compiled_module(model):
        model._original_forward = original
    vars(forward)["_casts"] = True
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
