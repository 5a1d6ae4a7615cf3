"""The examples of docs/integrations.md that need a package run where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laws.source import ROOT
from laws.test_pages import blocks

PAGE = ROOT / "docs" / "integrations.md"
EXAMPLES = [
    (word.removeprefix("needs-"), first, "\n".join(code))
    for words, first, code in blocks(PAGE.read_text())
    for word in words
    if word.startswith("needs-")
]


def test_each_package_has_an_example() -> None:
    assert {package for package, _, _ in EXAMPLES} == {"lightning", "accelerate", "transformers"}


@pytest.mark.parametrize(
    ("package", "first", "code"), EXAMPLES, ids=[f"{package}, line {first}" for package, first, _ in EXAMPLES]
)
def test_an_example_runs(package: str, first: int, code: str, tmp_path: Path) -> None:
    """Without warnings as errors: these packages warn of each other."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "example.py").write_text("\n" * (first - 1) + code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{PAGE} (the traceback has the page's line numbers)\n{done.stderr}"
