"""Saving and loading of a checkpoint file: a crash keeps the last complete file, and damage is found before use."""

from __future__ import annotations

import errno
import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from halfpeak.checkpoint import trailer
from halfpeak.checkpoint.archives import check_pickles
from halfpeak.checkpoint.plain import plain
from halfpeak.checkpoint.temporary import remove_stale, temporary, temporary_path
from halfpeak.core.errors import CheckpointError, ConfigTypeError
from halfpeak.core.short_repr import short_repr

StrPath = str | os.PathLike[str]


def save(path: StrPath, state: dict[str, Any], *, keep_previous: bool = True) -> None:
    """Write ``state`` to ``path`` atomically: a crash at any instant leaves a complete file.

    The data is written to a temporary file in the same directory and synced to the disk; then the file is renamed to
    ``path``. The file that had this name becomes ``<name>.previous``, unless it is visibly incomplete and a previous
    file exists. A symbolic link at ``path`` is replaced, and its target is not touched. Temporary files that killed
    writers left in the directory are removed.

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
            trailer.write(file, data)
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
    """Read a file that :func:`save` wrote.

    Trailer, length and digest are checked before anything is unpickled. Then the same open file is read as plain data
    only, so no file can run code, whatever torch's environment variables say.

    Args:
        map_location: the device of the tensors, as in ``torch.load``; None keeps the device that they were saved from.
        fall_back: if the file is damaged or missing, read the previous file instead, with a ``RuntimeWarning``.

    Raises:
        CheckpointError: the file is damaged, missing, foreign, or holds something other than plain data. The message
            names the previous file if that file is intact.
    """
    target = as_path(path)
    try:
        file = trailer.open_verified(target)
    except CheckpointError as error:
        previous = previous_path(target)
        try:
            file = trailer.open_verified(previous)
        except CheckpointError:
            raise error from None
        if not fall_back:
            file.close()
            raise CheckpointError(
                f"{error}. {previous} is intact: load that, or write fall_back=True", damaged=error.damaged
            ) from None
        warnings.warn(f"{error}. {previous} is read instead", RuntimeWarning, stacklevel=2)
        target = previous
    with file:
        loaded = _unpickle(file, map_location, f"{target} is intact, but cannot be read as plain data")
    data = plain(loaded, target.name)
    if not isinstance(data, dict):
        raise CheckpointError(f"{target} holds a {type(data).__qualname__}; save() writes a dict")
    return data


def load_plain(path: StrPath, *, map_location: torch.device | str | None = "cpu") -> Any:
    """Read a file that another program wrote with ``torch.save``, as plain data only.

    This is ``torch.load(path, weights_only=True)`` with limits and with one type of exception. Such a file has no
    digest, so damage that leaves it readable is not noticed.

    Raises:
        CheckpointError: the file cannot be read, or needs classes or functions. Save such a file again as plain data,
            in the program that wrote it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "weights.pth"
    >>> torch.save({"weight": torch.ones(1)}, path)
    >>> load_plain(path)
    {'weight': tensor([1.])}
    """
    target = as_path(path)
    with trailer.open_regular(target) as file:
        return _unpickle(file, map_location, f"{target} is not a file of plain data")


def verify(path: StrPath) -> None:
    """Check trailer, length and digest of a file without unpickling anything.

    Raises:
        CheckpointError: the file is damaged, missing or foreign.
    """
    trailer.open_verified(as_path(path)).close()


def previous_path(path: StrPath) -> Path:
    """The path to which :func:`save` moves the file that it replaces.

    >>> previous_path("run/last.pt").name
    'last.pt.previous'
    """
    target = as_path(path)
    return target.parent / (target.name + ".previous")


def as_path(path: StrPath) -> Path:
    """Convert a path to ``Path``.

    Raises:
        ConfigTypeError: the value is not a path.
    """
    try:
        return Path(path)
    except TypeError:
        raise ConfigTypeError(f"path={short_repr(path)} must be a str or a Path") from None


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
    previous = previous_path(target)
    moved = keep_previous and _keep(target, previous)
    try:
        os.replace(source, target)
    except OSError:
        if moved:
            os.replace(previous, target)
        raise


def _keep(target: Path, previous: Path) -> bool:
    """Keep the file at ``target`` as ``previous`` too; True if it was renamed, because it could not be hard-linked."""
    if not os.path.lexists(target):
        return False
    # A writer that was killed here leaves both names on one file. A broken file must not replace a good previous one.
    if os.path.lexists(previous) and (
        os.path.samestat(target.lstat(), previous.lstat()) or not trailer.looks_complete(target)
    ):
        return False
    spare = temporary_path(target)
    try:
        os.link(target, spare, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a file system without hard links
        os.replace(target, previous)
        return True
    try:
        # os.replace() is atomic; os.link() straight to `previous` would need the older file removed first. The spare
        # name is missing if another writer removed it as stale; that writer keeps a previous file, too.
        with suppress(FileNotFoundError):
            os.replace(spare, previous)
    finally:
        spare.unlink(missing_ok=True)
    return False


def _sync_directory(target: Path) -> None:
    """Sync the directory, so that the new name survives a power loss."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
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


def _unpickle(file: BinaryIO, map_location: Any, refusal: str) -> Any:
    try:
        check_pickles(file)
        return torch.load(file, map_location=map_location, weights_only=True, mmap=False)
    except Exception as error:
        raise CheckpointError(f"{refusal}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The cause of an error; torch's message without its advice to set ``weights_only=False``."""
    if isinstance(error, CheckpointError):
        return str(error)
    lines = (line.rpartition("WeightsUnpickler error: ")[2] for line in str(error).splitlines())
    found = (
        line for line in lines if line.strip() and "weights_only" not in line and "two options" not in line
    )
    return f"{type(error).__name__}: {next(found, 'not plain data').partition('. Please use')[0][:300]}"
