"""The eager backend on an accelerator: torch operations that read ``found_inf`` there, so the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused.backends.base import BackendStep, GradStats, PackingBackend
from halfpeak.fused.backends.kernels import measure
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.fused.rules.base import Rule, gradient_sign

CHUNK = 2**22
"""Elements per chunk: enough to keep a device busy, with intermediate results that are small beside the buffers."""


class EagerDeviceBackend(PackingBackend):
    """Runs on every accelerator, for slices without a Triton kernel: float64, rules of user code, several devices."""

    name = "eager"

    def measure(
        self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> GradStats:
        home = multiplier.device
        read = [
            measure(chunk, multiplier.to(chunk.device))
            for slice_ in slices
            for chunk in self._packer(slice_.buffer, grads).split(CHUNK)
        ]
        squares, flags = zip(*[(total.to(home), flag.to(home)) for total, flag in read], strict=True)
        return GradStats(torch.stack(squares).sum(), torch.stack(flags).any().float())

    def prepare(self, step: BackendStep) -> Callable[[], None]:
        return lambda: self._run(self.clipped(step))

    def _run(self, step: BackendStep) -> None:
        numbers: dict[tuple[Rule, int, torch.dtype], Tensor] = {}
        for slice_ in step.slices:
            if slice_.rule.layerwise and not len(slice_.buffer):
                continue  # an empty parameter has no norm
            wide = torch.promote_types(slice_.buffer.weight.dtype, torch.float32)
            key = (slice_.rule, id(slice_.step_count), wide)
            if key not in numbers:
                numbers[key] = _numbers(slice_, step, wide)
            grad = self._packer(slice_.buffer, step.grads)
            size = len(grad) if slice_.rule.layerwise else CHUNK
            for start in range(0, len(grad), size):
                _update(slice_, grad, slice(start, start + size), numbers[key], step.found_inf)
        for counter in {id(slice_.step_count): slice_.step_count for slice_ in step.slices}.values():
            found_inf = step.found_inf
            counter.increment(1 if found_inf is None else found_inf.to(counter.step.device) == 0)


def _numbers(slice_: BufferSlice, step: BackendStep, wide: torch.dtype) -> Tensor:
    """The factor of the gradients, then the rule's constants.  # wide[1 + k]"""
    device, group = slice_.buffer.weight.device, step.groups[slice_.group]
    # In float32, 1 - 0.999**t would lose most of its bits; Metal has no wider dtype.
    exact = torch.float32 if device.type == "mps" else torch.float64
    constants = slice_.rule.constants(group, slice_.step_count.step.to(device, exact) + 1)
    values = [_there(value, device, exact) for value in (step.multiplier, *constants)]
    values[0] = values[0] * gradient_sign(group)
    return torch.stack(values).to(wide)


def _there(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.reshape(()).to(device, dtype)
    # A kernel fills the tensor, because a copy from pageable host memory would make the host wait.
    return torch.full((), float(value), dtype=dtype, device=device)


def _update(slice_: BufferSlice, grad: Tensor, at: slice, numbers: Tensor, found_inf: Tensor | None) -> None:
    buffer = slice_.buffer
    whole_buffer = (buffer.weight, buffer.low, buffer.states)
    weight, low, slots = whole_buffer if slice_.rule.layerwise else buffer.chunk(at)
    wide = numbers.dtype
    multiplier, *constants = numbers.unbind()
    whole, *state = slice_.rule.decode(weight, slots, wide)
    moved = slice_.rule(whole, grad[at].to(wide) * multiplier, state, constants)
    skips = None if found_inf is None else found_inf.to(grad.device) != 0
    written = zip((weight, *slots), slice_.rule.encode(moved, constants), strict=True)
    # All values are computed before any write, because an encoding may read all of the old values.
    ends = [
        (end, value if skips is None else torch.where(skips, end, value.to(end.dtype)))
        for end, value in written
    ]
    for end, value in ends:
        end.copy_(value)
    if low is not None:
        low.copy_(moved[0] if skips is None else torch.where(skips, low, moved[0].to(low.dtype)))
