"""Per-operation casts by the lists that torch keeps for a device: ``torch.autocast``, as a scope that can be entered again."""

from __future__ import annotations

import threading

import torch


class DeviceCasts:
    """Casts as ``torch.autocast`` does on this type of device, at its cost and with its cache of casts.

    Its lists differ between devices and from apex's (on a CPU softmax, sums and norms stay low), it leaves float64 alone,
    and it knows no bans. For the forward pass only, as torch asks: what is recomputed in backward brings it back.

    Attributes:
        traced: the scope in a form that code which :func:`torch.compile` traces can enter.

    >>> x, casts = torch.ones(2, 2), DeviceCasts("cpu", torch.bfloat16)
    >>> with casts, casts:
    ...     (x @ x).dtype, (x @ x).softmax(0).dtype
    (torch.bfloat16, torch.bfloat16)
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self._local = _Local()
        self.traced = torch.autocast(device_type, dtype)

    def __enter__(self) -> DeviceCasts:
        scope = torch.autocast(self.device_type, self.dtype)
        scope.__enter__()
        self._local.entered.append(scope)
        return self

    def __exit__(self, *_: object) -> None:
        self._local.entered.pop().__exit__(None, None, None)


class _Local(threading.local):
    """The autocast contexts that are open on this thread, outermost first."""

    def __init__(self) -> None:
        self.entered: list[torch.autocast] = []
