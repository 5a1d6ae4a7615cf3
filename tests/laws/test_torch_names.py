"""Every private name of torch that the package uses stands in ``core/torch_compat.py``, is used, and is there in this torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from halfpeak.core.torch_compat import PRIVATE_NAMES
from laws.source import Module, modules, require_none

LISTED = [
    (owner, name, versions)
    for versions, owners in PRIVATE_NAMES.items()
    for owner, names in owners.items()
    for name in names.split()
]

NOT_OF_TORCH = {
    "_getframe": "Python's sys",
    **dict.fromkeys(("_asdict", "_fields", "_make", "_replace"), "Python's named tuples"),
    "_initializing": "Python's module specs",
    "_trainer": "Lightning's",
    "_forward_module": "Fabric's",
    "_scope_": "mmengine's configurations",
    "_base_": "configurations of OpenMMLab",
    "_set_": "the beginning of names of hooks of mmcv",
    **dict.fromkeys(("_optimizers", "_original_forward"), "accelerate's"),
    "_loss_scale": "apex's loss scaler",
    "_deactivate": "apex's handle, which amp has, too",
    **dict.fromkeys(
        (
            *("_amp_stash", "_amp_lazy_init", "_lazy_init_maybe_master_weights"),
            "_master_params_to_model_params",
        ),
        "apex's attributes of an optimizer",
    ),
    "_metadata": "an attribute of every state_dict, also of those in files",
    "_extra_state": "the end of keys in files",
    "torch._tensor._rebuild_from_type_v2": "a name in pickles, which is compared and not called",
    "torch._utils._rebuild_": "the beginning of names in pickles",
    "_dense_tensors": "the end of names that code to migrate has",
}
"""Private names in the source that are not looked up in torch, each with whose it is."""

PRIVATE = r"_[A-Za-z]\w*"
IN_TEXT = re.compile(rf"{PRIVATE}|torch(\.\w+)*\.{PRIVATE}(\.\w+)*")
"""A string that is a private name: for ``getattr``, for a table of names, for ``sys.modules``."""


def names(tree: ast.Module, own: frozenset[str] = frozenset()) -> Iterator[tuple[ast.AST, str]]:
    """The private names in a file that it does not define. Of ``self`` and in strings, those that ``own`` has not, either.

    Args:
        own: the names that the package defines.
    """
    here = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(PRIVATE, node.attr):
            if node.attr not in here and not (of_self(node) and node.attr in own):
                yield node, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if re.search(rf"\.{PRIVATE}", f"{node.module}.{alias.name}"):
                    yield node, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and IN_TEXT.fullmatch(str(node.value)):
            yield from [(node, node.value)] if node.value not in here | own else []


def of_self(node: ast.Attribute) -> bool:
    """Whether it is an attribute of the object or the class that the method belongs to."""
    return ast.unparse(node.value) in ("self", "cls", "super()")


@cache
def defined(tree: ast.Module) -> frozenset[str]:
    """The names that a file defines: functions, classes, variables, and attributes that it sets on ``self``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and of_self(node):
            found.add(node.attr)
    return frozenset(found)


@cache
def used() -> tuple[tuple[Module, ast.AST, str], ...]:
    """The private names of torch in the source."""
    own = frozenset().union(*(defined(module.tree) for module in modules()))
    return tuple(
        (module, node, name)
        for module in modules()
        for node, name in names(module.tree, own)
        if name not in NOT_OF_TORCH
    )


def covers(owner: str, name: str, found: str) -> bool:
    """Whether a row is about a name in the source: the whole path, its beginning, or a part of it."""
    path = f"{owner}.{name}"
    return f"{path}.".startswith(f"{found}.") or found in path.split(".")


def test_every_private_name_is_listed() -> None:
    require_none(
        [
            f"{module.at(node)}: {name}"
            for module, node, name in used()
            if not any(covers(owner, listed, name) for owner, listed, _ in LISTED)
        ],
        "use a public name; or add a row to PRIVATE_NAMES of core/torch_compat.py, with the versions of torch that have it",
    )


def test_every_listed_name_is_used() -> None:
    there = {name for _, _, name in used()}
    unused = [
        f"{owner}.{name}" for owner, name, _ in LISTED if not any(covers(owner, name, one) for one in there)
    ]
    require_none(unused, "nothing needs these rows of PRIVATE_NAMES: delete them")
    written = {name for module in modules() for _, name in names(module.tree)}
    require_none(NOT_OF_TORCH.keys() - written, "nothing needs these rows of NOT_OF_TORCH: delete them")


def is_in_range(versions: str) -> bool:
    """Whether the installed torch is not older than the first of these versions."""
    return TorchVersion(torch.__version__) >= versions.split()[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is")  # the compiler, when it is imported
@pytest.mark.parametrize(
    ("owner", "name"),
    [pytest.param(owner, name, id=f"{owner}.{name}") for owner, name, seen in LISTED if is_in_range(seen)],
)
def test_this_torch_has_it(owner: str, name: str) -> None:
    thing = found_at(owner)
    if hasattr(thing, name):
        return
    # What only objects have is set, or declared, in the source of their class or of the module that reads it.
    sources = [inspect.getsource(one) for one in (thing.__mro__[:-1] if isinstance(thing, type) else [thing])]
    assert any(re.search(rf"\b{name}\b", source) for source in sources), (
        f"torch has no {owner}.{name} any more"
    )


def found_at(path: str) -> Any:
    """A module, or a class in it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch._foreach_new_(x)", ["_foreach_new_"]),
        ("tensor._version", ["_version"]),
        ("from torch.nn import _new", ["torch.nn._new"]),
        ("from torch._new import public", ["torch._new.public"]),
        ("from torch.nn import Module\nfrom math import _new", []),
        ("getattr(state, '_fresh', None)", ["_fresh"]),
        ("sys.modules.get('torch._new.module')", ["torch._new.module"]),
        ("'a sentence about torch._new'", []),
        ("self._own = 1\nother._own", []),
        ("self._new", ["_new"]),
        ("self._ours\n'_ours'\nother._ours", ["_ours"]),
        ("self.__dict__\n_own = 2\nx._own", []),
    ],
)
def test_the_law_sees(text: str, found: list[str]) -> None:
    assert [name for _, name in names(ast.parse(text), frozenset({"_ours"}))] == found
