"""Files and configuration are data: the package has no way to run code out of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from laws.source import imports, modules, require_none

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "runpy",
    "code",
    "pty",
    "joblib",
}
"""Modules that run code from a file, or make that easy."""

CALLS = {"eval", "exec", "compile", "__import__"}
"""Builtins that run code."""

METHODS = {
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "torch.hub.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.serialization.add_safe_globals",
    "torch.serialization.safe_globals",
    "torch.ops.load_library",
}
"""Functions of other packages that run code from a file, or make that easy."""

READS_FILES = {
    "checkpoint/read.py": (
        "torch.serialization.safe_globals",
        "the one reader of files: it gives torch's safe reader inert stand-ins for the names in a file, and nothing that "
        "those names mean; the corpus of hostile files in tests/checkpoint is the judge",
    ),
}
"""Files that tell torch's reader what it may call: the one breach allowed in each, and its reason."""

RUNS_PROGRAMS = {
    "cli/doctor.py": (
        "import runpy",
        "halfpeak doctor FILE.py:FUNCTION tries the training that its user names on the command line",
    ),
    "cli/script.py": (
        "import runpy",
        "halfpeak run does what python does: it runs the program that its user names on the command line",
    ),
}
"""Files whose purpose is to run a program of the user: the one breach allowed in each, and its reason."""


def breaches(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] in MODULES for alias in node.names):
                yield node
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").split(".")[0] in MODULES or named & (METHODS | {"torch.load"}):
                yield node
        elif isinstance(node, ast.Name):
            if node.id in CALLS:
                yield node
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in METHODS:
            yield node
        elif isinstance(node, ast.Call):
            literal = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if ast.unparse(node.func) == "torch.load" and not literal:
                yield node
            if any(k.arg in ("shell", "allow_pickle", "trust_remote_code") for k in node.keywords):
                yield node


def test_the_package_runs_nothing_out_of_files() -> None:
    found = [
        f"{module.at(node)}: {ast.unparse(node)[:90]}"
        for module in modules()
        for node in breaches(module.tree)
        if ast.unparse(node) != (READS_FILES | RUNS_PROGRAMS).get(module.where, ("", ""))[0]
    ]
    require_none(
        found, "read files with halfpeak.checkpoint, or torch.load(..., weights_only=True), and keep to data"
    )


def test_the_reader_of_files_imports_nothing_that_a_file_names() -> None:
    (reader,) = (module for module in modules() if module.where in READS_FILES)
    assert len(list(breaches(reader.tree))) == 1
    assert not {name for _, name in imports(reader) if name.split(".")[0] in ("importlib", "sys", "copyreg")}


def test_torch_load_is_called_by_its_name() -> None:
    """An alias would hide it from the law above."""
    calls = {
        id(node.func) for module in modules() for node in ast.walk(module.tree) if isinstance(node, ast.Call)
    }
    aliased = [
        module.at(node)
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load" and id(node) not in calls
    ]
    require_none(aliased, "call torch.load(..., weights_only=True) in full")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=False)", 1),
        ("torch.load(path, weights_only=safe)", 1),
        ("torch.load(path, **{'weights_only': True})", 1),
        ("torch.load(path, map_location='cpu', weights_only=True)", 0),
        ("from torch import load", 1),
        ("import pickle", 1),
        ("from pickle import loads", 1),
        ("import torch, dill.source", 1),
        ("eval(text)", 1),
        ("run = exec", 1),
        ("model.eval()", 0),
        ("re.compile(text); torch.compile(model)", 0),
        ("yaml.load(text)", 1),
        ("yaml.safe_load(text)", 0),
        ("from yaml import unsafe_load", 1),
        ("subprocess.run(line, shell=True)", 1),
        ("numpy.load(path, allow_pickle=True)", 1),
        ("torch.serialization.add_safe_globals([Hook])", 1),
    ],
)
def test_the_law_sees(text: str, found: int) -> None:
    assert len(list(breaches(ast.parse(text)))) == found
