"""``LossScaleCollapse`` names only parameters with nonfinite gradients, although clipping spreads a NaN to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from support.nets import TYPICAL


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("clip", [None, 1.0, halfpeak.ClipValue(value=0.5)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("patience", [1, 3])
def test_clipping_does_not_blame_the_others(level: str, clip: Any, bad: float, patience: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = halfpeak.ScaleConfig(init=1.0, floor=1.0, patience=patience)
    engine = halfpeak.prepare(
        model,
        optimizer,
        halfpeak.LEVELS[level].replace(loss_scale="dynamic"),
        clip=clip,
        scale=scale,
    )
    first, second = model.parameters()

    def step(bad: float) -> None:
        with engine.forward():
            spoilt = first * 1
            spoilt.register_hook(lambda grad: torch.full_like(grad, bad))
            loss = spoilt.float().sum() + second.float().sum()
        engine.backward(loss)
        engine.step()

    for _ in range(patience - 1):
        step(bad)
    with pytest.raises(halfpeak.LossScaleCollapse) as caught:
        step(bad)
    assert caught.value.parameters == ("0.weight",)
