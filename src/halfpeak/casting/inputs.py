"""The inputs of a low model and of its float32 modules: the hook that casts them, and the values that were given."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.tree import cast_leaf, map_tree
from halfpeak.core.dtypes import LOW
from halfpeak.core.torch_compat import is_capturing, outside_inference_mode, traced_inline


@dataclass(slots=True)
class Given:
    """What a model was given for an input that it has rounded; an attribute of the rounded tensor.

    Attributes:
        value: as it was given.
        version: of the rounded tensor, which stands for ``value`` until it is written.
        is_used: whether a float32 module has taken ``value``.
    """

    value: Tensor
    version: int
    is_used: bool = False


# Without slots: the compiler of torch 2.11 reads the __dict__ of a hook.
@dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook that casts positional and keyword arguments, through nested containers.

    A float32 module in a low model that takes an input of the model itself gets the value that was given, not the rounded one;
    not in compiled code, which sees no version counters.
    """

    dtype: torch.dtype

    @traced_inline
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast."""
        cast = tuple([map_tree(value, self._cast) for value in args])
        return cast, {key: map_tree(value, self._cast) for key, value in kwargs.items()}

    def _cast(self, leaf: Any) -> Any:
        if self.dtype in LOW:
            notes = isinstance(leaf, Tensor) and not is_compiling()
            return _rounded(leaf, self.dtype) if notes else cast_leaf(leaf, self.dtype)
        given = given_for(leaf)
        if given is None:
            return cast_leaf(leaf, self.dtype)
        given.is_used = True
        return given.value.to(self.dtype)


@outside_inference_mode  # whose tensors have no version
def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    low = cast_leaf(tensor, dtype)
    if low is not tensor:
        setattr(low, _GIVEN, Given(tensor, low._version))
    return low


def given_for(rounded: Any) -> Given | None:
    """What a model was given for an input that it has rounded; None for anything else."""
    given: Given | None = getattr(rounded, _GIVEN, None)
    return None if given is None or is_compiling() or given.version != rounded._version else given


_GIVEN: Final = "halfpeak_given"


def warn_of_rounding(model: nn.Module) -> RemovableHandle:
    """Warn after the first forward pass of a low model of an input that loses much by being rounded.

    Only float inputs of at most one dimension are looked at, such as the time steps of a diffusion model. Waits for the device
    if there is one.
    """
    return model.register_forward_hook(WarnOfRounding(), with_kwargs=True)


class WarnOfRounding:
    """The hook of :func:`warn_of_rounding`. It removes itself."""

    @traced_inline
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Warn, unless the code is compiled or a CUDA graph is captured, where nothing can be read."""
        if is_compiling():
            return
        inputs = list(_vectors(module, args, kwargs))
        if any(is_capturing(tensor.device) for _, tensor in inputs):
            return
        key = next(key for key, hook in module._forward_hooks.items() if hook is self)
        del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]
        for name, low in inputs:
            given = given_for(low)
            if given is None or given.is_used or not low.numel():
                continue
            value, rounded = given.value.detach().flatten(), low.detach().flatten()
            loss = (value - rounded).abs()
            worst = int(loss.argmax())
            if loss[worst] > LOSS:
                was, now = float(value[worst]), float(rounded[worst])
                warnings.warn(
                    f"{type(module).__name__} rounds its input {name}: {was:.7g} becomes {now:.7g} in {low.dtype}. For exact "
                    "values write halfpeak.prepare(..., cast_forward_inputs=False) and cast the other inputs yourself; or, if "
                    "one module takes it as it is, keep_fp32=[...] with that module",
                    stacklevel=5,
                )
                return


LOSS: Final = 2**-4
"""What rounding may change in an input without a warning. Numbers below 16 lose less in bfloat16, and below 128 in float16."""


def _vectors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of at most one dimension among the arguments of ``forward``, with their names."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    named = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args)]
    for name, value in [*named, *kwargs.items()]:
        if isinstance(value, Tensor) and value.dim() <= 1:
            yield name, value
