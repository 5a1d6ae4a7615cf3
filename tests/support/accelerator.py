"""A simulated CUDA device, which computes no values: host memory is real, device memory is torch's fake tensors.

Whatever would make the host wait for a real device is recorded, or raises if only the device knows the result's shape.
Operands on two devices raise, as on a real one. Autograd would ask the device for its streams, so a backward pass only
assigns gradients.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from halfpeak.casting.rule_table import Table
from halfpeak.ops.triton import is_installed, kernels

aten = torch.ops.aten


class Device(TorchDispatchMode):
    """Runs operations on the host, and computes only the shapes of those on the device.

    Attributes:
        waits: what made the host wait, each with the lines of halfpeak that led there.
        transfers: copies between host and device that did not make the host wait.
        launches: the names of the Triton kernels launched.
        variants: the kernels launched, each with the kinds of arguments that it is compiled for.
        parameters: the tensors to which a backward pass gives gradients.
        is_capturing: whether a graph is being captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.transfers: list[str] = []
        self.launches: list[str] = []
        self.variants: set[tuple[object, ...]] = set()
        self.parameters: list[Tensor] = []
        self.is_capturing = False
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[Any] = []
        # Made-up address and storage by ``_cdata``. The storage is kept alive, so that no other gets its ``_cdata``.
        self._places: dict[int, tuple[int, Any]] = {}
        self._free = itertools.count(2**40, 2**32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, tensors = func.overloadpacket, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        target = kwargs.get("device")
        is_there = any(t.device.type == "cuda" for t in tensors)
        if not is_there and (target is None or torch.device(target).type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name is aten._local_scalar_dense:
            self._waits("a value was read")
            return 0.0 if args[0].is_floating_point() else 0
        if name is aten.equal:
            self._waits("two tensors were compared")
            return True
        if name is aten.index_put_ and any(i is not None and i.dtype is torch.bool for i in args[1]):
            self._waits("a mask was counted")
        if name is aten._fused_sgd_:
            return None  # fake tensors do not support it
        result = func(*args, **kwargs)
        if name is aten._to_copy:
            self.note_copy(result, args[0], non_blocking=kwargs.get("non_blocking", False))
        elif name is aten._foreach_copy_:
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            for to, source in zip(args[0], args[1], strict=True):
                self.note_copy(to, source, non_blocking=not blocks)
        return tree_map(_made_real, result)

    def note_copy(self, to: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Record a copy between host and device. It waits, unless it is non-blocking and the host memory is pinned."""
        way = f"{source.device.type} to {to.device.type}"
        if to.device.type == source.device.type:
            return
        host = to if to.device.type == "cpu" else source
        if non_blocking and self.is_pinned(host):
            self.transfers.append(way)
        else:
            self._waits(f"a copy from {way}")

    def pin(self, tensor: Tensor) -> Tensor:
        """Record the memory of ``tensor`` as pinned.

        Raises:
            AssertionError: a graph is being captured, which pinning would break.
        """
        assert not self.is_capturing, "memory is pinned while a graph is being captured"
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was recorded as pinned."""
        place = tensor.untyped_storage()._cdata
        return any(storage._cdata == place for storage in self._pinned)

    def place_of(self, tensor: Tensor) -> int:
        """A made-up address on the device."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._places:
            self._places[storage._cdata] = (next(self._free), storage)
        return self._places[storage._cdata][0] + tensor.storage_offset() * tensor.itemsize

    def launch(self, name: str) -> Callable[..., None]:
        """A stand-in for a kernel, which only records its launches."""

        def run(*args: Any, **kwargs: Any) -> None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            assert all(tensor.device.type == "cuda" for tensor in tensors), f"{name} reads host memory"
            self.launches.append(name)
            self.variants.add((name, *map(_kind, tree_leaves((args, kwargs), is_leaf=_is_none))))

        return run

    def backward(self) -> None:
        """Assign or accumulate gradients, as autograd would."""
        for parameter in self.parameters:
            fresh = torch.empty_like(parameter)
            parameter.grad = fresh if parameter.grad is None else parameter.grad.add_(fresh)

    @contextmanager
    def capture(self, *_: Any, **__: Any) -> Generator[None]:
        """Record that the body is captured in a graph."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def _waits(self, what: str) -> None:
        lines = [
            f"{os.path.basename(frame.filename)}:{frame.lineno}"
            for frame in reversed(traceback.extract_stack())
            if f"{os.sep}halfpeak{os.sep}" in frame.filename
        ]
        assert not self.is_capturing, f"{what} while a graph is being captured: {' < '.join(lines[:4])}"
        self.waits.append(f"{what}: {' < '.join(lines[:4])}")


def _kind(leaf: object) -> object:
    """What a kernel is compiled for: the type of a number, not its value."""
    if isinstance(leaf, Tensor):
        return leaf.dtype
    return leaf if isinstance(leaf, (bool, str, torch.dtype, type(None))) else type(leaf).__name__


def _is_none(leaf: object) -> bool:
    return leaf is None


def _made_real(value: Any) -> Any:
    """Zeros on the host in place of a tensor that was read from the device."""
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with unset_fake_temporarily():
        return torch.zeros(value.shape, dtype=value.dtype)


class Event:
    """An event that is always complete."""

    device: Device

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        assert not self.device.is_capturing, "an event is queried while a graph is being captured"
        return True

    def synchronize(self) -> None:
        self.device._waits("an event was waited for")


@contextmanager
def accelerator(patch: pytest.MonkeyPatch) -> Generator[Device]:
    """In the body, ``device="cuda"`` means a simulated device."""
    device = Device()
    Table({}, {})  # Looks up torch's functions once in a process; it must not find the stand-ins.
    for name, stand_in in _stand_ins(device).items():
        patch.setattr(name, stand_in)
    if is_installed():
        for name in ("add_unscaled", "measure", "control", "norm", "update", "lamb_trust_update"):
            patch.setattr(kernels(), name, device.launch(name))
        # Its launcher makes the tensors of the result: only the kernel itself is replaced.
        run = device.launch("decide")
        patch.setattr(
            kernels(),
            "decide_kernel",
            {(1,): lambda *args, num_warps, enable_fp_fusion, **kwargs: run(*args, **kwargs)},
        )
    with torch.no_grad(), device.fake, device:
        yield device


def on_device(module: nn.Module) -> nn.Module:
    """A module made on the meta device, moved to the simulated one."""
    return module.to_empty(device="cuda")


def _stand_ins(device: Device) -> dict[str, Any]:
    """Replacements for what torch built without CUDA, or fake tensors, cannot do."""

    def pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return device.pin(made) if pin_memory else made

        return run

    address, get, copy = Tensor.data_ptr, Tensor.__getitem__, Tensor.copy_

    def data_ptr(self: Tensor) -> int:
        return device.place_of(self) if self.device.type == "cuda" else address(self)

    def getitem(self: Tensor, key: Any) -> Tensor:
        return _item(self, key) if self.device.type == "cuda" else get(self, key)

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.device.type == "cuda":
            torch._foreach_copy_([self], [source.expand_as(self)], non_blocking)
            return self
        if source.device.type == "cuda":
            device.note_copy(self, source, non_blocking=non_blocking)
            return self.zero_()
        return copy(self, source, non_blocking)

    def value(name: str, kind: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
        on_host = getattr(Tensor, name)
        return lambda self: (
            kind(aten._local_scalar_dense(self)) if self.device.type == "cuda" else on_host(self)
        )

    event = type("Event", (Event,), {"device": device})
    return {
        "torch.Tensor.data_ptr": data_ptr,
        "torch.Tensor.__getitem__": getitem,
        "torch.Tensor.copy_": copy_,
        "torch.Tensor.item": value("item", lambda number: number),
        **{
            f"torch.Tensor.__{kind.__name__}__": value(f"__{kind.__name__}__", kind)
            for kind in (bool, int, float)
        },
        "torch.Tensor.__invert__": lambda self: torch.bitwise_not(self),
        "torch.Tensor.pin_memory": lambda self: device.pin(self.clone()),
        **{f"torch.{name}": pinning(getattr(torch, name)) for name in ("tensor", "zeros", "empty")},
        "torch.Event": event,
        "torch.accelerator.current_stream": lambda *_: None,
        "torch.accelerator.synchronize": lambda *_: device._waits("the device was synchronised"),
        "torch.cuda.is_current_stream_capturing": lambda: device.is_capturing,
        "torch.Tensor.backward": lambda *_, **__: device.backward(),
        "torch.random.fork_rng": lambda *_, **__: nullcontext(),
        "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132),
        "torch.cuda.device": lambda *_: nullcontext(),
        "torch.cuda.stream": lambda *_: nullcontext(),
        **dict.fromkeys(("torch.cuda.Stream", "torch.cuda.current_stream"), lambda *_: MagicMock()),
        "torch.cuda.CUDAGraph": MagicMock,
        "torch.cuda.graph": device.capture,
        "halfpeak.engine.cuda_graph._require_no_graph": lambda *_: None,  # would ask for streams
        # The checks refuse fake tensors, which are no plain tensors.
        "halfpeak.fused.base.check_parameter": lambda *_: None,
        "halfpeak.fused.flat.layout.check_parameter": lambda *_: None,
        **dict.fromkeys(
            (
                f"halfpeak.{name}"
                for name in (
                    "ops.accumulate.are_dense",
                    "parts.window.can_stay",
                    "engine.fused_step.can_stay",
                )
            ),
            lambda grads: all(grad is not None for grad in grads),
        ),
        "halfpeak.ops.foreach._fit_kernel": lambda *_: True,
        "halfpeak.parts.checks.as_vector": lambda tensor: tensor.detach().view(-1),
    }


def _item(tensor: Tensor, key: Any) -> Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        rest = (slice(None),) * (tensor.dim() - len(keys) + 1)
        keys = (*keys[:at], *rest, *keys[at + 1 :])
    dim = 0
    for one in keys:
        if isinstance(one, int):
            tensor = tensor.select(dim, one)
            continue
        if one is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(one, slice):
            tensor = aten.slice(tensor, dim, one.start, one.stop, one.step or 1)
        else:
            tensor = aten.index(tensor, [*[None] * dim, one])
        dim += 1
    return tensor
