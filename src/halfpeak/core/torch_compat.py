"""Torch's internals: the names of all that the package uses, and some uses.

The uses are scalars read from host memory, the autograd graph, and marks for the compiler, which are set without importing
the compiler, because that takes seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import Node
from torch.compiler import is_compiling

from halfpeak.core.errors import OrderError

P = ParamSpec("P")
R = TypeVar("R")

PRIVATE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "2.11 to 2.14": {
        "torch": "_amp_foreach_non_finite_check_and_unscale_ _foreach_add_ _foreach_clamp_max_ _foreach_clamp_min_ "
        "_foreach_copy_ _foreach_mul _foreach_mul_ _foreach_norm _fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_",
        "torch.Tensor": "_backward_hooks _fix_weakref _indices _is_view _values _version",
        "torch.UntypedStorage": "_cdata _expired",
        "torch._C": "_storage_Use_Count",
        "torch._C._dynamo.eval_frame": "_FrameAction _FrameExecStrategy set_code_exec_strategy",
        "torch._C._functorch": "is_functorch_wrapped_tensor",
        "torch._dynamo.callback": "callback_handler",
        "torch._dynamo.decorators": "_dynamo_marked_constant _torchdynamo_disable",
        "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
        "torch._guards": "TracingContext tracing",
        "torch._higher_order_ops.wrap": "tag_activation_checkpoint",
        "torch._inductor": "cpp_builder exc",
        "torch._inductor.compile_fx": "compile_fx_inner",
        "torch._inductor.decomposition": "select_decomp_table",
        "torch._ops.OpOverload": "_schema",
        "torch._utils": "_flatten_dense_tensors _unflatten_dense_tensors",
        "torch.amp.GradScaler": "_backoff_factor _check_inf_per_device _check_scale_growth_tracker _enabled "
        "_get_scale_async _growth_factor _growth_interval _per_optimizer_states",
        "torch.autograd": "_get_sequence_nr _profiler_enabled",
        "torch.autograd.graph.Node": "_sequence_nr",
        "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "_unsharded_param",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": "_partial_reduce_output",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "_fsdp_param_group _mp_policy",
        "torch.distributed.tensor.DTensor": "_local_tensor",
        "torch.nn.Module": "_buffers _call_impl _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs "
        "_forward_pre_hooks _forward_pre_hooks_with_kwargs _load_state_dict_post_hooks _load_state_dict_pre_hooks "
        "_modules _parameters _state_dict_hooks",
        "torch.nn.RNNBase": "_flat_weight_refs _flat_weights",
        "torch.nn.modules.batchnorm": "_BatchNorm _LazyNormBase _NormBase",
        "torch.nn.modules.instancenorm": "_InstanceNorm",
        "torch.nn.parallel.DistributedDataParallel": "_active_ddp_module _check_default_group _comm_hooks "
        "_delay_all_reduce_params _get_ddp_logging_data _inside_ddp_forward _static_graph_delay_allreduce_enqueued",
        "torch.nn.utils.parametrizations": "_SpectralNorm",
        "torch.optim.Optimizer": "_optimizer_load_state_dict_post_hooks _optimizer_load_state_dict_pre_hooks "
        "_optimizer_state_dict_post_hooks _optimizer_state_dict_pre_hooks _optimizer_step_post_hooks _optimizer_step_pre_hooks",
        "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
        "torch.overrides": "_get_current_function_mode_stack _pop_mode _push_mode",
        "torch.utils._device": "DeviceContext",
        "torch.utils._python_dispatch": "TorchDispatchMode is_traceable_wrapper_subclass",
        "torch.utils._pytree": "tree_leaves",
    },
    "2.13 to 2.14": {
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "_fsdp_param_groups",
    },
}
"""Versions of torch in which they were seen -> owner -> names that are private, or belong to a private module."""


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function that makes lasting tensors outside of ``torch.inference_mode``, whose tensors cannot be trained."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


_TYPES: Final[dict[torch.dtype, Any]] = {
    torch.float32: ctypes.c_float,
    torch.int32: ctypes.c_int32,
}


def host_values(*scalars: Tensor) -> list[Any] | None:
    """The values of plain float32 or int32 scalars on the CPU; None if one is something else, or being traced.

    No tensor operation that could wait for a device is called.

    >>> host_values(torch.tensor(3, dtype=torch.int32), torch.tensor(0.5))
    [3, 0.5]
    """
    if is_compiling():
        return None
    values: list[Any] = []
    for scalar in scalars:
        kind = _TYPES.get(scalar.dtype)
        if kind is None or type(scalar) is not Tensor or not scalar.is_cpu or scalar.dim():
            return None
        values.append(kind.from_address(scalar.data_ptr()).value)
    return values


def scalar_on(device: torch.device, scalar: Tensor) -> Tensor:
    """``scalar`` on ``device``. What the host knows is filled in there, because a copy from the host would wait.

    >>> scalar_on(torch.device("cpu"), torch.tensor(0.5))
    tensor(0.5000)
    """
    known = None if device == scalar.device else host_values(scalar)
    return scalar.to(device) if known is None else torch.full((), known[0], dtype=scalar.dtype, device=device)


def graph_leaves(root: Node) -> list[Tensor]:
    """The tensors whose ``.grad`` a backward pass from ``root`` writes. Walks the graph without recursion.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> graph_leaves(weight.square().sum().grad_fn)
    [tensor([1., 1.], requires_grad=True)]
    """
    seen, stack, ends = {root}, [root], list[Node]()
    while stack:
        node = stack.pop()
        children = node.next_functions
        if not children:
            ends.append(node)
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return [node.variable for node in ends if type(node).__name__ == "AccumulateGrad"]  # type: ignore[attr-defined]


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the kernels that are launched on ``device`` now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_inference_mode(call: str) -> None:
    """Refuse a call that makes or writes tensors for training, because torch would fail later, in another place.

    Raises:
        OrderError: ``call`` was called in ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise OrderError(
            f"{call} is not possible in torch.inference_mode(), because tensors created or written there cannot be trained; "
            "call it outside, or write torch.no_grad() instead"
        )


def single(number: float) -> float:
    """``number`` rounded to float32.

    >>> single(0.1)
    0.10000000149011612
    """
    return ctypes.c_float(number).value


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Mark ``function`` so that Python runs it, with all it calls, between two compiled graphs.

    :func:`torch.compiler.disable` does the same. A compiled function that ``function`` calls still runs compiled.

    >>> @untraced
    ... def double(x):
    ...     return 2 * x
    >>> double(3)
    6
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return traced_inline(function)


def traced_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Mark ``function`` so that it is traced only as a part of its caller.

    Without the mark the compiler compiles it by itself where Python calls it after a graph break.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)  # type: ignore[attr-defined]
    return function
