"""Loads states that were saved in one storage format into an optimizer that uses another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.flat.buffers import flat
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.fused.state_dtypes.quantized_rule import QuantizedRule
from halfpeak.ops.foreach import is_dense


def check_row(index: int, row: Mapping[str, Any], rule: Rule, target: Tensor) -> None:
    """Check the saved state of a parameter.

    Args:
        index: the parameter's index, for the message.
        rule: the rule that will step the parameter.

    Raises:
        StateError: a state is not a tensor, has another shape than here, or has a format that the rule cannot read.
    """
    parts = {part.name: part for part in rule.storage}
    numbers = {"step", *rule.state_names[len(rule.state_names) - rule.per_param_scalars :]}
    for name, value in row.items():
        part = parts.get(name)
        if (
            value is None
            or name in numbers
            or (part is None and not (isinstance(value, Tensor) and value.dim()))
        ):
            continue
        if not isinstance(value, Tensor):
            raise StateError(
                f"the state {name!r} of parameter {index} is {short_repr(value)} and should be a tensor"
            )
        if (
            name == REMAINDER
            and part is not None
            and value.dtype.is_signed == (target.dtype is torch.float16)
        ):
            raise StateError(
                f"the remainder of parameter {index} is of a {'bfloat16' if value.dtype.is_signed else 'float16'} weight, and "
                f"the weight is {target.dtype}; prepare the run at the level of the state, or build the optimizer without "
                "master= and load the float32 values of the model"
            )
        is_foreign = name.endswith("_scale") if part is None else value.dtype != part.dtype
        if is_foreign and name != REMAINDER and (part is None or not value.is_floating_point()):
            raise StateError(
                f"the state {name!r} of parameter {index} was saved with 8-bit moments; construct the optimizer with "
                "moments='int8', or load a state with float32 or bfloat16 moments"
            )
        block_size = 1 if part is None else part.block_size
        shape = target.shape if block_size == 1 else torch.Size([-(-target.numel() // block_size)])
        if value.shape != shape:
            raise StateError(
                f"the state {name!r} of parameter {index} has shape {tuple(value.shape)} and should have {tuple(shape)}; load "
                "the state of this model's optimizer"
            )


def adapt_row(row: MutableMapping[str, Any], rule: Rule, target: Tensor, before: Tensor | None) -> None:
    """Convert a loaded state row to the format of its rule: quantise moments, keep or drop the remainder.

    Args:
        row: the state row, changed in place.
        rule: the rule that will step the parameter.
        before: the remainder before the load, which belongs to the weight and stays if the row has none that fits.
    """
    master = rule.master if isinstance(rule, QuantizedRule) else None
    loaded = row.pop(REMAINDER, None)
    if master is not None:
        fits = loaded is not None and loaded.dtype == master.storage[1].dtype
        if fits or before is not None:
            row[REMAINDER] = loaded if fits else before
    if isinstance(rule, QuantizedRule):
        for name, codec in zip(rule.rule.state_names, rule.codecs, strict=True):
            value = row.get(name)
            if value is not None and value.is_floating_point() and len(codec.storage) > 1:
                like = target.detach() if is_dense(target) else target.detach().contiguous()
                ordered = torch.empty_like(like, dtype=torch.float32).copy_(value)
                parts = codec.encode(flat(ordered), torch.zeros((), dtype=torch.float32, device=value.device))
                row[name] = parts[0].as_strided(like.shape, like.stride())
                row.update({name + p.name: t for p, t in zip(codec.storage[1:], parts[1:], strict=True)})


def rows_of(loaded: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """The saved state rows with their indices, in the order of the groups. Does not check their number."""
    numbers: Iterable[Any] = (index for group in loaded["param_groups"] for index in group["params"])
    return ((index, loaded["state"].get(index, {})) for index in numbers)


def keep_dtypes(optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    """Replace tensors by copies in their saved dtype: torch casts some to a low-precision dtype and shares others."""
    for (_, row), target in zip(rows_of(loaded), params_of(optimizer), strict=True):
        for name, value in row.items():
            if isinstance(value, Tensor):
                optimizer.state[target][name] = value.detach().to(target.device, copy=True)
