"""Renames: imports of old libraries, and the uses of what they bind, under the names that answer to them now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node

from halfpeak.migrate.calls import change
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.findings import Finding, Refusal, Target
from halfpeak.migrate.imports import Entry, Imports, place
from halfpeak.migrate.names import FP16_OF_MMCV, Rule, answer, is_ours, module_for
from halfpeak.migrate.tree import Alias, Import, Tree, Use, walk

Edit = Callable[[], None]


_ASKING: Final = frozenset(
    {"find_spec", "find_loader", "import_module", "__import__", "version", "get_distribution", "distribution"}
)
_QUESTION: Final = Refusal(
    "it asks for an installed apex, which rewritten code does not need",
    "ask for halfpeak, or leave out the question",
)


class _Meaning(NamedTuple):
    """What a use stands for: the part of its chain that something answers to, and what."""

    node: cst.BaseExpression
    name: str
    answer: Rule | Refusal | str
    """A rule, a refusal, or the name of the module in its place."""


def rename(tree: Tree, target: Target) -> tuple[Edits, list[Finding]]:
    """Every import and use that can be renamed with certainty; the others are found, and left as they are.

    An import is renamed when everything it binds can be: one use that has no counterpart leaves it, and all other uses
    of the same name, untouched.
    """
    return _Renaming(tree, target).run()


class _Renaming:
    """One file."""

    def __init__(self, tree: Tree, target: Target) -> None:
        self._tree = tree
        self._target: Target = target
        self._edits = Edits()
        self._findings: set[Finding] = set()
        self._imports: dict[Import, Imports] = {}
        self._uses: dict[Alias, list[Use]] = defaultdict(list)

    def run(self) -> tuple[Edits, list[Finding]]:
        for use in self._tree.uses:
            for alias in use.aliases:
                self._uses[alias].append(use)
        takes_mmcv = self._takes_mmcv()
        for alias in self._tree.aliases:
            if takes_mmcv or not alias.full.startswith("mmcv"):
                self._alias(alias)
        for statement, imports in self._imports.items():
            if imports.has_changed:
                place(self._tree, self._edits, statement, imports)
        self._find_stars()
        self._find_questions()
        return self._edits, sorted(self._findings)

    def _takes_mmcv(self) -> bool:
        names = [alias.full for alias in self._tree.aliases] + [use.name for use in self._tree.uses]
        return any(name.startswith("mmcv.") and name.rpartition(".")[2] in FP16_OF_MMCV for name in names)

    def _alias(self, alias: Alias) -> None:
        is_own = is_ours(alias.name)
        uses = [use for use in self._uses[alias] if is_own or is_ours(use.name)]
        if (not uses and not is_ours(alias.full)) or self._tree.is_fallback(alias):
            return
        imports = self._imports.setdefault(alias.statement, Imports(alias.statement))
        leaf = answer(alias.name, self._target)
        module = module_for(alias.name, self._target)
        if isinstance(leaf, Rule):
            self._leaf(alias, leaf, uses, imports)
        elif module is not None:
            self._module(alias, module, uses, imports)
        else:
            self._root(alias, uses, imports)

    def _leaf(self, alias: Alias, rule: Rule, uses: list[Use], imports: Imports) -> None:
        """``from apex.parallel import LARC``: the local name stays, unless it stands for more than a name."""
        meanings = [_Meaning(*use.chain[0], rule) for use in uses]
        edits = [self._judge(use, meaning) for use, meaning in zip(uses, meanings, strict=True)]
        if not all(edits):
            return
        if "." in rule.name:
            imports.replace(alias.node, [Entry(rule.module.partition(".")[0])])
            for node, _, _ in meanings:
                self._respell(node, rule.path)
        else:
            imports.replace(alias.node, [Entry(rule.module, rule.name, alias.local)])
        _carry_out(edits)

    def _module(self, alias: Alias, module: str, uses: list[Use], imports: Imports) -> None:
        """``from apex import amp``: another module under the same local name; attributes stay where they are alike."""
        meanings = [self._meaning(use) for use in uses]
        edits = [self._judge(use, meaning) for use, meaning in zip(uses, meanings, strict=True)]
        if not all(edits):
            return
        package, _, name = module.rpartition(".")
        is_from = isinstance(alias.statement, cst.ImportFrom)
        imports.replace(
            alias.node, [Entry(package, name, alias.local) if is_from else Entry(module, None, alias.local)]
        )
        for node, name, found in meanings:
            if (
                isinstance(found, Rule)
                and f"{module}{name.removeprefix(alias.name)}" != f"{found.module}.{found.name}"
            ):
                self._respell(node, found.path)
                imports.also(Entry(found.module))
        _carry_out(edits)

    def _root(self, alias: Alias, uses: list[Use], imports: Imports) -> None:
        """``import apex``: each use is written anew in full, and the import goes when none is left."""
        stays = not is_ours(alias.full)
        for use in uses:
            meaning = self._meaning(use)
            edit = self._judge(use, meaning)
            if edit is None or isinstance(meaning.answer, Refusal):
                stays = True
                continue
            path, module = meaning.answer, meaning.answer
            if isinstance(meaning.answer, Rule):
                path, module = meaning.answer.path, meaning.answer.module
            self._respell(meaning.node, str(path))
            edit()
            to_torch = str(module).partition(".")[0] == "torch"
            if not (to_torch and self._tree.binds("torch", use.scope)):
                imports.also(Entry("torch" if to_torch else str(module)))
        in_torch = alias.full.startswith("torch")
        if not uses and not stays and not in_torch:
            self._unused(alias)
        elif not stays:
            imports.replace(alias.node, [Entry("torch")] if in_torch else [])

    def _unused(self, alias: Alias) -> None:
        found = _QUESTION if alias.full == "apex" else answer(alias.full, self._target)
        if isinstance(found, Refusal):
            self._find(alias.node, alias.full, found)

    def _meaning(self, use: Use) -> _Meaning:
        """The longest part of a chain that something answers to."""
        for node, name in reversed(use.chain):
            found = answer(name, self._target)
            if isinstance(found, Rule):
                return _Meaning(node, name, found)
        for node, name in reversed(use.chain):
            module = module_for(name, self._target)
            rest = use.name.removeprefix(name)
            if module is not None and (
                not rest or rest.startswith(".__")
            ):  # amp.__dict__: every module has one
                return _Meaning(node, name, module)
        found = answer(use.name, self._target)
        return _Meaning(
            use.node, use.name, found or Refusal("nothing answers to it here", "rewrite it by hand")
        )

    def _judge(self, use: Use, meaning: _Meaning) -> Edit | None:
        """How the surroundings of a use change; None where it has to stay, which is then found."""
        edit: Edit | Refusal = _nothing
        if use.doubt:
            edit = Refusal(use.doubt, "import it in one place, or rewrite it by hand")
        elif isinstance(meaning.answer, Refusal):
            edit = meaning.answer
        elif isinstance(meaning.answer, Rule):
            edit = self._edit(meaning.node, meaning.answer)
        if isinstance(edit, Refusal):
            self._find(meaning.node, meaning.name, edit)
            return None
        return edit

    def _edit(self, node: cst.BaseExpression, rule: Rule) -> Edit | Refusal:
        call = self._tree.call_of(node)
        if call is None:
            return self._bare(node, rule)
        if rule.arguments == "keep":
            return _nothing
        changed = change(rule.arguments, call.args, rule.device)
        return changed if isinstance(changed, Refusal) else lambda: self._recall(call, rule)

    def _bare(self, node: cst.BaseExpression, rule: Rule) -> Edit | Refusal:
        """A name that is not called."""
        if rule.arguments == "custom" and isinstance(self._tree.parent(node), cst.Decorator):
            return lambda: self._decorate(node, rule)
        if rule.bare == "always" or (rule.bare == "as a type" and self._is_type(node)):
            return _nothing
        partial = f'functools.partial({rule.path}, "{rule.device}")'
        write = partial if rule.arguments in ("autocast", "device") else rule.path
        return Refusal(
            f"it is passed on, and {rule.path} takes other arguments", f"write {write} if they fit"
        )

    def _is_type(self, node: cst.BaseExpression) -> bool:
        """Whether a name stands for a type only: in an annotation, or asked for with ``isinstance``."""
        for above in self._tree.parents(node):
            if isinstance(above, cst.Annotation):
                return True
            if isinstance(above, cst.Call):
                return isinstance(above.func, cst.Name) and above.func.value in ("isinstance", "issubclass")
            if isinstance(above, (cst.BaseStatement, cst.BaseSmallStatement)):
                return False
        return False

    def _recall(self, call: cst.Call, rule: Rule) -> None:
        def changed(updated: cst.Call) -> cst.Call:
            args = change(rule.arguments, updated.args, rule.device)
            return updated if isinstance(args, Refusal) else updated.with_changes(args=args)

        self._edits.expression(call, changed)

    def _decorate(self, node: cst.BaseExpression, rule: Rule) -> None:
        args = change(rule.arguments, [], rule.device)
        respelled = self._edits.pending(node)
        if not isinstance(args, Refusal):
            self._edits.expression(node, lambda updated: cst.Call(respelled(updated), args=args))

    def _respell(self, node: cst.BaseExpression, path: str) -> None:
        self._edits.expression(node, lambda updated: cst.parse_expression(path))

    def _find(self, node: cst.CSTNode, code: str, refusal: Refusal) -> None:
        self._findings.add(Finding(self._tree.line(node), code, refusal.reason, refusal.write))

    def _find_stars(self) -> None:
        for node in walk(self._tree.module):
            if (
                isinstance(node, cst.ImportFrom)
                and isinstance(node.names, cst.ImportStar)
                and node.module is not None
            ):
                module = get_full_name_for_node(node.module) or ""
                if not node.relative and is_ours(module):
                    self._find(
                        node, f"from {module} import *", Refusal("it hides what it imports", "name each")
                    )

    def _find_questions(self) -> None:
        """Code that names a module in a string: to look whether it is there, or to import it."""
        for node in walk(self._tree.module):
            text = node.args[0].value if isinstance(node, cst.Call) and node.args else None
            name = text.evaluated_value if isinstance(text, cst.SimpleString) else None
            if isinstance(node, cst.Call) and isinstance(name, str) and name.partition(".")[0] == "apex":
                asked = (get_full_name_for_node(node.func) or "").rpartition(".")[2]
                if asked in _ASKING:
                    self._find(node, f"{asked}({self._tree.code(node.args[0])})", _QUESTION)


def _nothing() -> None:
    pass


def _carry_out(edits: list[Edit | None]) -> None:
    for edit in edits:
        if edit is not None:
            edit()
