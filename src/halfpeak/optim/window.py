"""The entry of a wrapper's state for an open accumulation window, which mmengine's format cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from halfpeak.core.errors import StateError
from halfpeak.core.state_checks import (
    require_count,
    require_list,
    require_mapping,
    require_number,
)
from halfpeak.engine.state_checks import check_buffers, check_gradients

WINDOW_KEY: Final = "halfpeak"
"""The key of the entry. torch and mmengine ignore unknown keys."""

_VERSION: Final = 3
_KEYS: Final = ("version", "inner_count", "scale", "held", "gradients", "buffers")


def save_window(
    parameters: Iterable[Tensor],
    inner_count: int,
    scale: float,
    held: list[int],
    buffers: Sequence[Tensor],
) -> dict[str, Any]:
    """The entry, under :data:`WINDOW_KEY`; empty without gradients.

    Args:
        parameters: of the optimizer, numbered as in its state dict.
        inner_count: the number of backward passes so far.
        scale: the factor on the gradients.
        held: the numbers of the losses whose gradients a later pass is to reduce over the ranks.
        buffers: the batch-norm statistics that a skipped step restores.
    """
    grads = {number: p.grad for number, p in enumerate(parameters) if p.grad is not None}
    values = (_VERSION, inner_count, scale, held, grads, list(buffers))
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
    for number in require_list(known["held"], "held"):
        require_count(number, "the number of a loss in held")
    check_gradients(require_mapping(known["gradients"], "the gradients of the state"), parameters)


def load_gradients(saved: Mapping[str, Any], parameters: Sequence[Tensor], scale: float) -> None:
    """Restore the gradients of an entry, multiplied by ``scale``."""
    factor = scale / saved["scale"]
    for number, grad in saved["gradients"].items():
        parameter = parameters[number]
        dtype = grad.dtype if parameter.grad_dtype is None else parameter.dtype
        copy = grad.to(parameter.device, dtype, copy=True)
        parameter.grad = copy if factor == 1 else copy * factor
