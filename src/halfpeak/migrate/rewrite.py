"""rewrite: the new text of one file, and the findings that are left for a person."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import libcst as cst

from halfpeak.migrate.configs import rewrite_config
from halfpeak.migrate.findings import Finding, NotSupported, Target
from halfpeak.migrate.limits import exceeded_limit
from halfpeak.migrate.loops.loop_match import PREFIXES, match_loop, uses_of_amp
from halfpeak.migrate.loops.to_autocast import write_autocast
from halfpeak.migrate.loops.to_engine import write_engine
from halfpeak.migrate.rename import rename
from halfpeak.migrate.tree import Tree

_OLD_WORDS: Final = re.compile(rb"\b(?:apex|amp|amp_C|apex_C|fp16|mmcv|ApexOptimWrapper)\b")
"""A file without any of these words has nothing to rewrite, so it is not parsed."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result for one file.

    Attributes:
        source: the new content of the file; the old content if nothing changes.
        findings: the places that a person has to look at, by line.
        unreadable: whether the file could not be parsed; its only finding says why.
    """

    source: bytes
    findings: tuple[Finding, ...] = ()
    unreadable: bool = False


def rewrite(source: bytes, to: Target, *, keep_amp: bool = False) -> Rewritten:
    """Rewrite the parts of one file whose meaning is certain.

    ::

        halfpeak   a training loop that is matched in full gets an engine; any other loop uses ``halfpeak.amp``
        amp        apex's names are imported from ``halfpeak.amp``; the loop itself does not change
        torch      a loop whose opt level torch can express gets ``torch.autocast`` and ``GradScaler``

    With each target, ``torch.cuda.amp`` becomes ``torch.amp``. Encoding, line ends, comments and formatting stay.

    Args:
        keep_amp: whether the loop must use ``halfpeak.amp``, because other files share amp's state with this one.

    >>> print(rewrite(b"from apex import amp  # mixed precision", "amp").source.decode())
    from halfpeak import amp  # mixed precision
    """
    if not _may_have_old_names(source):
        return Rewritten(source)
    limit = exceeded_limit(source)
    if limit is not None:
        return unreadable(source, *limit)
    try:
        return _rewrite(cst.parse_module(source), source, to, keep_amp=keep_amp)
    except cst.ParserSyntaxError as error:
        return unreadable(source, error.raw_line, "a syntax error")
    except RecursionError:
        return unreadable(source, 1, "it is nested too deeply")
    except (UnicodeDecodeError, LookupError, SyntaxError) as error:
        return unreadable(source, 1, str(error))


def _rewrite(module: cst.Module, source: bytes, to: Target, *, keep_amp: bool) -> Rewritten:
    if module.bytes != source:
        return unreadable(source, 1, "its text would not come back byte for byte")
    tree = Tree(module)
    try:
        match = None if to == "amp" or keep_amp else match_loop(tree)
        write = write_engine if to == "halfpeak" else write_autocast
        edits, findings = rename(tree, to) if match is None else write(tree, match)
    except NotSupported as refused:
        edits, findings = rename(tree, to)
        found, keep = refused.finding(tree.line(refused.node)), "keep halfpeak.amp"
        if to == "torch":
            findings = [one for one in findings if not one.code.startswith(PREFIXES)]
            found = replace(found, write=found.write.replace(keep, "write --to amp"))
        findings.append(found)
    findings += rewrite_config(tree, to, edits)
    return Rewritten(edits.made_in(tree.module).bytes, tuple(sorted(set(findings))))


def names_of_amp(source: bytes) -> frozenset[str]:
    """The names of amp that a file uses; empty if it cannot be parsed."""
    if not _may_have_old_names(source) or exceeded_limit(source) is not None:
        return frozenset()
    try:
        return frozenset(uses_of_amp(Tree(cst.parse_module(source))))
    except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError, SyntaxError, RecursionError):
        return frozenset()


def _may_have_old_names(source: bytes) -> bool:
    """Whether the text contains one of ``_OLD_WORDS``. Null bytes are ignored, so that text in UTF-16 is reported."""
    return _OLD_WORDS.search(source.replace(b"\0", b"")) is not None


def unreadable(source: bytes, line: int, reason: str) -> Rewritten:
    """The result for a file that cannot be read."""
    finding = Finding(line, "the file", f"it cannot be read: {reason}", "mend it, and run this again")
    return Rewritten(source, (finding,), unreadable=True)
