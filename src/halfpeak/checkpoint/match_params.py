"""Matching of saved masters to weights by value: masters are saved without names, and each rounds to its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.checkpoint.read import has_values
from halfpeak.core.errors import StateError


def match_params(weights: Mapping[str, Any], masters: Sequence[Tensor]) -> dict[str, Tensor]:
    """The masters of the weights that have one, by the names of the weights.

    A master fits a weight of the same shape that equals the master rounded to the low-precision dtype, because the last
    step wrote the weight so. A ``state_dict`` that was widened to float32 since still has this value. The masters may be
    in another order than the weights; equal weights get theirs in order, unless other orders would give other values.

    Raises:
        StateError: a master fits no weight, or the match is ambiguous. The message names the master.

    >>> weight = torch.tensor([0.1, 0.2]).half()
    >>> match_params({"weight": weight}, [torch.tensor([0.1, 0.2])])["weight"]
    tensor([0.1000, 0.2000])
    """
    known = {name: one for name, one in weights.items() if has_values(one) and one.is_floating_point()}
    fitting: list[list[str]] = []
    for number, master in enumerate(masters):
        if not (has_values(master) and master.is_floating_point()):
            raise StateError(f"master {number} is {master.dtype}; masters are dense floating-point tensors")
        fitting.append([name for name, weight in known.items() if _fits(weight, master)])
        if not fitting[-1]:
            raise StateError(
                f"master {number} of shape {tuple(master.shape)} rounds to no weight of that shape: masters and weights are "
                "not from the same step"
            )
    in_order = _in_order(fitting, list(known))
    if in_order is not None:
        return dict(zip(in_order, masters, strict=True))
    found: dict[str, Tensor] = {}
    for number, (names, master) in enumerate(zip(fitting, masters, strict=True)):
        free = [name for name in names if name not in found]
        if not free or any(name in found and not _same(found[name], master) for name in names):
            raise StateError(
                f"master {number} fits {' as well as '.join(map(repr, names[:2]))}, which hold equal weights, and the masters "
                "differ: convert in the script that made the file, where the order of the parameters is known"
            )
        found[free[0]] = master
    return found


def _in_order(fitting: Sequence[Sequence[str]], names: Sequence[str]) -> list[str] | None:
    """A name for each list of fitting ones, in the order of ``names``; None if there is no such choice."""
    places, last, chosen = {name: place for place, name in enumerate(names)}, -1, list[str]()
    for fit in fitting:
        later = [places[name] for name in fit if places[name] > last]
        if not later:
            return None
        last = min(later)
        chosen.append(names[last])
    return chosen


def _fits(weight: Tensor, master: Tensor) -> bool:
    """Whether a weight equals its master, rounded or as it is."""
    if weight.shape != master.shape:
        return False
    # The first row tells most weights of one shape apart.
    if weight.dim() > 1 and len(weight) > 1 and not _fits(weight[0], master[0]):
        return False
    dtypes = {torch.float16, torch.bfloat16} if weight.dtype == torch.float32 else {weight.dtype}
    return any(_same(weight.float(), master.to(dtype).float()) for dtype in (*dtypes, torch.float32))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
