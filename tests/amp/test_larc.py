"""LARC: the local rate against its formula, and LARC in every place where torch expects an Optimizer."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from halfpeak.amp.larc import LARC
from halfpeak.core.errors import ConfigError, ConfigTypeError
from support.nets import LEVELS
from support.states import same


def expected(
    p: Tensor, g: Tensor, *, lr: float, decay: float, trust: float, clip: bool, eps: float
) -> Tensor:
    """The gradient that LARC should pass to the inner optimizer."""
    size, slope = p.norm().item(), g.norm().item()
    if size == 0 or slope == 0:
        return g
    rate = trust * size / (slope + size * decay + eps)
    return (g + decay * p) * (min(rate / lr, 1.0) if clip else rate)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("trust", [0.001, 10.0])
def test_the_formula(clip: bool, decay: float, trust: float) -> None:
    values = [torch.randn(4, 3), torch.randn(5), torch.zeros(3), torch.randn(2), torch.randn(())]
    grads = [torch.randn(4, 3), torch.randn(5) * 1e-6, torch.randn(3), torch.zeros(2), torch.randn(())]
    parameters = [nn.Parameter(value.clone()) for value in values]
    skipped = nn.Parameter(torch.ones(2))
    inside = torch.optim.SGD([*parameters, skipped], lr=0.5, weight_decay=decay)
    optimizer = LARC(inside, trust_coefficient=trust, clip=clip, eps=1e-3)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()
    for parameter, value, grad in zip(parameters, values, grads, strict=True):
        adapted = expected(value, grad, lr=0.5, decay=decay, trust=trust, clip=clip, eps=1e-3)
        torch.testing.assert_close(parameter.data, value - 0.5 * adapted, rtol=1e-6, atol=1e-7)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, adapted, rtol=1e-6, atol=1e-7)
    assert torch.equal(skipped.data, torch.ones(2))
    assert inside.param_groups[0]["weight_decay"] == decay


def test_groups_have_their_own_rates() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.5}, {"params": [second], "lr": 0.4}]
    optimizer = LARC(torch.optim.SGD(groups, lr=1.0), clip=False)
    first.grad, second.grad = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    optimizer.step()
    for (weight, lr, decay), grad in zip(((first, 0.1, 0.5), (second, 0.4, 0.0)), torch.eye(2), strict=True):
        adapted = expected(torch.ones(2), grad, lr=lr, decay=decay, trust=0.02, clip=False, eps=1e-8)
        torch.testing.assert_close(weight.data, 1 - lr * adapted)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0]


def test_low_norms_are_taken_in_float32() -> None:
    weight = nn.Parameter(torch.full((60000,), 300.0).half())  # a norm above float16's largest number
    optimizer = LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=1.0, clip=False)
    weight.grad = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight.data, torch.zeros_like(weight))


def test_weight_decay_comes_back_when_the_optimizer_inside_raises() -> None:
    weight = nn.Parameter(torch.ones(2))
    inside = torch.optim.SGD([weight], lr=0.1, weight_decay=0.3)

    def fail(*args: Any) -> None:
        assert inside.param_groups[0]["weight_decay"] == 0
        raise KeyError("inside")

    inside.register_step_pre_hook(fail)
    weight.grad = torch.ones(2)
    with pytest.raises(KeyError):
        LARC(inside).step()
    assert inside.param_groups[0]["weight_decay"] == 0.3


def test_a_group_without_weight_decay_gets_none() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert "weight_decay" not in self.param_groups[0]

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = LARC(Plain([weight]))
    optimizer.step()
    assert set(optimizer.param_groups[0]) == {"params", "lr"}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sparse_gradients(decay: float) -> None:
    dense, sparse = nn.Embedding(6, 3), nn.Embedding(6, 3, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    rows = torch.tensor([1, 4, 1])
    for embedding in (dense, sparse):
        embedding(rows).square().sum().backward()
        LARC(torch.optim.SGD(embedding.parameters(), lr=0.5, weight_decay=decay)).step()
    torch.testing.assert_close(sparse.weight.data, dense.weight.data, rtol=1e-6, atol=1e-7)
    assert sparse.weight.grad is not None
    assert sparse.weight.grad.is_sparse == (decay == 0)


def test_a_closure_is_adapted_at_each_call() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LARC(torch.optim.LBFGS([weight], lr=0.1, max_iter=3), clip=False, trust_coefficient=0.1)
    seen: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        seen.append(weight.grad)  # type: ignore[arg-type]
        return loss

    assert optimizer.step(closure).item() == 25.0
    assert len(seen) > 1
    assert all(grad.norm() < 1 for grad in seen)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_take_it(make: Any) -> None:
    rates: list[list[float]] = []
    for wrap in (LARC, lambda optimizer: optimizer):
        weight = nn.Parameter(torch.ones(2))
        optimizer = wrap(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        scheduler = make(optimizer)
        rates.append([])
        for _ in range(4):
            weight.grad = torch.ones(2)
            optimizer.step()
            scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def trained(steps: int = 2) -> tuple[nn.Parameter, LARC]:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LARC(torch.optim.Adam([weight], lr=0.1, weight_decay=0.1), trust_coefficient=0.01)
    step(weight, optimizer, steps)
    return weight, optimizer


def step(weight: nn.Parameter, optimizer: LARC, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()


def test_everything_is_that_of_the_optimizer_inside() -> None:
    weight, optimizer = trained()
    inside = optimizer.optim
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inside.param_groups
    assert optimizer.state is inside.state
    assert optimizer.defaults is inside.defaults
    assert optimizer.state_dict() == inside.state_dict()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inside.param_groups) == 2
    groups, state = optimizer.param_groups[:1], copy.copy(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state
    assert inside.param_groups is groups
    assert inside.state is state
    optimizer.zero_grad()
    assert weight.grad is None
    assert repr(optimizer).startswith("LARC(trust_coefficient=0.01, clip=True, eps=1e-08, optim=Adam (")


def test_state_dict_hooks_are_shared_and_step_hooks_are_not() -> None:
    weight, optimizer = trained(1)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append(f"save {type(o).__name__}"))
    optimizer.optim.register_load_state_dict_post_hook(lambda o: calls.append(f"load {type(o).__name__}"))
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(f"step {type(o).__name__}"))
    optimizer.load_state_dict(optimizer.state_dict())
    step(weight, optimizer, 1)
    assert calls == ["save Adam", "load Adam", "step LARC"]


def through_a_state(pair: tuple[nn.Parameter, LARC]) -> tuple[nn.Parameter, LARC]:
    weight, optimizer = trained(0)
    weight.data.copy_(pair[0].data)
    optimizer.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    return weight, optimizer


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), through_a_state]
)
def test_copies_and_resumes_are_independent_and_bitwise(copied: Any) -> None:
    weight, optimizer = trained()
    other, again = copied((weight, optimizer))
    assert (again.trust_coefficient, again.clip, again.eps) == (0.01, True, 1e-8)
    assert again.param_groups[0]["params"][0] is other
    before = other.data.clone()
    step(weight, optimizer, 2)
    assert torch.equal(other.data, before)
    step(other, again, 2)
    assert torch.equal(other.data, weight.data)


@pytest.mark.parametrize("level", LEVELS)
def test_amp_and_an_engine_take_it_and_skip(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    other = copy.deepcopy(model)
    optimizer, twin = (
        LARC(torch.optim.SGD(one.parameters(), lr=0.5, weight_decay=1e-3), trust_coefficient=0.1)
        for one in (model, other)
    )
    engine = halfpeak.prepare(model, optimizer, halfpeak.LEVELS[level].replace(loss_scale=8.0))
    amp.initialize(other, twin, opt_level=level, loss_scale=8.0, verbosity=0)
    x = torch.randn(16, 4)
    losses: list[float] = []
    for poisoned in (False, True, False, False):
        factor = math.inf if poisoned else 1.0
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with engine.forward():
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss * factor)
        assert engine.step().stepped() is not poisoned
        assert same(before, model.parameters()) is poisoned
        losses.append(loss.item())
        twin.zero_grad()
        with amp.scale_loss(
            (other(x).float() - x.sum(1, keepdim=True)).square().mean() * factor, twin
        ) as scaled:
            scaled.backward()
        twin.step()
        assert same(model.parameters(), other.parameters())
    assert losses[3] < losses[0]
    assert optimizer.param_groups[0]["weight_decay"] == 1e-3


def test_refusals() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigTypeError, match="Parameter is not a"):
        LARC(weight)  # type: ignore[arg-type]
    inside = torch.optim.SGD([weight], lr=0.1)
    for settings in ({"trust_coefficient": 0.0}, {"trust_coefficient": math.nan}, {"eps": -1.0}):
        with pytest.raises(ConfigError):
            LARC(inside, **settings)
    assert LARC(inside, eps=0).eps == 0.0
