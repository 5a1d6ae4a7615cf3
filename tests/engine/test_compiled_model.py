"""A model under torch.compile: before or after it is prepared, the bits of the eager run, and nothing traced twice."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import halfpeak
from halfpeak import LEVELS, amp
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper

# The compiler itself looks whether a tensor that it is given has a gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Step = Callable[[Tensor], float]


class Net(nn.Module):
    """Layers that a level treats in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).softmax(-1))


def unchanged(model: Any) -> Any:
    return model


def native(model: Any, level: str, then: Callable[[Any], Any] = unchanged) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = halfpeak.prepare(model, optimizer, level, clip=1.0)
    model = then(model)

    def step(x: Tensor) -> float:
        with engine.forward():
            loss = model(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def of_amp(model: Any, level: str, then: Callable[[Any], Any] = unchanged) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    same, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert same is model
    model = then(model)

    def step(x: Tensor) -> float:
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def wrapped(make: Callable[..., Any]) -> Callable[..., Step]:
    def start(model: Any, level: str, then: Callable[[Any], Any] = unchanged) -> Step:
        wrapper = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), level)
        with wrapper.optim_context(model):
            model = then(model)

        def step(x: Tensor) -> float:
            with wrapper.optim_context(model):
                loss = model(x).float().square().mean()
            wrapper.update_params(loss)
            return float(loss.detach())

        return step

    return start


def apex_wrapper(optimizer: torch.optim.Optimizer, level: str) -> ApexOptimWrapper:
    return ApexOptimWrapper(optimizer=optimizer, opt_level=level)


def amp_wrapper(optimizer: torch.optim.Optimizer, level: str) -> AmpOptimWrapper:
    return AmpOptimWrapper(optimizer=optimizer, dtype="bfloat16")


FRONT_ENDS: dict[str, Callable[..., Step]] = {
    "native": native,
    "amp": of_amp,
    "ApexOptimWrapper": wrapped(apex_wrapper),
    "AmpOptimWrapper": wrapped(amp_wrapper),
}
ROWS = [
    (name, level) for name in FRONT_ENDS for level in LEVELS if name != "AmpOptimWrapper" or level == "O4"
]

ORDERS = ("before", "after", "after a run before")
# Each order with and without hooks that are traced, in every front end: not all of the product.
CASES = [(*row, ORDERS[index % 3], index % 2 == 0) for index, row in enumerate(ROWS)]


@contextmanager
def another_run() -> Generator[None]:
    """A second run that casts per operation, alive in the same process."""
    other = nn.Linear(8, 2)
    engine = halfpeak.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), "O1")
    with engine.forward():
        other(torch.ones(2, 8)).sum()
    yield
    engine.remove()


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for index in range(4):
        x = torch.randn(6, 8, generator=generator)
        yield x * float("inf") if index == 2 else x


def trained(model: nn.Module, step: Step) -> tuple[list[float], list[Tensor]]:
    losses = [step(x) for x in batches()]
    return losses, [value.detach().clone() for value in model.state_dict().values()]


def new_net(*, inlined: bool = False) -> Any:
    """A network, as one whose hooks torch calls between graphs, or as one whose hooks it traces with the layers."""
    torch.manual_seed(0)
    return nn.Sequential(Net()) if inlined else Net()


@pytest.mark.parametrize(("front_end", "level", "order", "inlined"), CASES)
def test_a_compiled_model_has_the_bits_of_the_eager_one(
    front_end: str, level: str, order: str, inlined: bool
) -> None:
    torch._dynamo.reset()
    model, twin = new_net(inlined=inlined), new_net(inlined=inlined)
    if order == "after a run before":
        for one in (model, twin):
            one(torch.ones(4, 8))
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = partial(torch.compile, backend=counter, fullgraph=True)
    with another_run():
        if order == "after":
            step = FRONT_ENDS[front_end](model, level, compiled)
        else:
            both = compiled(model)
            if order == "after a run before":
                both.eval()(torch.ones(4, 8))
                both.train()
            step = FRONT_ENDS[front_end](both, level)
        first = counter.frame_count
        losses, values = trained(model, step)
        expected_losses, expected = trained(twin, FRONT_ENDS[front_end](twin, level))
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, values, expected))
    assert counter.frame_count == first + 1  # a whole graph, and nothing is traced anew in later steps


@pytest.mark.parametrize("level", LEVELS)
def test_submodules_and_models_compiled_in_place(level: str) -> None:
    torch._dynamo.reset()
    model, twin = new_net(), new_net()
    model.compile(backend="aot_eager")
    model.body.compile(backend="aot_eager", fullgraph=True)
    step, expected = native(model, level), native(twin, level)
    for x in batches():
        torch.testing.assert_close(step(x), expected(x), rtol=0, atol=0, equal_nan=True)
        for one in (model, twin):
            one.eval()
        with torch.no_grad():
            assert torch.equal(model(torch.ones(2, 8)), twin(torch.ones(2, 8)))
        for one in (model, twin):
            one.train()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("level", LEVELS)
def test_a_prepared_model_is_exported_and_traced_for_serving(level: str) -> None:
    model, x = new_net(), torch.ones(3, 8)
    native(model, level)(torch.ones(6, 8))
    model.eval()
    expected = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    traced: Any = torch.jit.trace(model, (x,))
    assert torch.equal(traced(x), expected)
