"""A training step with ``amp.scale_loss`` under torch.compile gives the losses and weights of the eager step."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfpeak import amp

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def train(level: str, *, compiled: bool) -> list[Tensor]:
    """Return the losses and weights of a few steps; the third step overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.detach()

    run = torch.compile(step, backend="aot_eager") if compiled else step
    x, y = torch.randn(5, 4, 8), torch.randint(2, (5, 4))
    x[2] *= 1e30
    return [*(run(*batch) for batch in zip(x, y, strict=True)), *(p.detach() for p in model.parameters())]


@functools.cache
def step_of_torch(*, compiled: bool) -> Tensor:
    """A weight after one step of torch's SGD without amp."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64))
    weight.grad = torch.randn(64)
    step = torch.optim.SGD([weight], lr=0.1).step
    (torch.compile(step, backend="aot_eager") if compiled else step)()
    return weight.detach()


# The compiler causes both warnings: it uses deprecated functions, and reads `.grad` of a loss carried over a graph break.
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_step_is_the_step(level: str) -> None:
    eager, compiled = train(level, compiled=False), train(level, compiled=True)
    # torch 2.11 also compiles its optimizers, and the compiled step rounds once more than the eager one.
    is_exact = torch.equal(step_of_torch(compiled=False), step_of_torch(compiled=True))
    tolerance = 0 if is_exact else 1e-6
    for left, right in zip(eager, compiled, strict=True):
        assert torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
