"""``halfpeak migrate`` without and with ``--write``: which files it reads, and how it writes them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from halfpeak.cli.main import main
from halfpeak.core.errors import ConfigError
from halfpeak.migrate.project import find
from migrate.scripts import source

OLD = "from apex import amp\n"
NEW = "from halfpeak import amp\n"


pytestmark = pytest.mark.usefixtures("own_folder")


def put(name: str, text: str = OLD) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_diff_is_shown_and_nothing_is_touched(capsys: pytest.CaptureFixture[str]) -> None:
    path = put("a.py")
    before = path.stat().st_mtime_ns
    assert main(["migrate", "a.py"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-{OLD}+{NEW}"
    assert printed.err == "1 file would change, 0 places left to look at; --write applies it\n"
    assert path.read_text() == OLD
    assert path.stat().st_mtime_ns == before
    assert [one.name for one in Path().iterdir()] == ["a.py"]


def test_write_changes_the_file_and_keeps_its_permissions(capsys: pytest.CaptureFixture[str]) -> None:
    path = put("a.py")
    path.chmod(0o750)
    assert main(["migrate", "a.py", "--write"]) == 0
    assert capsys.readouterr().out == "rewritten a.py\n"
    assert path.read_text() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert [one.name for one in Path().iterdir()] == ["a.py"]
    assert main(["migrate", "a.py", "--write"]) == 0
    assert capsys.readouterr().err == "0 files rewritten, 0 places left to look at\n"


def test_check_tells_by_its_status() -> None:
    path = put("a.py")
    assert main(["migrate", "a.py", "--check"]) == 1
    assert path.read_text() == OLD
    put("a.py", NEW)
    assert main(["migrate", "a.py", "--check"]) == 0


def test_a_diff_can_be_applied_by_patch(capsys: pytest.CaptureFixture[str]) -> None:
    text = source("larc").decode() + "\n# the last line, without an end"
    put("larc.py", text.replace("\n", "\r\n"))
    assert main(["migrate", "larc.py"]) == 0
    diff = capsys.readouterr().out
    assert main(["migrate", "larc.py", "--write"]) == 0
    wanted = Path("larc.py").read_bytes()
    put("larc.py", "").write_bytes(text.replace("\n", "\r\n").encode())
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], input=diff.encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path("larc.py").read_bytes() == wanted


def test_folders_are_walked_but_for_environments_hidden_ones_and_links() -> None:
    put("p/a.py")
    put("p/deep/b.py")
    put("p/notes.txt")
    for skipped in (
        ".git/c.py",
        ".venv/c.py",
        "venv/c.py",
        "own_env/c.py",
        "__pycache__/c.py",
        "x.egg-info/c.py",
    ):
        put(f"p/{skipped}")
    put("p/own_env/pyvenv.cfg", "")
    put("elsewhere/d.py")
    Path("p/link.py").symlink_to(Path("elsewhere/d.py").resolve())
    Path("p/folder").symlink_to(Path("elsewhere").resolve())
    assert find([Path("p")]) == [Path("p/a.py"), Path("p/deep/b.py")]
    assert find([Path("p/a.py"), Path("p"), Path("p/notes.txt")]) == [
        Path("p/a.py"),
        Path("p/deep/b.py"),
        Path("p/notes.txt"),
    ]


def test_a_link_that_is_named_stays_a_link() -> None:
    target = put("elsewhere/d.py")
    link = Path("link.py")
    link.symlink_to(target)
    assert main(["migrate", "link.py", "--write"]) == 0
    assert link.is_symlink()
    assert target.read_text() == NEW


def test_one_bad_file_does_not_keep_the_others_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    put("p/a.py")
    put("p/b.py", "from apex import amp\nprint 'python 2'\n")
    put("p/c.py")
    assert main(["migrate", "p", "--write"]) == 2
    assert "p/b.py:2: the file: it cannot be read" in capsys.readouterr().err
    assert [Path(f"p/{name}.py").read_text() == NEW for name in "abc"] == [True, False, True]


HOSTILE = {
    "brackets": ("x = " + "(" * 50_000 + ")" * 50_000).encode(),
    "blocks": "".join(f"{' ' * depth}if x:\n" for depth in range(400)).encode(),
    "operators": ("x = " + "a + " * 50_000 + "a").encode(),
    "unary": ("x = " + "not " * 50_000 + "a").encode(),
    "size": b"x = 1\n" * 500_000,
}


def test_files_beyond_the_limits_are_said_and_the_others_rewritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in HOSTILE.items():
        put(f"p/{name}.py", "").write_bytes(OLD.encode() + text + b"\n")
    put("p/utf16.py", "").write_bytes(OLD.encode("utf-16"))
    put("p/z.py")
    os.mkfifo("p/pipe.py")
    os.mkfifo("pipe")
    assert main(["migrate", "p", "pipe", "--write"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "rewritten p/z.py\n"
    *said, summary = printed.err.splitlines()
    unread = {line.partition(".py:")[0].partition(":")[0]: line for line in said}
    assert unread.keys() == {*(f"p/{name}" for name in HOSTILE), "p/utf16", "pipe"}
    assert all("the file: it cannot be read" in line for line in said)
    assert "save it as UTF-8" in unread["p/utf16"]
    assert summary == f"1 file rewritten, {len(said)} places left to look at, {len(said)} files not read"


def test_what_is_left_is_listed_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    put("a.py", "import torch\nf = torch.cuda.amp.autocast\n")
    assert main(["migrate", "a.py"]) == 0
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("a.py:2: torch.cuda.amp.autocast: it is not called here")
    assert 'functools.partial(torch.autocast, "cuda")' in printed[0]
    assert printed[1] == "0 files would change, 1 place left to look at"


def test_a_path_that_does_not_exist_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    put("a.py")
    assert main(["migrate", "a.py", "absent", "--write"]) == 2
    assert (
        capsys.readouterr().err == "halfpeak migrate: there is no absent; name files or folders that exist\n"
    )
    assert Path("a.py").read_text() == OLD


@pytest.mark.parametrize(
    "arguments", [["migrate"], ["migrate", ".", "--to", "jax"], ["migrate", ".", "--wirte"]]
)
def test_wrong_options_are_one_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.endswith("halfpeak migrate --help lists the options\n")
    assert len(printed.splitlines()) == 1


def test_a_write_that_fails_is_said_and_leaves_the_old_file_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put("a.py")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["migrate", "a.py", "--write"]) == 2
    assert "a.py: not written (unchanged): No space left on device" in capsys.readouterr().err
    assert path.read_text() == OLD
    assert [one.name for one in Path().iterdir()] == ["a.py"]


def test_the_other_commands_work_without_libcst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("halfpeak.migrate", "libcst"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["--version"]) == 0
    put("a.py")
    assert main(["migrate", "a.py"]) == 2
    assert capsys.readouterr().err == "halfpeak migrate: libcst is not installed; write pip install libcst\n"


def test_a_notebook_that_is_named_is_refused_and_in_a_folder_passed_over() -> None:
    notebook = put("folder/a.ipynb", '{"cells": []}')
    with pytest.raises(ConfigError, match=r"is a notebook; write jupyter nbconvert"):
        find([notebook])
    assert find([notebook.parent]) == []
