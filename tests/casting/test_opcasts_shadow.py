"""Shadow weights: one cast per weight and step, whatever the number of backward passes, and never a stale one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfpeak
from casting.test_opcasts_cache import (
    MUTATIONS,
    Twice,
    by_data,
    by_fused_optimizer,
    by_numpy,
    by_storage,
    reference,
)
from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.registry import low_function
from halfpeak.casting.shadows import ShadowWeights

LOW = torch.bfloat16


class CountCasts(TorchDispatchMode):
    """Counts the casts of float32 tensors of the given shapes to a low dtype."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += args[0].dtype is torch.float32 and (kwargs or {}).get("dtype") is LOW
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Shapes of weights are unlike those of activations."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)
        self.recompute = recompute

    def block(self, x: Tensor) -> Tensor:
        return F.gelu(self.second(F.gelu(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        assert isinstance(hidden, Tensor)
        return self.third(hidden)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def train(
    every: int, steps: int, *, optimizer: Make = OPTIMIZERS["fused"], recompute: bool = False, **options: Any
) -> tuple[Net, list[int]]:
    """Train and count the casts of weights in each step."""
    torch.manual_seed(0)
    net = Net(recompute)
    engine = halfpeak.prepare(net, optimizer(net.parameters()), "O4", accumulate=every, **options)
    shapes, counts = {p.shape for p in net.parameters()}, []
    for _ in range(steps):
        with CountCasts(shapes) as casts:
            for _ in range(every):
                with engine.forward():
                    loss = F.cross_entropy(net(torch.randn(4, 5)), torch.randint(3, (4,)))
                engine.backward(loss)
                engine.step()
        counts.append(casts.count)
    return net, counts


@pytest.mark.parametrize("recompute", [False, True])
def test_casts_of_weights_do_not_grow_with_the_micro_batches(recompute: bool) -> None:
    counts = {every: train(every, 2, recompute=recompute, shadow_weights=True)[1] for every in (1, 2, 5)}
    assert counts == {1: [6, 6], 2: [6, 6], 5: [6, 6]}
    assert train(5, 1, recompute=recompute)[1] == [50 if recompute else 30]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_bit_for_bit(optimizer: str, recompute: bool) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "recompute": recompute}
    plain, _ = train(3, 4, **options)
    shadowed, _ = train(3, 4, **options, shadow_weights=True)
    for left, right in zip(plain.parameters(), shadowed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_each_backward_pass_brings_its_own_float32_gradient() -> None:
    layer, x = nn.Linear(3, 3), torch.rand(2, 3)
    grads: list[Tensor] = []
    casts = OpCasts(LOW, shadow=True)
    for _ in range(3):
        layer.zero_grad()
        with casts:
            out = layer(x)
        out.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is torch.float32
        grads.append(layer.weight.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_a_fused_step_of_the_callers_own_is_seen() -> None:
    net, x = Net(), torch.ones(1, 5)
    optimizer = OPTIMIZERS["fused"](net.parameters())
    engine = halfpeak.prepare(net, optimizer, "O4", shadow_weights=True)
    with engine.forward():
        before = net(x)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with engine.forward():
        after = net(x)
    with OpCasts(LOW):
        assert torch.equal(after, net(x))
    assert not torch.equal(after, before)


def test_nothing_is_held_while_the_optimizer_steps() -> None:
    net = Net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    engine = halfpeak.prepare(net, optimizer, "O4", shadow_weights=True)
    seen: list[Tensor | None] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(shadow()))
    with engine.forward():
        shadow = weakref.ref(given(net.first.weight))
        loss = net(torch.ones(1, 5)).float().sum()
    engine.backward(loss)
    del loss
    assert shadow() is not None
    engine.step()
    assert seen == [None]


@low_function
def given(weight: Tensor) -> Tensor:
    """What an operation gets in place of a weight."""
    return weight


SILENT = {by_data, by_fused_optimizer, by_numpy, by_storage}
"""Writes that change neither version nor address: between scopes nobody sees them."""


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_no_shadow_is_stale_inside_a_scope(mutate: Callable[[Twice], None]) -> None:
    model, x = Twice(), torch.rand(2, 4, requires_grad=True)
    with OpCasts(LOW, shadow=True):
        graph = model(x)
        mutate(model)
        after = model(x)
        with torch.no_grad():
            evaluated = model(x)
    assert not torch.equal(after, graph)
    assert torch.equal(after, reference(model, x, LOW))
    assert torch.equal(evaluated, after)


SEEN = [mutation for mutation in MUTATIONS if mutation not in SILENT]


@pytest.mark.parametrize("mutate", SEEN, ids=lambda mutate: mutate.__name__)
def test_no_shadow_is_stale_after_a_change_between_scopes(mutate: Callable[[Twice], None]) -> None:
    model, x, casts = Twice(), torch.rand(2, 4), OpCasts(LOW, shadow=True)
    with casts:
        before = model(x)
    mutate(model)
    with casts:
        after = model(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, reference(model, x, LOW))


def test_memory_that_another_tensor_had_before_is_another_weight() -> None:
    # As an allocator may lay one tensor where another was that is gone.
    place = bytearray(4 * 16)
    weight = nn.Parameter(torch.zeros(4, 4))
    casts, own = OpCasts(torch.bfloat16, shadow=True), weight.data
    addresses: set[int] = set()
    for number in (1.0, 2.0, 3.0):
        torch.frombuffer(place, dtype=torch.float32).fill_(number)
        weight.data = torch.frombuffer(place, dtype=torch.float32).view(4, 4)
        addresses.add(weight.data_ptr())
        with casts, torch.no_grad():
            assert F.linear(torch.eye(4), weight)[0, 0].item() == number
        weight.data = own
    assert len(addresses) == 1


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_clearing_helps_after_any_change(mutate: Callable[[Twice], None]) -> None:
    model, x, casts = Twice(), torch.rand(2, 4), OpCasts(LOW, shadow=True)
    with casts:
        before = model(x)
    mutate(model)
    casts.clear_cache()
    with casts:
        after = model(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, reference(model, x, LOW))


def test_freezing_and_unfreezing() -> None:
    model, x, casts = Twice(), torch.rand(2, 4), OpCasts(LOW, shadow=True)
    for trains in (True, False, True):
        model.requires_grad_(trains)
        with casts:
            assert model(x).requires_grad is trains


def test_a_first_use_without_gradients_does_not_keep_a_weight_from_training() -> None:
    model, x, casts = Twice(), torch.rand(2, 4), OpCasts(LOW, shadow=True)
    with casts, torch.no_grad():
        assert not model(x).requires_grad
    with casts, torch.inference_mode():
        model(x)
    with casts:
        model(x).float().sum().backward()
    assert model.first.weight.grad is not None


def test_what_inference_mode_makes_is_not_kept() -> None:
    weight, shadows = nn.Parameter(torch.rand(3, 3)), ShadowWeights(LOW)
    with torch.inference_mode():
        shadows.cast(weight)
    assert len(shadows) == 0


def test_scopes_of_one_object_share_and_others_do_not() -> None:
    layer, x, casts = nn.Linear(3, 3), torch.rand(2, 3), OpCasts(LOW, shadow=True)
    with CountCasts({layer.weight.shape}) as counted:
        with casts:
            layer(x)
            with casts:
                layer(x)
            layer(x)
        with casts:
            layer(x)
        assert counted.count == 1
        with OpCasts(LOW, shadow=True):
            layer(x)
        assert counted.count == 2


def test_a_copied_engine_has_shadows_of_its_own_weights() -> None:
    net = Net()
    engine = halfpeak.prepare(
        net, OPTIMIZERS["fused"](net.parameters()), "O4", accumulate=2, shadow_weights=True
    )
    x = torch.rand(2, 5)
    with engine.forward():
        loss = net(x).float().sum()
    engine.backward(loss)
    engine.step()
    other = copy.deepcopy(engine)
    for one in (engine, other):
        with one.forward():
            loss = one.model(x).float().sum()
        one.backward(loss)
        one.step()
    for left, right in zip(net.parameters(), other.model.parameters(), strict=True):
        assert left is not right
        assert torch.equal(left, right)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_shadows_are_for_casts_per_operation(level: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(halfpeak.ConfigError, match="'O1' or 'O4'"):
        halfpeak.prepare(layer, OPTIMIZERS["sgd"](layer.parameters()), level, shadow_weights=True)
    assert layer.weight.dtype is torch.float32
