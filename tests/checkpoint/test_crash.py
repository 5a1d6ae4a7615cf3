"""A save that is killed, or that the system refuses, leaves the old file untouched and no stale files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from halfpeak.checkpoint import load, previous_path, save
from halfpeak.checkpoint import temporary as temporary_module
from halfpeak.core.errors import CheckpointError
from support.forks import python


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path / "last.pt", new_state(step))
    return tmp_path / "last.pt"


def new_state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((20_000,), float(step))}


def check_untouched(path: Path, step: int = 2) -> None:
    assert load(path)["step"] == step
    assert {entry.name for entry in path.parent.iterdir()} <= {"last.pt", "last.pt.previous"}


def test_killed_at_every_line_and_at_random(tmp_path: Path) -> None:
    done = python(str(Path(__file__).with_name("killed_writer.py")), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "10 random moments" in done.stdout


class FailingFile:
    """A file whose n-th write fails."""

    def __init__(self, file: Any, failing: int, error: BaseException) -> None:
        self.file = file
        self.left = failing
        self.error = error

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextmanager
def failing_write(number: int, error: BaseException) -> Iterator[list[FailingFile]]:
    files: list[FailingFile] = []

    def open_failing(*args: Any) -> FailingFile:
        files.append(FailingFile(open(*args), number, error))  # noqa: SIM115 (save closes it)
        return files[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(temporary_module, "open", open_failing, raising=False)
        yield files


def test_the_nth_write_fails(path: Path) -> None:
    with failing_write(0, OSError()) as files:
        save(path, new_state(2))
    writes = -files[0].left
    assert writes > 10
    for number in range(1, writes + 1):
        with (
            failing_write(number, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
            pytest.raises(CheckpointError, match=r"a file that was there is unchanged: .*No space left"),
        ):
            save(path, new_state(3))
        check_untouched(path)
    save(path, new_state(3))
    check_untouched(path, 3)


def test_an_interrupt_stays_an_interrupt(path: Path) -> None:
    with failing_write(5, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        save(path, new_state(3))
    check_untouched(path)


def test_a_full_disk(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    for limit in (0, 1, 1000, size // 2, size - 22, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError, match="too large"):
                save(path, new_state(3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_untouched(path)


def fail_once(patch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Make a function of ``os`` fail at its first call."""
    real = getattr(os, name)
    calls: list[object] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    patch.setattr(os, name, failing)


@pytest.mark.parametrize(
    ("name", "code"), [("replace", errno.EACCES), ("replace", errno.EIO), ("fsync", errno.EIO)]
)
def test_a_call_fails_once(path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    fail_once(monkeypatch, name, code)
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        save(path, new_state(3))
    check_untouched(path)
    save(path, new_state(4))
    check_untouched(path, 4)
    assert load(previous_path(path))["step"] == 2


def test_two_writers_of_one_file_leave_it_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second writer saves before and after each link and rename of the first."""
    saved = iter(range(3, 1000))
    calls = {name: getattr(os, name) for name in ("link", "replace")}

    def in_between(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as alone:
                for other, function in calls.items():
                    alone.setattr(os, other, function)
                save(path, new_state(next(saved)))
                try:
                    return real(*args, **kwargs)
                finally:
                    load(path)
                    save(path, new_state(next(saved)))

        return call

    for name, real in calls.items():
        monkeypatch.setattr(os, name, in_between(real))
    save(path, new_state(next(saved)))
    monkeypatch.undo()
    check_untouched(path, load(path)["step"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_system_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The old file is renamed, and a second rename that fails is taken back."""
    real, calls = os.replace, []

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def replace(*args: Any) -> None:
        calls.append(args)
        if fails and len(calls) == 2:
            refuse()
        real(*args)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", replace)
    if fails:
        with pytest.raises(CheckpointError, match="not permitted"):
            save(path, new_state(3))
        check_untouched(path)
    else:
        save(path, new_state(3))
        check_untouched(path, 3)
        assert load(previous_path(path))["step"] == 2


def test_the_directory_cannot_be_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, codes = os.fsync, [None, errno.EIO, None, errno.EINVAL]

    def failing(descriptor: int) -> None:
        code = codes.pop(0)
        if code is not None:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="was written, but may not survive a power loss"):
        save(path, new_state(3))
    check_untouched(path, 3)
    save(path, new_state(4))
    check_untouched(path, 4)
