"""Promise 2: a weight is its master, rounded. Whichever of the two is written, the other follows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer

import halfpeak
from halfpeak.core.optimizer_state import params_of
from halfpeak.parts.state_dict_hooks import ValuesOut
from promises.by_hand import SIDES, Loop, Prepared, Side, bits
from promises.cases import (
    Case,
    adam,
    batch,
    each,
    fused_adamw,
    fused_sgd,
    generator,
    loss_of,
    rows,
    run,
    sgd,
    torchs_fused,
    train,
    two_layers,
)
from support.nets import LEVELS, MASTERED
from support.states import same, through_a_file

# Values written on either side, at any moment between a step and the next.


@torch.no_grad()
def clamp(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.clamp_(-0.25, 0.25)


@torch.no_grad()
def copy_in(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))


@torch.no_grad()
def shrink(tensors: list[Tensor]) -> None:
    torch._foreach_mul_(tensors, 0.75)


@torch.no_grad()
def one_element(tensors: list[Tensor]) -> None:
    tensors[0][0, 0] = 0.3


def initialize(tensors: list[Tensor]) -> None:
    nn.init.trunc_normal_(tensors[2], generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def no_value_changed(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.clone())


WRITES = (clamp, copy_in, shrink, one_element, initialize, no_value_changed)


def written(loop: Loop, write: Callable[[list[Tensor]], None], side: Side) -> Iterator[None]:
    for seed in range(8):
        if seed % 3 == 0:
            write(loop.tensors(side))
            loop.follow(side)
            yield
        loop.backward(loss_of(loop, seed))
        if seed % 3 == 1:
            write(loop.tensors(side))
            loop.follow(side)
        loop.step()
        yield


def masters_written_between_forward_and_backward(loop: Loop) -> Iterator[None]:
    """autograd reads the weights that the forward pass has read."""
    for seed in range(4):
        loss = loss_of(loop, seed)
        clamp(loop.tensors("optimizer"))
        loop.backward(loss)
        loop.follow("optimizer")
        yield
        loop.step()
        yield


def loaded(loop: Loop, part: bool) -> Iterator[None]:
    """A state dict has the masters' values, so that what is loaded keeps every digit."""
    for seed in range(6):
        train(loop, seed)
        if seed % 2:
            value = (torch.arange(15) / 7 - 1).view(3, 5)
            if isinstance(loop, Prepared):
                net: Any = loop.nets[0]
                one, name = (net[2], "weight") if part else (net, "2.weight")
                one.load_state_dict({**one.state_dict(), name: value})
            else:
                loop.tensors("optimizer")[2].detach().copy_(value)
                loop.follow("optimizer")
        yield


def swapped(loop: Loop, side: Side, through_data: bool) -> Iterator[None]:
    """An evaluation with other weights, such as averaged ones: put back, they have every digit that they had."""
    for seed in range(6):
        tensors = loop.tensors(side)
        before = [tensor.detach().clone() for tensor in tensors]
        writes = [tensor.data if through_data else tensor.detach() for tensor in tensors]
        for value in writes:
            value.copy_(value * 0.5)
        if side == "optimizer":
            loop.follow(side)
        with torch.no_grad():
            half = loop.output(batch(seed))
        for value, old in zip(writes, before, strict=True):
            value.copy_(old)
        if side == "optimizer":
            loop.follow(side)
        with torch.no_grad():
            assert not torch.equal(loop.output(batch(seed)), half)
        yield
        train(loop, seed)


def swapped_by_state_dict(loop: Loop) -> Iterator[None]:
    for seed in range(6):
        if isinstance(loop, Prepared):
            (net,) = loop.nets
            before = copy.deepcopy(net.state_dict())
            net.load_state_dict({name: value * 0.5 for name, value in before.items()})
            with torch.no_grad():
                loop.output(batch(seed))
            net.load_state_dict(before)
        yield
        train(loop, seed)


def sam(loop: Loop, side: Side) -> Iterator[None]:
    """Perturbs the weights by the gradients of one pass, and steps by those of a second."""
    for seed in range(6):
        loop.backward(loss_of(loop, seed))
        added = [tensor.grad * 0.5 for tensor in loop.holders(side) if tensor.grad is not None]
        for sign in (1, -1):
            with torch.no_grad():
                for tensor, value in zip(loop.tensors(side), added, strict=True):
                    tensor.add_(sign * value)
            loop.follow(side)
            if sign == 1:
                loop.zero_grad(side)
                loop.backward(loss_of(loop, seed))
        loop.step()
        yield


class Lookahead(Optimizer):
    """Steps by another optimizer over its own groups, and writes their parameters every second step."""

    def __init__(self, nets: list[nn.Module]) -> None:
        self.base = adam(nets)
        super().__init__(self.base.param_groups, {})
        self.base.param_groups = self.param_groups
        self.slow: list[Tensor] = []
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = params_of(self)
        self.slow = self.slow or [p.clone() for p in params]
        self.base.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, params, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class AssigningSGD(torch.optim.SGD):
    """Gives its parameters new memory in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in params_of(self):
            if p.grad is not None:
                p.data = p - 0.125 * p.grad


def hooked(nets: list[nn.Module]) -> Optimizer:
    """A hook writes the parameters after each step."""
    optimizer = sgd(nets)
    optimizer.register_step_post_hook(lambda one, *_: clamp(params_of(one)))
    return optimizer


def steps(loop: Loop) -> Iterator[None]:
    for seed in range(6):
        train(loop, seed)
        yield


# What is trained.


def through_its_parts(loop: Loop, seed: int) -> Tensor:
    """A forward pass that calls the layers of a model, and not the model."""
    net: Any = loop.nets[0]
    with loop.forward():
        x = batch(seed).to(net[0].weight.dtype)
        for layer in net:
            x = layer(x)
        return x.float().square().mean()


def frozen(
    loop: Loop, side: Side, thaws: Side, moment: str, forward: Callable[[Loop, int], Tensor] = loss_of
) -> Iterator[None]:
    """As in a GAN whose networks are parts of one model: in some passes a part is frozen."""

    def toggle(now: str, side: Side, wanted: bool, seed: int) -> None:
        if now == moment and seed % 2:
            for index in (0, 1) if seed < 5 else (2, 3):
                loop.freeze(side, index, wanted)

    for seed in range(7):
        toggle("before forward", side, False, seed)
        loss = forward(loop, seed)
        toggle("before backward", side, False, seed)
        loop.backward(loss)
        yield
        loop.step()
        toggle(moment, thaws, True, seed)
        yield


def frozen_first() -> list[nn.Module]:
    (net,) = two_layers()
    net[0].requires_grad_(False)  # type: ignore[index,operator]
    return [net]


def thawed(loop: Loop) -> Iterator[None]:
    for seed in range(5):
        if seed == 2:
            for index in (0, 1):
                loop.freeze("model", index, True)
        train(loop, seed)
        yield


def with_closure(loop: Loop) -> Iterator[None]:
    for seed in range(4):
        if seed % 2:
            clamp(loop.tensors("model"))
            loop.follow("model")

        def closure(seed: int = seed) -> Tensor:
            loss = loss_of(loop, seed)
            loop.backward(loss)
            return loss

        loop.step_with(closure)
        yield


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": adam,
    "torch's fused": torchs_fused,
    "FusedAdamW": fused_adamw,
    "FusedSGD": fused_sgd,
    "one for each layer": lambda nets: each(list(nets[0])[::2]),
}

CASES: dict[str, Case] = {
    **{
        f"{write.__name__} on the {side}'s side": Case(
            partial(written, write=write, side=side), makes=list(OPTIMIZERS.values())[number % 5]
        )
        for number, (write, side) in enumerate((write, side) for write in WRITES for side in SIDES)
    },
    **{
        f"clamp on the {side}'s side, {name}": Case(partial(written, write=clamp, side=side), makes=makes)
        for side in SIDES
        for name, makes in OPTIMIZERS.items()
    },
    "masters written between forward and backward": Case(
        masters_written_between_forward_and_backward, levels=MASTERED
    ),
    "a state dict is loaded": Case(partial(loaded, part=False)),
    "a state dict of a part is loaded": Case(partial(loaded, part=True)),
    **{
        f"swapped on the {side}'s side, data={data}, {name}": Case(
            partial(swapped, side=side, through_data=data), makes=makes
        )
        for side in SIDES
        for data in (False, True)
        for name, makes in OPTIMIZERS.items()
        if not (side == "optimizer" and data)
    },
    "swapped by a state dict": Case(swapped_by_state_dict),
    **{f"SAM on the {side}'s side": Case(partial(sam, side=side), makes=sgd) for side in SIDES},
    "SAM on the masters of torch's fused": Case(partial(sam, side="optimizer"), makes=torchs_fused),
    "Lookahead": Case(steps, makes=Lookahead),
    "an optimizer that assigns": Case(steps, makes=lambda nets: AssigningSGD(nets[0].parameters(), lr=0.1)),
    "a hook that writes": Case(steps, makes=hooked),
    **{
        f"frozen on the {side}'s side, thawed on the {thaws}'s, {moment}": Case(
            partial(frozen, side=side, thaws=thaws, moment=moment), makes=sgd
        )
        for side in SIDES
        for thaws in SIDES
        for moment in ("before forward", "before backward")
    },
    **{
        f"frozen on the {side}'s side, in a pass through parts": Case(
            partial(frozen, side=side, thaws=side, moment="before forward", forward=through_its_parts),
            makes=sgd,
        )
        for side in SIDES
    },
    "a layer that was frozen when it was prepared": Case(thawed, (frozen_first,)),
    "weights written before a closure": Case(with_closure, makes=sgd),
}


@rows(CASES)
def test_values(case: Case, level: str) -> None:
    (loop,) = run(case, level)
    loop.engine.parts.agree()
    for weight, main in zip(loop.tensors("model"), loop.tensors("optimizer"), strict=True):
        assert torch.equal(main.to(weight.dtype), weight)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("through_data", [True, False])
def test_weights_written_last_are_saved_and_kept(level: str, through_data: bool) -> None:
    """By value, also through ``.data``: in a state dict, and when an engine is taken off."""
    loop = Prepared(level, two_layers(), adam)
    train(loop)
    exact = loop.values()
    weights = loop.tensors("model")
    for weight in weights[1:]:
        (weight.data if through_data else weight.detach()).mul_(0.5)
    expected = [exact[0], *(weight.float() for weight in weights[1:])]
    for saved in (loop.values(), list(through_a_file(loop.engine.state_dict())["models"][0].values())):
        assert [bits(value)[1:] for value in saved] == [bits(value)[1:] for value in expected]  # type: ignore[index]
    low = [bits(weight) for weight in weights]
    loop.engine.remove()
    assert [bits(weight) for weight in weights] == low
    assert params_of(loop.optimizers[0]) == weights


LOADS: dict[str, Callable[[Prepared], object]] = {
    "model": lambda loop: loop.nets[0].load_state_dict(through_a_file(loop.nets[0].state_dict())),
    "engine": lambda loop: loop.engine.load_state_dict(through_a_file(loop.engine.state_dict())),
    "masters written": lambda loop: [main.mul_(1.5) for main in loop.tensors("optimizer")],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_layer_written_after_a_load_keeps_what_was_written(level: str, load: str, evaluates: bool) -> None:
    """As in fine-tuning: load a checkpoint, then initialise the head anew."""
    loop = Prepared(level, two_layers(), adam)
    train(loop)
    with torch.no_grad():
        LOADS[load](loop)
        head = loop.tensors("model")[-2]
        head.fill_(0.25)
    if evaluates:
        with torch.no_grad():
            loss_of(loop, 1)
    assert loop.values()[-2].unique().tolist() == [0.25]
    loss = loss_of(loop, 1)
    assert head.unique().tolist() == [0.25]
    loop.backward(loss)
    assert loop.tensors("optimizer")[-2].unique().tolist() == [0.25]


@pytest.mark.parametrize("level", MASTERED)
def test_pruning_made_permanent_is_kept_where_its_weight_is_written_again(level: str) -> None:
    """``prune.remove`` writes through ``.data``."""
    loop = Prepared(level, two_layers(), lambda nets: torch.optim.SGD(nets[0].parameters(), lr=0.125))
    layer: Any = loop.nets[0][0]
    train(loop)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    train(loop)
    prune.remove(layer, "weight")
    with torch.no_grad():
        layer.weight.copy_(layer.weight.clone())
    pruned = layer.weight == 0
    assert pruned.sum() == pruned.numel() // 2
    loop.backward(loss_of(loop, 1) * 0)
    loop.step()
    assert (layer.weight == 0)[pruned].all()


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("writes", [True, False])
def test_writes_through_data_in_training_are_told_once_and_say_what_to_write(
    level: str, writes: bool
) -> None:
    """Masters do not follow them, as in apex."""
    loop, calm = (Prepared(level, two_layers(), adam) for _ in range(2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(34):
            if writes and 16 < seed < 33:
                for weight in loop.tensors("model"):
                    weight.data.clamp_(-0.0625, 0.0625)
            loss = loss_of(calm, seed)
            for one in (loop, calm):
                one.backward(loss_of(one, seed) if one is loop else loss)
                one.engine.step()
    assert len(told) == writes
    for one in told:
        assert "under torch.no_grad() instead: p.clamp_(...)" in str(one.message)
        assert one.filename == __file__


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", ["nothing", "forward", "state_dict", "abort", "a pass that raises"])
@pytest.mark.parametrize("side", ["model", "optimizer"])
def test_masters_follow_any_write_before_the_first_pass(level: str, first: str, side: Side) -> None:
    """As in apex, which makes masters in the first pass: ``net.apply(weights_init)`` of many scripts writes ``.data``."""

    def trained(through_data: bool) -> list[Any]:
        loop = Prepared(level, two_layers(), adam)
        if first == "forward":
            loss_of(loop, 7)
        elif first == "state_dict":
            loop.engine.state_dict()
        elif first == "abort":
            loop.engine.abort()
        elif first == "a pass that raises":
            with pytest.raises(RuntimeError), loop.engine.scaled(loss_of(loop, 7)):
                raise RuntimeError
        for tensor in loop.tensors(side):
            value = torch.linspace(-1, 1, tensor.numel()).view_as(tensor)
            if through_data and side == "model":
                tensor.data.copy_(value)
            else:
                with torch.no_grad():
                    tensor.copy_(value)
        train(loop), train(loop, 1)
        return [bits(tensor) for tensor in loop.tensors("optimizer")]

    assert trained(through_data=True) == trained(through_data=False)


@pytest.mark.parametrize("level", MASTERED)
def test_a_moved_or_resized_weight_is_an_error_and_can_still_be_saved(level: str) -> None:
    loop = Prepared(level, two_layers(), adam)
    train(loop)
    weight = loop.tensors("model")[1]
    weight.data = torch.zeros(7, dtype=weight.dtype)
    with torch.no_grad():
        weight.fill_(1)
    with pytest.raises(halfpeak.ParameterError, match=r"went from \(5,\) on cpu to \(7,\)"):
        loop.step()
    assert loop.nets[0].state_dict()["0.bias"].tolist() == [1.0] * 7
    other = Prepared(level, two_layers(), adam)
    assert train(other)  # although the first is still alive, as in a notebook


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_taken_off_and_put_on_goes_on_from_the_rounded_weights(level: str) -> None:
    (net,) = two_layers()
    optimizer = adam([net])
    engine = halfpeak.prepare(net, optimizer, halfpeak.LEVELS[level].replace(loss_scale=64.0))
    weights = list(net.parameters())
    for seed in range(3):
        with engine.forward():
            loss = net(batch(seed)).float().square().mean()
        engine.backward(loss)
        engine.step()
    rounded = [weight.detach().float() for weight in weights]
    moments = [optimizer.state[main]["exp_avg"].float().clone() for main in params_of(optimizer)]
    engine.remove()
    assert all(now is then for now, then in zip(params_of(optimizer), weights, strict=True))
    net(batch(0).to(weights[0].dtype)).float().square().mean().backward()
    assert all(weight.grad is not None and weight.grad.dtype is weight.dtype for weight in weights)
    net.zero_grad()
    assert same([optimizer.state[weight]["exp_avg"].float() for weight in weights], moments)
    again = halfpeak.prepare(net, optimizer, halfpeak.LEVELS[level].replace(loss_scale=64.0))
    assert same([value.float() for value in net.state_dict().values()], rounded)
    assert same([optimizer.state[main]["exp_avg"].float() for main in again.main_params()], moments)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_before_prepare_and_after_remove_are_those_of_the_parameters(level: str) -> None:
    (net,) = generator()
    optimizer = sgd([net])
    net(batch(0)).square().mean().backward()
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    engine = halfpeak.prepare(net, optimizer, halfpeak.LEVELS[level].replace(loss_scale=64.0))
    for p, main, old in zip(net.parameters(), engine.main_params(), before, strict=True):
        assert p.grad is not None
        assert p.grad is main.grad
        torch.testing.assert_close(p.grad.float(), old, rtol=1e-2, atol=1e-4)
    engine.remove()
    for p in net.parameters():
        assert p.grad is not None
        assert p.grad.dtype is p.dtype


@pytest.mark.parametrize("level", LEVELS)
def test_a_deep_copy_of_a_prepared_model_computes_the_same_and_is_independent(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Prepared(level, two_layers(), adam)
    train(loop)
    (net,) = loop.nets
    monkeypatch.setattr(ValuesOut, "_has_warned", False)
    has_masters = level in MASTERED
    with pytest.warns(RuntimeWarning, match="average the float32 values") if has_masters else nullcontext():
        copies = [copy.deepcopy(net)]
    copies += [copy.deepcopy(net), through_a_file(net, weights_only=False)]  # it is told once
    with torch.no_grad():
        expected = net(batch(0))
        for copied in copies:
            assert torch.equal(copied(batch(0)), expected)
        for weight in loop.tensors("model"):
            weight.zero_()
        for copied in copies:
            assert torch.equal(copied(batch(0)), expected)
            assert {value.dtype for value in copied.state_dict().values()} == {torch.float32}
    train(loop)
    assert all(not hook_reaches(copied, loop) for copied in copies)


def hook_reaches(copied: nn.Module, loop: Prepared) -> bool:
    """Whether the state dict of a copy has a value of the engine's."""
    ours = {main.data_ptr() for main in loop.tensors("optimizer")}
    return any(value.data_ptr() in ours for value in copied.state_dict().values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("look", ["forward", "state_dict", "unscale"])
@pytest.mark.parametrize("has_saliency", [True, False])
def test_masters_and_gradients_that_inference_mode_has_seen_first_are_trained(
    level: str, look: str, has_saliency: bool
) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)
    net = nn.Sequential(first, last)
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(last.parameters(), lr=0.1)
    engine = halfpeak.prepare(net, optimizer, level)
    first.requires_grad_(True)
    optimizer.add_param_group({"params": list(first.parameters())})
    if has_saliency:
        engine.parts.agree()
        net(torch.ones(3, 4)).float().sum().backward()
    with torch.inference_mode():
        {
            "forward": lambda: net(torch.ones(3, 4)),
            "state_dict": engine.state_dict,
            "unscale": engine.unscale,
        }[look]()
    with engine.forward():
        loss = net(torch.ones(3, 4)).float().square().mean()
    engine.backward(loss)
    engine.step()
    assert not any(main.is_inference() for main in engine.main_params())
