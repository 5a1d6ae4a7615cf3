"""``make oracle``: runs mmcv 1.7.2 itself again and compares the results with the record that the tests use.

Whole numbers, text and order must be equal, and floats close, because another processor sums in another order. Then
halfpeak resumes from files that mmcv has written.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import halfpeak.runner

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from runner.oracle import record, record_runner, runner_cases  # noqa: E402


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
    """Print the differences; return whether there are any."""
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


def train(package: Any, kind: str, folder: str, resumed: Path | None = None) -> list[torch.Tensor]:
    """The weights at the end of a run, which resumes from a file if one is given."""
    made = runner_cases.make(package, kind, work_dir=folder)
    made.register_training_hooks(
        {"policy": "step", "step": [2]}, {"grad_clip": {"max_norm": 0.5}}, {"interval": 1}
    )
    if resumed is not None:
        made.resume(resumed)
    made.run([runner_cases.loader()], [("train", 1)])
    return [parameter.detach() for parameter in made.model.parameters()]


def hand_over_differs(mmcv: Any, kind: str, file: str) -> bool:
    """mmcv trains and saves; halfpeak resumes from a file in the middle. Return whether the final weights differ."""
    with tempfile.TemporaryDirectory() as theirs, tempfile.TemporaryDirectory() as ours:
        end = train(mmcv, kind, theirs)
        found = train(halfpeak.runner, kind, ours, Path(theirs, file))
    is_same = all(torch.equal(one, other) for one, other in zip(end, found, strict=True))
    print(
        f"{file} of mmcv, resumed by halfpeak: {'the same weights' if is_same else f'{found} instead of {end}'}"
    )
    return not is_same


def main(folder: str) -> int:
    found = {"mmcv.json": record.record(folder), "runner.json": record_runner.record(folder)}
    wrong = [compare(name, tree) for name, tree in found.items()]
    mmcv = record.import_mmcv(folder, None)
    wrong.append(hand_over_differs(mmcv, "EpochBasedRunner", "epoch_2.pth"))
    wrong.append(hand_over_differs(mmcv, "IterBasedRunner", f"iter_{2 * runner_cases.BATCHES}.pth"))
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
