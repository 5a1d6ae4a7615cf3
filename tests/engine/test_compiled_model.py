"""A model compiled before or after ``prepare`` trains to the bits of the eager run, and no graph is traced twice."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import halfpeak
from halfpeak import LEVELS, amp
from laws.drivers import Case, Run
from support.nets import make_batch
from support.states import same

# torch.compile itself reads ``.grad`` of its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Net(nn.Module):
    """Layers that one level treats in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).softmax(-1))


def new_net(seed: int = 0, *, inlined: bool = False) -> Any:
    """A network, whose hooks torch calls between graphs, or with ``inlined`` traces together with the layers."""
    torch.manual_seed(seed)
    return nn.Sequential(Net()) if inlined else Net()


def started(driver: str, level: str, make: Callable[[int], Any]) -> Run:
    run = Case(driver=driver, level=level, optimizer="sgd", make_net=make).run()
    run.convert()
    return run


def step(run: Run, number: int) -> Tensor:
    """Train one step and return its loss; step 2 overflows."""
    losses: list[Tensor] = []

    def loss_of() -> Tensor:
        x, y = make_batch(number)
        losses.append(run.loss((x * float("inf") if number == 2 else x, y)))
        return losses[0]

    run.take(loss_of)
    run.done += 1
    return losses[0].detach()


def trained(run: Run) -> tuple[list[Tensor], list[Tensor]]:
    losses = [step(run, number) for number in range(4)]
    return losses, [value.detach().clone() for value in run.net.state_dict().values()]


ROWS = [
    *(("native", level) for level in LEVELS),
    *((("amp", "ApexOptimWrapper")[index % 2], level) for index, level in enumerate(LEVELS)),
    ("AmpOptimWrapper", "O4"),
]

ORDERS = ("before", "after", "after a run before")
# Not the whole product: each order comes with and without inlined hooks, for the engine and for front ends.
CASES = [(*row, ORDERS[index % 3], index // 3 % 2 == 0) for index, row in enumerate(ROWS)]


@contextmanager
def another_run() -> Generator[None]:
    """A second run that casts per operation, alive in the same process."""
    other = nn.Linear(8, 2)
    engine = halfpeak.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), "O1")
    with engine.forward():
        other(torch.ones(2, 8)).sum()
    yield
    engine.remove()


@pytest.mark.parametrize(("front_end", "level", "order", "inlined"), CASES)
def test_a_compiled_model_has_the_bits_of_the_eager_one(
    front_end: str, level: str, order: str, inlined: bool
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = partial(torch.compile, backend=counter, fullgraph=True)

    def make(seed: int, *, compiles: bool) -> Any:
        model = new_net(seed, inlined=inlined)
        if order == "after a run before":
            with amp.disable_casts():  # those of the first run of ``amp`` would reach it
                model(torch.ones(4, 6))
        if compiles and order != "after":
            model = compiled(model)
            if order == "after a run before":
                model.eval()(torch.ones(4, 6))
                model.train()
        return model

    with another_run():
        run = started(front_end, level, partial(make, compiles=True))
        if order == "after":
            run.net = compiled(run.net)
        first = counter.frame_count
        losses, values = trained(run)
        expected_losses, expected = trained(started(front_end, level, partial(make, compiles=False)))
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0, equal_nan=True)
    assert same(values, expected)
    assert counter.frame_count == first + 1  # a whole graph, and nothing is traced anew in later steps


@pytest.mark.parametrize("level", LEVELS)
def test_submodules_and_models_compiled_in_place(level: str) -> None:
    torch._dynamo.reset()

    def in_place(seed: int) -> Any:
        model = new_net(seed)
        model.compile(backend="aot_eager")
        model.body.compile(backend="aot_eager", fullgraph=True)
        return model

    run, twin = started("native", level, in_place), started("native", level, new_net)
    for number in range(4):
        torch.testing.assert_close(step(run, number), step(twin, number), rtol=0, atol=0, equal_nan=True)
        with torch.no_grad():
            assert torch.equal(*(one.net.eval()(torch.ones(2, 6)) for one in (run, twin)))
        for one in (run, twin):
            one.net.train()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("level", LEVELS)
def test_a_prepared_model_is_exported_and_traced_for_serving(level: str) -> None:
    run, x = started("native", level, new_net), torch.ones(3, 6)
    step(run, 0)
    model = run.net.eval()
    expected = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    traced: Any = torch.jit.trace(model, (x,))
    assert torch.equal(traced(x), expected)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_kept_layers_of_a_compiled_model_compute_in_float32(level: str) -> None:
    torch._dynamo.reset()
    losses: dict[bool, list[float]] = {}
    for compiles in (False, True):
        net = new_net()
        engine = halfpeak.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), level, keep_fp32=["body.0"])
        dtypes: list[torch.dtype] = []
        net.body[0].register_forward_hook(lambda _, __, output, seen=dtypes: seen.append(output.dtype))
        model = torch.compile(net, backend="aot_eager") if compiles else net
        losses[compiles] = []
        for number in range(3):
            x, y = make_batch(number)
            with engine.forward():
                loss = nn.functional.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            losses[compiles].append(loss.item())
        assert dtypes == [torch.float32] * 3
    assert losses[True] == losses[False]
