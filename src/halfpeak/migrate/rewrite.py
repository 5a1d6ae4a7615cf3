"""Rewrite: the text of one file under new names, and what is left for a person to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Final

import libcst as cst

from halfpeak.migrate.autocast import write_autocast
from halfpeak.migrate.configs import rewrite_config
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.findings import Finding, Target
from halfpeak.migrate.native import write_native
from halfpeak.migrate.recognise import PREFIXES, recognise, uses_of_amp
from halfpeak.migrate.renames import rename
from halfpeak.migrate.training import Unsure
from halfpeak.migrate.tree import Tree

_SIGNS: Final = re.compile(rb"\b(?:apex|amp|amp_C|apex_C|fp16|mmcv|ApexOptimWrapper)\b")
"""A file without any of these words has nothing to rewrite."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of a file.

    Attributes:
        source: its new content; the old one where nothing is to change.
        findings: what was left, by line.
        unreadable: it is not Python that can be read, and the only finding says why.
    """

    source: bytes
    findings: tuple[Finding, ...] = ()
    unreadable: bool = False


def rewrite(source: bytes, to: Target, *, keep_amp: bool = False) -> Rewritten:
    """Rewrite one file, as far as it is certain what its code means.

    ::

        halfpeak   a training loop that is understood in full gets an engine; any other stays on ``halfpeak.amp``
        amp        apex's names, from ``halfpeak.amp``: every loop runs as it is
        torch      ``torch.autocast`` and ``GradScaler``, where these can express the opt level

    In each, ``torch.cuda.amp`` becomes ``torch.amp``. Encoding, line ends, comments and formatting are those of the
    source.

    Args:
        keep_amp: do not try the native API, because other files share amp's state with this one.

    >>> print(rewrite(b"from apex import amp  # mixed precision", "amp").source.decode())
    from halfpeak import amp  # mixed precision
    """
    if _SIGNS.search(source) is None:
        return Rewritten(source)
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        return unreadable(source, error.raw_line, "a syntax error")
    except (UnicodeDecodeError, LookupError, SyntaxError, RecursionError) as error:
        return unreadable(source, 1, str(error))
    if module.bytes != source:
        return unreadable(source, 1, "its text would not come back byte for byte")
    findings: list[Finding] = []
    loop, refused = _rewrite_loop(module, to, findings, keep_amp=keep_amp)
    tree = Tree(loop)
    edits, left = rename(tree, to)
    if refused and to == "torch":
        left = [one for one in left if not one.code.startswith(PREFIXES)]
    renamed, config_findings = rewrite_config(_visit(tree.module, edits), to)
    findings += _on_old_lines([*left, *config_findings], module.code, loop.code)
    return Rewritten(renamed.bytes, tuple(sorted(set(findings))))


def is_guest(source: bytes) -> bool:
    """Whether a file trains with an amp that another one initialises."""
    if _SIGNS.search(source) is None:
        return False
    try:
        uses = uses_of_amp(Tree(cst.parse_module(source)))
    except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError, SyntaxError, RecursionError):
        return False
    return bool(uses) and "initialize" not in uses


def _rewrite_loop(
    module: cst.Module, to: Target, findings: list[Finding], *, keep_amp: bool
) -> tuple[cst.Module, bool]:
    """The file with its training loop rewritten, and whether it has one that was refused."""
    if to == "amp" or keep_amp:
        return module, False
    tree = Tree(module)
    try:
        training = recognise(tree)
        if training is None:
            return module, False
        edits, notes = (write_native if to == "halfpeak" else write_autocast)(tree, training)
    except Unsure as unsure:
        found = unsure.finding(tree)
        keep = "keep halfpeak.amp" if to == "halfpeak" else "write --to amp"
        findings.append(replace(found, write=found.write.replace("keep halfpeak.amp", keep)))
        return module, True
    findings += notes
    return _visit(tree.module, edits), False


def _visit(module: cst.Module, edits: Edits) -> cst.Module:
    if not edits:
        return module
    changed = module.visit(edits)
    assert isinstance(changed, cst.Module)
    return changed


def _on_old_lines(findings: list[Finding], old: str, new: str) -> list[Finding]:
    """Findings in a text, with the lines of the text it was made from."""
    before, after = ([line.strip() for line in text.splitlines()] for text in (old, new))
    lines: dict[int, int] = {}
    for block in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        lines.update({block.b + offset + 1: block.a + offset + 1 for offset in range(block.size)})

    def moved(line: int) -> int:
        return next((lines[one] for one in range(line, 0, -1) if one in lines), 1)

    return [replace(one, line=moved(one.line)) for one in findings]


def unreadable(source: bytes, line: int, reason: str) -> Rewritten:
    """A file that is left as it is because it cannot be read."""
    finding = Finding(line, "the file", f"it cannot be read: {reason}", "mend it, and run this again")
    return Rewritten(source, (finding,), unreadable=True)
