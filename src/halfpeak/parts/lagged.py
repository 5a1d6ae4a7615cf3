"""Reading a device scalar without waiting: the newest value that has already arrived."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Lagged:
    """Copies a scalar to the host in the background; :attr:`value` is the last copy that is known to have arrived.

    On an accelerator the copy goes to pinned memory and an event says when it is there, so the value is usually that of
    a step or two ago. On the CPU it is the current one. No tensor operation that waits is ever called. While a graph is
    being captured nothing is read: what is launched then is not run.

    >>> import torch
    >>> lagged = Lagged(torch.device("cpu"))
    >>> lagged.push(torch.tensor(3.0))
    >>> lagged.value
    3.0
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros((), dtype=torch.float32, pin_memory=device.type == "cuda")
        self._event: torch.Event | None = None
        self._device = device
        self._value = 0.0

    def push(self, scalar: Tensor) -> None:
        """Start copying a scalar. A copy still on its way is left to arrive and this one is dropped."""
        if self._is_capturing() or (self._event is not None and not self._event.query()):
            return
        self._value = self._read()
        self._buffer.copy_(scalar, non_blocking=True)
        if self._device.type != "cpu":
            self._event = torch.Event(self._device.type)
            # The stream of the scalar's own device, which need not be the current one.
            self._event.record(torch.accelerator.current_stream(scalar.device))

    @property
    def value(self) -> float:
        """The last value that has arrived."""
        if not self._is_capturing() and (self._event is None or self._event.query()):
            self._value = self._read()
        return self._value

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _read(self) -> float:
        # Host memory is read as memory: Tensor.item() would count, and on some backends act, as a synchronisation.
        return float(ctypes.c_float.from_address(self._buffer.data_ptr()).value)
