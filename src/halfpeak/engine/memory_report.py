"""Memory: how many bytes an engine holds, in total and per parameter, by purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from halfpeak.engine.step import Step
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.ops.foreach import gradients_of
from halfpeak.ops.shards import local_of
from halfpeak.parts.remainder_store import remainder_store_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes held at one moment. Each storage counts once and whole, so the sum is what the allocator has handed out.

    Activations saved for the backward pass and the buckets of a parallel wrapper are not counted.

    Attributes:
        parameters: the number of elements of the weights.
        weights: the parameters of the models.
        masters: float32 copies that optimizers step.
        remainders: the state that replaces masters in an optimizer that keeps remainders.
        moments: all other state of the optimizers.
        gradients: those held now; none after a step.
        buffers: of the models, and the copies that a skipped step restores.
        scratch: everything else that engine and optimizers hold, such as memory in which gradients are packed.

    Example:
        >>> import torch, halfpeak
        >>> from halfpeak.fused import FusedAdamW
        >>> model = torch.nn.Linear(512, 512, bias=False)
        >>> optimizer = FusedAdamW(model.parameters(), master="remainder")
        >>> engine = halfpeak.prepare(model, optimizer, "O5")
        >>> engine.backward(model(torch.ones(1, 512)).sum())
        >>> engine.memory().per_parameter()["remainders"]
        2.0
    """

    parameters: int
    weights: int = 0
    masters: int = 0
    remainders: int = 0
    moments: int = 0
    gradients: int = 0
    buffers: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, kind) for kind in _KINDS)

    def per_parameter(self) -> dict[str, float]:
        """Bytes per parameter of each kind, and ``"total"``."""
        count = max(self.parameters, 1)
        return {kind: getattr(self, kind) / count for kind in (*_KINDS, "total")}

    def __str__(self) -> str:
        """A table."""
        rows = [f"{kind:<12}{each:>10.3f}" for kind, each in self.per_parameter().items() if each]
        return "\n".join(("bytes per parameter", *rows))


_KINDS = tuple(field.name for field in fields(Memory) if field.name != "parameters")


def measure(run: Step) -> Memory:
    """The bytes that an engine holds now. Changes nothing."""
    models, optimizers, pairs = run.parts.models, run.parts.optimizers, run.parts.pairs
    stepped = (window.weights for window in run.parts.windows)
    weights = list(_once(chain(*(model.parameters() for model in models), *stepped)))
    holders = [*weights, *pairs.masters]
    rows = [row for optimizer in optimizers for row in optimizer.state.values()]
    keeps = any(remainder_store_of(optimizer) is not None for optimizer in optimizers)
    by_kind: dict[str, Iterable[Any]] = {
        "weights": weights,
        "masters": pairs.masters,
        "remainders": [row[REMAINDER] for row in rows if keeps and REMAINDER in row],
        "moments": rows,
        "gradients": gradients_of(holders),
        "buffers": [*(buffer for model in models for buffer in model.buffers()), run.parts.stats],
        "scratch": [*map(_own, optimizers), _own(run)],
    }
    # By id or address. Everything visited stays alive until the end, because its id could be reused otherwise.
    seen: dict[Any, object] = {}
    counted = {kind: _count(holders, seen) for kind, holders in by_kind.items()}
    return Memory(parameters=sum(map(Tensor.numel, weights)), **counted)


def _once(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(tensor): tensor for tensor in tensors}.values()


def _own(thing: object) -> list[Any]:
    """The values of all attributes of an object."""
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]


def _count(holders: Iterable[Any], seen: dict[Any, object]) -> int:
    """The bytes of all storages that are reachable from ``holders`` and not in ``seen``."""
    total, waiting = 0, list(holders)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            total += _storage_bytes(thing, seen)
        elif id(thing) not in seen and not isinstance(thing, (str, nn.Module, type)):
            inside = _inside(thing)
            if inside is not None:
                seen[id(thing)] = thing
                waiting += inside
    return total


def _storage_bytes(tensor: Tensor, seen: dict[Any, object]) -> int:
    (tensor,) = local_of([tensor])
    if tensor.is_sparse:
        return sum(_storage_bytes(part, seen) for part in (tensor._indices(), tensor._values()))
    storage = tensor.untyped_storage()
    key = (tensor.device, storage.data_ptr())
    if key in seen:
        return 0
    seen[key] = storage
    return storage.nbytes()


def _inside(thing: Any) -> list[Any] | None:
    """The contents of a container, or of an object of a halfpeak class; None for anything else."""
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(thing, (list, tuple, set, frozenset, WeakSet)):
        return list(thing)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if type(thing).__module__.partition(".")[0] == "halfpeak":
        return _own(thing)
    return None


def peak_memory(device: torch.device | None) -> int | None:
    """The peak number of bytes of tensors on an accelerator; None without one, or if it keeps no count."""
    if device is None or device.type == "cpu":
        return None
    try:
        return torch.accelerator.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # a backend whose allocator keeps no statistics
        return None
