"""Damaged files, and states with one thing in them replaced, removed, added or exchanged, from a seed."""

from __future__ import annotations

import math
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Slot = tuple[Any, Any]
"""A container and the key or index of one value in it."""


def flip(path: str | Path, at: int | None = None) -> None:
    """Flip a bit of one byte of an archive; by default, of the byte in the middle of its largest record."""
    data = bytearray(Path(path).read_bytes())
    if at is None:
        with zipfile.ZipFile(path) as archive:
            record = max((archive.read(name) for name in archive.namelist()), key=len)
        at = data.index(record) + len(record) // 2
    data[at] ^= 1
    Path(path).write_bytes(data)


def damaged(state: Any, rng: random.Random) -> tuple[str, Any]:
    """What was damaged, and a copy of ``state`` with that damage. Undamaged tensors are shared."""
    top = [copied(state)]
    return _damage(top, rng), top[0]


def copied(state: Any) -> Any:
    """``state`` with containers of its own."""
    if isinstance(state, dict):
        return type(state)((key, copied(value)) for key, value in state.items())
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else state


def garbage(rng: random.Random) -> Any:
    """A value that does not belong in a state."""
    return rng.choice(_GARBAGE)()


def of_tensor(tensor: Tensor, rng: random.Random) -> Tensor:
    """Another tensor made of one: of another shape, dtype, layout or content."""
    return rng.choice(_OF_TENSOR)(tensor.detach())


def deep(depth: int) -> list[Any]:
    """A list nested ``depth`` times."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cycle() -> list[Any]:
    """A list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value


def _damage(top: list[Any], rng: random.Random) -> str:
    slots = [((), (top, 0)), *_slots(top[0], ())]
    path, (holder, key) = rng.choice(slots)
    value = holder[key]
    name = "/".join(map(str, path))
    if isinstance(value, Tensor) and rng.random() < 0.6:
        holder[key] = of_tensor(value, rng)
        return f"{name} -> another tensor ({_kind(holder[key])})"
    choice = rng.random()
    if choice < 0.15 and holder is not top:
        del holder[key]
        return f"{name} removed"
    if choice < 0.3 and isinstance(value, (dict, list)):
        extra = garbage(rng)
        if isinstance(value, list):
            value.insert(rng.randint(0, len(value)), extra)
        else:
            value[_key(rng)] = extra
        return f"{name} has more: {_kind(extra)}"
    if choice < 0.4 and path:
        other, (its_holder, its_key) = rng.choice(slots[1:])
        if path[: len(other)] != other and other[: len(path)] != path:
            holder[key], its_holder[its_key] = its_holder[its_key], value
            return f"{name} exchanged with {'/'.join(map(str, other))}"
    holder[key] = garbage(rng)
    return f"{name} -> {_kind(holder[key])}"


def _slots(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Slot]]:
    inner: Any = (
        list(value.items())
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in inner:
        yield (*path, key), (value, key)
        yield from _slots(part, (*path, key))


def _key(rng: random.Random) -> Any:
    return rng.choice(("more", 0, 99, -1, None, 1.5, ("a", 1), b"x", "params", "x\x1b[2J"))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.layout} {tuple(value.shape) if not value.is_nested else 'nested'} {value.device}"
    return (
        type(value).__name__
        if isinstance(value, (list, dict, tuple, str, set))
        else f"{type(value).__name__} {_short(value)}"
    )


def _short(value: Any) -> str:
    return "of many digits" if isinstance(value, int) and abs(value) > 10**20 else repr(value)[:40]


_GARBAGE: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 7,
    lambda: 2**31,
    lambda: -(2**63) - 1,
    lambda: 10**4400,
    lambda: 1.5,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1j,
    lambda: "x",
    lambda: "x" * 10**6,
    lambda: "\x1b[2J[/x]",
    lambda: b"x",
    list,
    dict,
    tuple,
    set,
    object,
    OrderedDict,
    lambda: [[1]],
    lambda: [None, "x"],
    lambda: (1, 2, 3),
    lambda: {"a": {"b": [1]}},
    lambda: {0: 1, None: 2, "x": 3},
    lambda: {(1, (2, 3)): torch.ones(2)},
    lambda: range(3),
    lambda: torch.float16,
    lambda: torch.Size([2, 3]),
    lambda: deep(5000),
    cycle,
    lambda: torch.ones(()),
    lambda: torch.ones(3),
    lambda: torch.ones((), dtype=torch.int64),
    lambda: torch.tensor(math.nan),
    lambda: torch.ones((), device="meta"),
    lambda: torch.ones(3).to_sparse(),
    lambda: torch.ones(2, requires_grad=True) * 2,
)

_OF_TENSOR: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.flatten()[:-1],
    lambda t: t[None],
    lambda t: t.reshape(-1),
    lambda t: torch.zeros(0),
    lambda t: t.new_zeros(()),
    lambda t: t.new_ones(()).expand(t.shape),
    lambda t: t.new_ones(()).expand(1000, 1000, 1000),
    lambda t: t.double(),
    lambda t: t.to(torch.float8_e4m3fn) if t.is_floating_point() else t.bool(),
    lambda t: t.to(torch.int64),
    lambda t: t.bool(),
    lambda t: t.to(torch.complex64),
    lambda t: torch.full(t.shape, math.nan),
    lambda t: torch.full(t.shape, -math.inf),
    lambda t: torch.full(t.shape, -1.0),
    lambda t: torch.full(t.shape, 3e38),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t.float().reshape(-1, 1).to_sparse_csr(),
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    lambda t: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda t: t.clone().requires_grad_() * 1 if t.is_floating_point() else t,
)
