"""The state of every random generator that training may draw from, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def take(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Python's, torch's and (where it is in use) NumPy's state, and that of the given accelerators.

    >>> before = take()
    >>> first = torch.rand(2)
    >>> put(before)
    >>> torch.equal(torch.rand(2), first)
    True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "cpu": torch.get_rng_state(),
        "devices": {
            str(device): torch.get_device_module(device).get_rng_state(*_which(device))
            for device in set(devices)
            if device.type not in ("cpu", "meta")
        },
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [
            str(name),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(cached),
        ]
    return state


def put(state: Mapping[str, Any]) -> None:
    """Put back what :func:`take` gave. Devices that this machine does not have are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["cpu"].cpu())
    for name, saved in state["devices"].items():
        device = torch.device(name)
        module: Any = torch.get_device_module(device) if _is_here(device) else None
        if module is not None:
            module.set_rng_state(saved.cpu(), *_which(device))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), *rest))


def _is_here(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return (
        accelerator is not None
        and accelerator.type == device.type
        and (device.index or 0) < torch.accelerator.device_count()
    )


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """The argument that names a device to its module's generator; there is one mps device, and it is not named."""
    return () if device.type == "mps" else (device,)
