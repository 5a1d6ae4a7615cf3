"""After bad batches the loss scale soon grows again, and a nonfinite loss does not lower it at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_resume_after_a_loss_that_is_not_finite(level: str, every: int) -> None:
    engine = make("FusedSGD", level, accumulate=every)
    with engine.forward():
        loss = engine.model(torch.ones(2, 4)).float().mean() + torch.inf
    engine.backward(loss)
    resumed = make("FusedSGD", level, accumulate=every)
    resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
    for one in (engine, resumed):
        if every > 1:
            one.step()
            run(one, 1)
        else:
            one.step()
        assert (int(one.num_skipped), one.read_scale()) == (1, 2.0**16)


def test_losses_answer_for_themselves() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    engine = halfpeak.prepare([first, second], optimizers, "O2", num_losses=2)

    def step(model: nn.Module, loss_id: int, bad: float) -> Tensor:
        optimizer = optimizers[loss_id]
        with engine.forward():
            loss = model(torch.ones(2, 4)).float().mean() + bad
        engine.backward(loss, loss_id=loss_id, optimizers=optimizer)
        return engine.step(optimizers=optimizer).found_inf

    assert [step(first, 0, torch.nan).item(), step(second, 1, 0.0).item()] == [1, 0]
    assert engine.read_scale(0) == engine.read_scale(1) == 2.0**16
