"""on_cpu: a scope in which a script that asks for CUDA gets the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfpeak.shim.cuda_names import CUDA, NVTX, PROFILER

CPU: Final = torch.device("cpu")
_STAY: Final = (Tensor.cuda, Tensor.pin_memory)
_MISSING: Final = object()


@contextmanager
def on_cpu() -> Generator[None]:
    """Let the CPU be the script's one CUDA device; afterwards torch is as it was.

    * ``tensor.cuda()``, ``.to("cuda")``, ``.to(0)``, ``pin_memory()`` and ``device="cuda"`` of any torch function stay on,
      or go to, the CPU: through a torch function mode, hence on this thread.
    * ``torch.cuda`` answers for one device: ``is_available()`` is true, ``device_count()`` 1, memory 0; streams and events
      are there and have nothing to wait for; seeds and random states of CUDA are ignored.
    * Process groups of ``nccl`` are of ``gloo``, ``DistributedDataParallel`` and ``DataParallel`` drop ``device_ids``,
      ``torch.load`` maps to the CPU, and ``autocast("cuda")`` is ``autocast("cpu")`` in the same dtype.

    ``tensor.is_cuda`` and ``tensor.device`` tell the truth.
    """
    with ExitStack() as undo:
        for module, names in ((torch.cuda, CUDA), (torch.cuda.nvtx, NVTX), (torch.cuda.profiler, PROFILER)):
            _replace(undo, module, names)
        _replace(undo, torch, _global())
        _replace(undo, nn.Module, {"to": _module_to()})
        # Its argument is parsed before the mode is asked.
        _replace(undo, Tensor, {"record_stream": _nothing})
        for module in (dist, dist.distributed_c10d):
            _replace(undo, module, _groups())
        _replace(undo, nn.parallel.DistributedDataParallel, {"__init__": _without_devices()})
        _replace(undo, nn.DataParallel, {"__init__": _only_the_module})
        _replace(undo, torch.autocast, {"__init__": _cpu_autocast()})
        undo.enter_context(_ToCpu())
        yield


class _ToCpu(TorchFunctionMode):
    """Every CUDA device among the arguments of a torch function becomes the CPU."""

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
    """The CPU for a CUDA device, which may also be a number; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device)):
        return value
    return CPU if isinstance(value, int) or str(value).startswith("cuda") else value


def _kind(value: Any) -> Any:
    """``torch.FloatTensor`` for ``torch.cuda.FloatTensor``, by its name."""
    return value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value


def _nothing(*args: Any) -> None: ...


def _global() -> Mapping[str, Any]:
    # Looked up by name: what is loaded, and how, stays the script's own call.
    load, set_type, set_device = (
        getattr(torch, name) for name in ("load", "set_default_tensor_type", "set_default_device")
    )

    @functools.wraps(load)
    def to_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, CPU, *args, **kwargs)

    @functools.wraps(set_type)
    def set_default_type(t: Any) -> None:
        set_type(_kind(t))

    @functools.wraps(set_device)
    def set_default_device(device: Any) -> None:
        set_device(_place(device))

    return {
        "load": to_cpu,
        "set_default_tensor_type": set_default_type,
        "set_default_device": set_default_device,
    }


def _module_to() -> Callable[..., Any]:
    move = nn.Module.to

    @functools.wraps(move)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        placed = {key: _place(value) if key == "device" else value for key, value in kwargs.items()}
        return move(self, *(_place(one) for one in args[:1]), *args[1:], **placed)

    return to


def _groups() -> Mapping[str, Any]:
    start, new = dist.init_process_group, dist.new_group

    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return start(_gloo(backend), *args, **{k: v for k, v in kwargs.items() if k != "device_id"})

    @functools.wraps(new)
    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new(*args, backend=_gloo(backend), **kwargs)

    return {"init_process_group": init_process_group, "new_group": new_group}


def _gloo(backend: str | None) -> str | None:
    return "gloo" if backend is not None and "nccl" in str(backend).lower() else backend


def _without_devices() -> Callable[..., None]:
    build = nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(build)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        build(self, module, None, None, *args, **kwargs)

    return init


def _only_the_module(
    self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
) -> None:
    """``DataParallel`` as torch makes it where there is no device: it calls the module."""
    nn.Module.__init__(self)
    self.module, self.device_ids, self.dim = module, [], dim


def _cpu_autocast() -> Callable[..., None]:
    build = torch.autocast.__init__

    @functools.wraps(build)
    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        build(self, device_type, dtype, *args, **kwargs)

    return init


def _replace(undo: ExitStack, owner: Any, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        before = vars(owner).get(name, _MISSING)
        undo.callback(_put_back, owner, name, before)
        setattr(owner, name, value)


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
