"""Installs a wheel alone into a new environment, and does there what README.md shows: ``make wheel``.

python -m release.in_new_environment dist/halfpeak-0.1.0-py3-none-any.whl
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from support.pages import python_of

ROOT = Path(__file__).resolve().parents[2]


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "new", with_pip=True)
        programs = folder / "new" / ("Scripts" if os.name == "nt" else "bin")
        python, command = str(programs / "python"), str(programs / "halfpeak")
        call(
            folder, python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)
        )
        call(folder, python, "-m", "pip", "check")
        readme = folder / "readme.py"
        readme.write_text(
            python_of((ROOT / "README.md").read_text(encoding="utf-8"), run=True), encoding="utf-8"
        )
        for arguments in ([command, "--help"], [command, "env"], [python, "-W", "error", str(readme)]):
            told = call(folder, *arguments)
            if told:  # also torch's own warnings, which a filter of Python does not turn into errors
                raise SystemExit(f"{' '.join(arguments)} wrote to stderr:\n{told}")


def call(folder: Path, *arguments: str) -> str:
    """Run a program in ``folder``, without this process's paths to modules; returns what it wrote to stderr."""
    print("+", *arguments, flush=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(arguments, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed with {done.returncode}:\n{done.stderr}")
    return done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
