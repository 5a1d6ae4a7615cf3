"""What kind of file or folder a checkpoint is, whether it is whole, and what it holds; nothing in it is executed."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from halfpeak.checkpoint import archives, trailer
from halfpeak.checkpoint.dcp import METADATA, read_dcp
from halfpeak.checkpoint.file import StrPath, as_path, load, load_plain
from halfpeak.checkpoint.safe_unpickle import is_plain_symbol
from halfpeak.core.errors import CheckpointError

_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # its first pickle, a magic number
_HEAD: Final = 32
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
    target = as_path(path)
    return _open_folder(target) if target.is_dir() else _open_file(target)


def _open_file(path: Path) -> Opened:
    with trailer.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
        file.seek(max(0, size - trailer.SIZE))
        sealed = file.read(len(trailer.MAGIC)) == trailer.MAGIC
    opened = Opened(path=path, container="a file", size=size, unread="it is no checkpoint")
    if sealed:
        return _open_sealed(opened)
    if head.startswith(trailer.ZIP_START):
        return _open_zip(opened)
    if head[:1] == b"\x80" and _LEGACY in head:
        return _read(opened, "a torch file of the format before 1.6", archives.read_legacy)
    if archives.looks_like_safetensors(head, size):
        return _read_as_data(opened, "a safetensors file", archives.read_safetensors)
    if head[:1] == b"\x80":
        return _read(opened, "a bare pickle", archives.read_bare)
    return replace(opened, container=_name_foreign(path, head))


def _open_sealed(opened: Opened) -> Opened:
    opened = replace(opened, container="a halfpeak file", integrity="digest right", unread="")
    try:
        return replace(opened, tree=load(opened.path))
    except CheckpointError as error:
        damaged = "is damaged" in str(error)
        integrity = "damaged" if damaged else opened.integrity
        return replace(opened, integrity=integrity, damaged=damaged, unread=str(error))


def _open_zip(opened: Opened) -> Opened:
    container = "a torch zip file"
    try:
        with zipfile.ZipFile(opened.path) as archive:
            names = archive.namelist()
            broken = archive.testzip()
        found = "" if broken is None else f"the zip checksum of its record {broken!r:.200} is wrong"
    except archives.ZIP_ERRORS as error:
        found = str(error) or type(error).__name__
        names = []
    if found:
        return replace(opened, container=container, integrity="damaged", damaged=True, unread=found)
    parts = {name.rpartition("/")[2] for name in names}
    if "data.pkl" not in parts:
        return replace(opened, container="a zip file", unread="it has no data.pkl, as torch writes it")
    if "constants.pkl" in parts:
        return replace(opened, container="a TorchScript archive", unread="it holds a program, not a state")
    twice = len(names) - len(set(names))
    notes = (f"{twice} record names occur twice: readers differ in which one they take",) if twice else ()
    with trailer.open_regular(opened.path) as file:
        if not trailer.ends_with_archive(file):
            notes += ("bytes follow the archive: a damaged trailer of halfpeak, or something that was added",)
    opened = replace(opened, integrity="zip checksums right", notes=notes)
    return _read(opened, container, archives.read_zip)


def _read(opened: Opened, container: str, reader: Callable[[BinaryIO], archives.Content]) -> Opened:
    """Read what torch reads as plain data; where it refuses, what ``reader`` finds."""
    try:
        return replace(opened, container=container, tree=load_plain(opened.path), unread="")
    except CheckpointError as refusal:
        found = _read_as_data(opened, container, reader)
        return replace(found, unread=f"{refusal}; read as data, {found.unread}") if found.unread else found


def _read_as_data(opened: Opened, container: str, reader: Callable[[BinaryIO], archives.Content]) -> Opened:
    try:
        with trailer.open_regular(opened.path) as file:
            tree, symbols = reader(file)
    except CheckpointError as error:
        return replace(opened, container=container, unread=str(error))
    wanted = tuple(name for name in symbols if not is_plain_symbol(name))
    return replace(opened, container=container, tree=tree, symbols=wanted, unread="")


RUN_FILE: Final = "checkpoint.pt"
"""What stands for a folder of ``halfpeak train``."""


def _open_dcp(path: Path) -> Opened:
    size = sum(one.stat().st_size for one in path.iterdir() if one.is_file())
    opened = Opened(path=path, container="a folder of torch.distributed.checkpoint", size=size)
    try:
        tree, symbols = read_dcp(path)
    except CheckpointError as error:
        return replace(opened, integrity="damaged", damaged=True, unread=str(error))
    wanted = tuple(name for name in symbols if not is_plain_symbol(name))
    return replace(opened, integrity="zip checksums of all parts right", tree=tree, symbols=wanted)


def _open_folder(path: Path) -> Opened:
    if (path / METADATA).is_file():
        return _open_dcp(path)
    if (path / RUN_FILE).is_file():
        return _open_file(path / RUN_FILE)
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
