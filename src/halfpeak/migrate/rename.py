"""rename: replaces imports of old libraries, and the uses of their names, by the new names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node

from halfpeak.migrate import calls
from halfpeak.migrate.calls import OldCall
from halfpeak.migrate.edits import Edit
from halfpeak.migrate.findings import Finding, Refusal, Target
from halfpeak.migrate.imports import ImportedName, ImportRewrite
from halfpeak.migrate.names import Replacement, is_old, look_up, module_for
from halfpeak.migrate.tree import Alias, Import, Tree, Use, walk

_LOOKUPS: Final = frozenset(
    {"find_spec", "find_loader", "import_module", "__import__", "version", "get_distribution", "distribution"}
)
_PACKAGES: Final = ("apex", "mmcv")
"""Packages that code may look for without using them."""

_SAME_NAMES: Final = frozenset({"apex.fp16_utils"})
"""Modules whose replacement has every name that ``import *`` takes from them."""

_UNKNOWN: Final = Refusal("it has no known replacement", "rewrite it by hand")


class _Meaning(NamedTuple):
    """The longest part of a use's attribute chain that has a replacement, and this replacement."""

    use: Use
    node: cst.BaseExpression
    name: str
    found: Replacement | Refusal | str
    """The replacement, the refusal, or the name of the new module."""


def rename(tree: Tree, target: Target) -> tuple[list[Edit], list[Finding]]:
    """Rename the imports and uses whose meaning is certain; report the others and leave them unchanged.

    ``from apex import amp`` is renamed only if all uses of ``amp`` can be: one use without a replacement leaves the
    import and all other uses unchanged. With ``import apex``, each use is renamed independently of the others.
    """
    return _Renaming(tree, target).run()


class _Renaming:
    """The renaming of one file."""

    def __init__(self, tree: Tree, target: Target) -> None:
        self._tree = tree
        self._target: Target = target
        self._edits: list[Edit] = []
        self._findings: set[Finding] = set()
        self._imports: dict[Import, ImportRewrite] = {}

    def run(self) -> tuple[list[Edit], list[Finding]]:
        uses: dict[Alias, list[Use]] = defaultdict(list)
        for use in self._tree.uses:
            for alias in use.aliases:
                uses[alias].append(use)
        for alias in self._tree.aliases:
            ours = [use for use in uses[alias] if is_old(alias.name) or is_old(use.name)]
            if (ours or is_old(alias.full)) and not self._tree.is_fallback(alias):
                self._rename(alias, [self._meaning(use) for use in ours])
        for imports in self._imports.values():
            self._edits += imports.edits()
        self._rename_stars()
        self._find_lookups()
        return self._edits, sorted(self._findings)

    def _rename(self, alias: Alias, uses: Sequence[_Meaning]) -> None:
        imports = self._imports.setdefault(alias.statement, ImportRewrite(self._tree, alias.statement))
        replacement, module = look_up(alias.name, self._target), module_for(alias.name, self._target)
        if isinstance(replacement, Replacement):
            self._rename_name(alias, replacement, [self._first(one, replacement) for one in uses], imports)
        elif module is not None:
            self._rename_module(alias, module, uses, imports)
        elif not uses:
            self._rename_unused(alias, imports)
        elif self._is_one_place(alias) and all(isinstance(one.found, Refusal) for one in uses):
            self._find(alias.node, alias.full, look_up(alias.full, self._target))
        else:
            self._rename_package(alias, uses, imports)

    def _rename_name(
        self, alias: Alias, replacement: Replacement, uses: Sequence[_Meaning], imports: ImportRewrite
    ) -> None:
        """``from apex.parallel import LARC``: the local name stays, unless the replacement is a method."""
        edits = self._edits_of_all(uses)
        if edits is None:
            return
        if "." in replacement.name:
            imports.replace(alias.node, ImportedName(replacement.module.partition(".")[0]))
            edits += [self._tree.replaced(one.node, replacement.path) for one in uses]
        else:
            imports.replace(alias.node, ImportedName(replacement.module, replacement.name, alias.local))
        self._edits += edits

    def _rename_module(
        self, alias: Alias, module: str, uses: Sequence[_Meaning], imports: ImportRewrite
    ) -> None:
        """``from apex import amp``: the new module gets the local name; only attributes with new names change."""
        edits = self._edits_of_all(uses)
        if edits is None:
            return
        package, _, name = module.rpartition(".")
        is_from = isinstance(alias.statement, cst.ImportFrom)
        imports.replace(
            alias.node, ImportedName(*((package, name) if is_from else (module, None)), local=alias.local)
        )
        for one in uses:
            if isinstance(one.found, Replacement):
                same = f"{module}{one.name.removeprefix(alias.name)}"
                if same != f"{one.found.module}.{one.found.name}":
                    edits.append(self._tree.replaced(one.node, one.found.path))
                    imports.add(ImportedName(one.found.module))
        self._edits += edits

    def _rename_package(self, alias: Alias, uses: Sequence[_Meaning], imports: ImportRewrite) -> None:
        """``import apex``: each use gets its full new name; the import goes if no use of the old name is left."""
        stays = not is_old(alias.full)
        for one in uses:
            edits = self._edits_of(one)
            if edits is None or isinstance(one.found, Refusal):
                stays = True
                continue
            path, module = one.found, one.found
            if isinstance(one.found, Replacement):
                path, module = one.found.path, one.found.module
            self._edits += [self._tree.replaced(one.node, str(path)), *edits]
            to_torch = str(module).partition(".")[0] == "torch"
            imports.add(ImportedName("torch" if to_torch else str(module)))
        if not stays:
            imports.replace(alias.node, ImportedName("torch") if alias.full.startswith("torch") else None)

    def _rename_unused(self, alias: Alias, imports: ImportRewrite) -> None:
        """``import apex.amp`` that is not used in this file."""
        module = module_for(alias.full, self._target)
        if module is not None:
            imports.replace(alias.node, ImportedName("torch" if module == "torch.amp" else module))
        else:
            self._find(
                alias.node,
                alias.full,
                _UNUSED if alias.full in _PACKAGES else look_up(alias.full, self._target),
            )

    def _is_one_place(self, alias: Alias) -> bool:
        """Whether an import is reported instead of its uses: one of a package alone says less than each use."""
        return "." in alias.full and is_old(alias.full)

    def _meaning(self, use: Use) -> _Meaning:
        """The longest part of a use's attribute chain that has a replacement, else a refusal."""
        for node, name in reversed(use.chain):
            found = look_up(name, self._target)
            if isinstance(found, Replacement):
                return _Meaning(use, node, name, found)
        for node, name in reversed(use.chain):
            module = module_for(name, self._target)
            rest = use.name.removeprefix(name)
            # Every module has attributes such as amp.__dict__.
            if module is not None and (not rest or rest.startswith(".__")):
                return _Meaning(use, node, name, module)
        found = look_up(use.name, self._target)
        return _Meaning(use, use.node, use.name, found if isinstance(found, Refusal) else _UNKNOWN)

    def _first(self, meaning: _Meaning, replacement: Replacement) -> _Meaning:
        """The meaning of a use of a name that is imported itself: that of the first part of its attribute chain."""
        return _Meaning(meaning.use, *meaning.use.chain[0], replacement)

    def _edits_of_all(self, meanings: Sequence[_Meaning]) -> list[Edit] | None:
        """The edits of all uses; None if one of them cannot be renamed."""
        found = [self._edits_of(one) for one in meanings]
        edits = [one for one in found if one is not None]
        return [edit for some in edits for edit in some] if len(edits) == len(found) else None

    def _edits_of(self, meaning: _Meaning) -> list[Edit] | None:
        """The edits around a use, beside its name; None if the use cannot be renamed, which is reported."""
        edits: list[Edit] | Refusal = []
        if meaning.use.doubt:
            edits = Refusal(meaning.use.doubt, "import it in one place, or rewrite it by hand")
        elif isinstance(meaning.found, Refusal):
            edits = meaning.found
        elif isinstance(meaning.found, Replacement):
            call = self._tree.call_of(meaning.node)
            if call is None:
                edits = self._bare(meaning.node, meaning.found)
            elif meaning.found.arguments is not None:
                edits = meaning.found.arguments(OldCall(self._tree, call, meaning.found.device))
        if isinstance(edits, Refusal):
            self._find(meaning.node, meaning.name, edits)
            return None
        return edits

    def _bare(self, node: cst.BaseExpression, replacement: Replacement) -> list[Edit] | Refusal:
        """The edits for a use that is not a call."""
        if replacement.bare == "as a decorator" and isinstance(self._tree.parent(node), cst.Decorator):
            _, end = self._tree.span(node)
            return [Edit(end, end, f'(device_type="{replacement.device}")')]
        if replacement.bare == "always" or (replacement.bare == "as a type" and self._is_type(node)):
            return []
        path = write = replacement.path
        if replacement.arguments in (calls.for_autocast, calls.with_device):
            write = f'functools.partial({path}, "{replacement.device}")'
        return Refusal(
            f"it is not called here, and {path} takes other arguments", f"write {write} if they fit"
        )

    def _is_type(self, node: cst.BaseExpression) -> bool:
        """Whether a name is used as a type: in an annotation, ``isinstance`` or ``issubclass``."""
        for above in self._tree.parents(node):
            if isinstance(above, cst.Annotation):
                return True
            if isinstance(above, cst.Call):
                return isinstance(above.func, cst.Name) and above.func.value in ("isinstance", "issubclass")
            if isinstance(above, (cst.BaseStatement, cst.BaseSmallStatement)):
                return False
        return False

    def _find(self, node: cst.CSTNode, code: str, found: object) -> None:
        reason, write = found if isinstance(found, Refusal) else _UNKNOWN
        self._findings.add(Finding(self._tree.line(node), code, reason, write))

    def _rename_stars(self) -> None:
        for node in walk(self._tree.module):
            match node:
                case cst.ImportFrom(module=cst.Name() | cst.Attribute() as origin, names=cst.ImportStar()):
                    module = get_full_name_for_node(origin) or ""
                case _:
                    continue
            new = module_for(module, self._target) if module in _SAME_NAMES else None
            if new is not None:
                self._edits.append(self._tree.replaced(origin, new))
            elif not node.relative and is_old(module):
                unclear = Refusal("it does not say which names it imports", "import each name")
                self._find(node, f"from {module} import *", unclear)

    def _find_lookups(self) -> None:
        """Report calls that look for a package, or import it, by a string."""
        for node in walk(self._tree.module):
            match node:
                case cst.Call(args=[cst.Arg(value=cst.SimpleString(evaluated_value=str(name))) as text, *_]):
                    asked = (get_full_name_for_node(node.func) or "").rpartition(".")[2]
                    package = name.partition(".")[0]
                    if package in _PACKAGES and asked in _LOOKUPS:
                        self._find(node, f"{asked}({self._tree.text(text)})", _asks_for(package))
                case _:
                    pass


_UNUSED: Final = Refusal(
    "nothing in this file uses it, unless the import itself asks whether it is installed",
    "remove the import, or import halfpeak",
)


def _asks_for(package: str) -> Refusal:
    return Refusal(
        f"it checks for an installed {package}, which rewritten code does not need",
        "check for halfpeak, or remove the check",
    )
