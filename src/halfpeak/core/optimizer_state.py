"""The parameters of an optimizer, and the check of a state dict before an optimizer loads it.

torch checks only the sizes of the groups. Any other state that does not fit raises in the middle of loading or in a later
step, or lets a step use wrong memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Final, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import (
    NotRequired,
    Schema,
    is_number,
    require,
    require_number,
    require_plain,
    unfit,
)

_ADAM: Final = ("step", "exp_avg", "exp_avg_sq")
_ROWS: Final[Mapping[type[Optimizer], tuple[str, ...]]] = {
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.NAdam: (*_ADAM, "mu_product"),
    torch.optim.RAdam: _ADAM,
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.SparseAdam: _ADAM,
}
"""The state that torch's optimizers have for every stepped parameter, and read without a check."""

_WHEN_SET: Final = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Further state of torch's optimizers, by the hyper-parameter that requires it."""

_SCALARS: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""State tensors with one number for a parameter."""

PER_ELEMENT: Final = {*_WHEN_SET.values(), *chain.from_iterable(_ROWS.values())} - _SCALARS
"""State tensors with one number for each element of a parameter."""

_AT_LEAST_ZERO: Final = frozenset({"lr", "initial_lr", "eps", "weight_decay", "momentum", "lr_decay", "step"})

_ALWAYS_SAVED: Final = frozenset(
    {
        *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "etas"),
        *("lr_decay", "lambd", "t0", "momentum_decay", "step_sizes", "beta2_decay", "d"),
    }
)
"""Hyper-parameters that a saved group must have if the optimizer has them. Later versions of torch added others."""

_SWITCHES: Final = frozenset({"foreach", "fused"})
"""Hyper-parameters that are True, False, or None for what suits the device."""

_WIDE: Final = (torch.float32, torch.float64)

_ANY_LEAF: Final = partial(require_plain, any_leaf=True)

RowCheck: TypeAlias = Callable[[Tensor, Mapping[Any, Any], Any, str], None]
"""Checks the saved state of a parameter: takes the parameter, its saved group, that state and an expression for it."""

OPTIMIZER_STATE: Final[Mapping[Any, Schema]] = {
    "state": {object: ...},
    "param_groups": [{"params": [..., ...], object: ...}, ...],
    object: ...,
}
"""What ``Optimizer.state_dict()`` gives, of any class."""


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order of its groups; a mock of one may have groups without parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group.get("params", ())]


def row_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The state of a parameter, empty if it has none: ``ZeroRedundancyOptimizer`` has None for those of other ranks."""
    return optimizer.state.get(parameter) or {}


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other names or numbers for its parameters.

    >>> renamed({"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, {0: "weight", 1: "bias"})
    {'state': {'weight': {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': ['weight', 'bias']}]}
    """
    return {
        **state,
        "state": {names.get(key, key): row for key, row in state["state"].items()},
        "param_groups": [
            {**group, "params": [names.get(name, name) for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def state_dtypes(state: Mapping[str, Any]) -> list[str]:
    """The names and forms of the tensors in an optimizer's state, each pair once.

    >>> state_dtypes({"state": {0: {"exp_avg": torch.ones(2), "step": 3}}, "param_groups": [{"params": [0]}]})
    ['exp_avg torch.float32']
    """
    rows = (row for row in state["state"].values() if isinstance(row, Mapping))
    return sorted({f"{k} {form_of(v)}" for row in rows for k, v in row.items() if isinstance(v, Tensor)})


def form_of(value: Tensor) -> str:
    """What the numbers of a state stand for: the dtype; in 8 bits also the order, because their blocks follow the memory.

    >>> form_of(torch.ones(2)), form_of(torch.ones(2, 3, dtype=torch.int8).T)
    ('torch.float32', 'torch.int8 not contiguous')
    """
    return (
        f"{value.dtype} not contiguous" if is_8_bit(value) and not value.is_contiguous() else str(value.dtype)
    )


def is_8_bit(value: object) -> TypeGuard[Tensor]:
    """Whether a state is a tensor of 8-bit integers."""
    return isinstance(value, Tensor) and value.dtype in (torch.int8, torch.uint8)


def are_params_of(optimizer: Optimizer, known: Sequence[Tensor]) -> bool:
    """Whether an optimizer has exactly these parameters in this order. Runs in every step, so its loops run in C (``map``)."""
    groups = [group.get("params", ()) for group in optimizer.param_groups]
    return sum(map(len, groups)) == len(known) and all(map(is_, chain.from_iterable(groups), known))


def check_optimizer_state(
    optimizer: Optimizer, saved: object, what: str = "state", check_row: RowCheck | None = None
) -> None:
    """Check that a state dict fits an optimizer: its groups, its hyper-parameters and the state of each parameter.

    The expected types and shapes are those of the optimizer's own values. Where it has no state yet, they follow from the
    names that torch's optimizers use.

    Args:
        what: the state as an expression, for the message.
        check_row: of a class that knows what its states are.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> state = optimizer.state_dict()
    >>> state["state"] = {0: {"momentum_buffer": torch.ones(3)}}
    >>> check_optimizer_state(optimizer, state)
    Traceback (most recent call last):
        ...
    halfpeak.core.errors.StateError: state['state'][0]['momentum_buffer'] is a float32 tensor of (3,) and should be a tensor \
of (2,); pass what state_dict() gave in a run that was built like this one

    Raises:
        StateError: it does not fit.
    """
    known = require(
        saved, what, {**OPTIMIZER_STATE, "param_groups": [*map(_group_schema, optimizer.param_groups)]}
    )
    groups = known["param_groups"]
    names = [name for group in groups for name in group["params"]]
    if len({*names}) < len(names):
        raise unfit(names, f"the list of the parameters of {what}", "one that has none twice")
    own_rows = {name: NotRequired({str: require_plain}) for name in names}
    rows = require(known["state"], f"{what}['state']", {**own_rows, str: _ANY_LEAF})
    # Like torch, this pairs parameters by their order.
    check = check_row or partial(_check_row, optimizer)
    for i, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        needed = {name for name in _ALWAYS_SAVED if optimizer.defaults.get(name) is not None}
        settings = {name: _setting(name, own) for name in needed.union(group)}
        require(group, f"{what}['param_groups'][{i}]", {**settings, "params": ...})
        for name, parameter in zip(group["params"], own["params"], strict=True):
            if name in rows:
                check(parameter, group, rows[name], f"{what}['state'][{short_repr(name)}]")
    # torch looks at the first row only to tell whether steps are counted in tensors.
    steps = [row.get("step") for name, row in rows.items() if name in own_rows]
    are_same = all(map(is_number, steps)) or all(isinstance(step, Tensor) for step in steps)
    if type(optimizer) in _ROWS and not are_same:
        raise StateError(
            f"'step' must be a tensor for all parameters of {what}, or a number for all; here the kinds differ, or a "
            "parameter has no 'step'"
        )


def _group_schema(own: Mapping[str, Any]) -> Schema:
    """What the group of any class is. Distributed checkpoints use the names that parameters have in the model."""
    return {"params": [int | str] * len(own["params"]), str: _ANY_LEAF}


def _setting(name: str, own: Mapping[str, Any]) -> Schema:
    """The schema of a hyper-parameter: of the type of the optimizer's own, if that is a plain type."""
    match own.get(name, 0 if name in _AT_LEAST_ZERO else ...):
        case None if name not in _SWITCHES:
            return bool | int | float | str | None
        case bool() | None:
            return bool | None
        case int() | float() | Tensor() as mine:
            return partial(require_number, least=0.0 if name in _AT_LEAST_ZERO and mine >= 0 else -math.inf)
        case tuple() | list() as mine if mine and all(
            is_number(one) or isinstance(one, Tensor) for one in mine
        ):
            return [_require_beta if name == "betas" else require_number] * len(mine)
        case _:
            return ...


def _require_beta(value: object, what: str) -> None:
    if require_number(value, what) >= 1:
        raise unfit(value, what, "a number below 1")


def _check_row(
    optimizer: Optimizer, parameter: Tensor, group: Mapping[Any, Any], row: Any, what: str
) -> None:
    required = _ROWS.get(type(optimizer), ()) if row else ()
    if required:
        # A scheduler may add a key to a group: mmengine's write the first beta as "momentum" too.
        switches = _WHEN_SET.keys() & optimizer.defaults.keys()
        required = (*required, *(_WHEN_SET[switch] for switch in switches if group.get(switch)))
    schema: dict[str, Schema] = {}
    for name in {*required, *row}:
        mine = row_of(optimizer, parameter).get(name)
        if name in _SCALARS:
            # Torch counts steps in float32 and loads other numbers in the dtype of the parameter.
            dtypes = (_WIDE if name == "step" else (*_WIDE, *LOW)) if name in required else None
            schema[name] = partial(_require_scalar, dtypes=dtypes)
        elif name in required or is_number(mine):
            schema[name] = parameter if name in required else require_number
        elif isinstance(mine, Tensor) or name in PER_ELEMENT:
            schema[name] = partial(_require_moment, parameter, mine)
        else:
            schema[name] = ...
    require(row, what, schema)


def _require_scalar(value: object, what: str, dtypes: Sequence[torch.dtype] | None) -> None:
    require_number(value, what, least=0.0)
    if dtypes is not None and isinstance(value, Tensor) and value.dtype not in dtypes:
        raise unfit(value, what, f"one of {dtypes}")


def _require_moment(parameter: Tensor, mine: object, value: object, what: str) -> None:
    """A tensor like the optimizer's own; if it has none, like the parameter, or one number, as layer-wise optimizers have."""
    like = mine if isinstance(mine, Tensor) else parameter
    if isinstance(value, Tensor):
        fits = value.shape == like.shape or (like is parameter and not value.dim())
    else:
        fits = value is None or like is parameter
    if not fits:
        raise unfit(value, what, f"a tensor of {tuple(like.shape)}")
