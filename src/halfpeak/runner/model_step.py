"""Checks and calls of ``train_step``, ``val_step`` or a batch processor, and of what they return."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeAlias

from torch import nn

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.wrappers import wrapper_of
from halfpeak.optim.unwrap import unwrap

BatchProcessor: TypeAlias = Callable[..., Any]


def check_model(model: nn.Module, batch_processor: BatchProcessor | None) -> None:
    """Check that a runner can call the model.

    Raises:
        ConfigTypeError: ``batch_processor`` cannot be called, or the model has no ``train_step``.
        ConfigError: the model has ``train_step`` or ``val_step`` beside a batch processor.
    """
    if batch_processor is not None:
        if not callable(batch_processor):
            raise ConfigTypeError(
                f"batch_processor={short_repr(batch_processor)} must be a function, or None"
            )
        if hasattr(unwrap(model), "train_step") or hasattr(unwrap(model), "val_step"):
            raise ConfigError("the model has train_step or val_step already; leave out batch_processor")
        warnings.warn(
            "batch_processor is deprecated; give the model train_step() and val_step()",
            DeprecationWarning,
            stacklevel=4,
        )
    elif not hasattr(model, "train_step"):
        wrapper = wrapper_of(model) or ""
        hint = "write def train_step(self, data, optimizer): return dict(loss=..., log_vars={...}, num_samples=...)"
        if wrapper:
            hint = f"{wrapper} hides it; write MMDistributedDataParallel(model), or wrap the layers inside the model"
        raise ConfigTypeError(f"{type(model).__name__} has no train_step; {hint}")


def val_step(model: Any, batch: Any, optimizer: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``model.val_step``, with the optimizer if its signature has a parameter for it."""
    parameters = list(inspect.signature(model.val_step).parameters.values())
    if any(parameter.name == "optimizer" for parameter in parameters):
        return model.val_step(batch, optimizer=optimizer, **kwargs)
    places = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    if len(places) > 1 or any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        return model.val_step(batch, optimizer, **kwargs)
    return model.val_step(batch, **kwargs)


def require_outputs(outputs: object, source: str) -> dict[str, Any]:
    """Return ``outputs``; ConfigTypeError unless they are a dict."""
    if not isinstance(outputs, dict):
        raise ConfigTypeError(
            f"{source} must return a dict, not {type(outputs).__name__}; write return dict(loss=loss)"
        )
    return outputs
