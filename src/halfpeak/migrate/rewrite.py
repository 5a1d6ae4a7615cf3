"""rewrite: the new text of one file, and the findings that are left for a person."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import libcst as cst

from halfpeak.migrate.configs import rewrite_config
from halfpeak.migrate.edits import edited
from halfpeak.migrate.findings import Finding, Target
from halfpeak.migrate.limits import exceeded_limit
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


def rewrite(source: bytes, to: Target) -> Rewritten:
    """Rewrite the names in one file whose meaning is certain: imports, calls, and entries of configurations.

    ::

        halfpeak   names of apex and mmcv become halfpeak's or torch's, those of ``torch.cuda.amp`` ``torch.amp``'s
        torch      as above where torch has a counterpart; names that only halfpeak has are reported

    Encoding, line ends, comments and formatting stay.

    >>> print(rewrite(b"from apex import amp  # mixed precision", "halfpeak").source.decode())
    from halfpeak import amp  # mixed precision
    """
    if not _may_have_old_names(source):
        return Rewritten(source)
    limit = exceeded_limit(source)
    if limit is not None:
        return unreadable(source, *limit)
    try:
        module = cst.parse_module(source)
        if module.bytes != source:
            return unreadable(source, 1, "its text would not come back byte for byte")
        tree = Tree(module)
        edits, findings = rename(tree, to)
        entries, more = rewrite_config(tree, to)
    except cst.ParserSyntaxError as error:
        return unreadable(source, error.raw_line, "a syntax error")
    except RecursionError:
        return unreadable(source, 1, "it is nested too deeply")
    except (UnicodeDecodeError, LookupError, SyntaxError) as error:
        return unreadable(source, 1, str(error))
    new = edited(tree.code, [*edits, *entries]).encode(module.encoding)
    return Rewritten(new, tuple(sorted({*findings, *more})))


def _may_have_old_names(source: bytes) -> bool:
    """Whether the text contains one of ``_OLD_WORDS``. Null bytes are ignored, so that text in UTF-16 is reported."""
    return _OLD_WORDS.search(source.replace(b"\0", b"")) is not None


def unreadable(source: bytes, line: int, reason: str) -> Rewritten:
    """The result for a file that cannot be read."""
    finding = Finding(line, "the file", f"it cannot be read: {reason}", "mend it, and run this again")
    return Rewritten(source, (finding,), unreadable=True)
