"""What kind of file or folder a checkpoint is, whether it is whole, and what it holds; nothing in it is executed."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from halfpeak.checkpoint import archives, trailer
from halfpeak.checkpoint.file import StrPath, load, load_plain
from halfpeak.checkpoint.safe_unpickle import is_plain_symbol
from halfpeak.core.errors import CheckpointError, ConfigTypeError

_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # its first pickle, a magic number
_HEAD: Final = 32
_ZIP_END_RECORD: Final = b"PK\x05\x06"
_ZIP_END_REST: Final = 18
_FOREIGN: Final = {b"\x89HDF": "an HDF5 file", b"GGUF": "a GGUF file", b"\x93NUMPY": "a NumPy array"}
_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".pkl", ".ckpt", ".safetensors"})


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What was found at a path.

    Attributes:
        container: the kind of file, in words.
        size: bytes.
        integrity: what is known about damage, in words.
        damaged: whether it is known to be damaged; then nothing was read.
        tree: the content; for a folder, a dict by file name. Objects of classes are records in it.
        symbols: classes and functions that the file wants, beyond plain data; empty for plain data.
        unread: why there is no ``tree``, or nothing.
        notes: what is odd about the file itself.
    """

    path: Path
    container: str
    size: int
    integrity: str = "no checksum"
    damaged: bool = False
    tree: Any = None
    symbols: tuple[str, ...] = ()
    unread: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """Whether this is a folder of files."""
        return self.container == FOLDER


FOLDER: Final = "a folder"


def open_any(path: StrPath) -> Opened:
    """Open a checkpoint of any kind, as data.

    What ``torch.load(weights_only=True)`` takes is read by it. What it refuses is read by
    :class:`~halfpeak.checkpoint.safe_unpickle.SafeUnpickler`, which knows no way to import or call anything.

    Raises:
        CheckpointError: there is no such file, or it cannot be opened.
    """
    try:
        target = Path(path)
    except TypeError:
        raise ConfigTypeError(f"path={path!r} must be a str or a Path") from None
    return _open_folder(target) if target.is_dir() else _open_file(target)


def _open_file(path: Path) -> Opened:
    with trailer.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
        file.seek(max(0, size - trailer.SIZE))
        sealed = file.read(len(trailer.MAGIC)) == trailer.MAGIC
    if sealed:
        return _open_sealed(path, size)
    if head.startswith(archives.ZIP_START):
        return _open_zip(path, size)
    if head[:1] == b"\x80" and _LEGACY in head:
        return _read(path, size, "a torch file of the format before 1.6", archives.read_legacy)
    if archives.looks_like_safetensors(head, size):
        with trailer.open_regular(path) as file:
            try:
                tree = archives.read_safetensors(file)
            except CheckpointError as error:
                return Opened(path=path, container="a safetensors file", size=size, unread=str(error))
        return Opened(path=path, container="a safetensors file", size=size, tree=tree)
    if head[:1] == b"\x80":
        return _read(path, size, "a bare pickle", archives.read_bare)
    return Opened(path=path, container=_name_foreign(path, head), size=size, unread="it is no checkpoint")


def _open_sealed(path: Path, size: int) -> Opened:
    container = "a halfpeak file"
    try:
        tree = load(path)
    except CheckpointError as error:
        damaged = "is damaged" in str(error)
        integrity = "damaged" if damaged else "digest right"
        return Opened(
            path=path, container=container, size=size, integrity=integrity, damaged=damaged, unread=str(error)
        )
    return Opened(path=path, container=container, size=size, integrity="digest right", tree=tree)


def _open_zip(path: Path, size: int) -> Opened:
    container = "a torch zip file"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            broken = archive.testzip()
        found = "" if broken is None else f"the zip checksum of its record {broken!r:.200} is wrong"
    except archives.ZIP_ERRORS as error:
        found = str(error) or type(error).__name__
        names = []
    if found:
        return Opened(
            path=path, container=container, size=size, integrity="damaged", damaged=True, unread=found
        )
    parts = {name.rpartition("/")[2] for name in names}
    if "data.pkl" not in parts:
        return Opened(
            path=path, container="a zip file", size=size, unread="it has no data.pkl, as torch writes it"
        )
    if "constants.pkl" in parts:
        return Opened(
            path=path, container="a TorchScript archive", size=size, unread="it holds a program, not a state"
        )
    twice = len(names) - len(set(names))
    notes = (f"{twice} record names occur twice: readers differ in which one they take",) if twice else ()
    if not _ends_with_archive(path):
        notes += ("bytes follow the archive: a damaged trailer of halfpeak, or something that was added",)
    return _read(path, size, container, archives.read_zip, integrity="zip checksums right", notes=notes)


def _read(
    path: Path, size: int, container: str, reader: Callable[[BinaryIO], archives.Content], **more: Any
) -> Opened:
    try:
        return Opened(path=path, container=container, size=size, tree=load_plain(path), **more)
    except CheckpointError as refusal:
        try:
            with trailer.open_regular(path) as file:
                tree, symbols = reader(file)
        except CheckpointError as error:
            reason = f"{refusal}; read as data, {error}"
            return Opened(path=path, container=container, size=size, unread=reason, **more)
    return Opened(
        path=path,
        container=container,
        size=size,
        tree=tree,
        symbols=tuple(name for name in symbols if not is_plain_symbol(name)),
        **more,
    )


def _open_folder(path: Path) -> Opened:
    files = sorted(one for one in path.iterdir() if one.is_file() and one.suffix in _SUFFIXES)
    if not files:
        return Opened(path=path, container=FOLDER, size=0, unread="no file in it is a checkpoint")
    opened = [_open_file(one) for one in files]
    broken = [one for one in opened if one.damaged]
    wanted = dict.fromkeys(symbol for one in opened for symbol in one.symbols)
    return Opened(
        path=path,
        container=FOLDER,
        size=sum(one.size for one in opened),
        integrity=f"damaged: {broken[0].path.name}"
        if broken
        else f"{len(files)} files, none known to be damaged",
        damaged=bool(broken),
        tree={one.path.name: one.tree for one in opened if not one.unread},
        symbols=tuple(wanted),
        unread="; ".join(one.unread for one in broken),
        notes=tuple(
            f"{one.path.name}: {note}" for one in opened for note in (*one.notes, one.unread) if note
        ),
    )


def _ends_with_archive(path: Path) -> bool:
    with trailer.open_regular(path) as file:
        file.seek(-len(_ZIP_END_RECORD) - _ZIP_END_REST, os.SEEK_END)
        return file.read(len(_ZIP_END_RECORD)) == _ZIP_END_RECORD


def _name_foreign(path: Path, head: bytes) -> str:
    if not head:
        return "an empty file"
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            return name
    with trailer.open_regular(path) as file:
        file.seek(257)
        if file.read(5) == b"ustar":
            return "a tar archive, as torch before 0.1.11 wrote them"
    return "a file of an unknown kind"
