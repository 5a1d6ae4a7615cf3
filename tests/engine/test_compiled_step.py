"""A whole training step under torch.compile: one graph for forward and loss, the engine's own calls between graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from engine.test_whole_step import OPTIMIZERS, Run, batches
from support.states import differences

pytestmark = pytest.mark.usefixtures("fresh_compiler")

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("sgd", {"level": level}) for level in ("O0", "O1", "O5")),
    ("sgd", {"level": "O2", "accumulate": 2}),
    ("sgd", {"level": "O4", "op_lists": "torch"}),
    ("torch's fused", {"level": "O4"}),
]


# torch.compile itself reads ``.grad`` of the loss at a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("optimizer", "options"), VARIANTS, ids=str)
def test_the_same_bits_and_no_break_but_the_engines_own_calls(
    optimizer: str, options: dict[str, Any]
) -> None:
    eager, run = (Run(OPTIMIZERS[optimizer], **options) for _ in range(2))
    compiled = torch.compile(run.step, backend="aot_eager")
    frames: list[int] = []
    for batch in batches(6):
        assert not differences(eager.step(*batch), compiled(*batch))
        frames.append(counters["frames"]["total"])
    assert not differences(eager.engine.state_dict(), run.engine.state_dict())
    assert int(run.engine.num_skipped) >= 1
    reasons = [reason for reason, count in counters["graph_break"].items() for _ in range(count)]
    assert len(reasons) == 2
    assert "Engine._backward" in reasons[0]
    assert "Engine._step" in reasons[1]
    assert frames[1:] == frames[:1] * 5  # nothing is traced again, whatever scale and counters do
