"""The state that a refused call must leave unchanged, as one comparable value."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def bits(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Identity, dtype and every bit of a tensor."""
    if tensor is None:
        return None
    return id(tensor), tensor.dtype, tuple(tensor.shape), raw(tensor)


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor in logical order; of a sparse one, of the dense one that it stands for."""
    dense = tensor.to_dense() if tensor.layout is torch.sparse_coo else tensor
    # Not .cpu(), which the casts of O1 and O4 make float32.
    flat = torch.empty_like(dense, device="cpu").copy_(dense.detach()) if not dense.is_cpu else dense.detach()
    flat = flat.resolve_conj().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def snapshot(*objects: nn.Module | Optimizer) -> list[Any]:
    """Values, gradients, identities, hooks and attribute names of models and optimizers, and torch's mode stack."""
    taken: list[Any] = [torch._C._len_torch_function_stack(), torch.is_autocast_enabled("cpu")]
    for one in objects:
        taken.append(_of_model(one) if isinstance(one, nn.Module) else _of_optimizer(one))
    return taken


def _of_model(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    hooks = [
        [
            (name, list(value))
            for name, value in sorted(vars(module).items())
            if name.endswith("_hooks") and value
        ]
        for module in model.modules()
    ]
    return [
        [(name, bits(tensor), bits(tensor.grad), tensor.requires_grad) for name, tensor in tensors],
        [(sorted(vars(module)), module.training) for module in model.modules()],
        hooks,
    ]


def _of_optimizer(optimizer: Optimizer) -> list[Any]:
    groups = [
        (
            id(group),
            {key: value for key, value in group.items() if key != "params"},
            [id(p) for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]
    state = [
        (id(parameter), {key: bits(v) if isinstance(v, Tensor) else v for key, v in entries.items()})
        for parameter, entries in optimizer.state.items()
    ]
    hooks = [list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
    return [groups, state, hooks, sorted(vars(optimizer))]


def values(*objects: nn.Module | Optimizer) -> list[Any]:
    """The state that training changes, without identities: bits of parameters, buffers, masters and optimizer state."""
    taken: list[Any] = []
    for one in objects:
        if isinstance(one, nn.Module):
            taken.append([(n, _plain(t)) for n, t in (*one.named_parameters(), *one.named_buffers())])
        else:
            parameters = [p for group in one.param_groups for p in group["params"]]
            taken.append([_plain(p) for p in parameters])
            taken.append([_of_state(one.state.get(p, {})) for p in parameters])
    return taken


def _of_state(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(v) if isinstance(v, Tensor) else v for key, v in entries.items()}


def _plain(tensor: Tensor) -> Any:
    return bits(tensor)[1:]  # type: ignore[index]
