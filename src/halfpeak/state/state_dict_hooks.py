"""Hooks by which ``state_dict`` of a low model gives the float32 values of its masters, and loading sets them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import OrderError
from halfpeak.state.masters import Masters


def hook_state_dict(model: nn.Module, masters: Masters) -> list[RemovableHandle]:
    """Make ``state_dict`` of ``model`` and of each submodule give float32 values, and ``load_state_dict`` set them.

    >>> import torch
    >>> model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    >>> handles = hook_state_dict(model, Masters())
    >>> model.state_dict()["weight"].dtype
    torch.float32
    """
    out, into = ValuesOut(masters), ValuesIn(masters)
    handles: list[RemovableHandle] = []
    for module in model.modules():
        # On every module, so that one refuses before its submodules are loaded, and handles submodules added later.
        handles.append(module.register_state_dict_post_hook(out))
        handles.append(module.register_load_state_dict_pre_hook(into))
    return handles


def has_fp32_state_dict(module: nn.Module) -> bool:
    """Whether :func:`hook_state_dict` has put its hooks on ``module``."""
    return any(isinstance(hook, ValuesOut) for hook in module._state_dict_hooks.values())


class _Hook:
    """A module hook that refers to the masters. Its copy in a deep copy or a pickle of the model has none."""

    def __init__(self, masters: Masters | None) -> None:
        self._masters = Masters() if masters is None else masters

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return type(self), (None,)


class ValuesOut(_Hook):
    """Puts into a state dict, for each low parameter, the value of its master, or without a master the parameter upcast.

    With ``keep_vars=True`` the live parameter stays.
    """

    # Module.register_state_dict_post_hook sets this attribute; copied and unpickled hooks need it, too.
    _from_public_api = True

    def __init__(self, masters: Masters | None) -> None:
        super().__init__(masters)
        self._given: dict[int, tuple[Tensor | None, int, bool]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        """A hook without masters. Warns if the copy is for torch's AveragedModel, which would average in the low dtype."""
        if _is_for_a_low_average():
            warnings.warn(
                "AveragedModel(model) copies low parameters and averages in their dtype, where small steps are lost to "
                "rounding; average the float32 values that model.state_dict() gives instead: "
                "average[name].lerp_(value, 0.001)",
                RuntimeWarning,
                stacklevel=2,
            )
        return super().__deepcopy__(memo)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace the low values in ``state``.

        Raises:
            OrderError: user code wrote in place to the values of the last two calls, which changes no weight.
        """
        for name, tensor in _tensors(module):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and is_low(value) and not isinstance(value, nn.Parameter):
                exact = self._masters.fp32_value(tensor)
                state[prefix + name] = self._widened(tensor, value) if exact is None else exact.detach()

    def _widened(self, tensor: Tensor, value: Tensor) -> Tensor:
        counter, version, was_written = self._given.pop(id(tensor), (None, 0, False))
        is_written = counter is not None and counter._version != version
        # torch.distributed.checkpoint writes once: it reads files into values, calls state_dict() again, and loads the first.
        if is_written and was_written:
            self._given.clear()
            raise OrderError(
                f"values of state_dict() were written in place, but they are float32 copies of {tensor.dtype} weights, which "
                "have not changed; write load_state_dict(values), and make a module that averages weights in this way (a deep "
                "copy, timm's ModelEma) before the model is prepared"
            )
        wide = value.float()
        if type(wide) is Tensor and not wide.is_inference():
            # A detached tensor shares the version counter of ``wide``, and with empty data keeps no memory alive.
            counter = wide.detach()
            counter.data = counter.new_empty(0)
            self._given[id(tensor)] = (counter, counter._version, is_written)
        return wide

    def forget(self, tensor: Tensor) -> None:
        """Forget the values given for a tensor: they are being loaded, so in-place writes to them are not lost."""
        self._given.pop(id(tensor), None)


class ValuesIn(_Hook):
    """Sets the master to the float32 value before ``load_state_dict`` rounds that value into the low parameter."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Give the values in ``state`` to the masters.

        Raises:
            OrderError: ``assign=True``, which would replace the parameters that the masters belong to.
        """
        assigns = (metadata or {}).get("assign_to_params_buffers", False)
        if assigns and any(self._masters.of(parameter) is not None for parameter in module.parameters()):
            raise OrderError(
                "load_state_dict(assign=True) would replace parameters that an optimizer's masters belong to; write "
                "load_state_dict(state), or load before preparing"
            )
        given = [hook for hook in module._state_dict_hooks.values() if isinstance(hook, ValuesOut)]
        for name, tensor in _tensors(module):
            value = state.get(prefix + name)
            if isinstance(value, Tensor):
                for out in given:
                    out.forget(tensor)
                value = self._masters.set_before_write(tensor, value)
                # With ``assign`` torch makes the value itself the parameter; otherwise ``copy_`` rounds it.
                state[prefix + name] = value.to(tensor.dtype) if assigns and is_low(tensor) else value


def _is_for_a_low_average() -> bool:
    """Whether torch's AveragedModel makes this copy of a low model. Only the call stack shows that."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not AveragedModel.__init__.__code__:
        frame = frame.f_back
    return frame is not None and any(map(is_low, frame.f_locals["model"].parameters()))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``module``, and of submodules without these hooks, added later: a parametrization, another layer."""
    own = chain(module._parameters.items(), module._buffers.items())
    yield from ((name, tensor) for name, tensor in own if tensor is not None)
    for name, child in module._modules.items():
        if child is not None and not has_fp32_state_dict(child):
            yield from ((f"{name}.{below}", tensor) for below, tensor in _tensors(child))
