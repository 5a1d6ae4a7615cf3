"""Remainders: reads and writes the float32 values of low-precision weights whose remainders are in the optimizer's state."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ParameterError
from halfpeak.core.optimizer_state import params_of
from halfpeak.fused.state_dtypes.codecs import REMAINDER, Remainder
from halfpeak.ops.shards import local_of, shard_like
from halfpeak.ops.versions import TensorVersions


class Remainders:
    """The :class:`~halfpeak.parts.remainder_store.RemainderStore` of a fused optimizer.

    A remainder is valid only for the weight with which it was encoded. If a parameter was written or given other memory
    since, its value is what was written, and the remainder is ignored. An in-place write through ``parameter.data`` is
    not noticed and keeps the remainder, which is less than one rounding of the weight.

    Args:
        optimizer: its state holds the remainders. Stored as a weak reference.
        codec: splits a weight.
    """

    def __init__(self, optimizer: Optimizer, codec: Remainder) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._codec = codec
        self._versions = TensorVersions()
        # The position of each parameter, by ``id``, in the snapshot of versions.
        self._positions: dict[int, int] = {}
        self._known: tuple[list[int], set[int]] = ([], set())

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter has a remainder, or will have one from its first step on."""
        return (
            parameter.dtype in LOW
            and id(parameter) in self._members()
            and (parameter.requires_grad or self._remainder_of(parameter) is not None)
        )

    def fp32_value(self, parameter: Tensor) -> Tensor:
        """The float32 value of a parameter.  # f32 of its shape"""
        remainder = self._remainder_of(parameter)
        low = parameter.detach()
        if remainder is None or remainder.shape != low.shape or self._was_written(parameter):
            return low.float()
        own, rest = local_of([low, remainder])
        return shard_like(self._codec.of(low.dtype).decode((own, rest.to(own.device))), parameter)

    @torch.no_grad()
    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Set the float32 value of a parameter, to the precision of the codec."""
        parameter.copy_(self.split(parameter, value))

    @torch.no_grad()
    def split(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Set the remainder and return the low weight, which the caller must write to the parameter next.

        Raises:
            ParameterError: the value has another shape.
        """
        if value.shape != parameter.shape:
            raise ParameterError(
                f"the value has shape {tuple(value.shape)}, and the weight {tuple(parameter.shape)}; pass a value of the "
                "weight's shape"
            )
        (wide,) = local_of([value.detach().to(parameter.device, torch.float32)])
        codec, seed = (
            self._codec.of(parameter.dtype),
            torch.zeros((), dtype=torch.float32, device=wide.device),
        )
        low, remainder = (shard_like(part, parameter) for part in codec.encode(wide, seed))
        known = self._remainder_of(parameter)
        if known is None:
            own = torch.empty_like(parameter, dtype=remainder.dtype, requires_grad=False)
            self._require_optimizer().state[parameter][REMAINDER] = own.copy_(remainder)
        else:
            known.copy_(remainder)
        if id(parameter) not in self._positions:
            self._positions[id(parameter)] = len(self._positions)
            self._versions.add(parameter)
        self._versions.record_next_write(self._positions[id(parameter)], parameter)
        return low

    def refresh(self) -> None:
        """Before a step: zero the remainders of parameters that were written since the last step."""
        for parameter in params_of(self._require_optimizer()):
            remainder = self._remainder_of(parameter)
            if remainder is not None and self._was_written(parameter):
                remainder.zero_()
                self._versions.record_one(self._positions[id(parameter)], parameter)

    def note(self) -> None:
        """After a step, or after weights have moved in memory: record that each remainder matches its weight."""
        parameters = params_of(self._require_optimizer())
        self._positions = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._versions.record(parameters)

    def _members(self) -> set[int]:
        """The ``id`` of each parameter of the optimizer, collected again when the size of a group changes."""
        optimizer = self._optimizer()
        sizes = [] if optimizer is None else [len(group["params"]) for group in optimizer.param_groups]
        if optimizer is not None and sizes != self._known[0]:
            self._known = (sizes, set(map(id, params_of(optimizer))))
        return self._known[1]

    def _was_written(self, parameter: Tensor) -> bool:
        position = self._positions.get(id(parameter))
        return position is not None and not self._versions.unchanged_one(position, parameter)

    def _remainder_of(self, parameter: Tensor) -> Tensor | None:
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.state.get(parameter, {}).get(REMAINDER)

    def _require_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ParameterError("the optimizer of these weights no longer exists; keep a reference to it")
        return optimizer
