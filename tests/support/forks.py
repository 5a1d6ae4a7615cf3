"""Scripts that are each run in a process of its own, which has imported what is slow already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from laws.source import ROOT

PROGRAM = """
import importlib, os, runpy, sys, traceback

for name in sys.argv[1].split():
    importlib.import_module(name)
for script in sys.argv[2:]:
    child = os.fork()
    if not child:
        os.chdir(os.path.dirname(script))
        sys.argv = [script]
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(script, "failed", file=sys.stderr)
"""


def errors_of(scripts: Sequence[Path], *options: str, modules: Sequence[str] = ()) -> str:
    """Run scripts, each in its folder; what they wrote to ``stderr``, if one of them failed.

    Args:
        scripts: each is ``__main__`` of its process.
        options: of Python.
        modules: what has been imported, beside torch and halfpeak.
    """
    names = " ".join(("torch", "torch._dynamo", "halfpeak.amp", "halfpeak.insight.doctor", *modules))
    done = subprocess.run(
        [sys.executable, *options, "-c", PROGRAM, names, *map(str, scripts)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stderr if done.returncode or " failed" in done.stderr else ""
