"""The entry of a wrapper's state for an open accumulation window, which mmengine's format cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import (
    require_count,
    require_list,
    require_mapping,
    require_number,
    require_tensor,
)
from halfpeak.engine.state_checks import check_buffers

WINDOW_KEY: Final = "halfpeak"
"""The key of the entry. torch and mmengine ignore unknown keys."""

_VERSION: Final = 3
_KEYS: Final = ("version", "inner_count", "scale", "unreduced", "gradients", "buffers")


def save_window(
    parameters: Iterable[Tensor],
    inner_count: int,
    scale: float,
    unreduced: list[int],
    buffers: Sequence[Tensor],
) -> dict[str, Any]:
    """The entry, under :data:`WINDOW_KEY`; empty without gradients.

    Args:
        parameters: of the optimizer, numbered as in its state dict.
        inner_count: the number of backward passes so far.
        scale: the factor on the gradients.
        unreduced: the numbers of the losses whose gradients a later pass is to reduce over the ranks.
        buffers: the batch-norm statistics that a skipped step restores.
    """
    grads = {number: p.grad for number, p in enumerate(parameters) if p.grad is not None}
    values = (_VERSION, inner_count, scale, unreduced, grads, list(buffers))
    return {WINDOW_KEY: dict(zip(_KEYS, values, strict=True))} if grads else {}


def check_window(saved: object, parameters: Sequence[Tensor]) -> None:
    """Check an entry for :func:`load_gradients`.

    Raises:
        StateError: it does not fit the parameters.
    """
    what = f"the entry {WINDOW_KEY!r} of the state"
    if require_mapping(saved, what).get("version") != _VERSION:  # type: ignore[union-attr]
        raise StateError(
            f"{what} was saved by another version of halfpeak; save at the end of a window, or leave it out"
        )
    known = require_mapping(saved, what, _KEYS)
    require_count(known["inner_count"], "inner_count")
    if not require_number(known["scale"], "scale") > 0:
        raise StateError(f"the scale of the gradients in {what} is {known['scale']}, and must be above 0")
    check_buffers(known["buffers"])
    for number in require_list(known["unreduced"], "unreduced"):
        require_count(number, "the number of a loss in unreduced")
    gradients = require_mapping(known["gradients"], "the gradients of the state")
    for number in gradients:
        if not isinstance(number, int) or not 0 <= number < len(parameters):
            raise StateError(
                f"a gradient has the number {short_repr(number)} in the state, and there are {len(parameters)} parameters"
            )
    for number, grad in gradients.items():
        if getattr(grad, "layout", None) is not torch.sparse_coo:
            require_tensor(grad, f"gradient {number}", like=parameters[number])
        elif grad.shape != parameters[number].shape:
            raise StateError(
                f"gradient {number} of the state has shape {tuple(grad.shape)}, and its parameter "
                f"{tuple(parameters[number].shape)}"
            )


def load_gradients(saved: Mapping[str, Any], parameters: Sequence[Tensor], scale: float) -> None:
    """Restore the gradients of an entry, multiplied by ``scale``."""
    factor = scale / saved["scale"]
    for number, grad in saved["gradients"].items():
        parameter = parameters[number]
        dtype = grad.dtype if parameter.grad_dtype is None else parameter.dtype
        copy = grad.to(parameter.device, dtype, copy=True)
        parameter.grad = copy if factor == 1 else copy * factor
