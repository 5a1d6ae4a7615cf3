"""The state of every random generator that training may draw from, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from halfpeak.core.errors import StateError


def capture(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of Python, torch, NumPy (if it was imported) and the given accelerators.

    >>> before = capture()
    >>> first = torch.rand(2)
    >>> restore(before)
    >>> torch.equal(torch.rand(2), first)
    True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "cpu": torch.get_rng_state(),
        "devices": {
            str(device): torch.get_device_module(device).get_rng_state(*_device_argument(device))
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


def restore(state: Mapping[str, Any], generators: Iterable[tuple[torch.Generator, Any]] = ()) -> None:
    """Restore the states that :func:`capture` returned. Devices that this machine does not have are left out.

    Args:
        state: what was captured.
        generators: more of them, each with its state.

    Raises:
        StateError: a part is missing, or no state of that generator.
    """
    try:
        _restore(state)
        for generator, saved in generators:
            generator.set_state(saved)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"the state of the random generators does not fit: {str(error)[:200]!r}") from None


def _restore(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["cpu"].cpu())
    for name, saved in state["devices"].items():
        device = torch.device(name)
        module: Any = torch.get_device_module(device) if _is_available(device) else None
        if module is not None:
            module.set_rng_state(saved.cpu(), *_device_argument(device))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), *rest))


def _is_available(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return (
        accelerator is not None
        and accelerator.type == device.type
        and (device.index or 0) < torch.accelerator.device_count()
    )


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """The argument by which a device module finds the generator; ``torch.mps`` has one device and takes none."""
    return () if device.type == "mps" else (device,)
