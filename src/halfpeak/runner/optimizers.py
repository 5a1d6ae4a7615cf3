"""One optimizer, a wrapper, or several by name: what a runner may hold, and how to read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer

from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.wrapper_dict import OptimWrapperDict

Optimizers: TypeAlias = Optimizer | dict[str, Optimizer] | None
"""What a runner takes as ``optimizer``."""


def check(optimizer: object) -> Optimizers:
    """Return ``optimizer`` if a runner can take it.

    Raises:
        ConfigTypeError: it cannot.
    """
    several = optimizer.items() if isinstance(optimizer, dict) else ()
    for name, value in several:
        if not isinstance(value, Optimizer):
            raise ConfigTypeError(
                f"optimizer[{name!r}] must be a torch.optim.Optimizer, not {type(value).__name__}"
            )
    if optimizer is None or isinstance(optimizer, (Optimizer, dict)):
        return optimizer
    raise ConfigTypeError(
        f"optimizer must be a torch.optim.Optimizer, a wrapper, a dict of optimizers or None, not "
        f"{type(optimizer).__name__}; write optimizer=SGD(model.parameters(), lr=0.1)"
    )


def by_name(optimizer: Optimizers) -> dict[str, Optimizer]:
    """The optimizers by name. A single one has the empty name.

    Raises:
        OrderError: there is none.
    """
    if optimizer is None:
        raise OrderError("this runner has no optimizer; pass optimizer=... to it")
    if isinstance(optimizer, OptimWrapperDict):
        return dict(optimizer.items())
    return dict(optimizer) if isinstance(optimizer, dict) else {"": optimizer}


def unnamed(values: Mapping[str, Any]) -> Any:
    """The value itself where it belongs to a single optimizer, else the values by name."""
    return values[""] if set(values) == {""} else dict(values)


def of_each_group(optimizer: Optimizers, number: Callable[[dict[str, Any]], float]) -> Any:
    """A number of each group; by name where there are several optimizers.

    The pseudo-group that a wrapper adds for its schedulers is left out.
    """
    inner = {
        name: one.optimizer if isinstance(one, BaseOptimWrapper) else one
        for name, one in by_name(optimizer).items()
    }
    return unnamed({name: [number(group) for group in one.param_groups] for name, one in inner.items()})
