"""The wheel and the sdist hold what a user needs, and say of themselves what pyproject.toml says."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import halfpeak
from laws.source import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"halfpeak-{halfpeak.__version__}"
ADDRESS = {"GITHUB_SERVER_URL": "https://forge.example", "GITHUB_REPOSITORY": "someone/halfpeak"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, as a workflow builds them. The sdist is built from the clone, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist")
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    build(folder / NAME, folder, "wheel")
    return folder


def build(source: Path, folder: Path, kind: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", kind]
    done = subprocess.run(command, cwd=source, env={**os.environ, **ADDRESS}, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        return email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))


def test_the_wheel_has_the_package_and_its_licence_alone(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        extra = {name.partition("/")[2] for name in wheel.namelist() if ".dist-info/" in name}
    package = ROOT / "src"
    sources = {path.relative_to(package).as_posix() for path in (package / "halfpeak").rglob("*.py")}
    assert files == sources | {"halfpeak/py.typed"}
    assert extra == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE"}


def test_the_sdist_has_what_the_commands_of_the_readme_need(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "constraints.txt",
        "hatch_build.py",
        "tests/conftest.py",
        "docs/conf.py",
        "README.md",
    } <= files
    assert {"examples/native/digits.py", "benchmarks/plot.py", "SECURITY.md", "CITATION.cff"} <= files


def test_the_metadata(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("halfpeak", halfpeak.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needed) == sorted(PROJECT["dependencies"])


def test_the_addresses_are_those_of_the_repository_that_a_workflow_builds_in(metadata: Message) -> None:
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls["Repository"] == "https://forge.example/someone/halfpeak"
    assert urls["Security"] == "https://forge.example/someone/halfpeak/security/advisories/new"


def test_a_build_that_knows_no_address_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    from hatch_build import addresses

    assert addresses() == {}


def test_the_long_description_links_to_no_file(metadata: Message) -> None:
    text = metadata.get_payload()
    assert "](docs/" not in text
    assert "](examples/" not in text
    assert "## The levels" in text


def test_the_installed_command_runs(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)
        module, _, function = (
            wheel.read(f"{NAME}.dist-info/entry_points.txt").decode().split()[-1].partition(":")
        )
    program = (
        f"import sys, {module} as command; print(command.__file__); sys.exit(command.{function}(['--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    where, *told = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert told[0] == "usage: halfpeak COMMAND [OPTIONS]"
