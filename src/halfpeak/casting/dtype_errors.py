"""torch's errors about dtypes in a prepared model, explained: which module raised one, its dtype, and what to write."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.inputs import CastInputs
from halfpeak.casting.modules import is_kept_fp32
from halfpeak.casting.tree import CASTABLE, tensors
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import HalfpeakError
from halfpeak.core.policy import Policy
from halfpeak.core.torch_compat import traced_inline
from halfpeak.ops.shards import is_shard


def explain(error: BaseException, models: Sequence[nn.Module], policy: Policy) -> None:
    """If torch has raised ``error`` because of dtypes, put what it means for these models before its message.

    The module at fault is the innermost of the traceback. The first of these that holds is said, with what to write:

    1. a weight of it, or of the dtype that it got, has not the dtype that the policy gives: float64, or cast or replaced
       after ``prepare``;
    2. it calls an operation that has no kernel for the low dtype, or uses a number beyond it;
    3. it got another dtype than that of its weights.

    >>> model = nn.Sequential(nn.Linear(2, 2).bfloat16())
    >>> try:
    ...     model(torch.ones(1, 2))
    ... except RuntimeError as error:
    ...     explain(error, [model], Policy(param=torch.bfloat16))
    ...     print(error)
    '0' (Linear) has torch.bfloat16 weights and got torch.float32; write x.to(torch.bfloat16) where it is called, or
    halfpeak.prepare(..., keep_fp32=['0']). torch: mat1 and mat2 must have the same dtype, but got Float and BFloat16
    """
    message = str(error)
    is_torchs = isinstance(error, RuntimeError | ValueError) and not isinstance(error, HalfpeakError)
    if not is_torchs or not _ABOUT_DTYPES.search(message) or _SAYS_TORCH in message:
        return
    fault = _find(error, models, policy)
    reason = fault.of_weights() or fault.of_operation(message) or fault.of_inputs()
    if reason is not None:
        error.args = (f"{reason}{_SAYS_TORCH}{message}",)


def explain_errors(model: nn.Module, policy: Policy) -> RemovableHandle:
    """Add a hook that applies :func:`explain` to what the forward pass of ``model`` raises."""
    # Without entries of the user, such as functions, which could not be pickled with the model.
    hook = ExplainErrors(replace(policy, keep_fp32=(), float8=None))
    return model.register_forward_hook(hook, always_call=True)


@dataclass(frozen=True)
class ExplainErrors:
    """The hook of :func:`explain_errors`."""

    policy: Policy

    @traced_inline
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Explain, if the forward pass has raised: then torch calls this hook without an output."""
        error = None if output is not None else sys.exception()
        if error is not None:
            explain(error, [module], self.policy)


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A module that has raised an error about dtypes.

    Attributes:
        policy: of the models.
        modules: all modules of the models.
        names: of all modules, by ``id``; the models themselves have none.
        kept: the ``id`` of each module that ``keep_fp32`` has kept, or that is in such a module.
        module: the innermost module of the traceback; None if there is none.
        got: the dtypes of the tensors with which it was called.
        is_inside: whether the forward pass of a model had called it.
    """

    policy: Policy
    modules: Sequence[nn.Module]
    names: dict[int, str]
    kept: set[int]
    module: nn.Module | None
    got: set[torch.dtype]
    is_inside: bool

    def of_weights(self) -> str | None:
        """A weight that has not the dtype that the policy gives it."""
        policy = self.policy
        for module, dtype in self._suspects():
            wanted = self._dtype_of(module)
            has = f"{self._describe(module)} has {dtype} weights"
            if dtype is wanted:
                continue
            if dtype is torch.float64 and policy.param is not torch.float32:
                return (
                    f"{has}, which halfpeak leaves as they are; write model.float() before it is prepared, and no .double() "
                    "afterwards"
                )
            if policy.param is not None or policy.per_op:
                return (
                    f"{has} where the prepared model had {wanted}; cast and replace layers before the model is prepared, or "
                    "call engine.remove() and prepare it again"
                )
        return None

    def _suspects(self) -> Iterator[tuple[nn.Module, torch.dtype]]:
        """The modules that may be to blame, with the dtype of each of their weights: that at fault, then the others."""
        inner = () if self.module is None else tuple(self.module.modules())
        blamed = self.got - {self._dtype_of(self.module)} if self.module is not None else CASTABLE
        for modules, dtypes in ((inner, CASTABLE), (self.modules, blamed)):
            for module in modules:
                for parameter in module.parameters(recurse=False):
                    # Frozen weights may be low where operations are cast.
                    is_free = self.policy.per_op and not parameter.requires_grad and parameter.dtype in LOW
                    if parameter.dtype in dtypes and not is_shard(parameter) and not is_free:
                        yield module, parameter.dtype

    def of_operation(self, message: str) -> str | None:
        """An operation without a kernel for the low dtype, or with a number beyond it."""
        low = self.policy.param if self.policy.param in LOW else self.policy.compute
        what = next((what for pattern, what in _OF_OPERATIONS.items() if pattern.search(message)), None)
        if what is None or low not in LOW or self.module is None:
            return None
        return f"{self._describe(self.module)} {what.format(low)}; write x.float() in it{self._or_kept()}"

    def of_inputs(self) -> str | None:
        """A module that got another dtype than that of its weights."""
        if self.module is None:
            return None
        own = self._dtype_of(self.module)
        others = self.got - {own}
        has = any(True for _ in self.module.parameters(recurse=False))
        mixes = (
            f"{self._describe(self.module)} {f'has {own} weights' if has else f'computes in {own}'} and "
            f"{f'got {others.pop()}' if len(others) == 1 else 'meets another dtype'}"
        )
        if not self.is_inside and self.policy.param is not None:
            return (
                f"{mixes}, because it was called from outside of the model's forward, which casts inputs; write a forward that "
                "calls it, or prepare it as a model of its own: halfpeak.prepare([body, head], ...)"
            )
        if not self.policy.cast_forward_inputs:
            mixes += ", since cast_forward_inputs=False leaves inputs as they are"
        return f"{mixes}; write x.to({own}) where it is called{self._or_kept()}"

    def _describe(self, module: nn.Module) -> str:
        name = self.names[id(module)]
        return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        """The dtype that the policy gives the weights of ``module``."""
        given = self.policy.param
        is_kept = id(module) in self.kept or is_kept_fp32(module, self.policy.norms)
        return torch.float32 if given is None or is_kept else given

    def _or_kept(self) -> str:
        """What to write for a module that shall compute in float32, if it is a part of a low model."""
        name = self.names[id(self.module)]
        if self.policy.param not in LOW or not name:
            return ""
        # The same place in all layers of a stack.
        alike = re.sub(r"\.\d+(?=\.)", ".*", name)
        return f", or halfpeak.prepare(..., keep_fp32=[{alike!r}])"


def _find(error: BaseException, models: Sequence[nn.Module], policy: Policy) -> _Fault:
    """Read the traceback, of which a call of a module has a frame with its arguments."""
    modules = {part: name for model in models for name, part in model.named_modules()}
    names = {id(part): name for part, name in modules.items()}
    at_fault: nn.Module | None = None
    called_with: tuple[Any, ...] = ()
    is_inside = False
    trace = error.__traceback__
    while trace is not None:
        found, code = trace.tb_frame.f_locals, trace.tb_frame.f_code
        module = found.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            if code is nn.Module._call_impl.__code__:
                called_with = (*found["args"], *found["kwargs"].values())
                is_inside = is_inside or not names[id(module)]
            elif module is not at_fault:
                called_with = ()
            at_fault = module
        trace = trace.tb_next
    return _Fault(
        policy=policy,
        modules=list(modules),
        names=names,
        kept={id(inner) for part in modules if _casts_to_float32(part) for inner in part.modules()},
        module=at_fault,
        got={tensor.dtype for tensor in tensors(called_with, {})},
        is_inside=is_inside,
    )


def _casts_to_float32(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, CastInputs) and hook.dtype is torch.float32 for hook in hooks)


_SAYS_TORCH: Final = ". torch: "

_ABOUT_DTYPES: Final = re.compile(
    r"dtype|scalar type|Input type|half precision|float16|\b(?:Half|BFloat16|Float|Double)(?:Tensor)?\b"
)

_OF_OPERATIONS: Final = {
    re.compile(
        r"not implemented for|[Uu]nsupported dtype|[Ll]ow precision dtypes|n't support tensor|half precision"
    ): "calls an operation that has no kernel for {}",
    re.compile("without overflow"): "uses a number that {} cannot hold",
}
