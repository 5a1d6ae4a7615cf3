"""What ``prepare`` refuses before it looks at any parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfpeak
from halfpeak.core.errors import ConfigTypeError

MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("models", "optimizers", "name"),
    [(OPTIMIZER, MODEL, "SGD"), (None, OPTIMIZER, "NoneType"), (MODEL, 3, "int")],
)
def test_what_is_no_model_or_no_optimizer(models: Any, optimizers: Any, name: str) -> None:
    with pytest.raises(ConfigTypeError, match=rf"^{name} is .*the model first$"):
        halfpeak.prepare(models, optimizers, "O2")
    assert MODEL.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda **given: halfpeak.prepare(MODEL, OPTIMIZER, "O2", **given), "accumulate"),
        (halfpeak.ScaleConfig, "interval"),
        (halfpeak.Accumulation, "every"),
        (halfpeak.ClipNorm, "max_norm"),
        (halfpeak.ClipValue, "value"),
    ],
)
def test_an_unknown_keyword_is_told_what_is_near(call: Any, near: str) -> None:
    with pytest.raises(ConfigTypeError, match=f"no keyword '{near}s'; did you mean '{near}'"):
        call(**{f"{near}s": 1})
    assert MODEL.weight.dtype is torch.float32


def test_an_engine_shows_its_public_names() -> None:
    model = torch.nn.Linear(2, 2)
    shown = dir(halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert {"backward", "forward", "step", "num_steps"} <= set(shown)
    assert not [name for name in shown if name.startswith("_") or name in ("taken", "plan")]
