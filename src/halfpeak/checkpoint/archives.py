"""Readers for the files of torch.save, pickle.dump and safetensors; nothing in a file is executed."""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import prod
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.checkpoint import trailer
from halfpeak.checkpoint.safe_unpickle import SafeUnpickler, is_plain_symbol
from halfpeak.core.errors import CheckpointError

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
"""The first pickle in a file of torch before 1.6, or of ``_use_new_zipfile_serialization=False``."""

MAX_HEADER: Final = 100_000_000

_ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,  # a compression or version that zipfile cannot read
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    MemoryError,
)
"""The exceptions that zipfile raises for broken archives."""

_SAFETENSORS: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Content(NamedTuple):
    """The content of a file, and the classes and functions that its pickle names, except for those of plain data."""

    tree: Any
    symbols: tuple[str, ...]


def read_zip(file: BinaryIO) -> Content:
    """Read an archive of ``torch.save`` as data.

    Raises:
        CheckpointError: the archive is broken or compressed, or declares more bytes than it holds.
    """
    with _opened(file) as archive:
        name = next((n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")), "data.pkl")
        root = name.removesuffix("data.pkl")
        byteorder = f"{root}byteorder"
        if byteorder in archive.NameToInfo:
            order = _record(archive, byteorder).decode("ascii", "replace")
            if order and order != sys.byteorder:
                raise CheckpointError(
                    f"the file has the byte order {order!r:.20}, and this machine {sys.byteorder!r}"
                )
        pickled = _record(archive, name)
        return _read(
            io.BytesIO(pickled), len(pickled), lambda key: bytearray(_record(archive, f"{root}data/{key}"))
        )


def verified_names(file: BinaryIO) -> list[str]:
    """Verify every checksum of an archive; return the names of its records.

    Raises:
        CheckpointError: a checksum is wrong, or the archive is broken.
    """
    with _opened(file) as archive:
        broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(f"the zip checksum of its record {broken!r:.200} is wrong")
        return archive.namelist()


@contextmanager
def _opened(file: BinaryIO) -> Generator[zipfile.ZipFile]:
    """Open an archive, and turn zipfile's exceptions for a broken one into CheckpointError."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except CheckpointError:
        raise
    except _ZIP_ERRORS as error:
        raise CheckpointError(f"the archive is broken: {error}") from None


def read_legacy(file: BinaryIO) -> Content:
    """Read a file of torch before 1.6 as data: five pickles, then the bytes of each storage.

    Raises:
        CheckpointError: the file is broken.
    """
    start, keys, item_sizes = _scan_legacy(file)
    raw: dict[str, bytearray] = {}
    for key in keys:
        length = int.from_bytes(file.read(8), "little") * item_sizes.get(key, 1)
        if length > _left(file):
            raise CheckpointError(f"storage {key!r:.100} is cut off")
        raw[key] = bytearray(file.read(length))
    file.seek(start)
    return _read(file, _left(file), raw.__getitem__)


def read_bare(file: BinaryIO) -> Content:
    """Read a file of plain ``pickle.dump`` as data.

    Raises:
        CheckpointError: the file is broken.
    """

    def refuse(key: str) -> bytearray:
        raise CheckpointError("the plain pickle refers to tensor data that it does not contain")

    return _read(file, _left(file), refuse)


def check_pickles(file: BinaryIO) -> None:
    """Check the pickles of a file of ``torch.save`` against our limits, without reading tensors; rewind the file.

    Call this before ``torch.load(weights_only=True)``, which runs no code but has no limits: a key of nested tuples
    ends its process. ``torch.load`` itself finds every other fault.

    Raises:
        CheckpointError: a pickle is broken, or exceeds a limit of :mod:`~halfpeak.checkpoint.safe_unpickle`.
    """
    file.seek(0)
    if file.read(len(trailer.ZIP_START)) == trailer.ZIP_START:
        with _opened(file) as archive:
            # All entries: if a name occurs twice, readers differ in which record they use.
            for entry in archive.infolist():
                if entry.filename.rpartition("/")[2] == "data.pkl":
                    if entry.file_size > 64 * entry.compress_size + 2**20:
                        raise CheckpointError(
                            f"the record {entry.filename!r:.200} expands to more than 64 times its compressed size, "
                            "and is refused as a possible decompression bomb"
                        )
                    pickled = archive.read(entry)
                    SafeUnpickler(io.BytesIO(pickled), len(pickled)).read_value()
    else:
        file.seek(0)
        _scan_legacy(file)
    file.seek(0)


def read_safetensors(file: BinaryIO) -> Content:
    """Read the tensors of a safetensors file by name: a JSON header has their offsets, and the bytes follow.

    Raises:
        CheckpointError: the header is broken, or declares bytes that the file does not hold.
    """
    length = int.from_bytes(file.read(8), "little")
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files can be read on little-endian machines only")
    if length > MAX_HEADER:
        raise CheckpointError(f"the safetensors header has {length} bytes; at most {MAX_HEADER} are read")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise CheckpointError("the safetensors header is not valid JSON") from None
    data = bytearray(file.read())
    entries = header.items() if isinstance(header, dict) else ()
    tensors: dict[str, Tensor] = {}
    left = len(data)
    for name, entry in entries:
        if name != "__metadata__":
            tensors[name] = _entry(name, entry, data)
            left -= tensors[name].nbytes
            if left < 0:
                raise CheckpointError("the safetensors entries overlap")
    return Content(tensors, ())


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Whether a file of ``size`` bytes that begins with ``head`` (9 bytes) may be a safetensors file."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8


def _scan_legacy(file: BinaryIO) -> tuple[int, list[str], dict[str, int]]:
    """The offset of the pickle with the content, the keys of the storages, and the bytes per element of each."""
    reader = SafeUnpickler(file, _left(file))
    if reader.read_value() != MAGIC_NUMBER:
        raise CheckpointError("the file was not written by torch.save")
    reader.read_value()
    reader.read_value()
    start = file.tell()
    reader.read_value()
    keys = reader.read_value()
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointError("the file has no list of its storages")
    return start, keys, reader.item_sizes


def _read(file: BinaryIO, size: int, read_storage: Callable[[str], bytearray]) -> Content:
    reader = SafeUnpickler(file, size, read_storage)
    tree = reader.read_value()
    return Content(tree, tuple(name for name in reader.symbols if not is_plain_symbol(name)))


def _left(file: BinaryIO) -> int:
    here = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(here)
    return end - here


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    if name not in archive.NameToInfo:
        raise CheckpointError(f"the archive has no record {name!r:.200}")
    entry = archive.getinfo(name)
    # torch never compresses: a compressed record may be a decompression bomb.
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise CheckpointError(f"the record {name!r:.200} is compressed, which torch.save never does")
    return archive.read(entry)


def _entry(name: str, entry: Any, data: bytearray) -> Tensor:
    try:
        dtype, shape, (begin, end) = _SAFETENSORS[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"the safetensors entry {name!r:.200} is broken, or of an unknown dtype"
        ) from None
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise CheckpointError(f"the safetensors entry {name!r:.200} has an impossible shape or offset")
    if end - begin != prod(shape) * dtype.itemsize or end > len(data):
        raise CheckpointError(
            f"the safetensors entry {name!r:.200} has offsets that do not fit its shape and dtype, or the file"
        )
    # Copy the bytes, because the offset of a tensor may not be aligned to its dtype.
    raw = data[begin:end]
    try:
        return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"the safetensors entry {name!r:.200} has an impossible shape or offset"
        ) from None
