"""Limits for files to parse: libcst's parser recurses in native code, so deep nesting would crash the process."""

from __future__ import annotations

import io
import tokenize
from typing import Final

MAX_BYTES: Final = 2**19
MAX_NESTING: Final = 100
"""Maximum depth of nested brackets, and of nested blocks. Python itself allows 200 and 100."""

MAX_CHAIN: Final = 500
"""Maximum number of tokens in an expression without a comma, such as ``a + b + c``."""


def exceeded_limit(source: bytes) -> tuple[int, str] | None:
    """The line and the reason why a file must not be parsed; None if it is within the limits.

    Time and memory are proportional to the size of the file. Text that cannot be split into tokens passes, because the
    parser reports what is wrong with it.

    >>> exceeded_limit(b"x = " + b"(" * 300 + b")" * 300)
    (1, 'it is nested more than 100 levels deep')
    """
    if len(source) > MAX_BYTES:
        return 1, f"it is larger than {MAX_BYTES} bytes"
    if b"\0" in source:
        return 1, "it contains null bytes, as text in UTF-16 does; save it as UTF-8"
    blocks, chains = 0, [0]
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            line = token.start[0]
            blocks += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
            if token.type == tokenize.NEWLINE or token.string in (",", ";"):
                chains[-1] = 0
            elif token.string in ("(", "[", "{"):
                chains.append(0)
            elif token.string in (")", "]", "}") and len(chains) > 1:
                chains.pop()
            chains[-1] += token.type not in (tokenize.COMMENT, tokenize.NL)
            if max(len(chains) - 1, blocks) > MAX_NESTING:
                return line, f"it is nested more than {MAX_NESTING} levels deep"
            if chains[-1] > MAX_CHAIN:
                return line, f"it has a statement of more than {MAX_CHAIN} parts"
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
        return None
    return None
