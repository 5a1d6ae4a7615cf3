"""rename: replaces imports of old libraries, and the uses of their names, by the new names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node

from halfpeak.migrate import calls
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.findings import Finding, Refusal, Target
from halfpeak.migrate.imports import NO_LOOP, ImportedName, ImportRewrite, LoopImports, place
from halfpeak.migrate.names import FP16_OF_MMCV, Replacement, is_old, look_up, module_for
from halfpeak.migrate.tree import Alias, Import, Tree, Use, walk

Edit = Callable[[], None]


_LOOKUPS: Final = frozenset(
    {"find_spec", "find_loader", "import_module", "__import__", "version", "get_distribution", "distribution"}
)
_SAME_NAMES: Final = frozenset({"apex.fp16_utils"})
"""Modules whose replacement has every name that ``import *`` takes from them."""

_ASKS_FOR_APEX: Final = Refusal(
    "it checks for an installed apex, which rewritten code does not need",
    "check for halfpeak, or remove the check",
)


class _Meaning(NamedTuple):
    """The longest part of a use's attribute chain that has a replacement, and this replacement."""

    node: cst.BaseExpression
    name: str
    found: Replacement | Refusal | str
    """The replacement, the refusal, or the name of the new module."""


def rename(tree: Tree, target: Target, loop: LoopImports = NO_LOOP) -> tuple[Edits, list[Finding]]:
    """Rename the imports and uses whose meaning is certain; report the others and leave them unchanged.

    ``from apex import amp`` is renamed only if all uses of ``amp`` can be: one use without a replacement leaves the
    import and all other uses unchanged. With ``import apex``, each use is renamed independently of the others.

    Args:
        loop: the imports that change with a training loop; the caller adds the edits of the loop.
    """
    return _Renaming(tree, target, loop).run()


class _Renaming:
    """The renaming of one file."""

    def __init__(self, tree: Tree, target: Target, loop: LoopImports) -> None:
        self._tree = tree
        self._target: Target = target
        self._edits = Edits()
        self._loop = loop
        self._findings: set[Finding] = set()
        self._imports: dict[Import, ImportRewrite] = {}
        self._uses: dict[Alias, list[Use]] = defaultdict(list)

    def run(self) -> tuple[Edits, list[Finding]]:
        for use in self._tree.uses:
            for alias in use.aliases:
                self._uses[alias].append(use)
        renames_mmcv = self._renames_mmcv()
        for alias in self._tree.aliases:
            if renames_mmcv or not alias.full.startswith("mmcv"):
                self._alias(alias)
        for statement, imports in self._imports.items():
            if imports.has_changed:
                place(self._tree, self._edits, statement, imports)
        self._find_stars()
        self._find_lookups()
        return self._edits, sorted(self._findings)

    def _renames_mmcv(self) -> bool:
        names = [alias.full for alias in self._tree.aliases] + [use.name for use in self._tree.uses]
        return any(name.startswith("mmcv.") and name.rpartition(".")[2] in FP16_OF_MMCV for name in names)

    def _alias(self, alias: Alias) -> None:
        kept = [use for use in self._uses[alias] if use not in self._loop.gone]
        if len(kept) < len(self._uses[alias]):
            imports = self._imports.setdefault(alias.statement, ImportRewrite(alias.statement))
            names = self._loop.names if alias in self._loop.where else ()
            if not kept:
                imports.replace(alias.node, names)
                return
            for name in names:
                imports.add(name)
        is_whole = is_old(alias.name)
        uses = [use for use in kept if is_whole or is_old(use.name)]
        if (not uses and not is_old(alias.full)) or self._tree.is_fallback(alias):
            return
        imports = self._imports.setdefault(alias.statement, ImportRewrite(alias.statement))
        replacement = look_up(alias.name, self._target)
        module = module_for(alias.name, self._target)
        if isinstance(replacement, Replacement):
            self._rename_name(alias, replacement, uses, imports)
        elif module is not None:
            self._rename_module(alias, module, uses, imports)
        else:
            self._rename_package(alias, uses, imports)

    def _rename_name(
        self, alias: Alias, replacement: Replacement, uses: list[Use], imports: ImportRewrite
    ) -> None:
        """``from apex.parallel import LARC``: the local name stays, unless the replacement is a method."""
        meanings = [_Meaning(*use.chain[0], replacement) for use in uses]
        edits = self._edits_of(uses, meanings)
        if edits is None:
            return
        if "." in replacement.name:
            imports.replace(alias.node, [ImportedName(replacement.module.partition(".")[0])])
            for node, _, _ in meanings:
                self._edits.respell(node, replacement.path)
        else:
            imports.replace(alias.node, [ImportedName(replacement.module, replacement.name, alias.local)])
        for edit in edits:
            edit()

    def _rename_module(self, alias: Alias, module: str, uses: list[Use], imports: ImportRewrite) -> None:
        """``from apex import amp``: the new module gets the local name; only attributes with new names change."""
        meanings = [self._meaning(use) for use in uses]
        edits = self._edits_of(uses, meanings)
        if edits is None:
            return
        package, _, name = module.rpartition(".")
        is_from = isinstance(alias.statement, cst.ImportFrom)
        new = ImportedName(package, name) if is_from else ImportedName(module)
        imports.replace(alias.node, [new._replace(local=alias.local)])
        for node, name, found in meanings:
            if not isinstance(found, Replacement):
                continue
            if f"{module}{name.removeprefix(alias.name)}" != f"{found.module}.{found.name}":
                self._edits.respell(node, found.path)
                imports.add(ImportedName(found.module))
        for edit in edits:
            edit()

    def _rename_package(self, alias: Alias, uses: list[Use], imports: ImportRewrite) -> None:
        """``import apex``: each use gets its full new name; the import is removed if no use of the old name is left."""
        stays = not is_old(alias.full)
        for use in uses:
            meaning = self._meaning(use)
            edit = self._check(use, meaning)
            if edit is None or isinstance(meaning.found, Refusal):
                stays = True
                continue
            path = module = meaning.found
            if isinstance(meaning.found, Replacement):
                path, module = meaning.found.path, meaning.found.module
            self._edits.respell(meaning.node, str(path))
            edit()
            to_torch = str(module).partition(".")[0] == "torch"
            if not (to_torch and self._tree.binds("torch", use.scope)):
                imports.add(ImportedName("torch" if to_torch else str(module)))
        in_torch = alias.full.startswith("torch")
        if not uses and not stays and not in_torch:
            self._find_unused(alias)
        elif not stays:
            imports.replace(alias.node, [ImportedName("torch")] if in_torch else [])

    def _find_unused(self, alias: Alias) -> None:
        found = _ASKS_FOR_APEX if alias.full == "apex" else look_up(alias.full, self._target)
        if isinstance(found, Refusal):
            self._find(alias.node, alias.full, found)

    def _meaning(self, use: Use) -> _Meaning:
        """The longest part of a use's attribute chain that has a replacement, else a refusal."""
        for node, name in reversed(use.chain):
            found = look_up(name, self._target)
            if isinstance(found, Replacement):
                return _Meaning(node, name, found)
        for node, name in reversed(use.chain):
            module = module_for(name, self._target)
            rest = use.name.removeprefix(name)
            # Every module has attributes such as amp.__dict__.
            if module is not None and (not rest or rest.startswith(".__")):
                return _Meaning(node, name, module)
        unknown = Refusal("it has no known replacement", "rewrite it by hand")
        return _Meaning(use.node, use.name, look_up(use.name, self._target) or unknown)

    def _edits_of(self, uses: list[Use], meanings: list[_Meaning]) -> list[Edit] | None:
        """The edits of all uses; None if one of them cannot be renamed."""
        checked = [self._check(use, meaning) for use, meaning in zip(uses, meanings, strict=True)]
        edits = [edit for edit in checked if edit is not None]
        return edits if len(edits) == len(uses) else None

    def _check(self, use: Use, meaning: _Meaning) -> Edit | None:
        """The edit of a use or of the call around it; None if the use cannot be renamed, which is reported."""
        edit: Edit | Refusal = _nothing
        if use.doubt:
            edit = Refusal(use.doubt, "import it in one place, or rewrite it by hand")
        elif isinstance(meaning.found, Refusal):
            edit = meaning.found
        elif isinstance(meaning.found, Replacement):
            edit = self._edit(meaning.node, meaning.found)
        if isinstance(edit, Refusal):
            self._find(meaning.node, meaning.name, edit)
            return None
        return edit

    def _edit(self, node: cst.BaseExpression, replacement: Replacement) -> Edit | Refusal:
        call = self._tree.call_of(node)
        if call is None:
            return self._bare(node, replacement)
        change, device = replacement.arguments, replacement.device
        if change is None:
            return _nothing
        changed = change(list(call.args), device)
        if isinstance(changed, Refusal):
            return changed

        def new_arguments(updated: cst.Call) -> cst.Call:
            args = change(list(updated.args), device)
            return updated if isinstance(args, Refusal) else updated.with_changes(args=args)

        return lambda: self._edits.replace(call, new_arguments)

    def _bare(self, node: cst.BaseExpression, replacement: Replacement) -> Edit | Refusal:
        """The edit for a use that is not a call."""
        if replacement.arguments is calls.for_custom and isinstance(self._tree.parent(node), cst.Decorator):
            return lambda: self._decorate(node, replacement)
        if replacement.bare == "always" or (replacement.bare == "as a type" and self._is_type(node)):
            return _nothing
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

    def _decorate(self, node: cst.BaseExpression, replacement: Replacement) -> None:
        args = calls.for_custom([], replacement.device)
        respelled = self._edits.pending(node)
        self._edits.replace(node, lambda updated: cst.Call(respelled(updated), args=args))

    def _find(self, node: cst.CSTNode, code: str, refusal: Refusal) -> None:
        self._findings.add(Finding(self._tree.line(node), code, refusal.reason, refusal.write))

    def _find_stars(self) -> None:
        unclear = Refusal("it does not say which names it imports", "import each name")
        for node in walk(self._tree.module):
            match node:
                case cst.ImportFrom(module=cst.Name() | cst.Attribute() as origin, names=cst.ImportStar()):
                    module = get_full_name_for_node(origin) or ""
                case _:
                    continue
            new = module_for(module, self._target) if module in _SAME_NAMES else None
            if new is not None:
                written = cst.parse_expression(new)
                self._edits.replace(node, lambda updated, new=written: updated.with_changes(module=new))
            elif not node.relative and is_old(module):
                self._find(node, f"from {module} import *", unclear)

    def _find_lookups(self) -> None:
        """Report calls that look for apex, or import it, by a string."""
        for node in walk(self._tree.module):
            match node:
                case cst.Call(args=[cst.Arg(value=cst.SimpleString(evaluated_value=str(name))) as text, *_]):
                    asked = (get_full_name_for_node(node.func) or "").rpartition(".")[2]
                    if name.partition(".")[0] == "apex" and asked in _LOOKUPS:
                        self._find(node, f"{asked}({self._tree.code(text)})", _ASKS_FOR_APEX)
                case _:
                    pass


def _nothing() -> None:
    pass
