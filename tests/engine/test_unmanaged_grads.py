"""Gradients of tensors that the engine does not step are unscaled: they equal those of a run with a scale of 1."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.core.errors import OrderError
from halfpeak.engine.engine import engine_of
from halfpeak.fused import FusedAdamW

LEVELS = ("O0", "O1", "O2", "O4", "O5")


class _Net(nn.Module):
    """In most tests the engine steps ``first``, and something else, or nothing, steps ``last``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def _loss(model: nn.Module) -> Tensor:
    engine = engine_of(model)
    with nullcontext() if engine is None else engine.forward():
        return model(torch.linspace(-1, 1, 12).view(3, 4)).float().square().sum()


def _kinds(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.1), FusedAdamW(parameters, lr=0.1)]


def _infinite(grad: Tensor) -> Tensor:
    return grad * float("inf")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [0, 1], ids=["sgd", "fused"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_they_are_what_they_would_be_without_a_scale(level: str, kind: int, accumulate: int) -> None:
    grads: list[list[Tensor]] = []
    for scale in (1.0, 1024.0):
        model = _Net()
        optimizer = _kinds(list(model.first.parameters()))[kind]
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=scale, accumulate=accumulate)
        for _ in range(accumulate):
            with engine.forward():
                loss = _loss(model)
            engine.backward(loss)
            engine.step()
        grads.append([p.grad for p in model.last.parameters() if p.grad is not None])
    assert len(grads[0]) == 2
    assert all(bool(g.abs().max() > 0) for g in grads[0])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_they_add_up_and_keep_what_was_there() -> None:
    model = _Net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.first.parameters(), lr=0.0), "O1", loss_scale=64.0)
    model.last.bias.grad = torch.full((2,), 3.0)
    engine.backward(_loss(model))
    once = model.last.bias.grad.clone()
    engine.step()
    engine.backward(_loss(model))
    torch.testing.assert_close(model.last.bias.grad - once, once - 3.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "of", ["a network that nobody prepared", "what another engine does not step", "inputs"]
)
def test_what_is_not_the_engines_gets_what_it_would_without_a_scale(
    level: str, accumulate: int, of: str
) -> None:
    grads: list[list[Tensor]] = []
    for scale in (1.0, 1024.0):
        model, critic, found = _Net(), _Net(), list[Tensor]()
        engine = halfpeak.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            level,
            loss_scale=scale,
            accumulate=accumulate,
        )
        alive = [engine]
        if of.startswith("what another"):
            alive.append(halfpeak.prepare(critic, torch.optim.SGD(critic.first.parameters(), lr=0.1), "O0"))
        for _ in range(2 * accumulate):
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
            with engine.forward():
                loss = critic.last(critic.first(model(x).float().repeat(1, 2))).float().square().sum()
            engine.backward(loss)
            engine.step()
            found.append(x)
        holders = found if of == "inputs" else list(critic.last.parameters())
        grads.append([p.grad for p in holders if p.grad is not None])
    assert len(grads[0]) == (2 * accumulate if of == "inputs" else 2)
    for one, other_scale in zip(*grads, strict=True):
        torch.testing.assert_close(one, other_scale, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("passes", [(0, 2, 4, 6), (1, 3, 5, 7), (2, 7, 9), (127, 129)])
def test_inputs_get_unscaled_gradients_in_whichever_passes_they_need_them(
    level: str, accumulate: int, passes: tuple[int, ...]
) -> None:
    """Adversarial training reads gradients of inputs in the attack's pass, and has none in the pass for the weights."""
    model = _Net()
    engine = halfpeak.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        level,
        loss_scale=1024.0,
        accumulate=accumulate,
    )
    for number in range(passes[-1] + 1):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(number in passes)
        with engine.forward():
            loss = model(x).float().square().sum()
        engine.backward(loss)
        engine.step()
        if number in passes:
            (expected,) = torch.autograd.grad(_Net()(x).square().sum() / accumulate, x)
            torch.testing.assert_close(x.grad, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("late", ["a loss that is added", "a criterion that is unfrozen"])
def test_a_criterion_with_weights_of_its_own_that_joins_after_a_warm_up(level: str, late: str) -> None:
    grads: list[list[Tensor]] = []
    for scale in (1.0, 1024.0):
        model, centers, found = _Net(), nn.Parameter(torch.ones(3, 2)), list[Tensor]()
        centers.requires_grad_(late.startswith("a loss"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=scale)
        for number in range(20):
            with engine.forward():
                output = model(torch.linspace(-1, 1, 12).view(3, 4)).float()
                loss = output.square().sum()
                if number >= 15:
                    centers.requires_grad_(True)
                if number >= 15 or not late.startswith("a loss"):
                    loss = loss + 0.1 * (output - centers).square().sum()
            engine.backward(loss)
            engine.step()
            if centers.grad is not None:
                found.append(centers.grad)
                centers.grad = None
        grads.append(found)
    assert len(grads[0]) == 5
    for one, other_scale in zip(*grads, strict=True):
        torch.testing.assert_close(one, other_scale, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_network_before_a_deep_one_that_is_unfrozen_after_a_warm_up(level: str) -> None:
    grads: list[list[Tensor]] = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        backbone = nn.Linear(4, 4).requires_grad_(False)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(12)]
        model, found = nn.Sequential(*layers), list[Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=scale)
        for number in range(20):
            backbone.requires_grad_(number >= 15)
            with engine.forward():
                loss = model(backbone(torch.linspace(-1, 1, 12).view(3, 4))).float().square().sum()
            engine.backward(loss)
            engine.step()
            if backbone.weight.grad is not None:
                found.append(backbone.weight.grad)
                backbone.weight.grad = None
        grads.append(found)
    assert len(grads[0]) == 5
    for one, other_scale in zip(*grads, strict=True):
        torch.testing.assert_close(one, other_scale, rtol=0.05, atol=0.05 * float(one.abs().max()))


def test_two_engines_over_one_model_step_as_one_optimizer_would() -> None:
    after: list[list[Tensor]] = []
    for apart in (True, False):
        model = _Net()
        groups = (
            [list(layer.parameters()) for layer in (model.first, model.last)]
            if apart
            else [list(model.parameters())]
        )
        optimizers = [FusedAdamW(group, lr=0.1) for group in groups]
        engines = [halfpeak.prepare(model, each, "O1", loss_scale=1024.0) for each in optimizers]
        for _ in range(3):
            engines[0].backward(_loss(model))
            engines[0].step()
            for other in engines[1:]:
                # The second engine steps on the gradients that the first engine's loss left on its parameters.
                other.backward(0.0 * _loss(model))
                other.step()
        after.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*after, strict=True):
        torch.testing.assert_close(one, other)


def test_an_infinite_one_keeps_nobody_from_stepping() -> None:
    model = _Net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.first.parameters(), lr=0.1), "O1", loss_scale=64.0)
    model.last.bias.register_hook(_infinite)
    engine.backward(_loss(model))
    assert engine.step().stepped()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exception_in_backward_leaves_what_was_there(accumulate: int) -> None:
    model = _Net()
    engine = halfpeak.prepare(
        model, torch.optim.SGD(model.first.parameters(), lr=0.1), "O1", loss_scale=64.0, accumulate=accumulate
    )
    there = model.last.bias.grad = torch.full((2,), 3.0)
    if accumulate == 2:
        engine.backward(_loss(model))
        engine.step()
    there_before = there.clone()

    def fail(_: Tensor) -> None:
        raise RuntimeError("no")

    handle = model.first.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        engine.backward(_loss(model))
    handle.remove()
    assert model.last.bias.grad is not None
    assert torch.equal(model.last.bias.grad, there_before)
    assert model.last.weight.grad is None


def test_a_refused_backward_pass_leaves_what_waits_scaled() -> None:
    model = _Net()
    engine = halfpeak.prepare(
        model, torch.optim.SGD(model.first.parameters(), lr=0.1), "O1", num_losses=2, loss_scale=64.0
    )
    with engine.scaled(_loss(model), delay=True) as scaled:
        scaled.backward()
    waiting = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(OrderError, match="another loss scale"):
        engine.backward(_loss(model), loss_id=1)
    left = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(left) == len(waiting) == 4
    assert all(torch.equal(one, other) for one, other in zip(left, waiting, strict=True))


def test_zeroing_them_inside_a_window_drops_what_was_there_before() -> None:
    grads: list[Tensor] = []
    for there in (None, torch.full((2,), 3.0)):
        model = _Net()
        engine = halfpeak.prepare(
            model, torch.optim.SGD(model.first.parameters(), lr=0.0), "O1", loss_scale=64.0, accumulate=2
        )
        model.last.bias.grad = there
        engine.backward(_loss(model))
        engine.step()
        model.last.zero_grad()
        engine.backward(_loss(model))
        engine.step()
        assert model.last.bias.grad is not None
        grads.append(model.last.bias.grad)
    assert torch.equal(*grads)


def test_a_parameter_that_joins_the_optimizer_is_one_no_longer() -> None:
    model = _Net()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, "O2", loss_scale=64.0)
    engine.backward(_loss(model))
    engine.step()
    model.last.zero_grad()
    before = model.last.weight.detach().clone()
    optimizer.add_param_group({"params": list(model.last.parameters())})
    engine.backward(_loss(model))
    engine.step()
    assert not torch.equal(model.last.weight, before)
    assert model.last.weight.grad is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_keeps_it() -> None:
    model = _Net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.first.parameters(), lr=0.1), "O1", loss_scale=64.0)
    engine.backward(_loss(model), create_graph=True)
    grad = model.last.weight.grad
    assert grad is not None
    assert grad.requires_grad
    model.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["added", "replaced", "a parameter"])
def test_layers_that_come_later(level: str, accumulate: int, how: str) -> None:
    grads: list[list[Tensor]] = []
    for scale in (1.0, 1024.0):
        model = _Net()
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.0)
        engine = halfpeak.prepare(model, optimizer, level, loss_scale=scale, accumulate=accumulate)
        late: list[nn.Parameter] = []
        # The new parameters come in the middle of the second window.
        for number in range(3 * accumulate):
            if number == accumulate + accumulate // 2:
                late = _come(model, how)
            with engine.forward():
                loss = _loss(model)
                loss = loss + sum(p.float().square().sum() for p in late if p.dim() == 3)
            engine.backward(loss)
            engine.step()
        grads.append([p.grad for p in late if p.grad is not None])
    assert len(grads[0]) == (1 if how == "a parameter" else 2)
    assert all(bool(g.abs().max() > 0) for g in grads[0])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def _come(model: _Net, how: str) -> list[nn.Parameter]:
    """Add or replace parameters, and return the new ones."""
    torch.manual_seed(1)
    dtype = model.last.weight.dtype
    if how == "added":
        model.last = nn.Sequential(model.last, layer := nn.Linear(2, 2, dtype=dtype))  # type: ignore[assignment]
        return list(layer.parameters())
    if how == "replaced":
        model.last = nn.Linear(4, 2, dtype=dtype)
        return list(model.last.parameters())
    model.first.late = nn.Parameter(torch.ones(1, 2, 2, dtype=dtype))
    return [model.first.late]
