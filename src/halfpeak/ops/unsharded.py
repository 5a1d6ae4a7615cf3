"""Gradients of whole parameters that FSDP2 keeps until a backward pass reduces them: inside FSDP2, not in ``.grad``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of ``module``."""
    return callable(getattr(module, "set_requires_gradient_sync", None))


def reduces_gradients(model: nn.Module) -> bool | None:
    """Whether a backward pass that begins now reduces the gradients of all shards of a model over all their ranks.

    With replicas of shards that is two reductions, of which ``set_requires_all_reduce(False)`` leaves out the second. None if
    FSDP2 gathers no parameter of the model.
    """
    groups = _groups_in(model)
    return all(map(_reduces, groups)) if groups else None


def shards_in(model: nn.Module) -> Iterator[Tensor]:
    """The shards of a model, also between a forward and a backward pass, where it may have whole parameters instead."""
    for group in _groups_in(model):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param


class UnshardedGrads:
    """The gradients that FSDP2 has for some shards, taken out of it for a backward pass that is not theirs.

    FSDP2 would add those of that pass to them, or reduce them with it, even where they are frozen for its loss.

    Args:
        models: whose modules FSDP2 gathers.
        shards: the parameters whose gradients are taken, by ``id``.
    """

    def __init__(self, models: Iterable[nn.Module], shards: Container[int]) -> None:
        groups = [group for model in models for group in _groups_in(model)]
        found = [(group, p) for group in groups for p in group.fsdp_params if id(p.sharded_param) in shards]
        self._before = [(parameter, _grads_of(parameter)) for _, parameter in found]
        self._sums = [(group, group._partial_reduce_output) for group in dict(found)]
        for parameter, _ in self._before:
            _set(parameter, None, None)
        for group, _ in self._sums:
            group._partial_reduce_output = None

    def have_new(self) -> bool:
        """Whether the backward pass has left gradients there."""
        return any(grad is not None for parameter, _ in self._before for grad in _grads_of(parameter)) or any(
            group._partial_reduce_output is not None for group, _ in self._sums
        )

    def put_back(self) -> None:
        """Put them back in place of those that the backward pass has left there."""
        for parameter, grads in self._before:
            _set(parameter, *grads)
        for group, total in self._sums:
            group._partial_reduce_output = total


def drop_unsharded_grads(model: nn.Module) -> None:
    """Drop what FSDP2 has after an unfinished window or an exception; ``zero_grad()`` cannot reach it."""
    for group in _groups_in(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            _set(parameter, None, None)
    for root in _roots(model):
        # New in torch 2.12. Older versions cannot recover from an exception inside a forward or backward pass.
        reset = getattr(root, "reset_iter_state", None)
        if reset is not None:
            reset()


# torch has no public way to these gradients.


def _groups_in(model: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together in a model."""
    found: list[Any] = []
    for module in filter(is_fully_sharded, model.modules()):
        state = cast(Any, module)._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        found += [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def _reduces(group: Any) -> bool:
    has_replicas = getattr(group.mesh_info, "replicate_mesh_dim", None) is not None
    return group.reduce_grads and (group.all_reduce_grads or not has_replicas)


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
