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
