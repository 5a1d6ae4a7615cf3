"""The safetensors format, read: a JSON header that says where each tensor lies, and the bytes."""

from __future__ import annotations

import json
import sys
from math import prod
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from halfpeak.core.errors import CheckpointError

MAX_HEADER: Final = 100_000_000

_DTYPES: Final = {
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


def looks_like(head: bytes, size: int) -> bool:
    """Whether a file of ``size`` bytes that begins with ``head`` (9 bytes) is one."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8


def read_safetensors(file: BinaryIO) -> dict[str, Tensor]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: the header is broken, or declares what the file does not hold.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER or sys.byteorder != "little":
        raise CheckpointError(f"a safetensors header of {length} bytes cannot be read here")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise CheckpointError("the safetensors header is no JSON") from None
    data = bytearray(file.read())
    entries = header.items() if isinstance(header, dict) else ()
    return {str(name): _tensor(name, entry, data) for name, entry in entries if name != "__metadata__"}


def _tensor(name: str, entry: Any, data: bytearray) -> Tensor:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        fits = end - begin == prod(shape) * dtype.itemsize and min((begin, *shape), default=0) >= 0
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"the safetensors entry {name!r} is broken, or of an unknown dtype") from None
    if not fits or end > len(data):
        raise CheckpointError(f"the safetensors entry {name!r} declares other bytes than it has")
    # Bytes are copied, because a tensor may begin where its dtype is not aligned.
    raw = data[begin:end]
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)
