"""Checks of what can be prepared. They change nothing, but let torch complete optimizers without ``Optimizer.__init__``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfpeak.casting.modules import (
    check_entries,
    converted_parameters,
    holds_constants,
    ids_kept_by_user,
    is_prepared,
)
from halfpeak.core.dtypes import LOW, is_low
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, ParameterError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.policy import Policy
from halfpeak.core.wrappers import wrapper_of
from halfpeak.distributed.fsdp import check_shards
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.shards import is_shard, parts_of
from halfpeak.parts.parts import LIVE
from halfpeak.parts.remainder_store import remainder_store_of
from halfpeak.parts.state_dict_hooks import has_fp32_state_dict
from halfpeak.parts.step_hooks import is_hooked


def check_models(models: Sequence[Any], policy: Policy) -> None:
    """Check the models.

    Raises:
        ConfigTypeError: a model is not a module, or contains TorchScript.
        OrderError: a model was prepared before.
        ParameterError: a model is in a wrapper that casting its parameters would break, or has no storage.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(
                f"{type(model).__name__} is not a torch.nn.Module; pass a module or a list of modules"
            )
        scripted = next(
            (n for n, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None
        )
        if scripted is not None:
            which = f"part {scripted!r} of {type(model).__name__}" if scripted else type(model).__name__
            raise ConfigTypeError(
                f"{which} is TorchScript, which takes no hooks; "
                "prepare the module that it was made from, and compile that with torch.compile"
            )
        prepared = prepared_in(model)
        if prepared is not None:
            raise OrderError(f"{prepared} was prepared before{_what_to_do(model)}")
        wrapper = wrapper_of(model)
        if wrapper is not None and (policy.param is not None or policy.masters):
            raise ParameterError(
                f"{type(model).__name__} is wrapped by {wrapper}, which must come after the parameters are cast: prepare "
                "the inner module, then wrap it"
            )
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                raise ParameterError(
                    f"parameter {name} has no storage (device meta); materialise the model first"
                )
            if policy.masters and is_lazy(parameter):
                raise ParameterError(
                    f"parameter {name} has no shape yet (lazy module); run one forward pass before preparing"
                )
        check_shards(model, policy)
        _check_stepped_elsewhere(model, policy)
    if len({id(model) for model in models}) != len(models):
        raise ParameterError("the same model was passed twice")


def _check_stepped_elsewhere(model: nn.Module, policy: Policy) -> None:
    """Refuse to cast a weight that another engine steps in float32, where it has no master."""
    if policy.param is None or policy.param not in LOW:
        return
    steppers = (window for parts in LIVE for window in parts.windows if window.reference() is not None)
    stepped = {id(main) for window in steppers for main in window.mains if not is_low(main)}
    cast = {id(p) for p in converted_parameters(model, policy.param, policy.norms, policy.keep_fp32)}
    both = stepped & cast
    for name, parameter in model.named_parameters():
        if id(parameter) in both:
            raise OrderError(
                f"parameter {name} of {type(model).__name__} is in an optimizer that was prepared before and steps it in "
                f"float32, and would be cast to {policy.param}; prepare all models that share parts in one call, call "
                "engine.remove() on the engine of the first, or build a new model"
            )


def prepared_in(model: nn.Module) -> str | None:
    """The model, and its part, that was prepared before, as messages name it; None if it was not."""
    part = next((name for name, part in model.named_modules() if has_fp32_state_dict(part)), None)
    if part is None and not is_prepared(model):
        return None
    return f"{type(model).__name__}, part {part!r}," if part else type(model).__name__


def _what_to_do(model: nn.Module) -> str:
    known = {id(module) for parts in LIVE for one in parts.models for module in one.modules()}
    if known.isdisjoint(map(id, model.modules())):
        return (
            ", and its engine does not exist any more; build a new model, new.load_state_dict(model.state_dict()), and prepare "
            "that one"
        )
    return (
        "; prepare all models that share parts in one call, call engine.remove() on the engine of the first, or build a new "
        "model"
    )


def check_optimizers(optimizers: Sequence[Any], models: Sequence[nn.Module], policy: Policy) -> None:
    """Check the optimizers.

    Raises:
        ConfigTypeError: one is not an optimizer.
        OrderError: one was prepared before.
        ParameterError: none of its parameters belongs to the models; it shards its state, but must step masters; or it is
            torch's Muon over a matrix that is cut too finely.
    """
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigTypeError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer; pass a bare optimizer or a list of them"
            )
        if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            # timm's Lookahead and torch's PostLocalSGDOptimizer do not call Optimizer.__init__. __setstate__ adds the
            # missing attributes, as for an optimizer from an older pickle.
            Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})
        if is_hooked(optimizer):
            raise OrderError(
                f"{type(optimizer).__name__} was prepared before; call engine.remove() on its engine first, or build a "
                "new optimizer"
            )
        if policy.masters and any(
            cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__
        ):
            raise ParameterError(
                "ZeroRedundancyOptimizer steps the parameters by an optimizer of its own, which would never see float32 "
                "masters; shard the model by halfpeak.distributed.fully_shard(model, level) and pass a plain optimizer"
            )
        parameters = params_of(optimizer)
        if models and parameters and not any(id(parameter) in known for parameter in parameters):
            raise ParameterError(
                f"no parameter of {type(optimizer).__name__} belongs to the models; build the optimizer over "
                "model.parameters() of the same model objects, after moving them to their device"
            )
        for parameter in parameters:
            if not parameter.is_leaf:
                raise ParameterError(
                    f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is computed from "
                    "others, not a leaf; build the optimizer over parameters"
                )
        if isinstance(optimizer, torch.optim.Muon):
            _check_muon(parameters, models)
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise ParameterError("the same optimizer was passed twice")


def _check_muon(parameters: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
    """Refuse shards of a matrix with more parts than rows or columns.

    DTensor multiplies such a matrix whole and cannot add the result to its parts, so that torch's Muon raises in the middle
    of its step: its moment and its decayed weight have moved, later parameters have not.
    """
    names = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
    for parameter in filter(is_shard, parameters):
        for size, parts, what in zip(parameter.shape, parts_of(parameter), ("rows", "columns"), strict=False):
            if size < parts:
                raise ParameterError(
                    f"parameter {names.get(id(parameter), '(of no model)')} of shape {tuple(parameter.shape)} is sharded into "
                    f"{parts} parts of its {size} {what}, and torch.optim.Muon needs at least one of them in each part; give "
                    "it to AdamW: prepare(model, [Muon(matrices), AdamW(others)], level)"
                )


def check_float32_weights(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers step float32 weights, for levels that make no masters of low ones.

    Raises:
        ParameterError: a trainable parameter of an optimizer has low precision, and the optimizer stores no remainder of it.
    """
    for optimizer in optimizers:
        low = next((p for p in params_of(optimizer) if is_low(p) and p.requires_grad), None)
        if low is not None and remainder_store_of(optimizer) is None:
            named = (item for model in models for item in model.named_parameters())
            name = next((f"parameter {name}" for name, p in named if p is low), "a parameter")
            raise ParameterError(
                f"{type(optimizer).__name__} steps {name} in {low.dtype}, and this level steps float32 weights; call "
                "model.float() before preparing and no .half() or .bfloat16() afterwards, freeze it, or write level 'O2' or "
                "'O5', which make float32 masters"
            )


def check_remainders(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Check the optimizers that keep remainders instead of masters.

    Raises:
        ConfigError: the policy has no masters.
        ParameterError: another optimizer also steps one of the weights, or one without remainders steps low shards.
    """
    for optimizer in optimizers:
        if remainder_store_of(optimizer) is None:
            shard = next(
                (p for p in params_of(optimizer) if is_shard(p) and is_low(p) and p.requires_grad), None
            )
            if shard is not None and policy.masters:
                raise ParameterError(
                    f"{type(optimizer).__name__} steps shards in {shard.dtype} and keeps no remainders of them; write "
                    "FusedAdamW(..., master='remainder8') or master='remainder', or leave out low_shards=True"
                )
            continue
        name, own = type(optimizer).__name__, set(map(id, params_of(optimizer)))
        if policy.param in LOW and not policy.masters:
            raise ConfigError(
                f"{name} keeps what low-precision weights round away, and this level wants no master weights; use level 'O2' "
                "or 'O5', or leave out master="
            )
        if any(id(p) in own for other in optimizers if other is not optimizer for p in params_of(other)):
            raise ParameterError(
                f"{name} keeps remainders of its weights, which another optimizer would move without them; give each "
                "parameter to one optimizer, or leave out master="
            )


def check_keep_fp32(models: Sequence[nn.Module], policy: Policy) -> None:
    """Check that every entry of ``keep_fp32`` matches a module, and that kept and cast modules share no weight.

    Raises:
        ConfigError: the message names the entry, or the modules.
    """
    check_entries("keep_fp32", [entry for entry in policy.keep_fp32 if entry is not holds_constants], models)
    if policy.param not in LOW:
        return
    for model in models:
        inside = ids_kept_by_user(model, policy.keep_fp32)
        owners: dict[int, str] = {}
        for keeps in (True, False):
            for name, module in model.named_modules():
                for parameter in module.parameters(recurse=False) if (id(module) in inside) == keeps else ():
                    if keeps:
                        owners[id(parameter)] = name
                    elif id(parameter) in owners:
                        raise ConfigError(
                            f"keep_fp32 keeps {owners[id(parameter)]!r}, which shares a weight with {name!r}; write "
                            f"keep_fp32=[{owners[id(parameter)]!r}, {name!r}]"
                        )


def underflowing_eps(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], policy: Policy
) -> list[str]:
    """A warning for each ``eps`` of prepared models and optimizers that is zero in its dtype, so that 0 / 0 gives NaN.

    halfpeak's fused optimizers, torch's optimizers with ``fused=True`` and torch's norms add ``eps`` in float32.
    """
    texts: dict[str, None] = {}
    # With masters, any low parameter in a group is frozen, and gets its master when it is unfrozen.
    for optimizer in () if policy.masters else optimizers:
        for group in optimizer.param_groups:
            in_fp32 = isinstance(optimizer, FusedOptimizer) or group.get("fused")
            dtypes = {
                p.dtype for p in group["params"] if is_low(p) and _underflows(group.get("eps"), p.dtype)
            }
            if dtypes and not in_fp32:
                name = type(optimizer).__name__
                texts[
                    f"eps={group['eps']!r} of {name} is 0 in {dtypes.pop()}, in which it steps, and trains to NaN; write "
                    f"{name}(..., eps={_LOW_EPS!r})"
                ] = None
    for model in models:
        kept = ids_kept_by_user(model, policy.keep_fp32)
        for name, module in model.named_modules():
            own = next((p.dtype for p in module.parameters(recurse=False)), policy.param)
            eps = next((n for n in _EPS if _underflows(getattr(module, n, None), own)), None)
            if eps is not None and id(module) not in kept and not isinstance(module, _NORMS):
                texts[
                    f"{eps}={getattr(module, eps)!r} of {name or 'the model'} ({type(module).__name__}) is 0 in {own}, in "
                    f"which it computes; write {eps}={_LOW_EPS!r}, or keep_fp32=[{name!r}]"
                ] = None
    return list(texts)


_LOW_EPS: Final = 1e-4
"""A value that is far above zero in float16."""

_EPS: Final = ("eps", "epsilon", "variance_epsilon")

_NORMS: Final = (
    nn.modules.batchnorm._NormBase,
    nn.modules.batchnorm._LazyNormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    # Its eps guards the norm of a weight, which is not zero in training.
    torch.nn.utils.parametrizations._SpectralNorm,
)


def _underflows(eps: object, dtype: torch.dtype | None) -> bool:
    return isinstance(eps, float) and dtype in LOW and eps > 0 and torch.tensor(eps, dtype=dtype).item() == 0
