"""A device scalar on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Late:
    """Starts to copy a scalar to the host; :meth:`read` waits for that copy and for nothing that was queued after it.

    So the verdict of a step can be read while the device is busy with the next one.

    >>> Late(torch.tensor(1.0)).read()
    1.0
    """

    def __init__(self, scalar: Tensor) -> None:
        self._event: torch.Event | None = None
        if scalar.device.type == "cpu":
            self._host = scalar.detach().clone()
            return
        self._host = torch.empty((), dtype=scalar.dtype, pin_memory=scalar.device.type == "cuda")
        self._host.copy_(scalar.detach(), non_blocking=True)
        self._event = torch.Event(scalar.device)
        # The stream of the scalar's own device, which need not be the current one.
        self._event.record(torch.accelerator.current_stream(scalar.device))

    def read(self) -> float:
        """The value. Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
