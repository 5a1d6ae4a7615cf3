"""Matching of saved masters to weights by value: masters are saved without names, and each rounds to its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.checkpoint.canonical import has_values
from halfpeak.core.errors import StateError

LOW: Final = (torch.float16, torch.bfloat16)


def match_params(weights: Mapping[str, Any], masters: Sequence[Tensor]) -> dict[str, Tensor]:
    """The masters of the weights that have one, by the names of the weights.

    A master fits a weight of the same shape that equals the master rounded to the low-precision dtype, because the last
    step wrote the weight so. A ``state_dict`` that was upcast to float32 since still has this value. The masters may be
    in another order than the weights. If equal weights make a match ambiguous, the masters must be equal, too, or all
    masters must fit in the order of the weights.

    Raises:
        StateError: a master fits no weight, or the match is ambiguous. The message names the master.

    >>> weight = torch.tensor([0.1, 0.2]).half()
    >>> match_params({"weight": weight}, [torch.tensor([0.1, 0.2])])["weight"]
    tensor([0.1000, 0.2000])
    """
    candidates = {
        name: value for name, value in weights.items() if has_values(value) and value.is_floating_point()
    }
    for number, master in enumerate(masters):
        if not (has_values(master) and master.is_floating_point()):
            raise StateError(f"master {number} is {master.dtype}; masters are dense floating-point tensors")
    dtype = _dtype_of_rounding(candidates, masters)
    return _in_order(candidates, masters, dtype) or _by_value(candidates, masters, dtype)


def is_rounded(weight: Tensor, master: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight equals its master, rounded to ``dtype`` or as it is."""
    if weight.shape != master.shape:
        return False
    # The first row tells most weights of one shape apart.
    if weight.dim() > 1 and len(weight) > 1 and not is_rounded(weight[0], master[0], dtype):
        return False
    wide = weight.float()
    return _same(wide, master.to(dtype).float()) or _same(wide, master.float())


def _in_order(
    weights: Mapping[str, Tensor], masters: Sequence[Tensor], dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """Match the masters in the order of the weights, of which some may be skipped; None if they do not fit so."""
    found: dict[str, Tensor] = {}
    rest = iter(weights.items())
    for master in masters:
        for name, weight in rest:
            if is_rounded(weight, master, dtype):
                found[name] = master
                break
        else:
            return None
    skipped_low = any(value.dtype in LOW for name, value in weights.items() if name not in found)
    return None if skipped_low else found


def _by_value(
    weights: Mapping[str, Tensor], masters: Sequence[Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    by_shape: dict[torch.Size, list[str]] = {}
    for name, weight in weights.items():
        by_shape.setdefault(weight.shape, []).append(name)
    found: dict[str, Tensor] = {}
    for number, master in enumerate(masters):
        fitting = [
            name for name in by_shape.get(master.shape, ()) if is_rounded(weights[name], master, dtype)
        ]
        free = [name for name in fitting if name not in found]
        if not free:
            raise StateError(_no_weight(number, master, len(by_shape.get(master.shape, ()))))
        twins = [name for name in fitting if name in found and not _same(found[name], master)]
        if twins:
            raise StateError(
                f"master {number} fits {free[0]!r} as well as {twins[0]!r}, which hold equal weights, and the masters "
                "differ: convert in the script that made the file, where the order of the parameters is known"
            )
        found[free[0]] = master
    return found


def _dtype_of_rounding(weights: Mapping[str, Tensor], masters: Sequence[Tensor]) -> torch.dtype:
    """The low-precision dtype of the weights, or the one that they had before an upcast."""
    stored = next((value.dtype for value in weights.values() if value.dtype in LOW), None)
    if stored is not None or not masters:
        return stored or torch.float16
    # Upcast weights: the dtype in which the first inexact master rounds to a weight of its shape.
    first = next((m for m in masters if m.numel() and not _same(m.half().float(), m.float())), masters[0])
    for dtype in LOW:
        rounded = first.to(dtype).float()
        if any(value.shape == first.shape and _same(value.float(), rounded) for value in weights.values()):
            return dtype
    return torch.float16


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _no_weight(number: int, master: Tensor, of_that_shape: int) -> str:
    shape = tuple(master.shape)
    if of_that_shape == 0:
        return f"master {number} has shape {shape}, and no weight of the file has this shape"
    return (
        f"master {number} of shape {shape} rounds to none of the {of_that_shape} weights of that shape: masters and weights "
        "are not from the same step"
    )
