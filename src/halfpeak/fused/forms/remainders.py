"""Remainders: what bfloat16 weights are worth, by the remainders in the state of the optimizer that steps them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import ParameterError
from halfpeak.fused.forms.codecs import Remainder
from halfpeak.fused.layout import targets_of


class Remainders:
    """The :class:`~halfpeak.parts.keeper.Keeper` of a fused optimizer.

    A remainder belongs to the weight that it was rounded from. Where somebody else has written a parameter since, it is
    worth what was written; ``parameter.data`` written in place leaves no trace, and keeps its remainder, which is less than
    one rounding of it.

    Args:
        optimizer: held weakly; the remainders are in its state.
        codec: how a weight is split.
    """

    def __init__(self, optimizer: Optimizer, codec: Remainder) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._codec = codec
        self._marks: dict[int, tuple[int, int]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self._zeros: dict[torch.device, Tensor] = {}
        self._known: tuple[list[int], set[int]] = ([], set())

    def keeps(self, parameter: Tensor) -> bool:
        """Whether a weight has a remainder, or will have one from its first step on."""
        return (
            parameter.dtype is torch.bfloat16
            and id(parameter) in self._members()
            and (parameter.requires_grad or self._rest_of(parameter) is not None)
        )

    def value_of(self, parameter: Tensor) -> Tensor:
        """What a weight is worth.  # f32 of its shape"""
        rest = self._rest_of(parameter)
        low = parameter.detach()
        if rest is None or rest.shape != low.shape or self._was_written(parameter):
            return low.float()
        return self._codec.decode((low, rest.to(low.device)))

    @torch.no_grad()
    def take(self, parameter: Tensor, value: Tensor) -> None:
        """Make a weight worth ``value``, to the precision of the codec."""
        parameter.copy_(self.expect(parameter, value))

    @torch.no_grad()
    def expect(self, parameter: Tensor, value: Tensor) -> Tensor:
        """:meth:`take` for who writes the parameter himself, once and next: what he is to write.  # bf16

        Raises:
            ParameterError: the value has another shape.
        """
        if value.shape != parameter.shape:
            raise ParameterError(
                f"a weight of shape {tuple(parameter.shape)} cannot take a value of shape {tuple(value.shape)}"
            )
        wide = value.detach().to(parameter.device, torch.float32)
        low, rest = self._codec.encode(wide, torch.zeros((), device=wide.device))
        known = self._rest_of(parameter)
        if known is None:
            own = torch.empty_like(parameter, dtype=rest.dtype, requires_grad=False)
            self._require_optimizer().state[parameter]["remainder"] = own.copy_(rest)
        else:
            known.copy_(rest)
        self._marks[id(parameter)] = (parameter._version + 1, parameter.data_ptr())
        return low

    def stand_in(self, parameter: Tensor) -> Tensor:
        """A float32 tensor of a weight's shape and of no memory, whose ``grad`` is stepped if there is one."""
        known = self._stand_ins.get(id(parameter))
        if known is None or known[1].shape != parameter.shape or known[1].device != parameter.device:
            zero = self._zeros.setdefault(parameter.device, torch.zeros((), device=parameter.device))
            known = self._stand_ins[id(parameter)] = (parameter, zero.expand(parameter.shape))
        return known[1]

    def gradients_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of parameters that a step is to read: of their stand-ins, or where those have none their own."""
        if not self._stand_ins:
            return [parameter.grad for parameter in parameters]
        ends = (self._stand_ins.get(id(parameter), (parameter, parameter))[1] for parameter in parameters)
        return [p.grad if end.grad is None else end.grad for p, end in zip(parameters, ends, strict=True)]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """``optimizer.zero_grad()`` for the stand-ins."""
        for _, stand_in in self._stand_ins.values():
            if stand_in.grad is not None and not set_to_none:
                stand_in.grad.zero_()
            else:
                stand_in.grad = None

    def refresh(self) -> None:
        """Before a step: follow whoever has written weights since the last one."""
        for parameter in targets_of(self._require_optimizer()):
            rest = self._rest_of(parameter)
            if rest is not None and self._was_written(parameter):
                rest.zero_()
                del self._marks[id(parameter)]

    def note(self) -> None:
        """After a step, or when weights have moved in memory: what is there now is what the remainders belong to."""
        self._marks = {id(p): (p._version, p.data_ptr()) for p in targets_of(self._require_optimizer())}

    def _members(self) -> set[int]:
        """The parameters of the optimizer by ``id``, looked up anew when their number changes."""
        optimizer = self._optimizer()
        sizes = [] if optimizer is None else [len(group["params"]) for group in optimizer.param_groups]
        if optimizer is not None and sizes != self._known[0]:
            self._known = (sizes, set(map(id, targets_of(optimizer))))
        return self._known[1]

    def _was_written(self, parameter: Tensor) -> bool:
        now = (parameter._version, parameter.data_ptr())
        return self._marks.get(id(parameter), now) != now

    def _rest_of(self, parameter: Tensor) -> Tensor | None:
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.state.get(parameter, {}).get("remainder")

    def _require_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ParameterError(
                "the optimizer of these weights does not exist any more; keep a reference to it"
            )
        return optimizer
