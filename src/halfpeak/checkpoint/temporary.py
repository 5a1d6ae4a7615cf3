"""Temporary files beside their target, which replace it whole; those that killed writers left are removed after a day."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TextIO

_STALE: Final = re.compile(r"\..+\.[0-9a-f]{16}\.halfpeak-tmp", re.DOTALL)
_STALE_AFTER: Final = 24 * 3600.0


@contextmanager
def temporary(target: Path) -> Generator[BinaryIO]:
    """A new file in the directory of ``target``, with the permissions that the umask gives.

    The end of the block removes the file unless it was renamed.

    Raises:
        OSError: the file cannot be created.
    """
    file = open(temporary_path(target), "xb")  # noqa: SIM115 (closed below)
    try:
        yield file
    finally:
        # After a failed write, closing fails for the same reason; only the first error is raised.
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            os.unlink(file.name)


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
    """Remove the temporary files that nobody has written to for a day; no OSError is raised."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _STALE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    if entry.stat().st_mtime < time.time() - _STALE_AFTER:
                        os.unlink(entry.path)
