"""Reading of files as data: checksums and budget first, then torch's safe reader; nothing of a file is imported or run."""

from __future__ import annotations

import io
import mmap
import os
import re
import stat
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor

from halfpeak.checkpoint.scan import Scan, scan
from halfpeak.core.errors import CheckpointError, ConfigTypeError, HalfpeakError, MissingCheckpointError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import has_memory

StrPath = str | os.PathLike[str]

ZIP: Final = "a torch zip file"
_ZIP_START, _ZIP_END, _ZIP_END_SIZE = b"PK\x03\x04", b"PK\x05\x06", 22
_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch before 1.6: its magic number


class Content(NamedTuple):
    """What is in a file, the kind of file in words, and the classes and functions that loading it would import."""

    tree: Any
    container: str
    wants: tuple[str, ...] = ()


class Unknown:
    """Stands in a tree for an object whose class is not imported: its arguments and state are data.

    Attributes:
        name: the name of the class.
        args: what the class would be called with.
        state: what ``__setstate__`` or ``__dict__`` would get; None if there is nothing.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Unknown:
        """Like ``object.__new__``, which torch's reader calls with the arguments of the class."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def as_path(path: StrPath) -> Path:
    """Convert a path to ``Path``.

    Raises:
        ConfigTypeError: the value is not a path.
    """
    try:
        return Path(path)
    except TypeError:
        raise ConfigTypeError(f"path={short_repr(path)} must be a str or a Path") from None


@contextmanager
def open_regular(path: Path) -> Generator[BinaryIO]:
    """Open an existing regular file for reading.

    Raises:
        MissingCheckpointError: there is no such file.
        CheckpointError: the file is not readable, or not a regular file.
    """
    try:
        # Check before opening, because opening a pipe waits for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        kind = MissingCheckpointError if isinstance(error, FileNotFoundError) else CheckpointError
        raise kind(f"{str(path)!r} cannot be opened: {reason}") from error
    with file:
        yield file


def read_file(path: Path, *, map_location: Any = "cpu", as_data: bool = False) -> Content:
    """Read a file of ``torch.save``, also of torch before 1.6, or of safetensors.

    Args:
        map_location: as in ``torch.load``.
        as_data: whether an object of a class that torch does not know is read as :class:`Unknown`, as a dict or list with
            its items, or as a number if it is a NumPy scalar; if not, a file with such an object is refused.

    Raises:
        CheckpointError: the file is damaged, or torch's safe reader refuses it. The message has the path and the reason.
    """
    with open_regular(path) as file, refusing(path, "is not a file of plain data"):
        size, head = os.fstat(file.fileno()).st_size, file.read(32)
        file.seek(0)
        if head.startswith(_ZIP_START):
            kind, scans = ZIP, [scan(pickled) for pickled in check_zip(file, size)]
        elif _LEGACY in head:
            kind = "a torch file of the format before 1.6"
            scans = _scan_legacy(file)
        elif 2 <= int.from_bytes(head[:8], "little") <= size - 8 and head[8:9] == b"{":
            return Content(_read_safetensors(path), "a safetensors file")
        else:
            what = "empty" if not head else "a bare pickle" if head[:1] == b"\x80" else "no checkpoint"
            raise CheckpointError(f"it is {what}, and not of torch.save or safetensors", damaged=not head)
        filled = {name: kind for one in scans for name, kind in one.filled.items()}
        wants = sorted(_unsafe_names({name for one in scans for name in one.names}))
        if wants and not as_data:
            raise CheckpointError(f"loading it would import {', '.join(wants)[:300]}")
        file.seek(0)
        with torch.serialization.safe_globals([(_stand_in(name, filled), name) for name in wants]):
            tree = torch.load(file, map_location=map_location, weights_only=True, mmap=False)
        _check_tree(tree, size)
        return Content(tree, kind, tuple(name for name in wants if name not in _OF_DATA))


@contextmanager
def refusing(path: Path, refusal: str) -> Generator[None]:
    """Turn every exception of the block but halfpeak's own into a CheckpointError with the file and the cause."""
    try:
        yield
    except CheckpointError as error:
        said = "is damaged" if error.damaged else refusal
        raise CheckpointError(f"{path} {said}: {error}", damaged=error.damaged) from error.__cause__
    except HalfpeakError:
        raise
    except Exception as error:
        # Of torch's message, the cause without the advice to set weights_only=False.
        lines = [line.rpartition("WeightsUnpickler error: ")[2] for line in str(error).splitlines()]
        told = [line for line in lines if line.strip() and not re.search("weights_only|two options", line)]
        said = "".join(told[:1]).partition(". Please use")[0][:300]
        raise CheckpointError(f"{path} {refusal}: {type(error).__name__}: {said}") from error


def check_zip(file: BinaryIO, size: int) -> list[bytes]:
    """Check every checksum of an archive of ``torch.save``; return the pickles in it.

    Raises:
        CheckpointError: the archive is damaged, or it is none of ``torch.save``.
    """
    if not _ends_as_zip(file, size):
        raise CheckpointError("it is cut off, or bytes follow its end", damaged=True)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry.filename.lower() for entry in entries]  # torch finds a record whatever its case
            told = [(entry.compress_type, entry.file_size, entry.header_offset) for entry in entries]
            kinds, sizes, starts = zip(*told, strict=True)
            if any(kinds) or sum(sizes) > size or min(starts) or len(set(names)) < len(names):
                raise CheckpointError(
                    "its records are compressed, overlap, occur twice, or bytes precede them"
                )
            if broken := archive.testzip():
                raise CheckpointError(f"the checksum of its record {broken!r:.200} is wrong")
            pickles = [archive.read(one) for one in entries if one.filename.lower().endswith("data.pkl")]
    except Exception as error:
        said = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{said}{str(error)[:300]}", damaged=True) from error
    if not pickles or any(name.endswith("constants.pkl") for name in names):
        raise CheckpointError("it is a zip file of something else than torch.save")
    return pickles


def looks_complete(path: Path) -> bool:
    """Whether a file ends as an archive of ``torch.save`` does; checksums, which take longer, are not checked."""
    try:
        with open_regular(path) as file:
            return _ends_as_zip(file, os.fstat(file.fileno()).st_size)
    except (CheckpointError, OSError):
        return False


def _ends_as_zip(file: BinaryIO, size: int) -> bool:
    file.seek(max(0, size - _ZIP_END_SIZE))
    end = file.read()
    # Without a comment, whose length would be in the last two bytes.
    return len(end) == _ZIP_END_SIZE and end.startswith(_ZIP_END) and end.endswith(b"\0\0")


def _scan_legacy(file: BinaryIO) -> list[Scan]:
    """Scan the five pickles of a file of torch before 1.6."""
    scans = list[Scan]()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for _ in range(5):
            scans.append(scan(data, scans[-1].end if scans else 0))
    return scans


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise CheckpointError(
            "it needs safetensors, which is not installed", "pip install safetensors"
        ) from None
    return load_file(path)


def _unsafe_names(opcodes: Iterable[bytes]) -> Sequence[str]:
    """Of the globals that some opcodes name, those that torch does not know."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"".join([*opcodes, b"."]))
        file.writestr("archive/version", "3\n")
    archive.seek(0)
    return torch.serialization.get_unsafe_globals_in_checkpoint(archive)


def _stand_in(name: str, filled: Mapping[str, type]) -> Any:
    """What torch's reader calls in place of a class or function that it does not know."""
    if name.endswith(".multiarray.scalar"):
        return _number
    if name in filled:
        return _List if filled[name] is list else _Dict
    return type(name, (Unknown,), {"name": name})


class _Dict:
    """A class whose objects are dicts: torch adds items to containers of its own types only."""

    def __new__(cls, *args: Any) -> Any:
        return OrderedDict[Any, Any]()


class _List:
    """A class whose objects are lists, see :class:`_Dict`."""

    def __new__(cls, *args: Any) -> Any:
        return list[Any]()


def _number(dtype: Any, data: Any = None) -> Any:
    """A NumPy scalar as a Python number."""
    code = _NUMBERS.get(dtype.args[0]) if isinstance(dtype, Unknown) and dtype.args else None
    return None if code is None else struct.unpack(code, data)[0]


_NUMBERS: Final = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}

_OF_DATA: Final = {
    *(f"builtins.{name}" for name in ("dict", "list", "int", "float")),
    *(
        "collections.defaultdict",
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
    ),
}
"""Names of what is read as plain data."""


def _check_tree(tree: Any, size: int) -> None:
    """Refuse tensors that together are larger than their file; remove attributes, which may shadow methods."""
    sizes: dict[int, int] = {}
    for one in walk(tree):
        if type(one) in (Tensor, torch.nn.Parameter, OrderedDict):
            kept = vars(one).get("_metadata")
            vars(one).clear()
            vars(one).update({"_metadata": kept} if isinstance(kept, dict) and isinstance(one, dict) else {})
        if isinstance(one, Tensor) and has_memory(one):
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    if sum(sizes.values()) > size:
        raise CheckpointError("its tensors are larger than the file")


def walk(tree: Any) -> Generator[Any]:
    """Every value in a tree, once: a file may hold values that contain themselves."""
    seen: set[int] = set()
    left = [tree]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            if isinstance(one, dict):
                left += dict.values(one)
            elif isinstance(one, (list, tuple, set)):
                left += one
            elif isinstance(one, Unknown):
                left += [one.args, one.state]


def has_values(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor whose numbers can be compared: with memory for each, of at most 64 dimensions."""
    is_plain = type(value) in (Tensor, torch.nn.Parameter) and has_memory(value) and value.dim() <= 64
    return is_plain and value.nbytes <= value.untyped_storage().nbytes()
