"""A whole training step under torch.compile: one graph for forward and loss, the engine's own calls between graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import halfpeak
from support.states import same

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def build(optimizer: str, **options: Any) -> tuple[nn.Module, halfpeak.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )
    return model, halfpeak.prepare(model, OPTIMIZERS[optimizer](model.parameters()), clip=1.0, **options)


def step(model: nn.Module, engine: halfpeak.Engine, x: Tensor, y: Tensor) -> Tensor:
    with engine.forward():
        loss = F.cross_entropy(model(x).float() * 2.0, y)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Six batches; the fourth overflows every low-precision dtype."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, 8, generator=generator)
    x[3] *= 1e38
    return list(zip(x, torch.randint(2, (6, 4), generator=generator), strict=True))


VARIANTS: list[dict[str, Any]] = [
    *({"level": level} for level in ("O0", "O1", "O5")),
    {"level": "O2", "accumulate": 2},
    {"level": "O4", "op_lists": "torch"},
]


# torch.compile itself reads ``.grad`` of the loss at a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("sgd", options) for options in VARIANTS] + [("fused", {"level": "O4"})],
    ids=str,
)
def test_the_same_bits_and_no_break_but_the_engines_own_calls(
    optimizer: str, options: dict[str, Any]
) -> None:
    (model, engine), (twin, other) = build(optimizer, **options), build(optimizer, **options)
    compiled = torch.compile(step, backend="aot_eager")
    frames: list[int] = []
    for x, y in batches():
        expected = step(model, engine, x, y)
        assert torch.equal(compiled(twin, other, x, y), expected) or not expected.isfinite()
        frames.append(counters["frames"]["total"])
    assert same(model.state_dict().values(), twin.state_dict().values())
    assert int(engine.num_skipped) == int(other.num_skipped)
    reasons = [reason for reason, count in counters["graph_break"].items() for _ in range(count)]
    assert len(reasons) == 2
    assert "Engine._backward" in reasons[0]
    assert "Engine._step" in reasons[1]
    assert frames[1:] == frames[:1] * 5  # nothing is traced again, whatever scale and counters do
