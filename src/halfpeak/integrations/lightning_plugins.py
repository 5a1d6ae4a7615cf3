"""Plugins and callbacks for Lightning 2.x without base class: ``lightning`` and ``pytorch_lightning`` each define one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.checkpoint.scaler_states import from_grad_scaler
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError, ParameterError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.levels import Level, LevelName
from halfpeak.core.step_result import StepResult
from halfpeak.engine.averaged_model import AveragedModel
from halfpeak.engine.engine import Engine
from halfpeak.integrations.engine_adapter import OPTIONS, EngineAdapter
from halfpeak.optim.unwrap import unwrap

NOT_HERE: Final = {
    "accumulate": "Lightning accumulates gradients itself; write Trainer(accumulate_grad_batches=...)",
    "clip": "Lightning clips itself; write Trainer(gradient_clip_val=...), or fabric.clip_gradients(...)",
    "num_losses": "Lightning does not tell which loss a backward pass is for; leave it out",
}
"""Options of :func:`halfpeak.prepare` that Lightning handles itself, with the advice to show for each."""

ADVICE: Final = "write precision.connect(model, optimizer) after fabric.setup"


def precision_name(level: Level) -> str:
    """Lightning's name of the precision nearest to a level. Lightning shows it and estimates model sizes by it.

    >>> from halfpeak import LEVELS
    >>> [precision_name(LEVELS[name]) for name in ("O0", "O1", "O2", "O5")]
    ['32-true', '16-mixed', '16-true', 'bf16-true']
    """
    policy = level.policy()
    bits = {torch.float16: "16", torch.bfloat16: "bf16"}.get(policy.compute or torch.float32, "32")
    return f"{bits}-{'mixed' if policy.per_op else 'true'}"


class EnginePlugin:
    """Base of both plugins: the casts of a level, its backward passes, its state.

    Args:
        level: of :func:`halfpeak.prepare`.
        options: of :func:`halfpeak.prepare`, by name, except ``clip``, ``accumulate`` and ``num_losses``: Lightning's own.

    Raises:
        ConfigError: an unknown level or option, or an option that Lightning handles itself.
    """

    @known_keywords({name: f"options={{{name!r}: ...}}" for name in OPTIONS if name not in NOT_HERE})
    def __init__(
        self, level: LevelName | Level = "auto", options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.adapter = EngineAdapter(level, options, refused=NOT_HERE, advice=ADVICE)

    @property
    def precision(self) -> Any:
        """Lightning's name of the precision; ``"32-true"`` where ``"auto"`` has not met a model yet."""
        level = self.adapter.level
        return "32-true" if level is None else precision_name(level)

    @property
    def engine(self) -> Engine | None:
        """The engine; None while there is none."""
        return self.adapter.engine

    def forward_context(self) -> AbstractContextManager[Any]:
        """The casts of the level."""
        return self.adapter.forward()

    def state_dict(self) -> dict[str, Any]:
        """Loss scales, counters and the open window; Lightning saves the model and the optimizer, in float32."""
        return self.adapter.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        self.adapter.load_state_dict(state_dict)


class FabricPlugin(EnginePlugin):
    """An engine for what ``fabric.setup`` returned."""

    def connect(self, model: Any, *optimizers: Any) -> None:
        """Prepare an engine after ``fabric.setup``, which does not give a plugin model and optimizers together.

        Args:
            model: the model that ``fabric.setup`` returned, or a list of such models.
            optimizers: the optimizers that ``fabric.setup`` returned.
        """
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        raw = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        wrappers = [getattr(one, "_forward_module", one) for one in models]
        self.adapter.connect(wrappers, [unwrap(one) for one in wrappers], raw)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss and unscale the gradients."""
        with self.adapter.scaled(tensor) as scaled:
            scaled.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> StepResult:
        """Step or skip; ``optimizer.step()`` returns the result.

        Args:
            optimizer: the bare optimizer.
            kwargs: ``closure``, which calls ``fabric.backward(loss)``.
        """
        return self.adapter.step(optimizer, kwargs.get("closure"))


class TrainerPlugin(EnginePlugin):
    """An engine during ``Trainer.fit``; before and afterwards the module is an ordinary float32 module.

    At levels that store low-precision weights, each submodule of the ``LightningModule`` is converted and casts its own
    inputs and outputs, so ``training_step`` gets float32 from each submodule. Parameters of the ``LightningModule``
    itself, and submodules without parameters (losses, metrics), stay unchanged.
    """

    _after_closure: Callable[..., None]
    _wrap_closure: Callable[..., Any]

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare the engine. Schedulers with ``interval="step"`` do not step after a skipped optimizer step.

        Raises:
            ParameterError: the level stores half weights, and all parameters belong to the ``LightningModule`` itself.
            ConfigError: a callback cannot work at this level.
        """
        module = unwrap(model)
        level = self.adapter.level_for([module])
        _check_callbacks(module, level)
        if level.policy().per_op:
            parts: list[nn.Module] = [module]
        else:
            parts = list(called_submodules(module))
            if not parts:
                raise ParameterError(
                    f"{type(module).__name__} has no submodule with parameters, so {level.name} has nothing to "
                    "convert; put the parameters in a torch.nn.Module, or write HalfpeakPrecision('O1')"
                )
        self.adapter.connect([model], parts, [one for one in optimizers if one.param_groups], level)
        for config in lr_schedulers:
            if config.interval == "step" and not isinstance(config.scheduler, SkipAwareScheduler):
                config.scheduler = SkipAwareScheduler(config.scheduler, self.adapter)
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run ``LightningModule.backward`` on the scaled loss and unscale the gradients."""
        with self.adapter.scaled(tensor) as scaled:
            model.backward(scaled, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward and backward, Lightning's hooks and clipping on unscaled gradients, then step or skip.

        Returns:
            What the closure returned: the loss.
        """
        engine = self.adapter.connected()
        if isinstance(optimizer, torch.optim.LBFGS):
            self.adapter.step(optimizer, partial(self._wrap_closure, model, optimizer, closure))
            return None
        loss = closure()
        self._after_closure(model, optimizer)
        if loss is None and model.automatic_optimization and not engine.is_open:
            # training_step returned None, and no batch of the window has a gradient.
            self.adapter.results.pop(optimizer, None)
            return None
        self.adapter.step(optimizer)
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the loss scale of a run that Lightning's own ``MixedPrecision`` saved."""
        theirs = checkpoint.get("MixedPrecision")
        if theirs and type(self).__qualname__ not in checkpoint and self.engine is not None:
            numbers = from_grad_scaler(theirs)
            for scaler in self.engine.scalers:
                scaler.load_translated(numbers)  # a static scale keeps its value

    def teardown(self) -> None:
        """Restore the module's own dtypes, with the values of the masters. The next ``fit`` continues with the scale."""
        self.adapter.release()


class Averages:
    """Averages the float32 values that the optimizer steps. Validation and checkpoints use the averages.

    After training the module has them. Validation rounds them where a level stores half weights; at O3, which has no masters,
    so does the end of training.
    """

    _average_model: Any
    _device: Any
    _use_buffers: bool
    _kwargs: dict[str, Any]
    _current: dict[str, Tensor] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Copy the module for the averages."""
        if stage == "fit":
            pl_module.configure_model()
            self._average_model = AveragedModel(pl_module, use_buffers=self._use_buffers, **self._kwargs)
            self._current = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Move the averages to the module, which is on its device now."""
        self._average_model.to(self._device or pl_module.device)

    def _swap_models(self, pl_module: Any) -> None:
        """Put the averages into the module for a validation; at the next call put its own values back."""
        if self._current is None:
            self._current = {name: copy.deepcopy(value) for name, value in pl_module.state_dict().items()}
            self._copy_average_to_current(pl_module)
        else:
            pl_module.load_state_dict(self._current, strict=pl_module.strict_loading)
            self._current = None

    def _copy_average_to_current(self, pl_module: Any) -> None:
        averages = self._average_model.module.state_dict()
        pl_module.load_state_dict(averages, strict=pl_module.strict_loading)


def _check_callbacks(module: nn.Module, level: Level) -> None:
    trainer = getattr(module, "_trainer", None)
    has_half = level.policy().param in LOW
    for callback in [] if trainer is None else trainer.callbacks:
        name, bases = type(callback).__name__, {base.__name__ for base in type(callback).__mro__}
        if "BaseFinetuning" in bases and level.properties.master_weights:
            raise ConfigError(
                f"{name} looks for the names of the optimizer's parameters in the module, but at {level.name} the optimizer "
                "has their masters; write HalfpeakPrecision('O1') or 'O4', which have none"
            )
        averages = bases & {"WeightAveraging", "StochasticWeightAveraging"}
        if has_half and averages and not isinstance(callback, Averages):
            raise ConfigError(
                f"Lightning's {name} averages the half weights of {level.name}, and rounds its averages; write "
                "halfpeak.integrations.lightning.WeightAveraging or EMAWeightAveraging, or HalfpeakPrecision('O1') or 'O4'"
            )


class SkipAwareScheduler:
    """Wraps a learning-rate scheduler, whose ``step`` then does nothing after a skipped step of its optimizer."""

    def __init__(self, scheduler: Any, adapter: EngineAdapter) -> None:
        self._scheduler, self._adapter = scheduler, adapter

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, unless the last step of its optimizer was skipped or there was none. Waits."""
        last = self._adapter.results.get(self._scheduler.optimizer)
        if last is not None and last.stepped():
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def called_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over a module's children with parameters; for a ``ModuleList`` or ``ModuleDict`` over its children."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_submodules(child)
        elif next(child.parameters(), None) is not None:
            yield child
