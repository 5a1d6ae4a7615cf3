"""The state of every random generator that training may draw from, as plain data."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch

from halfpeak.core.errors import StateError

_NUMPY_WORDS: Final = 624
"""The words of a Mersenne Twister's state. NumPy accepts any position in them, and reads the memory there."""


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
    """Restore the states that :func:`capture` returned, without devices that this machine does not have.

    Args:
        generators: further generators, each with its state.

    Raises:
        StateError: a part is missing, or is not a state of its generator. Nothing was restored.
    """
    for put_back in parse(state, generators):
        put_back()


def parse(
    state: Mapping[str, Any], generators: Iterable[tuple[torch.Generator, Any]] = ()
) -> list[Callable[[], object]]:
    """Check the arguments of :func:`restore` on new generators; returns the calls that restore the states.

    Raises:
        StateError: a part is missing, or is not a state of its generator.
    """
    calls: list[Callable[[], object]] = []
    try:
        for try_out, put_back, saved in _parts(state, generators):
            try_out(saved)
            calls.append(partial(put_back, saved))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"the state of the random generators does not fit: {str(error)[:200]!r}") from None
    return calls


def _parts(
    state: Mapping[str, Any], generators: Iterable[tuple[torch.Generator, Any]]
) -> Iterator[tuple[Callable[[Any], object], Callable[[Any], object], Any]]:
    """For each generator: how to set a new one of its kind, how to set the generator itself, and its state."""
    missing = [name for name in ("python", "cpu", "devices") if name not in state]
    if missing:
        raise LookupError(f"it has no {', '.join(missing)}")
    version, words, gauss = state["python"]
    if not (gauss is None or isinstance(gauss, float)):  # Python accepts anything, and adds to it later
        raise TypeError(f"gauss_next of Python must be None or a float, not {type(gauss).__name__}")
    yield random.Random().setstate, random.setstate, (version, tuple(words), gauss)
    yield torch.Generator().set_state, torch.set_rng_state, state["cpu"].cpu()
    for name, saved in state["devices"].items():
        device = torch.device(name)
        if _is_available(device):
            yield torch.Generator(device).set_state, partial(_set_device, device), saved.cpu()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, *rest = state["numpy"]
        if len(keys) != _NUMPY_WORDS or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError(
                f"a NumPy state needs {_NUMPY_WORDS} words and a position from 0 to {_NUMPY_WORDS}"
            )
        saved = (name, numpy.asarray(array("I", keys)), position, *rest)
        yield numpy.random.RandomState().set_state, numpy.random.set_state, saved
    for generator, saved in generators:
        yield torch.Generator(generator.device).set_state, generator.set_state, saved


def _set_device(device: torch.device, saved: torch.Tensor) -> None:
    torch.get_device_module(device).set_rng_state(saved, *_device_argument(device))


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
