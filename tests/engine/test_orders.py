"""Orders of calls from ordinary scripts: the run is that of the plain order, or the call is refused and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import Engine
from support.nets import MASTERED

SCALE = 64.0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build(level: str, optimizer: Callable[[Any], Any] = adam, **options: Any) -> Engine:
    model = net()
    return halfpeak.prepare(model, optimizer(model.parameters()), level, loss_scale=SCALE, **options)


def backward(engine: Engine, seed: int = 0, **options: Any) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    with engine.forward():
        loss = engine.model(x).float().square().mean()
    engine.backward(loss, **options)


def train(engine: Engine, seed: int = 0) -> None:
    backward(engine, seed)
    engine.step()


def weights(engine: Engine) -> list[Tensor]:
    return [value.clone() for value in engine.model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# Parameters that come later.

LOOKS: dict[str, Callable[[Engine], object]] = {
    "state_dict": Engine.state_dict,
    "loop_state_dict": Engine.loop_state_dict,
    "abort": Engine.abort,
    "unscale": Engine.unscale,
    "accumulate": Engine.accumulate,
    "memory": Engine.memory,
    "main_params": Engine.main_params,
    "zero_grad": lambda engine: engine.optimizers[0].zero_grad(),
    "nothing": lambda engine: None,
}


def unfreeze(engine: Engine) -> None:
    engine.model[0].requires_grad_(True)  # type: ignore[operator, union-attr]


def add_group(engine: Engine) -> None:
    engine.optimizers[0].add_param_group({"params": list(engine.model[0].parameters())})  # type: ignore[operator]


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("come", [unfreeze, add_group])
def test_looking_between_new_parameters_and_the_next_backward(
    level: str, look: str, come: Callable[[Engine], None]
) -> None:
    def run(act: Callable[[Engine], object]) -> Engine:
        model = net()
        model[0].requires_grad_(come is add_group)
        trained = model[2].parameters() if come is add_group else model.parameters()
        engine = halfpeak.prepare(model, adam(trained), level, loss_scale=SCALE)
        train(engine)
        come(engine)
        model.zero_grad()  # Of what no optimizer has stepped so far.
        act(engine)
        for seed in range(1, 4):
            train(engine, seed)
        return engine

    engine = run(LOOKS[look])
    assert all(
        p.dtype is torch.float32 for group in engine.optimizers[0].param_groups for p in group["params"]
    )
    assert same(weights(engine), weights(run(LOOKS["nothing"])))


@pytest.mark.parametrize("level", [*MASTERED, "O0", "O1"])
def test_a_group_added_inside_a_window_keeps_the_gradients_of_its_passes(level: str) -> None:
    def run(*, late: bool) -> Engine:
        model = net()
        parts: list[Any] = [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())}]
        optimizer = torch.optim.SGD(parts[: 1 if late else 2], lr=0.5)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=SCALE, accumulate=2)
        backward(engine, 0)
        engine.step()
        if late:
            optimizer.add_param_group(parts[1])
        backward(engine, 1)
        engine.step()
        return engine

    for one, other in zip(weights(run(late=True)), weights(run(late=False)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
        assert not torch.equal(one, other * 0)
