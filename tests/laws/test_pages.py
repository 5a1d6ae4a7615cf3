"""Every code block of the pages runs, every command they show exists, every link leads somewhere."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from pathlib import Path

import pytest

import halfpeak
from halfpeak.core.levels import LEVELS
from laws.source import PACKAGE, ROOT
from support.forks import errors_of
from support.pages import blocks, python_of

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUNNABLE = [page for page in PAGES if python_of(page.read_text(), run=True).strip()]


CHUNKS = 3
"""Parts of the pages, each of which another process of the suite can run."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_code_blocks_run(chunk: int, tmp_path: Path) -> None:
    """In order, in one namespace, in an empty folder and a process of its own, with warnings as errors."""
    scripts = [tmp_path / str(number) / page.with_suffix(".py").name for number, page in enumerate(RUNNABLE)]
    for script, page in zip(scripts, RUNNABLE, strict=True):
        script.parent.mkdir()
        script.write_text(python_of(page.read_text(), run=True))
    errors = errors_of(scripts[chunk::CHUNKS], strict=True)
    assert not errors, f"the tracebacks have the pages' line numbers\n{errors}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_blocks_that_are_not_run_compile(page: Path) -> None:
    for words, first, code in blocks(page.read_text()):
        if words[:1] == ["python"] and "no-run" in words:
            compile("\n" * (first - 1) + "\n".join(code), str(page), "exec")


@pytest.mark.parametrize("page", RUNNABLE, ids=named)
def test_a_page_says_that_its_code_blocks_continue_each_other(page: Path) -> None:
    runs = [code for words, _, code in blocks(page.read_text()) if words == ["python"]]
    asks = [name for code in runs for name in unbound("\n".join(code))]
    assert not asks or "code blocks continue each other" in " ".join(page.read_text().split()), asks


def unbound(code: str) -> set[str]:
    """The names that a block of code reads and does not bind."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return {name.id for name in names} - bound - set(dir(builtins))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_shown_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
    assert shown <= targets


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_runner_keeps_line_numbers_and_leaves_out_what_is_not_run() -> None:
    page = "# T\n```python\nx = 1\n```\n```python no-run\ny = 2\n```\n```bash\nls\n```\n"
    assert python_of(page, run=True).splitlines()[2] == "x = 1"
    assert python_of(page, run=False).strip() == "y = 2"


def test_the_page_of_the_levels_says_what_the_code_does() -> None:
    text = (ROOT / "docs" / "levels.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    start = next(index for index, row in enumerate(rows) if row[0] == "property")
    assert rows[start][1:] == list(LEVELS), "the columns of the table of properties"
    written = {row[0]: row[1:] for row in rows[start + 2 :]}
    for name, shown in written.items():
        values = [getattr(level.properties, name) for level in LEVELS.values()]
        assert shown == [f'"{v}"' if isinstance(v, str) else str(v).removeprefix("torch.") for v in values], (
            name
        )


def test_the_page_of_prepare_has_its_arguments_and_defaults() -> None:
    text = (ROOT / "docs" / "prepare.md").read_text()
    written = re.findall(r"^\| `(\w+)` \| (?:`(.+?)` )?\|", text, flags=re.MULTILINE)
    known = inspect.signature(halfpeak.prepare).parameters.values()
    defaults = ["" if one.default is one.empty else repr(one.default).replace("'", '"') for one in known]
    assert written == list(zip([one.name for one in known], defaults, strict=True))


def test_the_files_that_the_architecture_names_exist() -> None:
    named_files = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / "docs" / "ARCHITECTURE.md").read_text())
    assert named_files
    folders = (ROOT, ROOT / "src" / "halfpeak")
    assert not [name for name in named_files if not any((folder / name).exists() for folder in folders)]


def test_the_papers_that_the_source_names_are_cited() -> None:
    papers = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
    source = {number for path in PACKAGE.rglob("*.py") for number in papers.findall(path.read_text())}
    cited = papers.findall((ROOT / "CITATION.cff").read_text())
    assert sorted(source) == sorted(cited)


def test_the_tests_that_the_page_of_promises_names_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text()
    tests = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    files = re.findall(r"`(\w+/test_\w+\.py)`", text)
    assert files
    assert not [name for name in files if name not in tests]
