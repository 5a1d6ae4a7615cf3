"""``StepResult.nonfinite()`` names the parameters whose gradients made the step skip."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak import fused
from support.nets import LEVELS

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, eps=1e-4, fused=True),
    "FusedAdamW": lambda parameters: fused.FusedAdamW(parameters, eps=1e-4),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_skipped_step_names_its_parameters(
    level: str, optimizer: str, clip: float | None, bad: float
) -> None:
    """Nearest to the loss first, without those to which a clip spreads a NaN; no names if the step was not skipped."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    engine = halfpeak.prepare(model, OPTIMIZERS[optimizer](model.parameters()), level, clip=clip)
    poisons: list[float] = []

    def poison(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        for factor in poisons:
            output.register_hook(partial(torch.mul, torch.tensor(factor, dtype=output.dtype)))

    model[0].register_forward_hook(poison)
    for poisoned in (False, True, False):
        poisons[:] = [bad] if poisoned else []
        with engine.forward():
            loss = model(torch.ones(2, 4)).float().mean() / 2**8
        engine.backward(loss)
        result = engine.step()
        assert result.stepped() != poisoned
        assert result.nonfinite() == (("0.bias", "0.weight") if poisoned else ())
