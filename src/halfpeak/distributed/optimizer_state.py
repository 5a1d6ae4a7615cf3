"""An optimizer's state as distributed checkpoints hold it: by names, and with moments of what was never stepped."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError, StateError
from halfpeak.core.optimizer_state import check_optimizer_state, params_of
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import has_memory, is_number, require_list, require_mapping


def with_initial_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` with an entry for every trainable parameter, ``step`` 0 where it has not been stepped.

    Args:
        optimizer: looked at only.
        state: of ``optimizer.state_dict()``.
    """
    known, parameters = dict(state["state"]), params_of(optimizer)
    groups = (group for group in optimizer.param_groups for _ in group["params"])
    for index, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
        if index not in known and parameter.requires_grad:
            entry = initial_moments(optimizer, parameter, group)
            if entry:
                known[index] = entry
    return {**state, "state": known}


def without_initial_moments(state: object) -> dict[str, Any]:
    """The state without what was never stepped, which an optimizer makes by itself.

    Raises:
        StateError: it is no state of an optimizer.
    """
    known, rows = _parts_of(state)
    return {**known, "state": {i: entry for i, entry in rows.items() if not _is_unstepped(entry)}}


def numbered(state: object, names: Sequence[str]) -> dict[str, Any]:
    """A state with names of parameters, or with numbers, as an optimizer numbers parameters of these names.

    Raises:
        StateError: it is no state of an optimizer, or one of parameters with other names.
    """
    known, rows = _parts_of(state)
    groups = [
        dict(require_mapping(group, "a parameter group"))
        for group in require_list(known.get("param_groups"), "parameter groups")
    ]
    sizes = [len(require_list(group.get("params"), "parameters of a group")) for group in groups]
    given = [name for group in groups for name in group["params"]]
    if not given or not all(isinstance(name, str) for name in given):
        return dict(known)
    numbers = {name: i for i, name in enumerate(names)}
    unknown, missing = sorted(set(given) - set(names)), sorted(set(names) - set(given))
    if unknown or missing or len(given) != len(names):
        raise StateError(
            f"the state is of other parameters: this optimizer has no {short_repr(unknown)}, and the state no "
            f"{short_repr(missing)}; load the state of this model's optimizer"
        )
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        group["params"] = list(range(start, start + size))
        start += size
    return {
        **known,
        "state": {numbers.get(key, key): row for key, row in rows.items()},
        "param_groups": groups,
    }


def initial_moments(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer of this class keeps of a parameter, before its first step; empty where that cannot be known."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    stand_in = torch.zeros_like(parameter, requires_grad=True)
    stand_in.grad = torch.zeros_like(parameter)
    try:
        fresh = type(optimizer)(
            [stand_in], **{k: v for k, v in group.items() if k in accepted and k != "params"}
        )
        fresh.step()
    except (TypeError, ValueError, RuntimeError):
        return {}
    entry = dict(fresh.state[stand_in])
    if isinstance(entry.get("step"), Tensor):
        entry["step"] = torch.zeros_like(entry["step"])
    elif "step" in entry:
        entry["step"] = 0
    return entry


def has_moments(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps anything of a parameter that it has stepped."""
    found = ((p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    first = next(found, None)
    return first is not None and bool(initial_moments(optimizer, *first))


class OptimizerOverParams(Optimizer):
    """An optimizer as :mod:`torch.distributed.checkpoint.state_dict` looks at one: its groups hold parameters of the model.

    Args:
        optimizer: whose state it loads.
        state: of ``optimizer``, by :func:`with_initial_moments`: torch would take a step to make moments.
        parameters: of the model, in the order of the groups.
    """

    def __init__(self, optimizer: Optimizer, state: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        # Without that of Optimizer, which is for optimizers that step.
        self._optimizer, self._saved, over = optimizer, state, list(parameters)
        self.defaults = {}
        self.param_groups = [
            {**group, "params": [over[i] for i in group["params"]]} for group in state["param_groups"]
        ]
        self.state = defaultdict(dict, {p: state["state"].get(i, {}) for i, p in enumerate(over)})

    def state_dict(self) -> dict[str, Any]:
        """The state that was given, in dicts of its own: torch puts names in place of the numbers."""
        groups = [dict(group) for group in self._saved["param_groups"]]
        return {**self._saved, "state": dict(self._saved["state"]), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the optimizer. Torch has put its parameters in the order of the groups.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        state = without_initial_moments(numbered(state_dict, names))
        check_optimizer_state(self._optimizer, state)
        self._optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        """Nothing is stepped here.

        Raises:
            OrderError: always.
        """
        raise OrderError("this optimizer is for get_state_dict and set_state_dict alone; write engine.step()")


def refuse_access_by_params(optimizer: Optimizer) -> None:
    """A hook before ``state_dict`` of an optimizer of masters: torch looks these up among the parameters of the model.

    Raises:
        OrderError: one of its functions is among the callers nearby.
    """
    if is_called_by_params():
        raise OrderError(
            f"{_BY_PARAMS} looks an optimizer's state up by the parameters of the model, and this one steps masters of them. "
            "Write get_state_dict(model, engine.state_dict_optimizers()), set_state_dict likewise, or save the engine: "
            "dcp.save({'engine': engine})"
        )


def is_called_by_params() -> bool:
    """Whether :mod:`torch.distributed.checkpoint.state_dict` is among the callers nearby.

    A step that it takes is no step of a training: zero gradients, a rate of zero, only to make moments. A refusal there
    would leave the rate at zero.
    """
    if _BY_PARAMS not in sys.modules:
        return False
    try:
        # No variable holds a frame: an exception from here would keep it, and with it all that the callers hold.
        return any(sys._getframe(depth).f_globals.get("__name__") == _BY_PARAMS for depth in range(_NEARBY))
    except ValueError:
        # There are fewer callers.
        return False


_BY_PARAMS: Final = "torch.distributed.checkpoint.state_dict"
_NEARBY: Final = 11


def _parts_of(state: object) -> tuple[Mapping[Any, Any], dict[Any, Mapping[Any, Any]]]:
    known = require_mapping(state, "an optimizer's state")
    rows = require_mapping(known.get("state"), "the state of an optimizer's parameters")
    return known, {key: require_mapping(row, "the state of a parameter") for key, row in rows.items()}


def _is_unstepped(entry: Mapping[str, Any]) -> bool:
    step = entry.get("step")
    if isinstance(step, Tensor):
        return has_memory(step) and step.numel() == 1 and step.item() == 0
    return is_number(step) and step == 0
