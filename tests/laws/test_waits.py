"""A step waits for the device once, to learn whether to skip; not at all with an optimizer that takes found_inf."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfpeak
from laws.source import PACKAGE


class Waits(TorchDispatchMode):
    """Notes the lines of halfpeak, or of this file, from which a value of a tensor reaches Python."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            stack = traceback.extract_stack()[:-1]
            # A test that reads a value itself is named by its own line.
            frames = [
                frame for frame in stack if frame.filename.startswith((str(PACKAGE), __file__))
            ] or stack
            self.places.append(f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
        return func(*args, **(kwargs or {}))


OPTIMIZERS = {
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1),
    "fused AdamW": (lambda parameters: torch.optim.AdamW(parameters, fused=True), 0),
}


@pytest.mark.parametrize("level", halfpeak.LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_how_often_a_step_waits(level: str, name: str) -> None:
    build, expected = OPTIMIZERS[name]
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    engine = halfpeak.prepare(model, build(model.parameters()), level, clip=1.0)
    for _ in range(3):
        with Waits() as waits:
            with engine.forward():
                loss = model(torch.ones(3, 4)).float().square().mean()
            engine.backward(loss)
            engine.step()
        assert len(waits.places) == expected, "\n".join(
            ["the step reads values of tensors at", *waits.places]
        )


def test_the_counter_counts() -> None:
    with Waits() as waits:
        bool(torch.ones(()) > 0)
        torch.ones(3).sum().item()
    assert len(waits.places) == 2
