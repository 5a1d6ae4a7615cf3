"""Temporary files beside their target: locked while the writer lives, removed once it has died."""

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

    The end of the block removes the file unless it was renamed. Until then the file is locked, even after it is closed,
    so that :func:`remove_stale` in another process does not remove it.

    Raises:
        OSError: the file cannot be created.
    """
    file, lock = _create(target)
    try:
        yield file
    finally:
        # After a failed write, closing fails for the same reason; only the first error is raised.
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            os.unlink(file.name)
        if lock is not None:
            os.close(lock)


@contextmanager
def temporary_folder(target: Path) -> Generator[Path]:
    """A new folder that the end of the block renames to ``target``; if the block raises, the folder is removed.

    Raises:
        OSError: the folder cannot be created or renamed.
    """
    hidden = temporary_path(target)
    hidden.mkdir()
    try:
        yield hidden
        os.rename(hidden, target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


@contextmanager
def replacing(target: Path) -> Generator[BinaryIO]:
    """A new file that the end of the block renames to ``target``; if the block raises, an old file stays as it was.

    A symbolic link at ``target`` is replaced, not followed.

    Raises:
        OSError: the file cannot be created, written or renamed.
    """
    with temporary(target) as file:
        yield file
        file.close()
        os.replace(file.name, target)


def write_text(target: Path, text: str) -> None:
    """Write a text file whole or not at all, see :func:`replacing`."""
    with replacing(target) as file:
        file.write(text.encode())


def temporary_path(target: Path) -> Path:
    """A unique name beside ``target`` that :func:`remove_stale` recognises."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.halfpeak-tmp")


def open_to_append(target: Path) -> TextIO:
    """Open a text file to add lines.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link or a pipe without a reader.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(target, "a", encoding="utf-8", opener=lambda path, mode: os.open(path, mode | flags, 0o666))


def remove_stale(directory: Path) -> None:
    """Remove the temporary files that dead writers left in ``directory``; no OSError is raised.

    A temporary file without a lock has no living writer. If the system or the file system has no locks, nothing is
    removed.
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
        # Before the file was locked, another process may have removed it as stale.
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
    # The lock lasts until every duplicate of the descriptor is closed, so the file can be closed before it is renamed.
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
