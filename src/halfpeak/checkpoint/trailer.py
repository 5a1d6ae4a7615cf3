"""The file format of halfpeak: a ``torch.save`` archive followed by a trailer with its length and digest.

The trailer has 52 bytes (little-endian)::

    magic      8 bytes    b"halfpeak"
    version    u32        1
    length     u64        bytes before the trailer
    digest    32 bytes    SHA-256 of everything before it, the three fields above included

Zip readers search for an archive's directory from the end and ignore bytes after it, so ``torch.load(path,
weights_only=True)`` reads the file without halfpeak, too. The digest reveals damage and mix-ups; it is no protection
against an attacker who can write the file.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from halfpeak.core.errors import CheckpointError

MAGIC: Final = b"halfpeak"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIQ")
SIZE: Final = _HEAD.size + hashlib.sha256().digest_size

ZIP_START: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_SIZE: Final = 22


def write(file: BinaryIO, data: Any) -> None:
    """Write plain data and its trailer to an empty file, and sync the file to the disk.

    Raises:
        OSError: the system refused to write. For a tensor that torch cannot write, torch raises other exceptions.
    """
    sink: Any = _Digesting(file)
    torch.save(data, sink)
    if sink.error is not None:
        raise sink.error
    head = _HEAD.pack(MAGIC, VERSION, sink.length)
    sink.sha256.update(head)
    file.write(head + sink.sha256.digest())
    file.flush()
    os.fsync(file.fileno())


def open_regular(path: Path) -> io.BufferedReader:
    """Open an existing regular file for reading.

    Raises:
        CheckpointError: the file is missing, not readable, or not a regular file.
    """
    try:
        # Check before opening, because opening a pipe waits for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return open(path, "rb")
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} cannot be opened: {error}") from error


def open_verified(path: Path) -> io.BufferedReader:
    """Open a file and verify its trailer, length and digest. Nothing is unpickled; the file is at its start.

    Raises:
        CheckpointError: the file cannot be opened or a check fails. The message says which.
    """
    file = open_regular(path)
    try:
        _verify(file, path)
        file.seek(0)
    except OSError as error:
        file.close()
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except BaseException:
        file.close()
        raise
    return file


def ends_with_archive(file: BinaryIO) -> bool:
    """Whether a file ends like a zip archive without a comment, as torch writes it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _ZIP_END_SIZE))
    return file.read(len(_ZIP_END)) == _ZIP_END


def looks_complete(path: Path) -> bool:
    """Whether a file has a trailer with the right length; the digest, which takes longer, is not checked."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            magic, _, length = _HEAD.unpack(_read_trailer(file, size)[0])
    except (CheckpointError, OSError):
        return False
    return magic == MAGIC and length == size - SIZE


class _Digesting:
    """A writer that counts and digests the bytes that it forwards.

    The first exception is stored instead of raised, because torch's C++ writer would replace it by its own and lose a
    ``KeyboardInterrupt``.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.length = 0
        self.sha256 = hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
                self.sha256.update(data)
            except BaseException as error:
                self.error = error
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        pass


def _verify(file: io.BufferedReader, path: Path) -> None:
    size = file.seek(0, os.SEEK_END)
    head, digest = _read_trailer(file, size)
    magic, version, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise CheckpointError(f"{path} {_describe_foreign(file, size)}")
    if version != VERSION:
        raise CheckpointError(f"{path} has format version {version}; this halfpeak reads version {VERSION}")
    if length != size - SIZE:
        raise CheckpointError(
            f"{path} is damaged: it holds {size - SIZE} bytes of data, and {length} were written",
            damaged=True,
        )
    file.seek(0)
    # torch.load reads a file that is no zip archive as an older format, which save() never writes.
    is_zip = file.read(len(ZIP_START)) == ZIP_START
    file.seek(0)
    if _digest(file, length + _HEAD.size) != digest:
        raise CheckpointError(
            f"{path} is damaged: its bytes do not fit the digest that was written with them", damaged=True
        )
    if not is_zip:
        raise CheckpointError(f"{path} does not hold a torch zip archive")


def _digest(file: io.BufferedReader, length: int) -> bytes:
    sha256 = hashlib.sha256()
    while length > 0 and (chunk := file.read(min(length, 2**20))):
        sha256.update(chunk)
        length -= len(chunk)
    return sha256.digest()


def _read_trailer(file: io.BufferedReader, size: int) -> tuple[bytes, bytes]:
    file.seek(max(0, size - SIZE))
    trailer = file.read(SIZE).ljust(SIZE, b"\0")
    return trailer[: _HEAD.size], trailer[_HEAD.size :]


def _describe_foreign(file: io.BufferedReader, size: int) -> str:
    if size == 0:
        return "is damaged: it is empty"
    if ends_with_archive(file):
        return (
            "is foreign: a torch file without the trailer that halfpeak writes, so that damage in it goes unnoticed. "
            "Write load_plain(path) to read it, which is torch.load(path, weights_only=True)"
        )
    return "is damaged or foreign: it does not end with the trailer that halfpeak writes"
