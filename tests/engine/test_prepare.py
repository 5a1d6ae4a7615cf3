"""``prepare`` refuses wrong arguments before it changes a parameter, and takes optimizers without ``__init__``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import halfpeak
from halfpeak.core.errors import ConfigTypeError
from support.nets import make_batch, make_net

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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from an import of torch
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_an_optimizer_without_init_and_defaults_is_stepped(level: str) -> None:
    """torch's ``PostLocalSGDOptimizer`` calls no ``Optimizer.__init__``; its averager writes the stepped parameters."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    def halve(params: list[dict[str, Any]]) -> None:
        for parameter in params[0]["params"]:
            parameter.detach().mul_(0.5)

    found: list[torch.Tensor] = []
    for wraps in (False, True):
        model = make_net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
        if wraps:
            optimizer = PostLocalSGDOptimizer(optimizer, SimpleNamespace(average_parameters=halve, step=0))  # type: ignore[arg-type]
        engine = halfpeak.prepare(model, optimizer, level, scale=halfpeak.ScaleConfig(init=256.0))
        x, y = make_batch(0)
        for _ in range(3):
            with engine.forward():
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
            engine.backward(loss)
            engine.step()
            if not wraps:
                halve(optimizer.param_groups)
        found.append(torch.cat([main.detach().flatten() for main in engine.main_params()]))
    assert torch.equal(*found)
