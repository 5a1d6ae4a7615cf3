"""What ``torch.cuda`` answers while the CPU plays the one CUDA device of a script: data and small stand-ins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Self

import torch

NAME: Final = "cpu, by halfpeak run"


class Event:
    """``torch.cuda.Event``: the CPU has finished whatever it was given, so an event is a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._time - self._time) * 1e3

    def query(self) -> bool:
        """Whether the work before it is done. It is."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream(AbstractContextManager[Any]):
    """``torch.cuda.Stream``: everything runs at once and in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Whether its work is done. It is."""
        return True

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def _answer(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: torch.compile keeps its rules by function."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _no_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _memory(*args: Any, **kwargs: Any) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _properties(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(name=NAME, major=7, minor=0, total_memory=_memory()[1], multi_processor_count=1)


_NOTHING: Final = (
    "set_device synchronize init empty_cache ipc_collect manual_seed manual_seed_all seed seed_all set_rng_state "
    "set_rng_state_all reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats set_per_process_memory_fraction set_stream"
)
_ZERO: Final = (
    "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached "
    "max_memory_cached utilization initial_seed"
)
_TENSORS: Final = "Float Double Half BFloat16 Long Int Short Char Byte Bool"

CUDA: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **{name: _answer(None) for name in _NOTHING.split()},
        **{name: _answer(0) for name in _ZERO.split()},
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TENSORS.split()},
        "is_available": _answer(True),
        "is_initialized": _answer(True),
        "is_bf16_supported": _answer(True),
        "is_current_stream_capturing": _answer(False),
        "device_count": _answer(1),
        "get_device_name": _answer(NAME),
        "get_device_capability": _answer((7, 0)),
        "get_device_properties": _properties,
        "get_arch_list": _answer([]),
        "get_rng_state": _no_state,
        "get_rng_state_all": lambda: [_no_state()],
        "mem_get_info": _memory,
        "memory_stats": lambda *args, **kwargs: {},  # pyright: ignore[reportUnknownLambdaType]
        "memory_summary": _answer(""),
        "device": lambda *args, **kwargs: nullcontext(),  # pyright: ignore[reportUnknownLambdaType]
        "device_of": lambda *args, **kwargs: nullcontext(),  # pyright: ignore[reportUnknownLambdaType]
        "stream": lambda stream=None: nullcontext(stream),  # pyright: ignore[reportUnknownLambdaType]
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *args, **kwargs: Stream(),  # pyright: ignore[reportUnknownLambdaType]
        "default_stream": lambda *args, **kwargs: Stream(),  # pyright: ignore[reportUnknownLambdaType]
    }
)
"""Name in ``torch.cuda`` -> what stands there."""

NVTX: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **{name: _answer(0) for name in ("mark", "range_push", "range_pop")},
        "range": lambda *args, **kwargs: nullcontext(),  # pyright: ignore[reportUnknownLambdaType]
    }
)
PROFILER: Final[Mapping[str, Any]] = MappingProxyType({name: _answer(None) for name in ("start", "stop")})
