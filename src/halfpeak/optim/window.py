"""The entry of a wrapper's state for an open accumulation window, which mmengine's format cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from halfpeak.core.errors import StateError
from halfpeak.core.schedule import require_saved_scale
from halfpeak.core.state_checks import Schema, require, require_count, require_mapping
from halfpeak.engine.state_checks import BUFFERS, gradients_schema

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
    what = f"state[{WINDOW_KEY!r}]"
    version = require_mapping(saved, what).get("version")
    if type(version) is not int or version != _VERSION:
        raise StateError(
            f"{what} was saved by another version of halfpeak; save at the end of a window, or leave it out"
        )
    schema: Schema = {
        "version": int,
        "inner_count": require_count,
        "scale": require_saved_scale,
        "held": [require_count, ...],
        "gradients": gradients_schema(parameters, [None] * len(parameters)),
        "buffers": BUFFERS,
    }
    require(saved, what, schema)


def load_gradients(saved: Mapping[str, Any], parameters: Sequence[Tensor], scale: float) -> None:
    """Restore the gradients of an entry, multiplied by ``scale``."""
    factor = scale / saved["scale"]
    for number, grad in saved["gradients"].items():
        parameter = parameters[number]
        dtype = grad.dtype if parameter.grad_dtype is None else parameter.dtype
        copy = grad.to(parameter.device, dtype, copy=True)
        parameter.grad = copy if factor == 1 else copy * factor
