"""Casting per module (O0, O2, O3, O5): converting parameters and buffers, and hooks that cast inputs and outputs.

Nothing is assigned on the module: the casts are forward hooks, picklable and without a reference to any module, so a
deep copy or a pickle of the model casts for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.inputs import CastInputs
from halfpeak.casting.suspend import resume, resume_autocast, suspend, suspend_autocast
from halfpeak.casting.tree import CASTABLE, cast_tree
from halfpeak.core.dtypes import LOW, is_low
from halfpeak.core.errors import ConfigError
from halfpeak.core.policy import KeepFp32, NormRule, Policy
from halfpeak.core.torch_compat import traced_inline, untraced
from halfpeak.ops.shards import is_shard

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_kept_fp32(module: nn.Module, norms: NormRule) -> bool:
    """Whether ``module`` is a normalisation layer that ``norms`` keeps in float32.

    >>> is_kept_fp32(nn.LayerNorm(4), "all"), is_kept_fp32(nn.LayerNorm(4), "batchnorm")
    (True, False)
    """
    if norms == "none":
        return False
    if norms == "batchnorm":
        return isinstance(module, _BatchNorm) and module.affine
    return isinstance(module, _NORMS)


def matches(entry: KeepFp32, name: str, module: nn.Module) -> bool:
    """Whether an entry of ``keep_fp32`` selects a module.

    >>> matches("head.*", "head.0", nn.ReLU()), matches(nn.Linear, "head.0", nn.ReLU())
    (True, False)
    """
    if isinstance(entry, str):
        return fnmatchcase(name, entry)
    return isinstance(module, entry) if isinstance(entry, type) else bool(entry(name, module))


def holds_constants(name: str, module: nn.Module) -> bool:
    """The entry of ``keep_fp32`` that ``prepare`` adds: a module without parameters that has floating-point buffers.

    Such as a rotary embedding, a table of positions, a frozen batch norm. What is computed from them often needs float32, and
    nothing in them is trained.

    >>> frequencies = nn.Module()
    >>> frequencies.register_buffer("inv_freq", torch.ones(4))
    >>> holds_constants("", frequencies), holds_constants("", nn.BatchNorm1d(4))
    (True, False)
    """
    has_buffers = any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    return has_buffers and next(module.parameters(), None) is None


def check_entries(option: str, entries: Sequence[KeepFp32], models: Iterable[nn.Module]) -> None:
    """Raise ConfigError if an entry of ``keep_fp32``, or of another option in this form, selects no module."""
    named = [item for model in models for item in model.named_modules()]
    for entry in entries:
        if not any(matches(entry, name, module) for name, module in named):
            known = ", ".join(repr(name) for name, _ in named[1:9])
            raise ConfigError(f"{option}: {entry!r} is none of the modules; they are called {known}, ...")


def kept_by_user(network: nn.Module, keep: Sequence[KeepFp32]) -> list[nn.Module]:
    """The outermost modules that ``keep_fp32`` selects: these and all inside them stay float32."""
    kept: list[nn.Module] = []
    inside: set[int] = set()
    for name, module in network.named_modules() if keep else ():
        if id(module) not in inside and any(matches(entry, name, module) for entry in keep):
            kept.append(module)
            inside.update(map(id, module.modules()))
    return kept


def ids_kept_by_user(network: nn.Module, keep: Sequence[KeepFp32]) -> set[int]:
    """The ids of the modules that ``keep_fp32`` selects and of all modules inside them."""
    return {id(part) for module in kept_by_user(network, keep) for part in module.modules()}


def _low_modules(
    network: nn.Module, dtype: torch.dtype, norms: NormRule, keep: Sequence[KeepFp32]
) -> Iterator[nn.Module]:
    """The modules whose own tensors are cast to ``dtype``."""
    kept = ids_kept_by_user(network, keep if dtype in LOW else ())
    return (m for m in network.modules() if id(m) not in kept and not is_kept_fp32(m, norms))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the module's own parameters, their gradients and its buffers in place; children are left alone.

    Parameters keep their identity. A low ``dtype`` leaves float64 and complex tensors alone, because float64 in a low
    model is deliberate. float32 as ``dtype`` casts every real floating-point tensor, as opt level O0 does.
    """
    for parameter in module.parameters(recurse=False):
        if is_convertible(parameter, dtype):
            parameter.data = parameter.data.to(dtype)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if is_convertible(buffer, dtype):
            buffer.data = buffer.data.to(dtype)


def convert_network(
    network: nn.Module,
    dtype: torch.dtype,
    norms: NormRule = "batchnorm",
    keep_fp32: Sequence[KeepFp32] = (),
) -> nn.Module:
    """Cast every module of ``network`` except those that ``norms`` and ``keep_fp32`` keep in float32; returns ``network``.

    >>> network = convert_network(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.float16)
    >>> [p.dtype for p in network.parameters()][1:3]
    [torch.float16, torch.float32]
    """
    low = list(_low_modules(network, dtype, norms, keep_fp32))
    for module in low:
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    for module in set(network.modules()).difference(low):
        if any(map(is_low, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            convert_module(module, torch.float32)
    return network


def is_convertible(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`convert_module` would cast this tensor. It casts no shards: the library that gathers them does."""
    if is_shard(tensor) or tensor.dtype not in CASTABLE:
        return False
    return dtype is torch.float32 or tensor.dtype is not torch.float64


def converted_parameters(
    network: nn.Module, dtype: torch.dtype, norms: NormRule, keep_fp32: Sequence[KeepFp32] = ()
) -> Iterator[nn.Parameter]:
    """The parameters that :func:`convert_network` would cast, each once. Changes nothing."""
    seen: set[int] = set()
    for module in _low_modules(network, dtype, norms, keep_fp32):
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen and is_convertible(parameter, dtype):
                seen.add(id(parameter))
                yield parameter


# Without slots, as CastInputs.
@dataclass(frozen=True)
class CastOutput:
    """A forward hook that casts what the module returns, through nested containers."""

    dtype: torch.dtype

    @traced_inline
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cast."""
        return cast_tree(output, self.dtype)


@untraced
def suspend_casts(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook after which operations are not cast, by ``torch.autocast`` neither, until :func:`resume_casts`."""
    suspend(module)
    suspend_autocast(module)


@untraced
def resume_casts(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward hook that ends :func:`suspend_casts`; called also if ``forward`` raises."""
    resume_autocast(module)
    resume(module)


def is_prepared(module: nn.Module) -> bool:
    """Whether the module has casting hooks of this file."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(isinstance(hook, (CastInputs, CastOutput)) for hook in hooks)


def cast_around(
    module: nn.Module, inputs: torch.dtype | None, output: torch.dtype | None
) -> list[RemovableHandle]:
    """Add hooks that cast the inputs of a module and what it returns; None casts nothing."""
    handles: list[RemovableHandle] = []
    if inputs is not None:
        handles.append(module.register_forward_pre_hook(CastInputs(inputs), with_kwargs=True))
    if output is not None:
        # Runs before other hooks, so that the user's hooks see the output that the caller gets.
        handles.append(module.register_forward_hook(CastOutput(output), prepend=True))
    return handles


def hook_boundary(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """Add hooks that cast the model's inputs to the dtype of its parameters and its outputs to the policy's output dtype."""
    stored = policy.param if policy.cast_forward_inputs else None
    if stored is not None and (
        needs_fp32_inputs(model, policy.norms) or id(model) in ids_kept_by_user(model, policy.keep_fp32)
    ):
        stored = torch.float32
    return cast_around(model, stored, policy.output)


def hook_kept(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """Add hooks by which the modules that stay float32 compute in float32. In a low model they return the low dtype.

    Batch norm needs no hook: its kernels take low inputs with float32 weights on every device. Without hooks, other layers
    would fail or differ between devices.
    """
    kept = kept_by_user(model, policy.keep_fp32)
    handles: list[RemovableHandle] = []
    if policy.per_op:
        for module in kept:
            handles += compute_in_fp32(module)
    if policy.param not in LOW:
        return handles
    inside = ids_kept_by_user(model, policy.keep_fp32)
    norms = [m for m in model.modules() if id(m) not in inside and needs_fp32_inputs(m, policy.norms)]
    for module in (*kept, *norms):
        # If the model itself is such a layer, hook_boundary casts.
        if module is not model:
            handles += cast_around(module, torch.float32, policy.param)
    return handles


def compute_in_fp32(module: nn.Module) -> list[RemovableHandle]:
    """Add hooks by which a float32 module computes in float32 where operations are cast, by whichever lists."""
    return [
        *cast_around(module, torch.float32, None),
        module.register_forward_pre_hook(suspend_casts),
        module.register_forward_hook(resume_casts, prepend=True, always_call=True),
    ]


def needs_fp32_inputs(module: nn.Module, norms: NormRule) -> bool:
    """Whether a layer that ``norms`` keeps in float32 must get float32. The kernels of batch norm take low inputs too."""
    return is_kept_fp32(module, norms) and not isinstance(module, _BatchNorm)
