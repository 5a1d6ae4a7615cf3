"""Opens a checkpoint of any kind: detects the kind of file or folder, checks for damage and reads it as data."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from halfpeak.checkpoint import archives, trailer
from halfpeak.checkpoint.dcp import METADATA, read_dcp
from halfpeak.checkpoint.file import StrPath, as_path, load, load_plain
from halfpeak.core.errors import CheckpointError

_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # archives.MAGIC_NUMBER, pickled
_HEAD: Final = 32
_FOREIGN: Final = {b"\x89HDF": "an HDF5 file", b"GGUF": "a GGUF file", b"\x93NUMPY": "a NumPy array"}
_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".pkl", ".ckpt", ".safetensors"})


RUN_FILE: Final = "checkpoint.pt"
"""The checkpoint in a folder of ``halfpeak train``; opening the folder opens this file."""


class Folder(dict[str, Any]):
    """The contents of the files in a folder, by file name."""


@dataclass(kw_only=True)
class Opened:
    """An opened checkpoint, or the reason why it cannot be read.

    Attributes:
        container: the kind of file, in words.
        size: bytes.
        integrity: which checksums are right or wrong, in words.
        tree: the content; for a folder of files, a :class:`Folder`. Objects that are not plain data are records.
        symbols: classes and functions that loading the file would import; empty for plain data.
        unread: why there is no ``tree``, or which files of a folder are damaged; else empty.
        left_out: the other files of a folder that cannot be read: the reasons by name.
        notes: oddities of the file itself.
    """

    path: Path
    container: str
    size: int
    integrity: str = "no checksum"
    tree: Any = None
    symbols: tuple[str, ...] = ()
    unread: str = ""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()

    @property
    def damaged(self) -> bool:
        """Whether a check found damage."""
        return self.integrity.startswith("damaged")


def open_any(path: StrPath) -> Opened:
    """Open a checkpoint of any kind, as data.

    A file that ``torch.load(weights_only=True)`` refuses is read by
    :class:`~halfpeak.checkpoint.safe_unpickle.SafeUnpickler`, which cannot import or call anything.

    Raises:
        CheckpointError: there is no such file, or it cannot be opened.
    """
    target = as_path(path)
    try:
        if (target / METADATA).is_file():
            return _open_dcp(target)
        if (target / RUN_FILE).is_file():
            return _open_file(target / RUN_FILE)
        return _open_folder(target) if target.is_dir() else _open_file(target)
    except OSError as error:
        raise CheckpointError(f"{str(target)!r} cannot be opened: {error.strerror}") from error


def _open_file(path: Path) -> Opened:
    with trailer.open_regular(path) as file:
        opened = Opened(path=path, container="a file", size=os.fstat(file.fileno()).st_size)
        try:
            _read(opened, file)
        except CheckpointError as error:
            opened.unread = str(error)
    return opened


def _read(opened: Opened, file: BinaryIO) -> None:
    """Detect the kind of a file, and read it."""
    head = file.read(_HEAD)
    file.seek(max(0, opened.size - trailer.SIZE))
    if file.read(len(trailer.MAGIC)) == trailer.MAGIC:
        _read_sealed(opened)
    elif head.startswith(trailer.ZIP_START):
        _read_zip(opened, file)
    elif head[:1] == b"\x80" and _LEGACY in head:
        opened.container = "a torch file of the format before 1.6"
        _read_pickled(opened, file, archives.read_legacy)
    elif archives.looks_like_safetensors(head, opened.size):
        opened.container = "a safetensors file"
        file.seek(0)
        opened.tree, _ = archives.read_safetensors(file)
    elif head[:1] == b"\x80":
        opened.container = "a bare pickle"
        _read_pickled(opened, file, archives.read_bare)
    else:
        opened.container = _name_foreign(file, head)
        raise CheckpointError("it is not a checkpoint")


def _read_sealed(opened: Opened) -> None:
    opened.container, opened.integrity = "a halfpeak file", "digest right"
    try:
        opened.tree = load(opened.path)
    except CheckpointError as error:
        if error.damaged:
            opened.integrity = "damaged"
        raise


def _read_zip(opened: Opened, file: BinaryIO) -> None:
    opened.container, opened.integrity = "a torch zip file", "damaged"
    names = archives.verified_names(file)
    opened.integrity = "zip checksums right"
    parts = {name.rpartition("/")[2] for name in names}
    if "data.pkl" not in parts:
        opened.container = "a zip file"
        raise CheckpointError("it has no data.pkl, which every file of torch.save has")
    if "constants.pkl" in parts:
        opened.container = "a TorchScript archive"
        raise CheckpointError("it holds a program, not a checkpoint")
    if twice := len(names) - len(set(names)):
        opened.notes = (f"{twice} record names occur twice: readers differ in which one they take",)
    if not trailer.ends_with_archive(file):
        opened.notes += (
            "bytes follow the archive: a damaged trailer of halfpeak, or something that was added",
        )
    _read_pickled(opened, file, archives.read_zip)


def _read_pickled(opened: Opened, file: BinaryIO, read: Callable[[BinaryIO], archives.Content]) -> None:
    """Read a file with ``torch.load(weights_only=True)``; if torch refuses it, with ``read``."""
    try:
        opened.tree = load_plain(opened.path)
    except CheckpointError as refusal:
        file.seek(0)
        try:
            opened.tree, opened.symbols = read(file)
        except CheckpointError as error:
            raise CheckpointError(f"{refusal}; nor can it be read as data: {error}") from None


def _open_dcp(path: Path) -> Opened:
    size = sum(one.stat().st_size for one in path.iterdir() if one.is_file())
    opened = Opened(path=path, container="a folder of torch.distributed.checkpoint", size=size)
    try:
        opened.tree, opened.symbols = read_dcp(path)
        opened.integrity = "zip checksums of all parts right"
    except CheckpointError as error:
        opened.integrity, opened.unread = "damaged", str(error)
    return opened


def _open_folder(path: Path) -> Opened:
    files = sorted(one for one in path.iterdir() if one.is_file() and one.suffix in _SUFFIXES)
    opened = [_open_file(one) for one in files]
    broken = [one for one in opened if one.damaged]
    unread = "; ".join(f"{one.path.name}: {one.unread}" for one in broken)
    integrity = f"{len(files)} files, none known to be damaged"
    if broken:
        integrity = f"damaged: {broken[0].path.name}"
    elif not files:
        unread, integrity = f"no file in it ends in {', '.join(sorted(_SUFFIXES))}", "no checksum"
    return Opened(
        path=path,
        container="a folder",
        size=sum(one.size for one in opened),
        integrity=integrity,
        tree=Folder({one.path.name: one.tree for one in opened if not one.unread}),
        symbols=tuple(dict.fromkeys(symbol for one in opened for symbol in one.symbols)),
        unread=unread,
        left_out={one.path.name: one.unread for one in opened if one.unread and not one.damaged},
        notes=tuple(f"{one.path.name}: {note}" for one in opened for note in one.notes),
    )


def _name_foreign(file: BinaryIO, head: bytes) -> str:
    if not head:
        return "an empty file"
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            return name
    file.seek(257)
    if file.read(5) == b"ustar":
        return "a tar archive, as torch before 0.1.11 wrote them"
    return "a file of an unknown kind"
