"""The examples of docs/integrations.md that need a package run if the package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from laws.source import ROOT
from support.forks import errors_of
from support.pages import blocks

PAGE = ROOT / "docs" / "integrations.md"
EXAMPLES = [
    (word.removeprefix("needs-"), first, "\n".join(code))
    for words, first, code in blocks(PAGE.read_text())
    for word in words
    if word.startswith("needs-")
]


def script(word: str) -> str:
    """The script of the page with this word after its fence."""
    (code,) = (code for words, _, code in blocks(PAGE.read_text()) if word in words)
    return "\n".join(code)


def test_each_package_has_an_example() -> None:
    assert {package for package, _, _ in EXAMPLES} == {"lightning", "accelerate", "transformers"}


def test_the_examples_run(tmp_path: Path) -> None:
    """Without warnings as errors, because these packages warn of each other."""
    installed = [example for example in EXAMPLES if importlib.util.find_spec(example[0]) is not None]
    scripts = [tmp_path / f"{package}_{first}" / "example.py" for package, first, _ in installed]
    for script, (_, first, code) in zip(scripts, installed, strict=True):
        script.parent.mkdir()
        script.write_text("\n" * (first - 1) + code)
    errors = errors_of(scripts)
    assert not errors, f"{PAGE} (the tracebacks have the page's line numbers)\n{errors}"
