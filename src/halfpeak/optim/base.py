"""BaseOptimWrapper: groups, rates, state and hooks of a wrapped optimizer. Compatible with mmengine 0.10.7."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.state_checks import copied, require_mapping, require_number
from halfpeak.engine.state_checks import check_optimizer


class BaseOptimWrapper(Optimizer, ABC):
    """One interface over an optimizer, whatever the precision of the step.

    A wrapper is a ``torch.optim.Optimizer``, so torch's learning-rate schedulers take it directly. Its groups, state
    and defaults are those of the wrapped optimizer.

    Attributes:
        optimizer: the wrapped optimizer. May be replaced.
        base_param_settings: with several groups, a pseudo-group that is never optimized, in which schedulers move the
            base learning rate without a group's multiplier; else None.

    Raises:
        ConfigTypeError: ``optimizer`` is not an optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # No super().__init__(), which would make groups and state: this class uses those of the wrapped optimizer.
        if not is_optimizer(optimizer):
            raise ConfigTypeError(
                f"optimizer must be a torch.optim.Optimizer, or have param_groups, step and zero_grad, not "
                f"{type(optimizer).__name__}; write optimizer=SGD(...)"
            )
        self.optimizer = optimizer
        self.base_param_settings: dict[str, Any] | None = None
        if len(optimizer.param_groups) > 1:
            # A learning rate may be a tensor, which schedulers fill in place.
            defaults = copy.deepcopy(dict(optimizer.defaults))
            self.base_param_settings = {"params": torch.tensor([0.0]), **defaults}

    @abstractmethod
    def update_params(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward, and step if a step is due."""

    @abstractmethod
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward."""

    @abstractmethod
    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Move the parameters."""

    @abstractmethod
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Drop the gradients."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's groups, then the pseudo-group if there is one."""
        if self.base_param_settings is None:
            return self.optimizer.param_groups
        return [*self.optimizer.param_groups, self.base_param_settings]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state."""
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self.optimizer.add_param_group(param_group)

    def get_lr(self) -> dict[str, list[float]]:
        """``{"lr": [one per group]}``, with ``"base_lr"`` first where there is a pseudo-group."""
        rates = {"lr": [group["lr"] for group in self.optimizer.param_groups]}
        if self.base_param_settings is None:
            return rates
        return {"base_lr": [self.base_param_settings["lr"]], **rates}

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"momentum": [one per group]}``: its momentum, else its first beta, else 0."""
        return {"momentum": [momentum_of(group) for group in self.optimizer.param_groups]}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict, with ``"base_param_settings"`` where there is a pseudo-group."""
        state = dict(self.optimizer.state_dict())
        if self.base_param_settings is not None:
            state["base_param_settings"] = dict(self.base_param_settings)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what :meth:`state_dict` returned, or a plain optimizer's state. The argument is not changed.

        Raises:
            StateError: it does not fit the optimizer. Nothing was loaded.
        """
        self.check_state_dict(state_dict)
        saved = {key: value for key, value in state_dict.items() if key != "base_param_settings"}
        if is_torch_optimizer(self.optimizer):
            # Copied, because torch's optimizers keep loaded tensors and write to them in place.
            saved = copied({key: saved[key] for key in ("state", "param_groups")}, "an optimizer's state")
        settings = copied(state_dict.get("base_param_settings"), "base_param_settings")
        self.optimizer.load_state_dict(saved)
        if settings is not None:
            self.base_param_settings = settings

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` would accept ``state_dict``.

        Raises:
            StateError: it would not.
        """
        settings = require_mapping(state_dict, "the state of a wrapper").get("base_param_settings")
        if settings is not None:
            what = "base_param_settings"
            require_number(require_mapping(settings, what).get("lr"), f"lr in {what}", least=0.0)
        if is_torch_optimizer(self.optimizer):
            check_optimizer(self.optimizer, state_dict)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register the hook on the wrapped optimizer."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register the hook on the wrapped optimizer."""
        return self.optimizer.register_step_post_hook(hook)

    def __getstate__(self) -> dict[str, Any]:
        # Learning-rate schedulers set a counting `step` on the wrapper; on a copy it would step the original.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def is_optimizer(value: object) -> bool:
    """Whether ``value`` has ``param_groups``, ``step`` and ``zero_grad``, and is not a wrapper.

    >>> is_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1)), is_optimizer(torch.optim.SGD)
    (True, False)
    """
    methods = (getattr(value, name, None) for name in ("step", "zero_grad"))
    has_all = hasattr(value, "param_groups") and all(map(callable, methods))
    return has_all and not isinstance(value, (type, BaseOptimWrapper))


def is_torch_optimizer(optimizer: object) -> bool:
    """Whether ``optimizer`` is a ``torch.optim.Optimizer``, which has step hooks. A mock of one is not."""
    return issubclass(type(optimizer), Optimizer)


def momentum_of(group: Mapping[str, Any]) -> float:
    """The momentum of a group, else its first beta, else 0."""
    if "momentum" in group:
        return group["momentum"]
    return group["betas"][0] if "betas" in group else 0
