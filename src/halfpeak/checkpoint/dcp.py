"""Reading (as data, without executing anything) and writing of torch.distributed.checkpoint (DCP) folders."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.checkpoint import archives, trailer
from halfpeak.checkpoint.canonical import has_names, is_optimizer
from halfpeak.checkpoint.plain import MAX_DEPTH
from halfpeak.checkpoint.safe_unpickle import DTYPES, Record, SafeUnpickler, Symbol, is_plain_symbol
from halfpeak.core.errors import CheckpointError

METADATA: Final = ".metadata"
"""The file by which a DCP folder is recognised. Its pickle says in which file each part of a value is."""


def read_dcp(folder: Path) -> archives.Content:
    """The state that was given to ``dcp.save``, with whole tensors, and the classes that the folder names beside DCP's.

    torch's reader is not used, because it unpickles. DCP does not preserve empty dicts and tuples of tensors.

    Raises:
        CheckpointError: a file is missing or broken, or the folder declares parts that it does not hold.
    """
    with trailer.open_regular(folder / METADATA) as file:
        reader = SafeUnpickler(file, os.fstat(file.fileno()).st_size)
        known = _fields(reader.read_value(), "Metadata")
    symbols = dict.fromkeys(name for name in reader.symbols if not (is_plain_symbol(name) or name in _OWN))
    entries, places, paths = (
        known.get(key) for key in ("state_dict_metadata", "storage_data", "planner_data")
    )
    if type(entries) is not dict or type(places) is not dict:
        raise CheckpointError(f"the {METADATA} of the folder has no table of entries and files")
    parts: dict[str, list[tuple[Any, Any]]] = {}
    left: dict[str, int] = {}
    for index, place in places.items():
        at = _fields(index, "MetadataIndex")
        content = archives.read_zip(io.BytesIO(_slice(folder, _fields(place, "_StorageInfo"), left)))
        symbols.update(dict.fromkeys(content.symbols))
        parts.setdefault(_text(at.get("fqn")), []).append((at.get("offset"), content.tree))
    paths = paths if type(paths) is dict else {}
    tree = _Branch()
    # The paths keep the order of the saved state; the entries are ordered by rank.
    for name in dict.fromkeys([*(name for name in paths if name in entries), *entries]):
        value = _whole(_text(name), entries[name], parts.get(name, []))
        _put(tree, paths.get(name, (name,)), value)
    return archives.Content(_built(tree), tuple(symbols))


def write_dcp(folder: Path, state: dict[str, Any]) -> None:
    """Write a folder that ``dcp.load`` reads on any number of ranks.

    Raises:
        OSError: the folder cannot be written.
    """
    import torch.distributed.checkpoint as dcp  # imported here, because the import is slow and only writing needs it

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def _fields(record: Any, name: str) -> Mapping[Any, Any]:
    """The attributes of a record that stands for an object of the DCP class ``name``."""
    if type(record) is not Record or record.name.rpartition(".")[2] != name or type(record.state) is not dict:
        raise CheckpointError(f"the {METADATA} of the folder has something else where a {name} belongs")
    return record.state


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointError(f"the {METADATA} of the folder has a name that is not a string")
    return value


def _slice(folder: Path, place: Mapping[Any, Any], left: dict[str, int]) -> bytes:
    """The bytes of one part. All parts in a file together may not declare more bytes than the file has."""
    name, offset, length = _text(place.get("relative_path")), place.get("offset"), place.get("length")
    if name != Path(name).name or type(offset) is not int or type(length) is not int:
        raise CheckpointError(f"a part of the folder has an impossible file name or offset: {name!r:.200}")
    if place.get("transform_descriptors"):
        raise CheckpointError("the parts of the folder are compressed; save them without extensions")
    with trailer.open_regular(folder / name) as file:
        left.setdefault(name, os.fstat(file.fileno()).st_size)
        left[name] -= max(length, 0)
        if offset < 0 or length < 0 or left[name] < 0:
            raise CheckpointError(f"the parts in {name!r:.200} reach beyond its end, or overlap")
        file.seek(offset)
        found = file.read(length)
    if len(found) < length:
        raise CheckpointError(f"{name!r:.200} is cut off")
    return found


def _whole(name: str, entry: Any, parts: Sequence[tuple[Any, Any]]) -> Any:
    """One value; a tensor is assembled from its parts."""
    if type(entry) is Record and entry.name.endswith(".BytesStorageMetadata") and len(parts) == 1:
        return parts[0][1]
    known = _fields(entry, "TensorStorageMetadata")
    size = _numbers(known.get("size"))
    if prod(size) == 0 and not parts:
        return torch.empty(size, dtype=_dtype(known.get("properties")))
    tensors = [tensor for _, tensor in parts]
    if not all(type(tensor) is Tensor and tensor.dtype == tensors[0].dtype for tensor in tensors):
        raise CheckpointError(
            f"tensor {name!r:.200} has a part that is not a tensor, or parts of different dtypes"
        )
    if sum(tensor.numel() for tensor in tensors) != prod(size) or not tensors:
        raise CheckpointError(
            f"tensor {name!r:.200} of shape {size} is not whole: its parts have another number of elements"
        )
    if len(parts) == 1 and tuple(tensors[0].shape) == size:
        return tensors[0]
    whole, seen = torch.empty(size, dtype=tensors[0].dtype), torch.zeros(size, dtype=torch.bool)
    for offset, tensor in parts:
        starts = _numbers(offset)
        ends = [start + n for start, n in zip(starts, tensor.shape, strict=False)]
        fits = len(starts) == tensor.dim() == len(size) and all(map(int.__le__, ends, size))
        where = tuple(map(slice, starts, ends))
        if not fits or bool(seen[where].any()):
            raise CheckpointError(f"tensor {name!r:.200} has parts that overlap, or lie outside of it")
        whole[where], seen[where] = tensor, True
    return whole


def _numbers(value: Any) -> tuple[int, ...]:
    """A tuple that was checked to be a shape or an offset."""
    if (
        type(value) is not tuple
        or len(value) > 64
        or any(type(n) is not int or not 0 <= n < 2**63 for n in value)
    ):
        raise CheckpointError(f"the {METADATA} of the folder has an impossible shape")
    return value


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if type(properties) is Record else None
    named = state[0] if type(state) is tuple and state else None
    dtype = DTYPES.get(named.name) if type(named) is Symbol else None
    if dtype is None:
        raise CheckpointError("a tensor of the folder has no known dtype")
    return dtype


class _Branch(dict[Any, Any]):
    """A dict or list under construction, by keys or indices; its own type, because a leaf value may be a dict."""


def _put(branch: _Branch, path: Any, value: Any) -> None:
    if type(path) is not tuple or not 0 < len(path) <= MAX_DEPTH or not {*map(type, path)} <= {str, int}:
        raise CheckpointError(f"the {METADATA} of the folder has an impossible path")
    for key in path[:-1]:
        branch = branch.setdefault(key, _Branch())
        if type(branch) is not _Branch:
            raise CheckpointError(
                f"the {METADATA} of the folder has a path that leads through a value which is no dict or list"
            )
    if path[-1] in branch:
        raise CheckpointError(f"the {METADATA} of the folder has two values at one path")
    branch[path[-1]] = value


def _built(branch: Any) -> Any:
    """The dict or list that a branch stands for."""
    if type(branch) is not _Branch:
        return branch
    if any(type(key) is int for key in branch):
        if branch.keys() != set(range(len(branch))):
            raise CheckpointError(f"the {METADATA} of the folder has a list with gaps")
        return [_built(branch[i]) for i in range(len(branch))]
    built = {key: _built(value) for key, value in branch.items()}
    for marker, names in _NUMBERED.items():
        for name in names if marker in built else ():
            rows = built.setdefault(name, {})
            if type(rows) is dict and not (is_optimizer(built) and has_names(built)):
                built[name] = {_as_number(key): row for key, row in rows.items()}
    return built


def _as_number(key: Any) -> Any:
    """The key as an int if it is a decimal number in text, as DCP writes int keys; else unchanged."""
    return int(key) if type(key) is str and _NUMBER.fullmatch(key) else key


_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")

_NUMBERED: Final[Mapping[str, tuple[str, ...]]] = {
    "param_groups": ("state",),
    "phase": ("true_sized", "scaled", "parked"),
    "lanes": ("losses",),
}
"""A key that identifies a dict, and the entries of this dict that have int keys. DCP turns int keys into text and omits
empty dicts."""

_OWN: Final = frozenset(
    {
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "Metadata",
                "BytesStorageMetadata",
                "TensorStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "pathlib.WindowsPath",
    }
)
"""Classes that every DCP folder names."""
