"""Tensors for pickles that are read as data: the bytes behind them, found in the archive and checked against it."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.checkpoint.reading.inert import InertReader
from halfpeak.checkpoint.reading.records import Symbol
from halfpeak.core.errors import CheckpointError

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
"""The first pickle of a file that torch wrote before 1.6, or with ``_use_new_zipfile_serialization=False``."""

_DTYPES: Final = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.storage._UntypedStorage": torch.uint8,
}

_BY_NAME: Final = {str(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, *_DTYPES.values())}


class Inert(NamedTuple):
    """What a pickle holds, and the classes and functions that it names."""

    tree: Any
    symbols: tuple[str, ...]


class _Storage(NamedTuple):
    dtype: torch.dtype
    data: Tensor  # u8[bytes]


def read_zip(file: BinaryIO) -> Inert:
    """The content of an archive of ``torch.save``, as data.

    Raises:
        CheckpointError: it is broken, packed, or declares more than it holds.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl"))
            root = name.removesuffix("data.pkl")
            _check_byteorder(
                _record(archive, f"{root}byteorder") if _has(archive, f"{root}byteorder") else b""
            )
            pickled = _record(archive, name)
            return _read(pickled, lambda key: bytearray(_record(archive, f"{root}data/{key}")))
    # zipfile raises NotImplementedError for a compression or version that it cannot read.
    except (zipfile.BadZipFile, StopIteration, NotImplementedError, RuntimeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the archive is broken: {error or 'it has no data.pkl'}") from None


def read_legacy(file: BinaryIO) -> Inert:
    """The content of a file that torch wrote before 1.6, as data: five pickles, then the bytes of each storage.

    Raises:
        CheckpointError: it is broken.
    """
    sizes: dict[str, int] = {}

    def note(identity: Any) -> _Storage:
        _, kind, key, _, _, *_ = identity
        sizes[key] = _dtype_of(kind).itemsize
        return _Storage(_dtype_of(kind), torch.empty(0, dtype=torch.uint8))

    reader = InertReader(note, _nothing)
    if reader.read(file) != MAGIC_NUMBER:
        raise CheckpointError("this is no file of torch.save")
    reader.read(file)
    reader.read(file)
    start = file.tell()
    reader.read(file)
    raw: dict[str, bytearray] = {}
    for key in reader.read(file):
        length = int.from_bytes(file.read(8), "little") * sizes.get(key, 1)
        raw[key] = bytearray(file.read(length))
        if len(raw[key]) != length:
            raise CheckpointError(f"storage {key!r} is cut off")
    file.seek(start)
    return _read(file, raw.__getitem__)


def read_bare(file: BinaryIO) -> Inert:
    """The content of a file of plain ``pickle.dump``, as data.

    Raises:
        CheckpointError: it is broken.
    """

    def refuse(key: str) -> bytearray:
        raise CheckpointError("a pickle without an archive names a storage")

    return _read(file, refuse)


def _nothing(*_: Any) -> None:
    return None


def _read(pickled: Any, load: Callable[[str], bytearray]) -> Inert:
    known: dict[str, Tensor] = {}

    def storage(identity: Any) -> _Storage:
        kind_of_id, kind, key, _, numel, *_ = identity
        if kind_of_id != "storage":
            raise CheckpointError(f"unknown persistent id {kind_of_id!r}")
        dtype = _dtype_of(kind)
        if key not in known:
            raw = load(key)
            known[key] = (
                torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            )
        if numel * dtype.itemsize > len(known[key]):
            raise CheckpointError(
                f"storage {key!r} declares more than the {len(known[key])} bytes that it has"
            )
        return _Storage(dtype, known[key])

    reader = InertReader(storage, _rebuild)
    tree = reader.read(pickled)
    return Inert(tree, tuple(reader.symbols))


def _rebuild(
    storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], dtype: Any
) -> Tensor:
    """A strided view of a storage, after a look at whether it stays inside."""
    kind = storage.dtype if dtype is None else _BY_NAME.get(getattr(dtype, "name", ""))
    numbers = (offset, *size, *stride)
    if kind is None or len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise CheckpointError("a tensor of the file has an impossible shape")
    held = len(storage.data) // kind.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 in size:
        return torch.empty(tuple(size), dtype=kind)
    if last >= held:
        raise CheckpointError(f"a tensor of the file reaches to element {last} of a storage of {held}")
    return storage.data[: held * kind.itemsize].view(kind).as_strided(tuple(size), tuple(stride), offset)


def _dtype_of(kind: Any) -> torch.dtype:
    dtype = _DTYPES.get(kind.name.replace("torch.cuda.", "torch.")) if isinstance(kind, Symbol) else None
    if dtype is None:
        raise CheckpointError("a storage of the file has no known type")
    return dtype


def _check_byteorder(record: bytes) -> None:
    if record and record.decode("ascii", "replace") != sys.byteorder:
        raise CheckpointError("the file was written with another byte order")


def _has(archive: zipfile.ZipFile, name: str) -> bool:
    return name in archive.NameToInfo


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    if not _has(archive, name):
        raise CheckpointError(f"the archive has no record {name!r}")
    entry = archive.getinfo(name)
    # torch packs nothing: a packed record may be a bomb.
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise CheckpointError(f"the record {name!r} is packed; torch.save packs nothing")
    return archive.read(entry)
