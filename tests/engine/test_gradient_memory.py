"""Gradients reuse memory between steps: the bits equal those of new memory, and gradients that user code keeps stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import halfpeak
from halfpeak.fused import FusedAdamW

STEPS = 6

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW, fused": partial(AdamW, lr=0.01, fused=True),
    "AdamW, foreach": partial(AdamW, lr=0.01, foreach=True),
    "SGD, fused": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "FusedAdamW": partial(FusedAdamW, lr=0.01, backend="eager"),
}


class Net(nn.Module):
    """Small and large weights, a norm that stays float32, and a branch that is not always taken."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 160)
        self.norm = nn.BatchNorm1d(160)
        self.branch = nn.Linear(160, 160)
        self.last = nn.Linear(160, 8)

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(x + self.branch(x) if branch else x)


def prepared(name: str, **how: Any) -> halfpeak.Engine:
    torch.manual_seed(0)
    model = Net()
    scale = halfpeak.ScaleConfig(init=2.0**10)
    return halfpeak.prepare(
        model,
        MAKERS[name](model.parameters()),
        halfpeak.LEVELS["O2"].replace(cast_model_type=torch.bfloat16),
        clip=0.5,
        scale=scale,
        **how,
    )


def backward(engine: halfpeak.Engine, step: int, *, poison: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 128, generator=generator)
    with engine.forward():
        loss = engine.models[0](x, branch=step % 3 != 1).square().mean()
    engine.backward(loss * float("inf") if poison else loss)


def state(engine: halfpeak.Engine) -> list[Tensor]:
    return [tensor.clone() for tensor in engine.models[0].state_dict().values()]


def held(engine: halfpeak.Engine) -> list[Tensor]:
    """The gradients that the optimizer reads."""
    return [grad for window in engine.parts.windows for grad in window.gradients()]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_bits_as_with_new_memory(name: str, every: int) -> None:
    ends: list[list[Tensor]] = []
    for keeps in (True, False):
        engine = prepared(name, accumulate=every)
        if not keeps:
            engine.parts.memory = None
        for step in range(STEPS * every):
            backward(engine, step, poison=step == every)
            engine.step()
        ends.append(state(engine))
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_gradients_lie_where_they_lay() -> None:
    engine = prepared("AdamW, fused")
    places: list[list[int]] = []
    for _ in range(3):
        backward(engine, 0)
        places.append([master.grad.data_ptr() for _, master in engine.pairs if master.grad is not None])
        engine.step()
    assert places[0] == places[1] == places[2]


def itself(tensor: Tensor) -> Tensor:
    return tensor


def flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1)


@pytest.mark.parametrize("look", [itself, Tensor.detach, flat])
def test_a_gradient_that_somebody_has_kept_stays_as_it_was(look: Callable[[Tensor], Tensor]) -> None:
    engine = prepared("AdamW, fused")
    kept: list[Tensor] = []
    then: list[Tensor] = []
    for step in range(6):
        backward(engine, step)
        own = list(map(look, held(engine))) if step < 3 else []
        engine.step()
        kept += own
        then += [grad.clone() for grad in own]
    assert all(torch.equal(one, two) for one, two in zip(kept, then, strict=True))
    assert len({grad.data_ptr() for grad in kept}) == len(kept)


def test_gradients_that_are_functions_leave_no_graph_behind() -> None:
    engine = prepared("AdamW, fused")
    for step in range(3):
        backward(engine, step)
        for grad in held(engine):
            grad += torch.zeros_like(grad, requires_grad=True)
        engine.step()
        backward(engine, step)
        assert not any(grad.requires_grad for grad in held(engine))
        engine.step()


@pytest.mark.parametrize(
    ("name", "how", "keeps"),
    [
        ("AdamW, fused", {}, True),
        ("AdamW, foreach", {}, True),
        ("FusedAdamW", {}, False),
        ("FusedAdamW", {"accumulate": 2}, True),
    ],
)
def test_what_is_held_after_a_step(name: str, how: dict[str, Any], keeps: bool) -> None:
    engine = prepared(name, **how)
    for step in (0, 2):
        backward(engine, step)
        engine.step()
    memory = engine.memory()
    assert memory.gradients == 0
    assert (engine.parts.windows[0].memory is not None) == keeps
    if name != "FusedAdamW":
        low = 4 * sum(master.numel() for _, master in engine.pairs)
        # Gradients that share a buffer begin at multiples of 64 bytes.
        assert 0 <= memory.scratch - low * keeps < 1024


def test_another_engine_is_neither_held_nor_counted() -> None:
    engines: list[halfpeak.Engine] = []
    for _ in range(2):
        engines.append(prepared("AdamW, foreach"))
        for step in (0, 2):
            backward(engines[-1], step)
            engines[-1].step()
    first, second = (engine.memory() for engine in engines)
    assert first == second
