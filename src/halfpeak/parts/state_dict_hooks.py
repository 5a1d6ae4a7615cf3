"""Hooks by which ``state_dict`` of a low model gives the float32 values of its masters, and loading sets them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import OrderError
from halfpeak.parts.pairs import Pairs


def hook_state_dict(model: nn.Module, pairs: Pairs) -> list[RemovableHandle]:
    """Make ``state_dict`` of ``model`` and of each submodule give float32 values, and ``load_state_dict`` set them.

    >>> import torch
    >>> model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    >>> handles = hook_state_dict(model, Pairs([]))
    >>> model.state_dict()["weight"].dtype
    torch.float32
    """
    out, into = ValuesOut(pairs), ValuesIn(pairs)
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
    """A module hook that refers to the pairs. Its copy in a deep copy or a pickle of the model has none."""

    def __init__(self, pairs: Pairs | None) -> None:
        self._pairs = Pairs([]) if pairs is None else pairs

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return type(self), (None,)


class ValuesOut(_Hook):
    """Puts into a state dict, for each low-precision parameter, the value of its master, or the parameter upcast.

    With ``keep_vars=True`` the live parameter stays.
    """

    # Module.register_state_dict_post_hook sets this attribute; copied and unpickled hooks need it, too.
    _from_public_api = True
    _has_warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        """A hook without masters. Warns once, because copies of models are mostly made to average weights in them."""
        if len(self._pairs) and not ValuesOut._has_warned:
            ValuesOut._has_warned = True
            warnings.warn(
                "a copy of a prepared model has low-precision weights and no masters, so an average kept in it loses small "
                "steps to rounding; to average the float32 values, write halfpeak.AveragedModel(model, multi_avg_fn=...)",
                RuntimeWarning,
                stacklevel=2,
            )
        return super().__deepcopy__(memo)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace the low-precision values in ``state``."""
        for name, tensor in _tensors(module):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and is_low(value) and not isinstance(value, nn.Parameter):
                exact = self._pairs.float32_value(tensor)
                state[prefix + name] = value.float() if exact is None else exact.detach()


class ValuesIn(_Hook):
    """Sets the master to the float32 value before ``load_state_dict`` rounds that value into the parameter."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Give the values in ``state`` to the masters.

        Raises:
            OrderError: ``assign=True``, which would replace the parameters that the masters belong to.
        """
        assigns = (metadata or {}).get("assign_to_params_buffers", False)
        if assigns and any(
            self._pairs.main_of(parameter) is not parameter for parameter in module.parameters()
        ):
            raise OrderError(
                "load_state_dict(assign=True) would replace parameters that an optimizer's masters belong to; write "
                "load_state_dict(state), or load before preparing"
            )
        for name, tensor in _tensors(module):
            value = state.get(prefix + name)
            if isinstance(value, Tensor):
                value = self._pairs.set_value(tensor, value)
                # With ``assign`` torch makes the value itself the parameter; otherwise ``copy_`` rounds it.
                state[prefix + name] = value.to(tensor.dtype) if assigns and is_low(tensor) else value


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``module``, and of submodules without these hooks, added later: a parametrization, another layer."""
    own = chain(module._parameters.items(), module._buffers.items())
    yield from ((name, tensor) for name, tensor in own if tensor is not None)
    for name, child in module._modules.items():
        if child is not None and not has_fp32_state_dict(child):
            yield from ((f"{name}.{below}", tensor) for below, tensor in _tensors(child))
