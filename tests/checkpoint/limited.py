"""A program that reads files with every reader, each file in a child with limits; prints how each ended, as JSON.

Usage: python limited.py CPU_SECONDS MEBIBYTES FILE ...
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
from halfpeak.core.errors import HalfpeakError


def read(path: Path) -> str:
    """A sealed file is read by ``load`` first, another by ``load_plain``."""
    if path.suffix == ".sealed":
        return told(lambda: inspect(path).findings)
    return told(lambda: convert(path, "apex", path.with_name("out"), drop=["all"], scale=1.0))


def told(reader: Callable[[], object]) -> str:
    try:
        found = reader()
    except HalfpeakError as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return str(found)[:300] if isinstance(found, list) else "read"


def limit(seconds: int, mebibytes: int) -> None:
    """More memory than the process has now by so much, and so many seconds of computing."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + mebibytes * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(seconds: int, mebibytes: int, paths: list[str]) -> None:
    warnings.simplefilter("ignore")
    ends: dict[str, str] = {}
    for path in paths:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                limit(seconds, mebibytes)
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
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
