"""After bad batches the loss scale soon grows again, and a nonfinite loss does not lower it at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import halfpeak
from halfpeak.fused import FusedSGD

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3),
    "AdamW(fused=True)": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=1e-3),
}


def run(engine: halfpeak.Engine, steps: int, *, loss: float = 0.0, grad: float = 0.0) -> halfpeak.StepResult:
    """Training steps; ``loss`` is added to each loss, ``grad`` to each gradient of the output."""
    for _ in range(steps):
        with engine.forward():
            out = engine.model(torch.ones(2, 4))
            out.register_hook(lambda found: found + grad)
            value = out.float().square().mean() + loss
        engine.backward(value)
        result = engine.step()
    return result


def make(name: str = "SGD", level: str = "O2", **options: Any) -> halfpeak.Engine:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return halfpeak.prepare(model, OPTIMIZERS[name](model.parameters()), level, **options)


FAULTS: list[dict[str, float]] = [{"loss": torch.nan}, {"loss": torch.inf}, {"grad": torch.inf}]


@pytest.mark.parametrize(
    ("name", "level", "fault"),
    [
        (name, ("O1", "O2")[(i + j) % 2], fault)
        for i, name in enumerate(OPTIMIZERS)
        for j, fault in enumerate(FAULTS)
    ],
    ids=str,
)
def test_a_bad_batch_in_40(name: str, level: str, fault: dict[str, float]) -> None:
    engine = make(name, level)
    for _ in range(8):
        run(engine, 39)
        assert run(engine, 1, **fault).found_inf.item() == 1
    if "grad" in fault:
        assert engine.read_scale() == 2.0**11
        run(engine, 15)
        assert engine.read_scale() == 2.0**12
    else:
        assert engine.read_scale() == 2.0**16
    assert int(engine.num_skipped) == 8
    assert all(parameter.isfinite().all() for parameter in engine.model.parameters())
