"""Saving and loading of a checkpoint file: a crash keeps the last complete file, and damage is found before use."""

from __future__ import annotations

import errno
import os
import stat
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

from halfpeak.checkpoint.plain import plain
from halfpeak.checkpoint.read import (
    StrPath,
    as_path,
    check_zip,
    looks_complete,
    open_regular,
    read_file,
    refusing,
)
from halfpeak.checkpoint.temporary import remove_stale, temporary
from halfpeak.core.errors import CheckpointError


def save(path: StrPath, state: dict[str, Any], *, keep_previous: bool = True) -> None:
    """Write ``state`` to ``path`` atomically: a crash at any instant leaves a complete file.

    The data is written to a temporary file in the same directory and synced to the disk; then the file is renamed to
    ``path``. The file that had this name becomes ``<name>.previous``, unless it is visibly incomplete and a previous
    file exists. A symbolic link at ``path`` is replaced, and its target is not touched. Temporary files that killed
    writers left in the directory are removed. ``torch.load(path, weights_only=True)`` reads the file, too.

    Args:
        state: nested dict, OrderedDict, list and tuple of tensors and None, bool, int, float, str, bytes. Parameters
            are saved as tensors. The whole storage of a view is saved, as in ``torch.save``.
        keep_previous: whether the replaced file is kept as ``<name>.previous``.

    Raises:
        CheckpointError: ``state`` holds a value of another type (the message has its path of keys; no file was changed)
            or the system refused to write (the old file stays).

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "last.pt"
    >>> save(path, {"step": 1})
    >>> save(path, {"step": 2})
    >>> load(path), load(previous_path(path))
    ({'step': 2}, {'step': 1})
    """
    target = as_path(path)
    if not isinstance(state, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"state is a {type(state).__qualname__}; write save(path, {{'name': value}})")
    data = plain(state)
    _check_target(target)
    remove_stale(target.parent)
    try:
        with temporary(target) as file:
            _write(file, data)
            file.close()
            _publish(Path(file.name), target, keep_previous)
    except Exception as error:  # OSError, or any exception of torch for a tensor that it cannot write
        raise CheckpointError(
            f"{target} was not written, and a file that was there is unchanged: {error}"
        ) from error
    _sync_directory(target)


def load(
    path: StrPath, *, map_location: torch.device | str | None = "cpu", fall_back: bool = False
) -> dict[str, Any]:
    """Read a file that :func:`save`, or another program with ``torch.save``, wrote as a dict of plain data.

    Every checksum of the file is checked first. Then ``torch.load(weights_only=True)`` reads it, so no file can run code,
    whatever torch's environment variables say.

    Args:
        map_location: the device of the tensors, as in ``torch.load``; None keeps the device that they were saved from.
        fall_back: if the file is damaged or missing, read the previous file instead, with a ``RuntimeWarning``.

    Raises:
        CheckpointError: the file is damaged, or holds something other than plain data. The message names the previous
            file if that file is intact.
        MissingCheckpointError: there is no such file. It is a CheckpointError and a FileNotFoundError.
    """
    target = as_path(path)
    try:
        loaded = read_file(target, map_location=map_location).tree
    except CheckpointError as error:
        previous = previous_path(target)
        try:
            verify(previous)
        except CheckpointError:
            raise error from error.__cause__
        if not fall_back:
            advice = f"{error}. {previous} is intact: load that, or write fall_back=True"
            raise type(error)(advice, damaged=error.damaged) from error.__cause__
        warnings.warn(f"{error}. {previous} is read instead", RuntimeWarning, stacklevel=2)
        loaded = read_file(previous, map_location=map_location).tree
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{target} holds a {type(loaded).__qualname__}; a checkpoint is a dict")
    return loaded


def verify(path: StrPath) -> None:
    """Check every checksum of a file of ``torch.save`` without unpickling anything.

    Raises:
        CheckpointError: the file is damaged, missing, or none of ``torch.save`` since torch 1.6.
    """
    target = as_path(path)
    with open_regular(target) as file, refusing(target, "is not a file of torch.save"):
        check_zip(file, os.fstat(file.fileno()).st_size)


def previous_path(path: StrPath) -> Path:
    """The path to which :func:`save` moves the file that it replaces.

    >>> previous_path("run/last.pt").name
    'last.pt.previous'
    """
    target = as_path(path)
    return target.parent / (target.name + ".previous")


class _Sink:
    """A writer that stores the first exception: torch's C++ writer would replace it by its own, even an interrupt."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        pass


def _write(file: BinaryIO, data: Any) -> None:
    sink: Any = _Sink(file)
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(data, sink)
    finally:
        torch.serialization.set_crc32_options(has_checksums)
    if sink.error is not None:
        raise sink.error
    file.flush()
    os.fsync(file.fileno())


def _check_target(target: Path) -> None:
    try:
        if not target.parent.is_dir():
            raise CheckpointError(f"{target} cannot be written: there is no directory {target.parent}")
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(target)!r} cannot be written: {error}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise CheckpointError(f"{target} is not a regular file; name a file, such as {target / 'last.pt'}")


def _publish(source: Path, target: Path, keep_previous: bool) -> None:
    """Rename ``source`` to ``target``; keep an older file as the previous one, unless it is broken and that one is there."""
    previous = previous_path(target)
    moved = False
    if (
        keep_previous
        and os.path.lexists(target)
        and (looks_complete(target) or not os.path.lexists(previous))
    ):
        try:
            previous.unlink(missing_ok=True)
            os.link(target, previous, follow_symlinks=False)
        except FileExistsError:  # another writer keeps it
            pass
        except (OSError, NotImplementedError):  # a file system without hard links
            os.replace(target, previous)
            moved = True
    try:
        os.replace(source, target)
    except OSError:
        if moved:
            os.replace(previous, target)
        raise


def _sync_directory(target: Path) -> None:
    """Sync the directory, so that the new name survives a power loss."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # The file system cannot sync directories, or the directory may be written but not read: both are accepted.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise CheckpointError(
                f"{target} was written, but may not survive a power loss: {error}"
            ) from error
