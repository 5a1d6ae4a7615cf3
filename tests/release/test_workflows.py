"""What the package and its pages say is tested is what the workflows test."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from laws.source import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
CI = WORKFLOWS["ci"]["jobs"]
INSTALL = (ROOT / "docs" / "install.md").read_text()


def version_of(requirements: list[str], package: str) -> str:
    (found,) = (re.search(r"[\d.]+", line) for line in requirements if re.match(rf"{package}\b", line))
    return found.group() if found else ""


def test_every_python_of_the_classifiers_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert CI["wheel"]["strategy"]["matrix"]["python"] == named
    tested = {row["python"] for row in CI["test"]["strategy"]["matrix"]["include"]}
    assert tested >= {named[0], named[-1]}
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert f"from {named[0]} to {named[-1]}" in INSTALL


def test_the_oldest_and_the_newest_torch_are_tested() -> None:
    oldest = version_of(PROJECT["dependencies"], "torch")
    pinned = version_of((ROOT / "constraints.txt").read_text().splitlines(), "torch")
    tested = [row.get("torch") for row in CI["test"]["strategy"]["matrix"]["include"]]
    assert {*tested} == {None, f"torch=={oldest}.*", "torch"}
    assert f"PyTorch {oldest} or newer" in INSTALL
    assert f"last ran with PyTorch {pinned.rpartition('.')[0]} on" in INSTALL


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_runs_exists(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE)) | {".venv/.python"}
    steps = [step for job in WORKFLOWS[name]["jobs"].values() for step in job.get("steps", [])]
    commands = [str(step.get("run", "")) for step in steps]
    assert {target for line in commands for target in re.findall(r"^make (\S+)", line)} <= targets
    assert all((ROOT / line).exists() for line in commands if line.startswith(".ci"))
    used = [job["uses"] for job in WORKFLOWS[name]["jobs"].values() if "uses" in job]
    assert all((ROOT / path).exists() for path in used)


def test_nothing_is_published_before_everything_has_passed() -> None:
    jobs: dict[str, Any] = WORKFLOWS["release"]["jobs"]
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    assert jobs["test"] == {"uses": "./.github/workflows/ci.yml"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets" not in (FOLDER / "release.yml").read_text()
