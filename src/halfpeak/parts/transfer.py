"""Reading a vector of the device without waiting for it: numbers on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Transfer:
    """Copies a vector to the host in the background.

    On an accelerator the copy goes to pinned memory and an event says when it is there; on the CPU it is there at once.

    >>> import torch
    >>> transfer = Transfer(torch.tensor([1.0, 0.5]))
    >>> transfer.has_arrived(), transfer.numbers()
    (True, [1.0, 0.5])

    Args:
        vector: nobody writes to it afterwards.  # [n]
    """

    def __init__(self, vector: Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = vector
        if vector.device.type != "cpu":
            pinned = vector.device.type == "cuda"
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=pinned)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.Event(vector.device.type)
            # The stream of the vector's own device, which need not be the current one.
            self._event.record(torch.accelerator.current_stream(vector.device))

    def has_arrived(self) -> bool:
        """Whether :meth:`numbers` would not wait."""
        return self._event is None or self._event.query()

    def numbers(self) -> list[float]:
        """The vector as numbers. Waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
