"""FSDP2 by opt level: torch's ``fully_shard`` with a level's dtypes, and checks of sharded models for ``prepare``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfpeak.casting.modules import (
    convert_network,
    ids_kept_by_user,
    is_kept_fp32,
    is_prepared,
    kept_by_user,
)
from halfpeak.core.dtypes import LOW, is_low
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, ParameterError
from halfpeak.core.levels import Level, LevelName
from halfpeak.core.policy import KeepFp32, NormRule, Policy
from halfpeak.core.short_repr import short_repr
from halfpeak.core.suitable import level_for
from halfpeak.ops.shards import has_process_group, is_shard
from halfpeak.ops.unsharded import is_fully_sharded

Blocks = type[nn.Module] | str | Sequence[type[nn.Module] | str]
"""A module class, the name of a class, the qualified name of a module; or a sequence of these."""


def fully_shard(
    model: nn.Module,
    level: LevelName | Level = "auto",
    *,
    mesh: Any = None,
    blocks: Blocks | None = None,
    reshard_after_forward: bool | int = True,
    offload: Any = None,
    keep_fp32: Sequence[KeepFp32] = (),
    low_shards: bool = False,
    cast_forward_inputs: bool = True,
    **options: Any,
) -> nn.Module:
    """Shard a model over the ranks with torch's FSDP2, so that its float32 shards serve as the masters of an opt level.

    Call it first, then build the optimizer over ``model.parameters()``, then call :func:`halfpeak.prepare` with the same
    level. At O2, O3 and O5 a forward pass gathers low-precision weights, gradients are reduced in float32, and the
    optimizer steps float32 shards, so ``prepare`` converts and copies no parameter. Normalisation layers that a level
    keeps in float32 are gathered in float32, all layers of a block together.

    Args:
        model: float32 parameters, on the device or on ``meta``; sharded in place.
        level: ``"O0"`` to ``"O5"``, ``"auto"`` or a value, as in :func:`halfpeak.prepare`. At O0, O1 and O4 everything stays
            float32.
        mesh: a ``DeviceMesh`` of one dimension (shards) or two (replicas, shards); None takes all ranks.
        blocks: modules whose weights are gathered together. None takes the outermost modules with submodules that have
            a sibling of the same class.
        reshard_after_forward: free the gathered weights after the forward pass, and gather them again for backward.
        offload: True keeps shards, gradients and moments in host memory; or torch's ``OffloadPolicy``.
        keep_fp32: modules that stay float32, as in :func:`halfpeak.prepare`; each is gathered by itself.
        low_shards: convert the weights to the level's dtype first and shard them so, at O2 and O5, for an optimizer with
            ``master="remainder8"`` or ``"remainder"``: 7.07 bytes per parameter over all ranks instead of 16. Gradients are
            reduced in float32 and then cast to the dtype of the shards, by torch.
        cast_forward_inputs: cast the inputs of the model to the dtype in which it computes. False leaves it to
            :func:`halfpeak.prepare` to cast them, or not to.
        options: of ``torch.distributed.fsdp.fully_shard``, except ``mp_policy``, which the level determines.

    Returns:
        ``model``.

    Raises:
        ConfigError: an unknown level, ``mp_policy``, no process group, a block that the model does not have, or low
            shards at a level without low-precision weights and masters.
        OrderError: the model was already prepared or sharded.
        ParameterError: it has low-precision parameters, which cannot become float32 shards, and ``low_shards`` is False.

    Example:
        A script that ``torchrun --nproc-per-node 2`` starts::

            torch.distributed.init_process_group()
            model = halfpeak.distributed.fully_shard(Net().to(device), "O2")
            optimizer = torch.optim.AdamW(model.parameters())
            engine = halfpeak.prepare(model, optimizer, "O2", clip=1.0)
    """
    policy = replace(level_for(level, [model]).policy(), keep_fp32=tuple(keep_fp32))
    _check(model, policy, options, low_shards=low_shards)
    if low_shards and policy.param is not None:
        convert_network(model, policy.param, policy.norms, policy.keep_fp32)
    chosen = _repeated_blocks(model) if blocks is None else _named_blocks(model, blocks)
    # Imported here because the import is slow and only this function needs it.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    if not isinstance(offload, OffloadPolicy):
        # Pinned memory needs an accelerator.
        offload = (
            CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if offload else OffloadPolicy()
        )
    shared: dict[str, Any] = {
        **options,
        "mesh": mesh,
        "offload_policy": offload,
        "reshard_after_forward": reshard_after_forward,
    }
    low = policy.param if policy.param in LOW and not policy.per_op else None
    keep_fp32 = () if low is None else policy.keep_fp32
    inside = ids_kept_by_user(model, keep_fp32)
    for module in kept_by_user(model, keep_fp32):
        torch_fully_shard(module, mp_policy=MixedPrecisionPolicy(), **shared)
    of_weights = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=None if low is None else torch.float32)
    for module in (*reversed(chosen), model):
        if id(module) in inside:
            continue
        kept = [] if low is None else _unsharded_norms(module, policy.norms, inside)
        if module in kept:
            torch_fully_shard(module, mp_policy=MixedPrecisionPolicy(), **shared)
            continue
        if kept:
            torch_fully_shard(kept, mp_policy=MixedPrecisionPolicy(), **shared)
        casts = cast_forward_inputs or module is not model
        torch_fully_shard(module, mp_policy=replace(of_weights, cast_forward_inputs=casts), **shared)
    return model


def check_shards(model: nn.Module, policy: Policy) -> None:
    """Check that FSDP2 gathers sharded parameters in the dtype that the policy expects, and reduces gradients in float32.

    Where a level stores no low-precision weights, FSDP2 gathers and reduces in the dtype of the shards.

    Raises:
        ConfigError: FSDP2 casts inputs that are to be left as they are.
        ParameterError: it does not. ``prepare`` cannot convert them, because shards do not change their dtype.
    """
    is_stored_low = policy.param in LOW
    if is_stored_low and not policy.cast_forward_inputs and is_fully_sharded(model):
        own: Any = model
        if own._get_fsdp_state()._mp_policy.cast_forward_inputs:
            raise ConfigError(
                "cast_forward_inputs=False, but FSDP2 casts the inputs of this model; write "
                "fully_shard(model, level, cast_forward_inputs=False), too"
            )
    for name, dtype, reduced, expected in _fsdp_dtypes(model, policy):
        if dtype is None and not is_stored_low:
            continue
        if dtype is None:
            raise ParameterError(
                f"parameter {name} is a DTensor that no fully_shard gathers, so it cannot become {policy.param}; call "
                "halfpeak.distributed.fully_shard(model, level) after parallelize_module, or use level 'O1' or 'O4'"
            )
        if dtype is not expected:
            norms = "halfpeak.LEVELS[level].replace(norms='batchnorm'), or write norms='all' here"
            raise ParameterError(
                f"parameter {name} is sharded and gathered in {dtype}, and this level computes with it in {expected}; shard "
                "the float32 model by halfpeak.distributed.fully_shard, with the level and keep_fp32= of this call"
                + (f": {norms}" if policy.norms == "batchnorm" else "")
            )
        if reduced is not torch.float32 and (is_stored_low or reduced is not dtype):
            raise ParameterError(
                f"the gradient of parameter {name} is reduced over the ranks in {reduced}, where it can overflow or lose small "
                "values; shard the float32 model by halfpeak.distributed.fully_shard, or with "
                "MixedPrecisionPolicy(..., reduce_dtype=torch.float32)"
            )


def _fsdp_dtypes(
    model: nn.Module, policy: Policy
) -> Iterator[tuple[str, torch.dtype | None, torch.dtype | None, torch.dtype | None]]:
    """Of every shard: name, dtype when gathered (None if FSDP2 does not gather it), of reductions, and expected dtype."""
    gathering: dict[str, Any] = {}
    inside = ids_kept_by_user(model, policy.keep_fp32)
    for path, module in model.named_modules():
        parent = gathering.get(path.rpartition(".")[0]) if path else None
        gathering[path] = module if is_fully_sharded(module) else parent
        for name, parameter in module.named_parameters(recurse=False):
            if is_shard(parameter):
                owner = gathering[path]
                own = None if owner is None else owner._get_fsdp_state()._mp_policy
                dtype = None if own is None else own.param_dtype or parameter.dtype
                reduced = None if own is None else own.reduce_dtype or dtype
                expected = policy.param
                if policy.param not in LOW:
                    expected = parameter.dtype
                elif id(module) in inside or is_kept_fp32(module, policy.norms):
                    expected = torch.float32
                yield f"{path}.{name}".lstrip("."), dtype, reduced, expected


def _check(model: Any, policy: Policy, options: Mapping[str, Any], *, low_shards: bool) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"{type(model).__name__} is not a torch.nn.Module; pass a module")
    if "mp_policy" in options:
        raise ConfigError("mp_policy= is what the level gives; leave it out, or call torch's fully_shard")
    if not has_process_group():
        raise ConfigError(
            "fully_shard needs torch.distributed; call torch.distributed.init_process_group first, and start the script "
            "with torchrun"
        )
    if is_prepared(model):
        raise OrderError(
            f"{type(model).__name__} was prepared before it was sharded, so its optimizer would step parameters that are no "
            "longer part of it; call fully_shard first, then build the optimizer, then call halfpeak.prepare"
        )
    if any(is_fully_sharded(module) for module in model.modules()):
        raise OrderError(
            f"{type(model).__name__} is sharded already; call fully_shard once, on the whole model"
        )
    if low_shards and (policy.param not in LOW or policy.per_op or not policy.masters):
        raise ConfigError(
            "low_shards=True is for levels with low-precision weights and masters; write 'O2' or 'O5', or leave it out"
        )
    low = next((name for name, parameter in model.named_parameters() if is_low(parameter)), None)
    if low is not None and policy.param in LOW and not low_shards:
        raise ParameterError(
            f"parameter {low} is in low precision, but the optimizer steps float32 shards; write model.float() first, or "
            "low_shards=True for an optimizer with master='remainder8'"
        )


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that have submodules, parameters and a sibling of the same class."""
    found: list[nn.Module] = []
    for module in model.children():
        alike = [other for other in model.children() if type(other) is type(module)]
        is_block = (
            len(alike) > 1 and any(True for _ in module.children()) and any(True for _ in module.parameters())
        )
        found += [module] if is_block else _repeated_blocks(module)
    return found


def _named_blocks(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    wanted = [blocks] if isinstance(blocks, (str, type)) else list(blocks)
    found: dict[str, nn.Module] = {}
    for one in wanted:
        matching = {
            name: module
            for name, module in model.named_modules()
            if module is not model
            and (isinstance(module, one) if isinstance(one, type) else one in (name, type(module).__name__))
        }
        if not matching:
            known = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ConfigError(
                f"blocks={short_repr(one)} is no part of {type(model).__name__}; its modules are {known}"
            )
        found.update(matching)
    return [module for name, module in model.named_modules() if name in found]


def _unsharded_norms(module: nn.Module, norms: NormRule, inside: set[int]) -> list[nn.Module]:
    """The layers of ``module``, itself included, that stay float32 and are neither sharded yet nor ``inside``."""
    return [
        one
        for one in module.modules()
        if is_kept_fp32(one, norms)
        and id(one) not in inside
        and not is_fully_sharded(one)
        and any(True for _ in one.parameters(recurse=False))
    ]
