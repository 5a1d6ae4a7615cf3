"""An optimizer's state as distributed checkpoints hold it: by names, and with moments of parameters never stepped."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError, StateError
from halfpeak.core.optimizer_state import (
    OPTIMIZER_STATE,
    check_optimizer_state,
    form_of,
    is_8_bit,
    params_of,
)
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import has_memory, is_number, require
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.state_dtypes.codecs import REMAINDER


def with_initial_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` with an entry for every trainable parameter; ``step`` is 0 if it was never stepped.

    Args:
        optimizer: not changed.
        state: the result of ``optimizer.state_dict()``.
    """
    known, parameters = dict(state["state"]), params_of(optimizer)
    groups = (group for group in optimizer.param_groups for _ in group["params"])
    for index, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
        row = known.get(index) or {}
        # The remainder of a weight is there before its moments.
        is_stepped = not row.keys() <= {REMAINDER}
        if parameter.requires_grad and not is_stepped:
            row = {**initial_moments(optimizer, parameter, group), **row}
        if row:
            # The float32 values of the model tell the remainder to the bit, and gloo and NCCL gather no 16-bit integers.
            known[index] = {name: value for name, value in row.items() if name != REMAINDER}
            if group.get("dampening") and "momentum_buffer" in row:
                known[index][_EXISTS] = torch.tensor(float(is_stepped))
    return {**state, "state": known}


def without_initial_moments(state: object) -> dict[str, Any]:
    """The state without entries of parameters that were never stepped, because an optimizer creates these by itself.

    Raises:
        StateError: ``state`` is not the state of an optimizer.
    """
    known = require(state, "state", {**OPTIMIZER_STATE, "state": {object: Mapping}})
    stepped = {i: entry for i, entry in known["state"].items() if not _is_unstepped(entry)}
    return {
        **known,
        "state": {
            i: {name: value for name, value in entry.items() if name != _EXISTS}
            for i, entry in stepped.items()
        },
    }


_EXISTS: Final = "momentum_buffer_exists"
"""1, or 0 if the optimizer has none yet: with dampening a buffer of zeros is another one."""


class InitialMoments:
    """Gives an optimizer moments for parameters that it has never stepped; during a step it has none, and makes its own.

    For a loop that passes the optimizer itself to :mod:`torch.distributed.checkpoint.state_dict`: torch reads a checkpoint
    into moments that are there, and takes a step to create some if there are none.

    Args:
        optimizer: has the moments from now on.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rows: dict[Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    # An empty row, as of SGD without momentum, is enough for torch not to take a step.
                    self._rows[parameter] = initial_moments(optimizer, parameter, group)
        optimizer.state.update(self._rows)
        self._handle = optimizer.register_load_state_dict_post_hook(self._find)

    @contextmanager
    def left_out(self) -> Generator[None]:
        """Context for a step."""
        self._take_out()
        try:
            yield
        finally:
            state = self._optimizer.state
            self._rows = {one: row for one, row in self._rows.items() if not state.get(one)}
            state.update(self._rows)

    def remove(self) -> None:
        """Leave the optimizer as if they had never been there."""
        self._handle.remove()
        self._take_out()

    def _take_out(self) -> None:
        state = self._optimizer.state
        self._rows = {parameter: state.pop(parameter, {}) for parameter in self._rows}

    def _find(self, optimizer: Optimizer) -> None:
        """In a state that was loaded, find the moments of parameters that were never stepped. Waits."""
        self._rows = {one: row for one, row in optimizer.state.items() if not row or _is_unstepped(row)}


def numbered(state: object, names: Sequence[str]) -> dict[str, Any]:
    """``state`` with parameter names replaced by the optimizer's numbers; a state with numbers is not changed.

    Raises:
        StateError: ``state`` is not the state of an optimizer, or its parameters have other names.
    """
    known = require(state, "state", OPTIMIZER_STATE)
    given = [name for group in known["param_groups"] for name in group["params"]]
    if not given or not all(isinstance(name, str) for name in given):
        return dict(known)
    numbers = {name: i for i, name in enumerate(names)}
    unknown, missing = sorted(set(given) - set(names)), sorted(set(names) - set(given))
    if unknown or missing or len(given) != len(names):
        raise StateError(
            f"the state is of other parameters: this optimizer has no {short_repr(unknown)}, and the state no "
            f"{short_repr(missing)}; load the state of this model's optimizer"
        )
    order = iter(range(len(names)))
    return {
        **known,
        "state": {numbers.get(key, key): row for key, row in known["state"].items()},
        "param_groups": [
            {**group, "params": [next(order) for _ in group["params"]]} for group in known["param_groups"]
        ],
    }


def initial_moments(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter before the first step of an optimizer of this class; empty if it cannot be found out."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.initial_row(parameter, group)
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


class OptimizerOverParams(Optimizer):
    """A view of an optimizer for :mod:`torch.distributed.checkpoint.state_dict`, with model parameters in its groups.

    torch copies a checkpoint into the tensors of the run that loads it, by name, whatever their numbers stand for. So 8-bit
    moments have names of their own here, which a run that stores others does not have.

    Args:
        optimizer: the optimizer that loads the state.
        state: the result of :func:`with_initial_moments`. Without moments, torch would take a step to create them.
        parameters: the parameters of the model, in the order of the groups.
    """

    def __init__(self, optimizer: Optimizer, state: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        # Does not call Optimizer.__init__, which is for optimizers that step.
        rows = {
            i: {_saved_name(k, v): v for k, v in (row or {}).items()} for i, row in state["state"].items()
        }
        self._optimizer, self._saved, over = optimizer, {**state, "state": rows}, list(parameters)
        self.defaults = {}
        self.param_groups = [
            {**group, "params": [over[i] for i in group["params"]]} for group in state["param_groups"]
        ]
        self.state = defaultdict(dict, {p: rows.get(i, {}) for i, p in enumerate(over)})

    def state_dict(self) -> dict[str, Any]:
        """A copy of the given state in new dicts, because torch replaces the numbers in them by names."""
        groups = [dict(group) for group in self._saved["param_groups"]]
        return {**self._saved, "state": dict(self._saved["state"]), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the optimizer. Torch passes its parameters in the order of the groups.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        require(state_dict, "state", OPTIMIZER_STATE)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        state = without_initial_moments(numbered(state_dict, names))
        state["state"] = {
            i: {_own_name(k, v): v for k, v in row.items()} for i, row in state["state"].items()
        }
        check_optimizer_state(self._optimizer, state)
        self._optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        """Refuse to step.

        Raises:
            OrderError: always.
        """
        raise OrderError("this optimizer is for get_state_dict and set_state_dict alone; write engine.step()")


def _saved_name(name: str, value: object) -> str:
    return f"{name} {form_of(value)}" if is_8_bit(value) else name


def _own_name(name: Any, value: object) -> Any:
    return name.partition(" ")[0] if isinstance(name, str) and is_8_bit(value) else name


def _is_unstepped(entry: Mapping[str, Any]) -> bool:
    step = entry.get("step", entry.get(_EXISTS))
    if isinstance(step, Tensor):
        return has_memory(step) and step.numel() == 1 and step.item() == 0
    return is_number(step) and step == 0
