"""With ``create_graph=True``, gradients keep their graph, and both they and the gradients of a penalty are unscaled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.fused import FusedSGD

LEVELS = {"O0": 0.0, "O1": 1e-2, "O2": 1e-2, "O5": 3e-2}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backward_passes", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_a_penalty_on_the_gradients(
    level: str, backward_passes: int, scale: float, kind: type[torch.optim.Optimizer]
) -> None:
    model, x = nn.Linear(4, 1, bias=False), torch.randn(3, 4)
    weight = model.weight.detach().clone().requires_grad_()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    engine = halfpeak.prepare(model, optimizer, level, loss_scale=scale)

    def first_gradient() -> Tensor:
        for _ in range(backward_passes):
            with engine.forward():
                loss = loss_of(model, x)
            engine.backward(loss, create_graph=True)
        (parameter,) = engine.main_params()
        assert parameter.grad is not None
        return parameter.grad

    with engine.forward():
        penalty = first_gradient().square().sum()
    optimizer.zero_grad()
    engine.backward(penalty)
    (got,) = engine.context.prepared[0].main_grads()

    plain = (x @ weight.t()).square().sum() * backward_passes
    (grad,) = torch.autograd.grad(plain, weight, create_graph=True)
    grad.square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(got, weight.grad, rtol=LEVELS[level] or 1e-5, atol=LEVELS[level])
    assert engine.step().stepped()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_is_seen(level: str) -> None:
    model = nn.Linear(4, 1)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    with engine.forward():
        loss = loss_of(model, torch.ones(3, 4)) * torch.inf
    engine.backward(loss, create_graph=True)
    assert not engine.step().stepped()
