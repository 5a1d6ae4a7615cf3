"""``make oracle``: asks mmcv 1.7.2 itself again, and compares with the record that the tests repeat.

Whole numbers, words and order must be the same, and floats near: another processor adds up in another order.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from runner.oracle import record, record_runner  # noqa: E402


def leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every value in nested dicts and lists, with its path."""
    if isinstance(value, (dict, list)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{where}/{key}")
    else:
        yield where, value


def is_near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
    return type(one) is type(other) and one == other


def compare(name: str, found: Any) -> bool:
    """Print what is different; returns whether anything is."""
    recorded = json.loads((HERE / name).read_text())
    ours, theirs = (dict(leaves(tree, name)) for tree in (json.loads(json.dumps(found)), recorded))
    missing = object()
    wrong = [
        where
        for where in sorted(ours.keys() | theirs.keys())
        if not is_near(ours.get(where, missing), theirs.get(where, missing))
    ]
    for where in wrong[:20]:
        print(f"{where}: recorded {theirs.get(where)!r}, mmcv gives {ours.get(where)!r}")
    rounded = sum(ours.get(where) != value for where, value in theirs.items()) - len(wrong)
    print(f"{name}: {len(theirs)} values, {len(wrong)} wrong, {rounded} equal but for rounding")
    return bool(wrong)


def main(folder: str) -> int:
    """Returns the exit status."""
    found = {"mmcv.json": record.record(folder), "runner.json": record_runner.record(folder)}
    return min(sum(compare(name, tree) for name, tree in found.items()), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
