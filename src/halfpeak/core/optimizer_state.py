"""The parameters of an optimizer, and the check of a state dict before an optimizer loads it.

torch checks only the sizes of the groups. Any other state that does not fit raises in the middle of loading or in a later
step, or lets a step use wrong memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import (
    has_memory,
    is_number,
    require_list,
    require_mapping,
    require_number,
    require_tensor,
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

_STEP_DTYPES: Final = (torch.float32, torch.float64)
_DEEPEST: Final = 16
_QUOTE: Final = "'"


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


def check_optimizer_state(optimizer: Optimizer, saved: object, *, own_shapes: bool = True) -> None:
    """Check that a state dict fits an optimizer: its groups, its hyper-parameters and the state of each parameter.

    The expected types and shapes are those of the optimizer's own values. Where it has no state yet, they follow from the
    names that torch's optimizers use.

    Args:
        own_shapes: False if the optimizer itself checks the shapes of its states, because it converts other ones.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> state = optimizer.state_dict()
    >>> state["state"] = {0: {"momentum_buffer": torch.ones(3)}}
    >>> check_optimizer_state(optimizer, state)
    Traceback (most recent call last):
        ...
    halfpeak.core.errors.StateError: momentum_buffer of parameter 0 is (3,) in the state and should be (2,)

    Raises:
        StateError: it does not fit.
    """
    known = require_mapping(saved, "an optimizer's state")
    if not {"state", "param_groups"} <= set(known):
        raise StateError(
            "an optimizer's state must have 'state' and 'param_groups'; pass optimizer.state_dict()"
        )
    groups = [
        require_mapping(group, "a parameter group")
        for group in require_list(known["param_groups"], "parameter groups")
    ]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(require_list(group.get("params"), "parameters of a group")) for group in groups]
    if sizes != given:
        raise StateError(
            f"parameter groups differ: the optimizer has groups of {short_repr(sizes)} parameters, the state dict of "
            f"{short_repr(given)}; build the optimizer as it was built for the run that saved it"
        )
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        _check_group(own, group, optimizer.defaults)
    places = dict(_places(optimizer, groups))
    rows = require_mapping(known["state"], "the state of an optimizer's parameters")
    for index, row in rows.items():
        if index in places:
            _check_row(
                optimizer,
                index,
                *places[index],
                require_mapping(row, f"the state of parameter {index}"),
                own_shapes=own_shapes,
            )
        elif isinstance(index, str):
            _check_values(row, f"the state {short_repr(index)}", any_leaf=True)
        else:
            raise StateError(
                f"the state dict has state for parameter {short_repr(index)}, which is in none of its param_groups"
            )
    if type(optimizer) in _ROWS:
        # torch looks at the first parameter only to tell whether steps are counted in tensors.
        steps = [isinstance(row.get("step"), Tensor) for index, row in rows.items() if index in places]
        if steps and not (all(steps) or (not any(steps) and all(rows.values()))):
            raise StateError(
                "'step' must be a tensor for all parameters of the state dict, or a number for all; here the kinds "
                "differ, or one parameter has no 'step'"
            )


def _places(
    optimizer: Optimizer, groups: Sequence[Mapping[Any, Any]]
) -> Iterator[tuple[int | str, tuple[Tensor, Mapping[Any, Any]]]]:
    """Pairs of a parameter's name in the state and (parameter, saved group). Like torch, it pairs parameters by order."""
    seen: set[int | str] = set()
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter, name in zip(own["params"], group["params"], strict=True):
            # Distributed checkpoints use the names that parameters have in the model.
            if isinstance(name, bool) or not isinstance(name, (int, str)):
                raise StateError(
                    f"'params' in the state's parameter groups must be integers or strings, not {short_repr(name)}"
                )
            if name in seen:
                raise StateError(f"parameter {short_repr(name)} is in the state's parameter groups twice")
            seen.add(name)
            yield name, (parameter, group)


def _check_group(own: Mapping[str, Any], group: Mapping[Any, Any], defaults: Mapping[str, Any]) -> None:
    missing = _ALWAYS_SAVED & {name for name, value in defaults.items() if value is not None} - set(group)
    if missing:
        raise StateError(f"a parameter group of the state has no {', '.join(sorted(missing))}")
    for name, value in group.items():
        if not isinstance(name, str):
            raise StateError(
                f"a parameter group of the state has the key {short_repr(name)}, which is not a string"
            )
        if name != "params":
            _check_values(value, f"{name} in the state's parameter group", any_leaf=True)
        if name in own and name != "params":
            _check_hyper_parameter(name, own[name], value)
        elif name in _AT_LEAST_ZERO:
            require_number(value, f"{name} in the state's parameter group", least=0.0)


def _check_hyper_parameter(name: str, own: object, value: object) -> None:
    """Check that a hyper-parameter has the type of the optimizer's own value, if that is a plain type."""
    what = f"{name} in the state's parameter group"
    if is_number(own) or isinstance(own, Tensor):
        require_number(value, what, least=0.0 if name in _AT_LEAST_ZERO and own >= 0 else -math.inf)
    elif (
        isinstance(own, (tuple, list))
        and own
        and all(is_number(one) or isinstance(one, Tensor) for one in own)
    ):
        for part in require_list(value, name, len(own)):
            if require_number(part, what) >= 1 and name == "betas":
                raise StateError(f"{what} must be below 1, not {short_repr(value)}")
    elif isinstance(own, bool) and not (value is None or isinstance(value, bool)):
        raise StateError(f"{what} must be True or False, not {short_repr(value)}")
    elif own is None and not (
        value is None
        or isinstance(value, bool)
        or (name not in _SWITCHES and isinstance(value, (int, float, str)))
    ):
        allowed = "None, True or False" if name in _SWITCHES else "None, True, False, a number or a string"
        raise StateError(f"{what} must be {allowed}, not {short_repr(value)}")


def _check_row(
    optimizer: Optimizer,
    index: object,
    parameter: Tensor,
    group: Mapping[Any, Any],
    row: Mapping[Any, Any],
    *,
    own_shapes: bool,
) -> None:
    own, required = row_of(optimizer, parameter), _ROWS.get(type(optimizer), ())
    if required and row:
        # A scheduler may add a key to a group: mmengine's write the first beta as "momentum" too.
        switches = optimizer.defaults.keys() & {switch for switch in _WHEN_SET if group.get(switch)}
        required = (*required, *(_WHEN_SET[switch] for switch in sorted(switches)))
        missing = [name for name in required if name not in row]
        if missing:
            raise StateError(f"the state of parameter {index} has no {', '.join(missing)}")
    for name, value in row.items():
        if not isinstance(name, str):
            raise StateError(
                f"the state of parameter {index} has the key {short_repr(name)}, which is not a string"
            )
        what, mine = f"{short_repr(name).strip(_QUOTE)} of parameter {index}", own.get(name)
        if name in _SCALARS or is_number(mine):
            require_number(value, what, least=0.0 if name in _SCALARS else -math.inf)
            # Torch counts steps in float32 and loads other numbers in the dtype of the parameter.
            if (
                isinstance(value, Tensor)
                and (not value.is_floating_point() or (name == "step" and value.dtype not in _STEP_DTYPES))
                and name in required
            ):
                raise StateError(f"{what} is {value.dtype} in the state and should be torch.float32")
        elif name in required:
            _require_own_memory(require_tensor(value, what, like=parameter), what)
        else:
            _check_values(value, what)
            # Layer-wise optimizers keep one number per parameter under the same name.
            is_each = name in PER_ELEMENT and isinstance(value, Tensor) and value.dim()
            expected = parameter.shape if is_each else None
            if own_shapes and isinstance(mine, Tensor):
                expected = mine.shape
            if isinstance(value, Tensor) and expected is not None and value.shape != expected:
                raise StateError(
                    f"{what} is {tuple(value.shape)} in the state and should be {tuple(expected)}"
                )
            if isinstance(mine, Tensor) and not (value is None or isinstance(value, Tensor)):
                raise StateError(f"{what} is {short_repr(value)} in the state and should be a tensor")


def _check_values(value: object, what: str, *, any_leaf: bool = False) -> None:
    """Check that a value holds numbers and tensors, and no container twice: torch walks through each as often as it occurs.

    Args:
        what: the name of the value, for the message.
        any_leaf: whether the containers may hold other values, as in a parameter group, which torch only copies.
    """
    waiting: list[tuple[object, int]] = [(value, 0)]
    seen: set[int] = set()
    while waiting:
        one, depth = waiting.pop()
        if one is None or isinstance(one, (bool, int, float)):
            continue
        if isinstance(one, Tensor):
            _require_own_memory(one, what)
        elif isinstance(one, (dict, list, tuple)):
            if id(one) in seen:
                raise StateError(
                    f"{what} contains the same {type(one).__name__} twice; put a copy in one of the places"
                )
            if depth == _DEEPEST:
                raise StateError(f"{what} has more than {_DEEPEST} levels of dicts and lists in one another")
            seen.add(id(one))
            waiting.extend((part, depth + 1) for part in (one.values() if isinstance(one, dict) else one))
        elif not any_leaf:
            verb = "contains" if depth else "is"
            raise StateError(f"{what} {verb} {short_repr(one)}; only numbers and tensors can be loaded there")


def _require_own_memory(value: Tensor, what: str) -> None:
    """Check that each element has its own address, because a step writes state in place, and that autograd computed none."""
    if value.requires_grad and not value.is_leaf:
        raise StateError(f"{what} is {short_repr(value)} that autograd computed; save a detached one")
    span = 1
    for stride, size in (
        sorted(zip(value.stride(), value.shape, strict=True)) if has_memory(value) else [(0, 2)]
    ):
        if size > 1 and stride < span:
            raise StateError(
                f"{what} is {short_repr(value)} that is not dense, or whose elements share memory; save a dense copy"
            )
        span += stride * (size - 1)
