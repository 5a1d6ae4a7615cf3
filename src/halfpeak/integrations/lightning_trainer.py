"""The part of a Trainer's precision plugin that is the same in ``lightning`` and in ``pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.checkpoint.foreign import from_grad_scaler
from halfpeak.core.errors import ParameterError
from halfpeak.integrations.lightning_engine import EnginePlugin
from halfpeak.optim.wrapped import unwrap


class TrainerPlugin(EnginePlugin):
    """An engine between ``Trainer.fit`` and its end; before and afterwards the module is an ordinary float32 one.

    At levels that store low weights the submodules of the ``LightningModule`` are converted and cast at their own
    boundaries, so ``training_step`` sees float32 wherever it calls them. Parameters that lie on the ``LightningModule``
    itself, and submodules without parameters (losses, metrics), stay as they are.
    """

    _after_closure: Callable[..., None]
    _wrap_closure: Callable[..., Any]

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Make the engine. A scheduler that steps with the optimizer waits where a step is skipped.

        Raises:
            ParameterError: the level stores low weights, and all parameters lie on the ``LightningModule`` itself.
        """
        module = unwrap(model)
        if "mixed" in self.precision:
            parts: list[nn.Module] = [module]
        else:
            parts = list(parts_of(module))
            if not parts:
                raise ParameterError(
                    f"{type(module).__name__} has no submodule with parameters, so {self.holder.level} has nothing to convert; "
                    "put the parameters in a torch.nn.Module, or write HalfpeakPrecision('O1')"
                )
        self.holder.connect([model], parts, [one for one in optimizers if one.param_groups])
        self._wrapper, self.holder.last = model, None
        for config in lr_schedulers:
            if config.interval == "step" and not isinstance(config.scheduler, PatientScheduler):
                config.scheduler = PatientScheduler(config.scheduler, self)
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run ``LightningModule.backward`` on the scaled loss and take the gradients in, true-sized."""
        with self._scaled(tensor) as scaled:
            model.backward(scaled, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward and backward, Lightning's hooks and clipping on true-sized gradients, then the step or none.

        Returns:
            What the closure returned: the loss.
        """
        engine = self._connected()
        if isinstance(optimizer, torch.optim.LBFGS):
            self.holder.step(engine, optimizer, partial(self._wrap_closure, model, optimizer, closure))
            return None
        loss = closure()
        self._after_closure(model, optimizer)
        if loss is None and model.automatic_optimization:
            self.holder.last = None  # training_step returned None: there was no backward pass
            return None
        self.holder.step(engine, optimizer)
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the loss scale of a run that Lightning's own ``MixedPrecision`` has saved."""
        theirs = checkpoint.get("MixedPrecision")
        if theirs and type(self).__qualname__ not in checkpoint and self.engine is not None:
            numbers = from_grad_scaler(theirs)
            for scaler in self.engine.scalers:
                if scaler.config.dynamic:
                    scaler.load_state_dict({**numbers, "grace": scaler.config.hysteresis})

    def teardown(self) -> None:
        """Give the module its own dtypes back, with the values of the masters. The next ``fit`` goes on with the scale."""
        self.holder.release()
        self._wrapper = None


class PatientScheduler:
    """A learning-rate scheduler whose ``step`` does nothing after a step that was skipped; else the scheduler itself."""

    def __init__(self, scheduler: Any, plugin: EnginePlugin) -> None:
        self._scheduler, self._plugin = scheduler, plugin

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler if the optimizer moved. Waits for the device."""
        last = self._plugin.last
        if last is not None and last.stepped():
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules with parameters that a module calls: its children, and what its lists and dicts of modules hold."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from parts_of(child)
        elif next(child.parameters(), None) is not None:
            yield child
