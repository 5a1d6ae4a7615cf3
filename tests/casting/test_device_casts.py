"""Casts by torch's own lists equal ``torch.autocast``, and are on in the forward pass alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import halfpeak
from halfpeak.casting.casts import DeviceCasts, OpCasts
from support.nets import product

LOW, FLOAT = torch.bfloat16, torch.float32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))


def batches() -> list[Tensor]:
    return list(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1)))


def test_the_lists_are_those_of_the_device() -> None:
    with DeviceCasts("cpu", LOW):
        assert torch.ones(2, 2).to(LOW).softmax(0).dtype is LOW
    with OpCasts(LOW):
        assert torch.ones(2, 2).to(LOW).softmax(0).dtype is FLOAT


def test_no_function_mode_makes_operations_dearer() -> None:
    model = net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O4")
    with engine.forward():
        assert _get_current_function_mode_stack() == []
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


class Seen(torch.autograd.Function):
    """Notes whether autocast is on in its backward."""

    found: bool | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Seen.found = torch.is_autocast_enabled("cpu")
        return grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_runs_without_but_recomputes_with_casts(reentrant: bool) -> None:
    model = net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O4")
    dtypes: list[torch.dtype] = []
    model[3].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    x = batches()[0].requires_grad_()
    with engine.forward():
        out = checkpoint(model, x, use_reentrant=reentrant)
        loss = Seen.apply(out).float().square().mean()
    engine.backward(loss)
    assert dtypes == [LOW, LOW]
    assert Seen.found is False


def test_entering_again_exceptions_and_threads() -> None:
    casts, found = DeviceCasts("cpu", LOW), []

    def work() -> None:
        found.append(product())
        with casts:
            found.append(product())
        found.append(product())

    def fail() -> None:
        with casts:
            raise KeyError

    with casts:
        with casts:
            assert product() is LOW
        assert product() is LOW
        with pytest.raises(KeyError):
            fail()
        assert product() is LOW
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with torch.autocast("cpu", enabled=False):
            assert product() is FLOAT
    assert product() is FLOAT
    assert found == [FLOAT, LOW, FLOAT]


def test_no_cast_outlives_its_weight() -> None:
    model = nn.Linear(4, 4)
    engine = halfpeak.prepare(model, torch.optim.AdamW(model.parameters(), lr=1.0, fused=True), "O4")
    x = batches()[0]
    for _ in range(2):
        with engine.forward():
            out = model(x)
            loss = out.float().square().mean()
        low = F.linear(x.to(LOW), model.weight.detach().to(LOW), model.bias.detach().to(LOW))
        assert torch.equal(out, low)
        engine.backward(loss)
        engine.step()
        model.weight.data.mul_(-2)
