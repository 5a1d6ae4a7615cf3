"""``halfpeak run``: a script sees what ``python`` would show it, and its errors and exit status pass through."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from halfpeak.cli.main import main
from shim.process import changes, process_state, run_python
from support.forks import python
from support.no_driver import be_built_for_cuda

LOOKS = """
import json, os, sys
seen = {
    "argv": sys.argv,
    "path": os.path.realpath(sys.path[0] or "."),
    "name": __name__,
    "file": os.path.abspath(__file__),
    "spec": None if __spec__ is None else __spec__.name,
    "package": __package__ or None,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "loader": type(__loader__).__name__ in ("SourceFileLoader", "_MainLoader", "zipimporter"),
    "local": __import__("neighbour").VALUE,
}
print(json.dumps(seen))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script, a module that it imports, a package and a zip archive."""
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "look.py").write_text(LOOKS)
    (folder / "neighbour.py").write_text("VALUE = 3\n")
    for name in ("__init__.py", "__main__.py", "tool.py"):
        (folder / "package" / name).write_text("" if name == "__init__.py" else LOOKS)
    with ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", LOOKS)
        archive.writestr("neighbour.py", "VALUE = 3\n")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["look.py", "--device", "cuda", "-m", "x"],
        ["../project/look.py"],
        ["-m", "look", "-h"],
        ["-m", "package"],
        ["-m", "package.tool", "1"],
        ["app.zip", "2"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_python_would_show_it(
    arguments: list[str], project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_python(arguments, project)
    assert plain.returncode == 0, plain.stderr
    monkeypatch.chdir(project)
    for name in ("look", "neighbour", "package", "package.tool"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["run", "--device", "cpu", *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plain.stdout)


def test_the_command_itself(project: Path) -> None:
    arguments = ["-m", "package.tool"]
    plain = run_python(arguments, project)
    emulated = python("-m", "halfpeak", "run", *arguments, folder=project)
    assert json.loads(emulated.stdout) == json.loads(plain.stdout), emulated.stderr


FOR_APEX = """
import torch
from apex import amp

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", max_loss_scale=256.0)
shuffle = torch.Generator(device="cuda").manual_seed(1)
for _ in range(2):
    with amp.scale_loss(model(torch.randn(8, 4, device="cuda", generator=shuffle)).square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
torch.cuda.synchronize()
torch.accelerator.synchronize()
print("steps:", int(optimizer.state[next(iter(optimizer.state))]["step"]))
"""


def test_a_script_trains_where_torch_is_built_for_cuda_and_no_gpu_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_built_for_cuda(monkeypatch)
    (tmp_path / "script.py").write_text(FOR_APEX)
    assert main(["run", "--device", "cpu", str(tmp_path / "script.py")]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.endswith("steps: 2\n")


FAILURES = {
    "error": "def f():\n    raise ValueError('mine')\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error\n",
    "halfpeak error": "import halfpeak\nraise halfpeak.ConfigError('mine')\n",
    "file error": "open('nothing/here')\n",
    "syntax": "def f(:\n    pass\n",
    "hook": "import sys\nsys.excepthook = lambda *error: print('hook', error[0].__name__)\n1 / 0\n",
    "thread": "import threading\nthreading.Thread(target=lambda: print('late')).start()\n1 / 0\n",
}


@pytest.mark.parametrize("name", FAILURES)
def test_errors_pass_through(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(FAILURES[name])
    plain = run_python(["script.py"], tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    assert main(["run", "script.py"]) == plain.returncode == 1
    seen = capsys.readouterr()
    assert seen.out == plain.stdout
    first, _, rest = seen.err.partition("\n")
    assert first.startswith("halfpeak run: halfpeak")
    assert rest == plain.stderr


def test_the_status_of_exit_passes_through(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('enough')\n")
    done = python("-m", "halfpeak", "run", "script.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["enough"]


def test_a_package_that_lacks_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway").mkdir()
    (tmp_path / "halfway" / "__init__.py").write_text("import nothere\n")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-m", "halfway.tool"]) == 1
    assert "No module named 'nothere'" in capsys.readouterr().err


def test_an_interrupted_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt\n")
    assert main(["run", str(tmp_path / "script.py")]) == 130
    assert capsys.readouterr().err.endswith("KeyboardInterrupt\n")


BAD = {
    "": r"no script was named; write halfpeak run SCRIPT",
    "nothere.py": r"there is no file 'nothere\.py'; write",
    "/": r"the folder '/' has no __main__\.py; name a script",
    "-m": r"-m needs a value",
    "-m nothere": r"there is no module 'nothere'; write",
    "-m os.nothere": r"there is no module 'os\.nothere'; write",
    "--device": r"--device needs a value",
    "--device tpu x.py": r"--device 'tpu'.*write --device cpu",
    "--device=tpu x.py": r"--device 'tpu'.*write --device cpu",
    "--shim detectron x.py": r"no shim 'detectron'; write one of apex",
    "--fast x.py": r"unknown option '--fast'",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_lines(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = process_state()
    assert main(["run", *line.split()]) == 2
    assert not changes(before)
    error = capsys.readouterr().err
    assert error.startswith("halfpeak run: ")
    assert error.count("\n") == 1
    assert re.search(BAD[line], error)


@pytest.mark.parametrize("line", ["-h", "--device cpu --help"])
def test_help(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *line.split()]) == 0
    assert "usage: halfpeak run" in capsys.readouterr().out


ENDS = {
    "end": "",
    "error": "raise ValueError\n",
    "collapse": "import halfpeak\nraise halfpeak.LossScaleCollapse('gone')\n",
    "exit": "raise SystemExit(5)\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_process_is_afterwards_as_it_was(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the script ends; it runs in this process, with casts on, CUDA in use and apex modules imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed\n"
        "import apex\n"
        "from apex import amp\n"
        "from apex.parallel import convert_syncbn_model\n"
        "model = convert_syncbn_model(torch.nn.Linear(2, 2)).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        f"assert torch.cuda.is_available()\n{ENDS[name]}"
    )
    before: dict[str, Any] = process_state()
    if name == "exit":
        with pytest.raises(SystemExit) as left:
            main(["run", "--device", "cpu", str(script)])
        assert left.value.code == 5
    else:
        assert main(["run", "--device", "cpu", str(script)]) == (0 if name == "end" else 1)
    assert not changes(before)
    captured = capsys.readouterr()
    assert "Selected optimization level O1" in captured.out
    assert "the CPU plays one CUDA device" in captured.err.splitlines()[0]


SPAWNS = """
import sys
import torch
import torch.multiprocessing as mp
from apex import amp

def work(rank, folder):
    torch.save(torch.ones(1).cuda() * rank, f"{folder}/{rank}.pt")

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
"""


def test_spawned_processes_find_the_same_scope(tmp_path: Path) -> None:
    """Spawned processes import the main script again."""
    (tmp_path / "script.py").write_text(SPAWNS)
    done = python("-m", "halfpeak", "run", "--device", "cpu", "script.py", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [float(torch.load(tmp_path / f"{rank}.pt", weights_only=True)) for rank in range(2)] == [0, 1]
