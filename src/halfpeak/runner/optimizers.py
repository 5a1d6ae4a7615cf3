"""The optimizers of a runner: one optimizer, a wrapper, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer

from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.wrapper_dict import OptimWrapperDict

Optimizers: TypeAlias = Optimizer | dict[str, Optimizer] | None
"""The types of a runner's ``optimizer``. An optimizer wrapper counts as an ``Optimizer``."""


def check(optimizer: object) -> Optimizers:
    """Return ``optimizer``; ConfigTypeError if a runner does not accept it."""
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
    """The optimizers by name, a single one by the empty name; OrderError if there is none."""
    if optimizer is None:
        raise OrderError("this runner has no optimizer; pass optimizer=... to it")
    if isinstance(optimizer, OptimWrapperDict):
        return dict(optimizer.items())
    return dict(optimizer) if isinstance(optimizer, dict) else {"": optimizer}


def unnamed(values: Mapping[str, Any]) -> Any:
    """The value of a single optimizer, or the values by name if there are several."""
    return values[""] if set(values) == {""} else dict(values)


def named(values: Any, names: Collection[str]) -> Any:
    """The inverse of :func:`unnamed`: the values by name, for optimizers with these names."""
    return {"": values} if set(names) == {""} else values


def of_each_group(optimizer: Optimizers, number: Callable[[dict[str, Any]], float]) -> Any:
    """A list with one number per group; a dict of lists by name if there are several optimizers.

    The extra group that a wrapper adds for its schedulers is left out.
    """
    inner = {
        name: one.optimizer if isinstance(one, BaseOptimWrapper) else one
        for name, one in by_name(optimizer).items()
    }
    return unnamed({name: [number(group) for group in one.param_groups] for name, one in inner.items()})
