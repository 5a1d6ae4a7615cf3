"""Loads states that were saved in one storage format into an optimizer that uses another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.state_checks import NotRequired, require, require_number, unfit
from halfpeak.fused.flat.buffers import flat
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.state_dtypes.codecs import (
    BLOCK_SIZES,
    REMAINDER,
    Codec,
    Identity,
    Int8Block,
    UInt8SqrtBlock,
)
from halfpeak.fused.state_dtypes.quantized_rule import QuantizedRule
from halfpeak.ops.foreach import is_dense
from halfpeak.ops.shards import is_shard, local_of, shard_like


def check_row(rule: Rule, target: Tensor, row: Mapping[str, Any], what: str) -> None:
    """Check the saved state of a parameter.

    Args:
        rule: the rule that will step the parameter.
        what: the state as an expression, for the message.

    Raises:
        StateError: a state is not a tensor, has another shape than here, or has a format that the rule cannot read.
    """
    checks = {name: partial(_check_state, rule, target, row, name) for name in row}
    require(row, what, {**checks, "step": NotRequired(partial(require_number, least=0.0))})


def _check_state(
    rule: Rule, target: Tensor, row: Mapping[str, Any], name: str, value: object, what: str
) -> None:
    is_part = name in {part.name for part in rule.storage}
    if value is None or not (isinstance(value, Tensor) or is_part):
        return
    shapes = _shapes_of(rule, target, row, name)
    allowed = f"a tensor of {' or '.join(str(tuple(one)) for one in shapes)}"
    if not isinstance(value, Tensor):
        raise unfit(value, what, allowed)
    if value.dim() and is_shard(value) != is_shard(target):
        raise StateError(
            f"{what} is a {type(value).__name__}, and the parameter a {type(target).__name__}; load it by "
            "torch.distributed.checkpoint"
        )
    if name == REMAINDER and is_part and value.dtype.is_signed == (target.dtype is torch.float16):
        low = torch.bfloat16 if value.dtype.is_signed else torch.float16
        raise StateError(
            f"{what} is that of a {low} weight, and the weight is {target.dtype}; prepare the run at the level of the state, "
            "or build the optimizer without master= and load the float32 values of the model"
        )
    if name != REMAINDER and value.dtype in _BLOCKED and not isinstance(row.get(name + _SCALE), Tensor):
        raise StateError(
            f"{what} is {value.dtype} and has no {name + _SCALE!r}, which 8-bit moments are saved with; load the state of this "
            "model's optimizer"
        )
    if not (value.shape in shapes or (not is_part and not value.dim())):
        raise unfit(value, what, allowed)


def adapt_row(row: MutableMapping[str, Any], rule: Rule, target: Tensor, before: Tensor | None) -> None:
    """Convert a loaded state row to the format of its rule: quantise moments or restore them, keep or drop the remainder.

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
    names = rule.rule.state_names if isinstance(rule, QuantizedRule) else rule.state_names
    codecs = rule.codecs if isinstance(rule, QuantizedRule) else (Identity(),) * len(names)
    for name, codec in zip(names, codecs, strict=True):
        if isinstance(row.get(name), Tensor):
            _adapt_state(row, name, codec, target)


def _adapt_state(row: MutableMapping[str, Any], name: str, codec: Codec, target: Tensor) -> None:
    """Convert one state of a parameter from what was saved to the format of a codec, to the bit where that is the same."""
    own, value = local_of([target.detach(), row[name]])
    like, parts = own if is_dense(own) else own.contiguous(), codec.storage
    stored: Sequence[Tensor] | None = None
    if value.dtype in _BLOCKED:
        (scale,) = local_of([row.pop(name + _SCALE)])
        block = _block_of(value, scale)
        if block == parts[-1].block_size and value.stride() == like.stride():
            stored = (value, scale)
        else:
            value = _restored(value, scale, block)
    if len(parts) == 1:
        row[name] = shard_like(value, target)
        return
    if stored is None:
        ordered = torch.empty_like(like, dtype=torch.float32).copy_(value)
        codes, scale = codec.encode(flat(ordered), torch.zeros((), dtype=torch.float32, device=value.device))
        stored = (codes.as_strided(like.shape, like.stride()), scale)
    for part, tensor in zip(parts, stored, strict=True):
        if part.block_size > 1:
            local, whole = tensor.view(part.shape_for(like.shape)), part.shape_for(target.shape)
            row[name + part.name] = shard_like(local, target, whole)
        else:
            row[name + part.name] = shard_like(tensor, target)


def _shapes_of(rule: Rule, target: Tensor, row: Mapping[str, Any], name: str) -> Sequence[torch.Size]:
    """The shapes that a state of a parameter may have: scales those of blocks of rows, or of older blocks across rows."""
    if name in rule.state_names[len(rule.state_names) - rule.per_param_scalars :]:
        return [torch.Size(())]
    codes = row.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) else None
    if not (isinstance(codes, Tensor) and codes.dtype in _BLOCKED):
        return [target.shape]
    scales = Int8Block().for_shape(target.shape).storage[1:]
    older = [] if is_shard(target) else [torch.Size([-(-target.numel() // BLOCK_SIZES[0])])]
    return [*(torch.Size(one.shape_for(target.shape)) for one in scales), *older]


def _block_of(codes: Tensor, scale: Tensor) -> int:
    """How many codes share a scale; 1 where there are none."""
    return BLOCK_SIZES[0] if scale.dim() == 1 else codes.numel() // max(scale.numel(), 1) or 1


def _restored(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """The float32 values of 8-bit moments.  # f32 of the shape of ``codes``"""
    dense = codes if is_dense(codes) else codes.contiguous()
    values = _BLOCKED[codes.dtype](block).decode((flat(dense), scale.reshape(-1)))
    return values.as_strided(dense.shape, dense.stride())


_SCALE: Final = "_scale"
_BLOCKED: Final = MappingProxyType({torch.int8: Int8Block, torch.uint8: UInt8SqrtBlock})
"""The codec of 8-bit moments by their dtype."""


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
