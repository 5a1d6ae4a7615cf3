"""Optimizers with internal float32 masters take over values that user code writes to a low-precision parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.amp.optimizers import FusedAdam, FusedMixedPrecisionLamb

LOW = torch.float16


def adam(params: Any) -> FusedAdam:
    return FusedAdam(params, lr=0.25, capturable=True, master_weights=True)


def lamb(params: Any) -> FusedMixedPrecisionLamb:
    return FusedMixedPrecisionLamb(params, lr=0.25, reduced_precision_dtype=LOW)


def assign_data(weight: nn.Parameter, value: Tensor) -> None:
    weight.data = value.clone()


def assign_data_twice(weight: nn.Parameter, value: Tensor) -> None:
    # The second assignment may reuse the address that the first one freed.
    weight.data = value + 1
    weight.data = value.clone()


def copy_in_place(weight: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(value)


@pytest.mark.parametrize("write", [assign_data, assign_data_twice, copy_in_place])
@pytest.mark.parametrize("make", [adam, lamb])
def test_a_written_parameter_is_what_the_next_step_starts_from(
    make: Callable[[Any], Any], write: Callable[[nn.Parameter, Tensor], None]
) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=LOW))
    optimizer = make([weight])
    weight.grad = torch.full((4,), 0.5, dtype=LOW)
    optimizer.step()
    value = torch.tensor([100.0, -100.0, 200.0, -200.0], dtype=LOW)
    write(weight, value)
    optimizer.step()
    assert weight.isfinite().all()
    # One step moves a weight by the learning rate (Adam), or by a part of the weight's norm (LAMB).
    assert torch.equal(weight.detach().sign(), value.sign())
    assert bool((weight - value).abs().max() < 80)


@pytest.mark.parametrize("make", [adam, lamb])
def test_an_engine_steps_it_as_it_steps_itself(make: Callable[[Any], Any]) -> None:
    models = [nn.Linear(6, 3).to(LOW) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    by_engine, alone = (make(model.parameters()) for model in models)
    engine = halfpeak.prepare(models[0], by_engine, level="O3")
    for step in range(1, 5):
        x = torch.randn(4, 6, dtype=LOW)
        with engine.forward():
            loss = models[0](x).float().square().mean()
        engine.backward(loss)
        engine.step()
        alone.zero_grad()
        models[1](x).float().square().mean().backward()
        alone.step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        assert by_engine.state_dict()["param_groups"][0]["step"] == step


@pytest.mark.parametrize("make", [adam, lamb])
def test_a_step_that_raises_leaves_the_parameters_in_the_groups(make: Callable[[Any], Any]) -> None:
    weights = [nn.Parameter(torch.ones(4, dtype=LOW)) for _ in range(2)]
    disturbed, other = (make([weight]) for weight in weights)
    for raises in (False, True, False):
        if raises:
            group = disturbed.param_groups[0]
            before, group["betas"] = group["betas"], ("none", "none")
            with pytest.raises((TypeError, ValueError)):
                disturbed.step()
            group["betas"] = before
        for weight, optimizer in zip(weights, (disturbed, other), strict=True):
            weight.grad = torch.full((4,), 0.5, dtype=LOW)
            optimizer.step()
        assert disturbed.param_groups[0]["params"][0] is weights[0] is next(iter(disturbed.state))
        assert torch.equal(*weights)
