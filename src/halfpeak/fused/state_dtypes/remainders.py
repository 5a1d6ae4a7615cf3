"""Remainders: the float32 values of bfloat16 weights, by the remainders in the state of the optimizer that steps them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import ParameterError
from halfpeak.core.optimizer_state import params_of
from halfpeak.fused.state_dtypes.codecs import Remainder
from halfpeak.ops.foreach import gradients_of
from halfpeak.ops.versions import TensorVersions


class Remainders:
    """The :class:`~halfpeak.state.remainder_store.RemainderStore` of a fused optimizer.

    A remainder belongs to the weight that it was rounded from. If a parameter was written or given other memory since, the
    value is what was written, and the remainder counts for nothing. A write in place through ``parameter.data`` cannot be
    seen and keeps the remainder, which is less than one rounding of the weight.

    Args:
        optimizer: held weakly; the remainders are in its state.
        codec: how a weight is split.
    """

    def __init__(self, optimizer: Optimizer, codec: Remainder) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._codec = codec
        self._versions = TensorVersions()
        # Where each parameter is in the list of versions, by ``id``.
        self._positions: dict[int, int] = {}
        self._placeholders: dict[int, tuple[Tensor, Tensor]] = {}
        self._zeros: dict[torch.device, Tensor] = {}
        self._known: tuple[list[int], set[int]] = ([], set())

    def has(self, parameter: Tensor) -> bool:
        """Whether a weight has a remainder, or will have one from its first step on."""
        return (
            parameter.dtype is torch.bfloat16
            and id(parameter) in self._members()
            and (parameter.requires_grad or self._remainder_of(parameter) is not None)
        )

    def fp32_value(self, parameter: Tensor) -> Tensor:
        """The float32 value of a weight.  # f32 of its shape"""
        remainder = self._remainder_of(parameter)
        low = parameter.detach()
        if remainder is None or remainder.shape != low.shape or self._was_written(parameter):
            return low.float()
        return self._codec.decode((low, remainder.to(low.device)))

    @torch.no_grad()
    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Set the value of a weight, to the precision of the codec."""
        parameter.copy_(self.split(parameter, value))

    @torch.no_grad()
    def split(self, parameter: Tensor, value: Tensor) -> Tensor:
        """:meth:`set_value` for a caller whose next write to the parameter stores the returned tensor.  # bf16

        Raises:
            ParameterError: the value has another shape.
        """
        if value.shape != parameter.shape:
            raise ParameterError(
                f"a weight of shape {tuple(parameter.shape)} cannot take a value of shape {tuple(value.shape)}"
            )
        wide = value.detach().to(parameter.device, torch.float32)
        low, remainder = self._codec.encode(wide, torch.zeros((), dtype=torch.float32, device=wide.device))
        known = self._remainder_of(parameter)
        if known is None:
            own = torch.empty_like(parameter, dtype=remainder.dtype, requires_grad=False)
            self._require_optimizer().state[parameter]["remainder"] = own.copy_(remainder)
        else:
            known.copy_(remainder)
        if id(parameter) not in self._positions:
            self._positions[id(parameter)] = len(self._positions)
            self._versions.add(parameter)
        self._versions.record_next_write(self._positions[id(parameter)], parameter)
        return low

    def grad_placeholder(self, parameter: Tensor) -> Tensor:
        """A float32 tensor of a weight's shape and of no memory, whose ``grad`` is stepped if there is one."""
        known = self._placeholders.get(id(parameter))
        if known is None or known[1].shape != parameter.shape or known[1].device != parameter.device:
            zero = self._zeros.setdefault(
                parameter.device, torch.zeros((), dtype=torch.float32, device=parameter.device)
            )
            known = self._placeholders[id(parameter)] = (parameter, zero.expand(parameter.shape))
        return known[1]

    def gradients_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of parameters that a step reads: those of their placeholders, or where these have none their own."""
        if not self._placeholders:
            return gradients_of(parameters)
        holders = (
            self._placeholders.get(id(parameter), (parameter, parameter))[1] for parameter in parameters
        )
        return [p.grad if one.grad is None else one.grad for p, one in zip(parameters, holders, strict=True)]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """``optimizer.zero_grad()`` for the placeholders."""
        for _, placeholder in self._placeholders.values():
            if placeholder.grad is not None and not set_to_none:
                placeholder.grad.zero_()
            else:
                placeholder.grad = None

    def refresh(self) -> None:
        """Before a step: zero the remainders of weights that were written since the last one."""
        for parameter in params_of(self._require_optimizer()):
            remainder = self._remainder_of(parameter)
            if remainder is not None and self._was_written(parameter):
                remainder.zero_()
                self._versions.record_one(self._positions[id(parameter)], parameter)

    def note(self) -> None:
        """After a step, or when weights have moved in memory: the remainders belong to what the weights hold now."""
        parameters = params_of(self._require_optimizer())
        self._positions = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._versions.record(parameters)

    def _members(self) -> set[int]:
        """The parameters of the optimizer by ``id``, looked up anew when their number changes."""
        optimizer = self._optimizer()
        sizes = [] if optimizer is None else [len(group["params"]) for group in optimizer.param_groups]
        if optimizer is not None and sizes != self._known[0]:
            self._known = (sizes, set(map(id, params_of(optimizer))))
        return self._known[1]

    def _was_written(self, parameter: Tensor) -> bool:
        position = self._positions.get(id(parameter))
        return position is not None and not self._versions.is_unchanged(position, parameter)

    def _remainder_of(self, parameter: Tensor) -> Tensor | None:
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.state.get(parameter, {}).get("remainder")

    def _require_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ParameterError("the optimizer of these weights no longer exists; keep a reference to it")
        return optimizer
