"""Temporary files beside their target: locked while the writer lives, removed after it died."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_STALE: Final = re.compile(r"\..+\.[0-9a-f]{16}\.halfpeak-tmp", re.DOTALL)


@contextmanager
def temporary(target: Path) -> Generator[BinaryIO]:
    """A new file in the directory of ``target``, with the permissions that the umask gives.

    It is gone at the end of the block unless it was renamed. Until then it is locked, also once it is closed, so that
    :func:`remove_stale` of another process leaves it alone.

    Raises:
        OSError: the file cannot be created.
    """
    file, lock = _create(target)
    try:
        yield file
    finally:
        # On the way out of a failed write, closing fails for the same reason; the first error is the one to hear.
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            os.unlink(file.name)
        if lock is not None:
            os.close(lock)


@contextmanager
def temporary_folder(target: Path) -> Generator[Path]:
    """A new folder beside ``target`` that takes this name at the end of the block, unless the block raises.

    Raises:
        OSError: it cannot be created.
    """
    hidden = temporary_path(target)
    hidden.mkdir()
    try:
        yield hidden
        os.rename(hidden, target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def write_text(target: Path, text: str) -> None:
    """Write a text file whole or not at all. A link in its place is replaced, not followed.

    Raises:
        OSError: it cannot be written.
    """
    with temporary(target) as file:
        file.write(text.encode())
        file.flush()
        os.replace(file.name, target)


def temporary_path(target: Path) -> Path:
    """A name beside ``target`` that nobody else uses, and that :func:`remove_stale` knows."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.halfpeak-tmp")


def open_to_append(target: Path) -> TextIO:
    """Open a text file to add lines.

    Raises:
        OSError: it cannot be opened, or is a link or a pipe that nobody reads.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(target, "a", encoding="utf-8", opener=lambda path, mode: os.open(path, mode | flags, 0o666))


def remove_stale(directory: Path) -> None:
    """Remove the temporary files of writers that died in ``directory``; a courtesy that never fails.

    A file that nobody holds locked has no living writer. Where the system or the file system knows no locks, nothing
    is removed.
    """
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _STALE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_unlocked(entry.path)


def _create(target: Path) -> tuple[BinaryIO, int | None]:
    while True:
        path = temporary_path(target)
        file = open(path, "xb")  # noqa: SIM115 (closed by `temporary`)
        lock = _lock(file.fileno())
        # Another process may have taken the newborn file for a stale one, before it was locked.
        if path.exists():
            return file, lock
        file.close()
        if lock is not None:
            os.close(lock)


def _lock(descriptor: int) -> int | None:
    if fcntl is None:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    # The lock lives as long as any duplicate, so the file can be closed before it is renamed.
    return os.dup(descriptor)


def _remove_unlocked(path: str) -> None:
    assert fcntl is not None
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)
