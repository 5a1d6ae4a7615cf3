"""Asynchronous copies of small device tensors to the host, which reads a value when it has arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from halfpeak.core.torch_compat import host_values, is_capturing


class AsyncCopy:
    """Starts to copy a small tensor to the host; :meth:`read` waits for this copy and for nothing queued after it.

    On an accelerator the copy goes to pinned memory and an event says when it has arrived; on the CPU it is there at once.
    The source may be overwritten as soon as the constructor has returned.

    Args:
        source: a scalar or a vector.
        buffer: host memory of the source's shape to copy into, such as an earlier copy's; new memory if None.

    Example:
        >>> import torch
        >>> copy = AsyncCopy(torch.tensor([1.0, 0.5]))
        >>> copy.is_ready(), copy.read().tolist()
        (True, [1.0, 0.5])
    """

    def __init__(self, source: Tensor, buffer: Tensor | None = None) -> None:
        self._event: torch.Event | None = None
        on_host = source.device.type == "cpu"
        if buffer is None:
            pinned = source.device.type == "cuda"
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        self._host = buffer
        self._host.copy_(source.detach(), non_blocking=not on_host)
        if not on_host:
            self._event = torch.Event(source.device.type)
            # The stream of the source's own device, which need not be the current one.
            self._event.record(torch.accelerator.current_stream(source.device))

    def is_ready(self) -> bool:
        """Whether :meth:`read` would return without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """The values, on the CPU. Waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class AsyncScalar:
    """The newest value of a device scalar that has arrived on the host, read without ever waiting.

    :meth:`push` starts a copy, or does nothing while an earlier copy is on its way, so on an accelerator :attr:`value` is
    usually a step or two old. On the CPU it is current. While a CUDA graph is captured nothing is read, because the copies
    launched then do not run.

    Example:
        >>> import torch
        >>> scalar = AsyncScalar(torch.device("cpu"))
        >>> scalar.push(torch.tensor(3.0))
        >>> scalar.value
        3.0
    """

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._buffer = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._copy: AsyncCopy | None = None
        self._device = device
        self._value = 0.0

    def push(self, scalar: Tensor) -> None:
        """Start copying a scalar, unless a copy is still on its way. A scalar in host memory is read at once."""
        known = host_values(scalar)
        if known is not None:
            (self._value,) = known
        elif self._receive():
            self._copy = AsyncCopy(scalar, self._buffer)

    @property
    def value(self) -> float:
        """The last value that has arrived; 0 before the first."""
        if self._copy is not None:
            self._receive()
        return self._value

    def _receive(self) -> bool:
        """Store the value of a copy that has arrived. Returns whether no copy is on its way."""
        if is_capturing(self._device):
            return False
        if self._copy is not None:
            if not self._copy.is_ready():
                return False
            # Tensor.item() would count, and on some backends act, as a synchronisation.
            (self._value,) = host_values(self._buffer) or (self._value,)
            self._copy = None
        return True
