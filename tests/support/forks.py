"""Runs programs, each in its own process, forked from a server process that has already imported slow modules."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "halfpeak.amp",
    "halfpeak.checkpoint",
    "halfpeak.cli.train_run",
    "halfpeak.distributed",
    "halfpeak.engine",
    "halfpeak.optim",
    "halfpeak.runner",
    "sklearn.datasets",
)
"""The modules that the server imports, so that no program does; making an optimizer would import the first one."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def python(
    *arguments: str,
    folder: Path | None = None,
    path: Sequence[Path] = (),
    strict: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with a script, with ``-m`` and a module, or with ``-c`` and a program.

    Args:
        arguments: of ``python``.
        folder: where it runs.
        path: where it looks for modules first.
        strict: warnings are errors.
        environment: variables beside :data:`ENVIRONMENT`.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as files:
        told = [files, str(folder or os.getcwd()), list(map(str, path)), strict, environment, arguments]
        server.stdin.write(json.dumps(told) + "\n")
        server.stdin.flush()
        try:
            status = int(server.stdout.readline())
        except BaseException:  # the timeout of a test
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        out, err = (Path(files, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(arguments, status, out, err)


def errors_of(scripts: Sequence[Path], *, strict: bool = False) -> str:
    """Run scripts, each in its folder, and return the ``stderr`` of those that failed."""
    ended = [python(str(script), folder=script.parent, strict=strict) for script in scripts]
    return "\n".join(f"{done.args[0]} failed\n{done.stderr}" for done in ended if done.returncode)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks another for each line of its input; it ends when the input is closed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "support.forks"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    return server


def be_python(arguments: Sequence[str]) -> NoReturn:
    """Run a program in this process, and end it."""
    status: Any = 0
    try:
        first, *rest = arguments
        sys.argv = rest if first == "-m" else [*arguments] if first != "-c" else ["-c", *rest[1:]]
        sys.path.insert(0, os.path.dirname(first) if os.path.isfile(first) else os.getcwd())
        if first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        status, _held = error.code, error  # the error's frames keep the main module alive until the end
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else status is not None)


def _serve() -> None:
    del sys.path[0]  # the folder in which the tests were started
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        files, folder, path, strict, environment, arguments = json.loads(line)
        child = os.fork()
        if not child:
            os.chdir(folder)
            os.environ.update(environment)
            sys.path[:0] = path
            for number, name in enumerate((os.devnull, f"{files}/out", f"{files}/err")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            warnings.resetwarnings()
            warnings.simplefilter("error" if strict else "default")
            be_python(arguments)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
