"""on_cpu: a scope that emulates one CUDA device on the CPU, and the values of ``torch.cuda`` inside the scope."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAME: Final = "cpu, by halfpeak run"
CPU: Final = torch.device("cpu")
_STAY: Final = (Tensor.cuda, Tensor.pin_memory)


def _do_nothing(self: Any, *args: Any) -> None:
    """Do nothing, because work on the CPU is finished when the call that started it returns."""


class Event:
    """``torch.cuda.Event`` on the CPU: a time, because all work before the event is finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Store the current time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._time - self._time) * 1e3

    def query(self) -> bool:
        """Whether the work before the event is done: always True."""
        return True

    wait = synchronize = _do_nothing


class Stream(AbstractContextManager[Any]):
    """``torch.cuda.Stream`` on the CPU: all work runs immediately and in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def record_event(self, event: Event | None = None) -> Event:
        """Return the event, recorded."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Whether the stream's work is done: always True."""
        return True

    wait_event = wait_stream = synchronize = _do_nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def _answer(value: Any) -> Callable[..., Any]:
    """A new function that returns ``value``. Each name needs its own: torch.compile keeps its rules by function."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _no_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _memory(*args: Any, **kwargs: Any) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _properties(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(name=NAME, major=8, minor=0, total_memory=_memory()[1], multi_processor_count=1)


def _runtime() -> Any:
    calls = ("ProfilerStart", "ProfilerStop", "DeviceSynchronize")
    return SimpleNamespace(**{f"cuda{name}": _answer(0) for name in calls})


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

CUDA: Final[Mapping[str, Any]] = {
    **{name: _answer(None) for name in _NOTHING.split()},
    **{name: _answer(0) for name in _ZERO.split()},
    **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TENSORS.split()},
    "is_available": _answer(True),
    "is_initialized": _answer(True),
    "is_bf16_supported": _answer(True),
    "is_current_stream_capturing": _answer(False),
    "device_count": _answer(1),
    "get_device_name": _answer(NAME),
    "get_device_capability": _answer((8, 0)),
    "cudart": _runtime,
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
"""Name in ``torch.cuda`` -> its value inside :func:`on_cpu`."""

ACCELERATOR: Final[Mapping[str, Any]] = {
    "is_available": _answer(False),
    "device_count": _answer(0),
    "current_accelerator": _answer(None),
    "current_stream": lambda *args, **kwargs: Stream(),  # pyright: ignore[reportUnknownLambdaType]
    "synchronize": _answer(None),
}
"""The same for ``torch.accelerator``: none is there, as in a build of torch for the CPU. What torch and halfpeak do for an
accelerator, such as asking a stream whether a graph captures it, needs a driver that is not there."""

NVTX: Final[Mapping[str, Any]] = {
    **{name: _answer(0) for name in ("mark", "range_push", "range_pop")},
    "range": lambda *args, **kwargs: nullcontext(),  # pyright: ignore[reportUnknownLambdaType]
}
PROFILER: Final[Mapping[str, Any]] = {name: _answer(None) for name in ("start", "stop")}
AUTOGRAD_PROFILER: Final[Mapping[str, Any]] = {"emit_nvtx": NVTX["range"]}


@contextmanager
def on_cpu() -> Generator[None]:
    """Emulate one CUDA device on the CPU; at the end of the block torch is restored.

    * ``tensor.cuda()``, ``.to("cuda")``, ``.to(0)``, ``pin_memory()`` and ``device="cuda"`` of any torch function give
      tensors on the CPU, and ``torch.Generator("cuda")`` a generator there. A torch function mode does this for functions,
      so it holds for the current thread.
    * ``torch.cuda`` reports one device: ``is_available()`` is True, ``device_count()`` is 1, allocated memory is 0.
      Streams and events exist and are always done. Seeds and random states of CUDA are ignored.
    * ``torch.accelerator`` reports none, whatever torch was built for, and has nothing to wait for.
    * ``nccl`` process groups become ``gloo``, ``DistributedDataParallel`` and ``DataParallel`` drop ``device_ids``,
      ``torch.load`` maps to the CPU, and ``autocast("cuda")`` becomes ``autocast("cpu")`` in the same dtype.

    ``tensor.is_cuda`` and ``tensor.device`` are unchanged: they report the CPU.
    """
    with ExitStack() as undo:
        _replace(undo, torch.cuda, CUDA)
        _replace(undo, torch.accelerator, ACCELERATOR)
        _replace(undo, torch.cuda.nvtx, NVTX)
        _replace(undo, torch.cuda.profiler, PROFILER)
        _replace(undo, torch.autograd.profiler, AUTOGRAD_PROFILER)
        # Not in the mode, which sees calls of functions, and not that a class is made into an object.
        _replace(undo, torch, {"Generator": _generators(torch.Generator)})
        # Not in the mode, because torch parses the argument of record_stream before it calls the mode.
        _replace(undo, Tensor, {"record_stream": _do_nothing})
        _replace(undo, nn.DataParallel, {"__init__": _only_the_module})
        for owner, name, change in _changes():
            _replace(undo, owner, {name: _changed(getattr(owner, name), change)})
        undo.enter_context(_ToCpu())
        yield


def _generators(original: Any) -> Any:
    """``torch.Generator`` on the CPU whatever device is asked for: a class to which all generators of torch belong."""

    class OfAny(type(original)):  # pyright: ignore[reportUntypedBaseClass]
        def __instancecheck__(cls, instance: object) -> bool:  # pyright: ignore[reportSelfClsParameterName]
            return isinstance(instance, original)

    class Generator(original, metaclass=OfAny):
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(_place(device))

    return Generator


class _ToCpu(TorchFunctionMode):
    """Replaces CUDA devices in the arguments of torch functions by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _STAY:
            kept = {key: value for key, value in kwargs.items() if key == "memory_format"}
            return args[0].to(CPU, **kept)
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _place(args[1]), *args[2:])
        if func is Tensor.type and len(args) > 1:
            args = (args[0], _kind(args[1]), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = _place(kwargs["device"])
        return func(*args, **kwargs)


def _place(value: Any) -> Any:
    """The CPU for a CUDA device or device number; any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device)):
        return value
    return CPU if isinstance(value, int) or str(value).startswith("cuda") else value


def _kind(value: Any) -> Any:
    """The CPU name of a tensor type: ``"torch.FloatTensor"`` for ``"torch.cuda.FloatTensor"``."""
    return value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value


_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def _changed(function: Callable[..., Any], change: Callable[..., _Arguments]) -> Callable[..., Any]:
    """``function`` called with its arguments changed by ``change``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> _Arguments:
    return (f, CPU, *args), kwargs


def _default_type(t: Any) -> _Arguments:
    return (_kind(t),), {}


def _default_device(device: Any) -> _Arguments:
    return (_place(device),), {}


def _module_to(module: nn.Module, *args: Any, **kwargs: Any) -> _Arguments:
    placed = {key: _place(value) if key == "device" else value for key, value in kwargs.items()}
    return (module, *map(_place, args[:1]), *args[1:]), placed


def _group(backend: str | None = None, *args: Any, **kwargs: Any) -> _Arguments:
    return (_gloo(backend), *args), {key: value for key, value in kwargs.items() if key != "device_id"}


def _new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> _Arguments:
    return args, {**kwargs, "backend": _gloo(backend)}


def _gloo(backend: str | None) -> str | None:
    return "gloo" if backend is not None and "nccl" in str(backend).lower() else backend


def _without_devices(
    ddp: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
) -> _Arguments:
    return (ddp, module, None, None, *args), kwargs


def _autocast(
    scope: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
) -> _Arguments:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    return (scope, device_type, dtype, *args), kwargs


def _changes() -> Iterator[tuple[Any, str, Callable[..., _Arguments]]]:
    """Yield the functions that get changed arguments inside :func:`on_cpu`."""
    yield torch, "load", _load
    yield torch, "set_default_tensor_type", _default_type
    yield torch, "set_default_device", _default_device
    yield nn.Module, "to", _module_to
    for module in (dist, dist.distributed_c10d):
        yield module, "init_process_group", _group
        yield module, "new_group", _new_group
    yield nn.parallel.DistributedDataParallel, "__init__", _without_devices
    yield torch.autocast, "__init__", _autocast


def _only_the_module(
    self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
) -> None:
    """``DataParallel.__init__`` as torch runs it without a device: forward then calls the module."""
    nn.Module.__init__(self)
    self.module, self.device_ids, self.dim = module, [], dim


def _replace(undo: ExitStack, owner: Any, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            undo.callback(delattr, owner, name)
        setattr(owner, name, value)
