"""Program that reads or converts each file in a child with limits, and prints how each child ended, as JSON.

Usage: python limited.py FILE ...
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from halfpeak.checkpoint import convert, inspect
from halfpeak.checkpoint.formats import TARGETS
from halfpeak.core.errors import HalfpeakError

MEMORY = (64 * 2**20, 384)
"""Bytes of memory, and bytes for each byte of the file, as SECURITY.md promises."""

SECONDS = (10, 20e-6)
"""CPU seconds, and seconds for each byte of the file: three times those of the machine on which this was written."""


def read(path: Path) -> str:
    """Convert a file to the form that its suffix names; inspect it if the suffix names none."""
    form = path.suffix.removeprefix(".")
    if form not in TARGETS:
        return told(lambda: inspect(path).findings)
    return told(lambda: convert(path, form, path.with_suffix(".out"), drop=["all"], scale=1.0))


def told(reader: Callable[[], object]) -> str:
    try:
        found = reader()
    except HalfpeakError as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return str(found)[:300] if isinstance(found, list) else "read"


def limit(size: int) -> None:
    """Limit the process to its present memory plus ``MEMORY``, and to ``SECONDS``, for a file of ``size`` bytes."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY[0] + MEMORY[1] * size,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS[0] + SECONDS[1] * size),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(paths: list[str]) -> None:
    warnings.simplefilter("ignore")
    ends: dict[str, str] = {}
    for path in paths:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                limit(os.path.getsize(path))
                os.write(sender, json.dumps(read(Path(path))).encode())
                os._exit(0)
            except BaseException:
                os.write(sender, json.dumps(traceback.format_exc()[-1500:]).encode())
                os._exit(1)
        os.close(sender)
        with os.fdopen(receiver) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        ends[Path(path).name] = json.loads(said) if said else f"ended with status {status}"
    json.dump(ends, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
