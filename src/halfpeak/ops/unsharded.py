"""Gradients of whole parameters that FSDP2 keeps until a backward pass reduces them: inside FSDP2, not in ``.grad``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import Tensor, nn


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of ``module``."""
    return callable(getattr(module, "set_requires_gradient_sync", None))


def reduces_gradients(model: nn.Module) -> bool:
    """Whether the coming backward pass reduces the gradients of a fully sharded model over the ranks."""
    modules = filter(is_fully_sharded, model.modules())
    return all(group.reduce_grads for module in modules for group in _groups_of(module))


class UnshardedGrads:
    """The gradients that FSDP2 has for some shards, taken out of it for a backward pass that is not theirs.

    FSDP2 would add those of that pass to them, or reduce them with it, even where they are frozen for its loss.

    Args:
        models: whose modules FSDP2 gathers.
        shards: the parameters whose gradients are taken, by ``id``.
    """

    def __init__(self, models: Iterable[nn.Module], shards: Container[int]) -> None:
        parameters = (parameter for model in models for parameter in _sharded(model))
        self._before = [(p, _grads_of(p)) for p in parameters if id(p.sharded_param) in shards]
        for parameter, _ in self._before:
            _set(parameter, None, None)

    def have_new(self) -> bool:
        """Whether the backward pass has left gradients there."""
        return any(grad is not None for parameter, _ in self._before for grad in _grads_of(parameter))

    def put_back(self) -> None:
        """Put them back in place of those that the backward pass has left there."""
        for parameter, grads in self._before:
            _set(parameter, *grads)


def drop_unsharded_grads(model: nn.Module) -> None:
    """Drop what FSDP2 has after an unfinished window or an exception; ``zero_grad()`` cannot reach it."""
    for module in filter(is_fully_sharded, model.modules()):
        for group in _groups_of(module):
            group._partial_reduce_output = None
    for parameter in _sharded(model):
        _set(parameter, None, None)
    for root in _roots(model):
        # New in torch 2.12. Older versions cannot recover from an exception inside a forward or backward pass.
        reset = getattr(root, "reset_iter_state", None)
        if reset is not None:
            reset()


# torch has no public way to these gradients.


def _groups_of(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for a module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _sharded(model: nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each parameter that it shards."""
    for module in filter(is_fully_sharded, model.modules()):
        for group in _groups_of(module):
            yield from group.fsdp_params


def _grads_of(parameter: Any) -> tuple[Tensor | None, Tensor | None]:
    """The sum over the passes of a window, in the dtype of reductions, and in that of the pass."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad, None if whole is None else whole.grad


def _set(parameter: Any, total: Tensor | None, grad: Tensor | None) -> None:
    parameter.unsharded_accumulated_grad = total
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None:
        whole.grad = grad


def _roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that FSDP2 gathers."""
    if is_fully_sharded(module):
        return [module]
    return [root for child in module.children() for root in _roots(child)]
