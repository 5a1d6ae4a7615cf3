"""Contexts to run a batch again without a trace: copies of the weights, the same random numbers, other dtypes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfpeak.casting.tree import cast_value
from halfpeak.core.dtypes import LOW
from halfpeak.parts import random_state

Value = Callable[[nn.Parameter], Tensor]
"""From a parameter to the value of its copy."""


@contextmanager
def stand_ins(models: Iterable[nn.Module], value: Value, *, dtype: torch.dtype | None) -> Generator[None]:
    """Replace every parameter and buffer by a copy in the body, so that writes of the body are gone afterwards.

    The originals are not touched: the body changes no gradients and versions of theirs, and calls no hooks of wrappers
    such as ``DistributedDataParallel``. Each copy gets the gradient hooks of its parameter.

    Args:
        models: their modules get the originals back, even if the body raises.
        value: returns the tensor to copy for a parameter.
        dtype: of the copies of low-precision tensors; None keeps the dtype of ``value``.
    """
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    copies: dict[int, Any] = {}
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    grads = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    try:
        for parameter, _ in grads:
            parameter.grad = None
        for model in models:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                if isinstance(module, nn.RNNBase):
                    own = vars(module)
                    kept.append(
                        (module, {n: own[n] for n in ("_flat_weights", "_flat_weight_refs") if n in own})
                    )
                both: list[dict[str, Any]] = [module._parameters, module._buffers]
                for table in both:
                    tables.append((table, dict(table)))
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = _copied(tensor, value, dtype, copies)
        yield
    finally:
        for table, originals in tables:
            table.clear()
            table.update(originals)
        for module, held in kept:
            vars(module).update(held)
        for parameter, grad in grads:
            parameter.grad = grad


def _copied(tensor: Tensor, value: Value, dtype: torch.dtype | None, copies: dict[int, Any]) -> Tensor:
    """The copy of a tensor, one for all modules that share the tensor."""
    if type(tensor) not in (Tensor, nn.Parameter):  # it may shard or pack itself, or have no storage yet
        return tensor
    if id(tensor) not in copies:
        source = value(tensor) if isinstance(tensor, nn.Parameter) else tensor
        copy = source.detach().clone()
        if dtype is not None and tensor.dtype in LOW:
            copy = copy.to(dtype)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            for hook in (tensor._backward_hooks or {}).values():
                copy.register_hook(hook)
        vars(copy).update(vars(tensor))
        copies[id(tensor)] = copy
    copy: Tensor = copies[id(tensor)]
    return copy


class Computing(TorchDispatchMode):
    """Computes in one dtype in the body wherever an operation would compute in float16 or bfloat16.

    The mode works below autograd and autocast: it replaces a requested low dtype and casts low operands. So casts at
    boundaries, per operation and in user code have no effect, in forward and in backward.

    Attributes:
        is_active: False lets operations run as written.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.is_active = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with other dtypes."""
        kwargs = dict(kwargs or {})
        if self.is_active:
            if kwargs.get("dtype") in LOW:
                kwargs["dtype"] = self._dtype
            if not func._schema.is_mutable:
                args = [cast_value(arg, self._cast) for arg in args]
                kwargs = {key: cast_value(arg, self._cast) for key, arg in kwargs.items()}
        return func(*args, **kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.dtype in LOW else tensor


@contextmanager
def undisturbed(models: Iterable[nn.Module]) -> Generator[Callable[[], None]]:
    """Run the body uncompiled and without collectives, and restore the random generators at its end.

    Yields:
        A function that restores the random generators at once.
    """
    devices = {parameter.device for model in models for parameter in model.parameters()}
    rewind = partial(random_state.restore, random_state.capture(devices))
    with ExitStack() as stack:
        stack.callback(rewind)
        stack.enter_context(_without_synchronisation())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield rewind


@contextmanager
def _without_synchronisation() -> Generator[None]:
    """Let no ``DistributedDataParallel`` that is called in the body run collectives, as in its ``no_sync``."""
    found: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    names = ("require_backward_grad_sync", "require_forward_param_sync")

    def before(module: nn.Module, args: Any) -> None:
        if id(module) not in found and all(name in vars(module) for name in names):
            found[id(module)] = module, {name: vars(module)[name] for name in names}
            vars(module).update(dict.fromkeys(names, False))

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    try:
        with warnings.catch_warnings():
            # The warning says that the hook fires once more for a compiled module, which does no harm here.
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            yield
    finally:
        handle.remove()
        for module, held in found.values():
            vars(module).update(held)
