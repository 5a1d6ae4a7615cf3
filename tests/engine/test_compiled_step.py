"""A training step of user code under torch.compile: forward and loss are one graph, the engine's own calls run between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import halfpeak
from support.states import differences

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch's fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("sgd", {"level": level}) for level in ("O0", "O1", "O5")),
    ("sgd", {"level": "O2", "accumulate": 2}),
    ("sgd", {"level": "O4", "op_lists": "torch"}),
    ("torch's fused", {"level": "O4"}),
]


class Run:
    """A net with batch norms and its engine."""

    def __init__(self, optimizer: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )
        self.engine = halfpeak.prepare(
            self.net, OPTIMIZERS[optimizer](self.net.parameters()), clip=1.0, **options
        )

    def step(self, x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, halfpeak.StepResult]:
        with self.engine.forward():
            loss = F.cross_entropy(self.net(x).float() * 2.0, y) * factor
        self.engine.backward(loss)
        return loss, self.engine.step()


# torch.compile itself reads ``.grad`` of the loss at a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("optimizer", "options"), VARIANTS, ids=str)
def test_the_same_bits_and_no_break_but_the_engines_own_calls(
    optimizer: str, options: dict[str, Any]
) -> None:
    eager, run = (Run(optimizer, **options) for _ in range(2))
    compiled = torch.compile(run.step, backend="aot_eager")
    frames: list[int] = []
    for number in range(6):
        x, y = torch.randn(4, 8), torch.randint(2, (4,))
        factor = torch.tensor(float("inf") if number == 3 else 1.0)
        assert not differences(eager.step(x, y, factor), compiled(x, y, factor))
        frames.append(counters["frames"]["total"])
    assert not differences(eager.engine.state_dict(), run.engine.state_dict())
    assert int(run.engine.num_skipped) >= 1
    reasons = [reason for reason, count in counters["graph_break"].items() for _ in range(count)]
    assert len(reasons) == 2
    assert "Engine._backward" in reasons[0]
    assert "Engine._step" in reasons[1]
    assert frames[1:] == frames[:1] * 5  # nothing is traced again, whatever scale and counters do
