"""OptimWrapperDict: several wrappers by name, as GAN training needs. Compatible with mmengine 0.10.7."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from halfpeak.core.errors import ConfigTypeError, OrderError, RegistryError, StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.optim.wrapper import OptimWrapper


def _refused(method: str) -> Any:
    def refuse(self: OptimWrapperDict, *args: Any, **kwargs: Any) -> NoReturn:
        names = ", ".join(map(repr, self.optim_wrappers))
        raise WrapperDictError(
            f"`{method}` should be called on one wrapper of {names}; write wrappers[name].{method}(...)"
        )

    refuse.__name__ = method
    refuse.__doc__ = "Refused: it has no meaning for several wrappers at once."
    return refuse


class OptimWrapperDict(OptimWrapper):
    """Wrappers by name. User code calls each by itself: ``wrappers["generator"].update_params(loss)``.

    A method without a meaning for several wrappers at once raises, and the message says what to write instead.
    ``initialize_count_status`` reaches every wrapper.

    Raises:
        ConfigTypeError: a value is not a wrapper.

    Example:
        >>> import torch
        >>> def wrap():
        ...     return OptimWrapper(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
        >>> wrappers = OptimWrapperDict(generator=wrap(), discriminator=wrap())
        >>> wrappers.get_lr()
        {'generator.lr': [0.1], 'discriminator.lr': [0.1]}
    """

    def __init__(self, **optim_wrapper_dict: OptimWrapper) -> None:
        # No super().__init__(), because the dict has no optimizer of its own.
        for name, wrapper in optim_wrapper_dict.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ConfigTypeError(
                    f"`OptimWrapperDict` only accepts OptimWrapper objects, not {type(wrapper).__name__} for {name!r}"
                )
        self.optim_wrappers = dict(optim_wrapper_dict)

    # A loss, a divisor and a count belong to one wrapper.
    update_params: Any = _refused("update_params")
    backward: Any = _refused("backward")
    step: Any = _refused("step")
    scale_loss: Any = _refused("scale_loss")
    should_update: Any = _refused("should_update")
    should_sync: Any = _refused("should_sync")
    optim_context: Any = _refused("optim_context")

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients of every wrapper."""
        for wrapper in self.optim_wrappers.values():
            wrapper.zero_grad(*args, **kwargs)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set the counts of every wrapper. A wrapper at another pace gets its counts on ``wrappers[name]``."""
        for wrapper in self.optim_wrappers.values():
            wrapper.initialize_count_status(model, init_counts, max_counts)

    @property
    def param_groups(self) -> dict[str, list[dict[str, Any]]]:  # type: ignore[override]
        """The groups of each wrapper, by name."""
        return {name: wrapper.param_groups for name, wrapper in self.optim_wrappers.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """``{"<name>.lr": [...]}``, with ``"<name>.base_lr"`` first where the wrapper has one."""
        return _joined({name: wrapper.get_lr() for name, wrapper in self.items()})

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"<name>.momentum": [...]}``."""
        return _joined({name: wrapper.get_momentum() for name, wrapper in self.items()})

    def state_dict(self) -> dict[str, Any]:
        """``{name: state of the wrapper}``."""
        return {name: wrapper.state_dict() for name, wrapper in self.optim_wrappers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the wrappers named in ``state_dict``; others keep their state.

        Raises:
            StateError: a name that no wrapper has, or a state that does not fit. Nothing was loaded.
        """
        self.check_state_dict(state_dict)
        for name, state in state_dict.items():
            self.optim_wrappers[name].load_state_dict(state)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` would accept ``state_dict``.

        Raises:
            StateError: it would not.
        """
        require_mapping(state_dict, "the state of the wrappers")
        unknown = [name for name in state_dict if name not in self.optim_wrappers]
        if unknown:
            raise UnknownWrapperStateError(
                f"Mismatched names: the state has {short_repr(unknown)}, the wrappers are {list(self.optim_wrappers)}"
            )
        for name, state in state_dict.items():
            self.optim_wrappers[name].check_state_dict(state)

    def items(self) -> Iterator[tuple[str, OptimWrapper]]:
        """Names and wrappers."""
        yield from self.optim_wrappers.items()

    def values(self) -> Iterator[OptimWrapper]:
        """The wrappers."""
        yield from self.optim_wrappers.values()

    def keys(self) -> Iterator[str]:
        """The names."""
        yield from self.optim_wrappers.keys()

    def __getitem__(self, key: str) -> OptimWrapper:
        try:
            return self.optim_wrappers[key]
        except KeyError:
            raise UnknownWrapperError(
                f"no wrapper {short_repr(key)}; there are {', '.join(map(repr, self.optim_wrappers))}"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self.optim_wrappers

    def __len__(self) -> int:
        return len(self.optim_wrappers)

    def __repr__(self) -> str:
        return "".join(f"name: {name}\n{wrapper!r}\n" for name, wrapper in self.optim_wrappers.items())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name == "optim_wrappers":
            raise AttributeError(name)
        known = next(iter(self.optim_wrappers), "name")
        raise AttributeError(f"OptimWrapperDict has no {name!r} of its own; write wrappers[{known!r}].{name}")

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def _joined(by_wrapper: Mapping[str, Mapping[str, list[float]]]) -> dict[str, list[float]]:
    return {f"{name}.{key}": numbers for name, own in by_wrapper.items() for key, numbers in own.items()}


class WrapperDictError(OrderError, NotImplementedError):
    """User code called a method of a single wrapper on the dict. mmengine raised NotImplementedError here."""


class UnknownWrapperError(RegistryError, AssertionError):
    """No wrapper has that name."""


class UnknownWrapperStateError(StateError, AssertionError):
    """A state has a name that no wrapper has."""
