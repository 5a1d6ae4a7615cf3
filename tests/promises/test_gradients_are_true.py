"""Promise 1: outside of a backward pass every ``.grad`` is float32 (O3: the weight's dtype) and unscaled."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from halfpeak.core.errors import OrderError
from halfpeak.core.optimizer_state import params_of
from halfpeak.fused import FusedSGD
from promises.by_hand import SCALE, SIDES, ByHand, Loop, Prepared, Side, assert_same, parameters
from promises.cases import (
    Case,
    batch,
    critic,
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
from support.states import same


def steps(loop: Loop) -> Iterator[None]:
    for seed in range(8):
        loop.backward(loss_of(loop, seed))
        loop.unscale()
        yield
        loop.step()


def steps_alone(loop: Loop) -> Iterator[None]:
    for seed in range(8):
        train(loop, seed)
        yield


# What user code does to gradients, on either side, after each pass of a window.


def clip(tensors: list[Tensor]) -> None:
    nn.utils.clip_grad_norm_(tensors, 0.05)


def mask(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad.mul_(torch.arange(tensor.numel()).reshape(tensor.shape) % 2)


def penalize(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad.add_(0.125)


def assign(tensors: list[Tensor]) -> None:
    """As A-GEM and PCGrad do: parts of one flat vector."""
    flat = torch.cat([tensor.grad.flatten() * 0.5 for tensor in tensors if tensor.grad is not None])
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.grad = part.view_as(tensor)


def drop_one(tensors: list[Tensor]) -> None:
    tensors[0].grad = None


def zero_one(tensors: list[Tensor]) -> None:
    grad = tensors[-1].grad
    assert grad is not None
    grad.zero_()


def write_data(tensors: list[Tensor]) -> None:
    """Changes no version counter."""
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad.data.mul_(0.5)


EDITS = (clip, mask, penalize, assign, drop_one, zero_one, write_data)


def edited(loop: Loop, edit: Callable[[list[Tensor]], None], side: Side) -> Iterator[None]:
    for seed in range(9):
        loop.backward(loss_of(loop, seed))
        loop.unscale()
        yield
        edit(loop.holders(side))
        loop.step()


# Several passes and several engines.


def past_the_engine(loop: Loop) -> Iterator[None]:
    """A plain ``loss.backward()``, which is true at a scale of 1, in turns with passes of the engine."""
    for seed in range(8):
        if seed % 2:
            loop.past(loss_of(loop, seed))
        else:
            loop.backward(loss_of(loop, seed))
        yield
        loop.step()


def one_graph_twice(loop: Loop) -> Iterator[None]:
    for seed in range(4):
        loss = loss_of(loop, seed)
        loop.backward(loss, retain_graph=True)
        yield
        loop.backward(loss)
        yield
        loop.step()


def zeroed_after_the_forward_pass(loop: Loop, side: Side, set_to_none: bool) -> Iterator[None]:
    for seed in range(8):
        loss = loss_of(loop, seed)
        if seed % 3 == 1:
            loop.zero_grad(side, set_to_none)
        loop.backward(loss)
        yield
        loop.step()


def gan(g: Loop, d: Loop, zeroes: str, generator_first: bool, joint: bool) -> Iterator[None]:
    """A loss of the generator reaches the critic, whose gradients are sums over both losses unless they are zeroed."""

    def of_generator(seed: int) -> None:
        with g.forward(), d.forward():
            loss = d.output(g.output(batch(seed))).square().mean()
        g.backward(loss)

    def of_critic(seed: int) -> None:
        if zeroes:
            d.zero_grad("model" if zeroes == "model" else "optimizer")
        with g.forward(), d.forward():
            fake = g.output(batch(seed)).detach()
            loss = d.output(batch(seed + 50)).mean() - d.output(fake).square().mean()
        d.backward(loss)

    order = [(of_generator, g), (of_critic, d)]
    for seed in range(5):
        for backward, loop in order if generator_first else order[::-1]:
            backward(seed)
            yield
            if not joint:
                loop.step()
                yield
        if joint:
            for _, loop in order:
                loop.step()


def gan_of_one(loop: Loop, joint: bool) -> Iterator[None]:
    """``optimizers=``: the parameters of the others keep the gradients they have."""
    of_g, of_d = loop.optimizers
    for seed in range(4):
        with loop.forward():
            fake = loop.output(batch(seed), 0).detach()
            loss = loop.output(batch(seed + 50), 1).mean() - loop.output(fake, 1).square().mean()
        loop.backward(loss, optimizers=of_d)
        yield
        if not joint:
            loop.step(optimizers=of_d)
        with loop.forward():
            loss = loop.output(loop.output(batch(seed), 0), 1).square().mean()
        loop.backward(loss, optimizers=of_g)
        yield
        if joint:
            loop.step()
        else:
            loop.step(optimizers=of_g)


def forward_before_the_step_of_another(loop: Loop) -> Iterator[None]:
    """autograd would refuse a graph whose weights are written meanwhile."""
    first, second = loop.optimizers
    for seed in range(4):
        losses = [loss_of(loop, seed, net=net) for net in range(2)]
        for loss, optimizer in zip(losses, (first, second), strict=True):
            loop.backward(loss, optimizers=optimizer)
            yield
            loop.step(optimizers=optimizer)
            yield


def one_trunk() -> tuple[Callable[[], list[nn.Module]], Callable[[], list[nn.Module]]]:
    """The networks of two loops, which share their first layer."""
    made: list[nn.Module] = []

    def first() -> list[nn.Module]:
        torch.manual_seed(0)
        made.append(nn.Linear(4, 4))
        return [nn.Sequential(made[-1], nn.Tanh(), nn.Linear(4, 2))]

    def second() -> list[nn.Module]:
        torch.manual_seed(1)
        return [nn.Sequential(made.pop(0), nn.Tanh(), nn.Linear(4, 3))]

    return first, second


def in_turns(one: Loop, other: Loop) -> Iterator[None]:
    for seed in range(6):
        for loop in (one, other):
            loop.backward(loss_of(loop, seed))
            yield
            loop.step()
            yield


def both_then_step(one: Loop, other: Loop) -> Iterator[None]:
    for seed in range(4):
        for loop in (one, other):
            loop.backward(loss_of(loop, seed))
            yield
        one.step()
        yield
        other.step()
        yield


# Gradients that are not dense float32 tensors.


def penalty_on_gradients(loop: Loop) -> Iterator[None]:
    for seed in range(3):
        loop.backward(loss_of(loop, seed), create_graph=True)
        yield
        norm = sum(t.grad.square().sum() for t in loop.holders("model") if t.grad is not None)
        loop.zero_grad("model")
        loop.backward(torch.as_tensor(norm))
        loop.unscale()
        yield
        loop.step()


def added_to_a_graph(loop: Loop) -> Iterator[None]:
    for seed in range(3):
        for other in range(2):
            loop.backward(loss_of(loop, seed + other), create_graph=True)
            yield
        loop.step()


def sparse_steps(loop: Loop) -> Iterator[None]:
    for seed in range(8):
        loop.backward(loss_of(loop, seed))
        yield
        for tensor in loop.holders("optimizer"):
            if tensor.grad is not None and tensor.grad.is_sparse:
                tensor.grad = tensor.grad.coalesce()  # SGD adds rows that are there twice one by one
        loop.step()
        yield


class Table(nn.Module):
    """An embedding with sparse gradients, beside a dense one and a complex and a float64 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = nn.Embedding(30, 4, sparse=True), nn.Embedding(30, 4)
        self.complex = nn.Parameter(torch.full((4,), 0.5 + 0.25j))
        self.wide = nn.Parameter(torch.linspace(0, 1, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rows = (
            x.flatten().argsort().view_as(x)
        )  # each once: the order of duplicates would change bits of their sum
        mixed = (self.sparse(rows) + self.dense(rows + 1)).sum(1)
        return mixed * (x * self.complex).real.float() + self.wide


def kinds() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Table()]


def tied() -> list[nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return [net]


def twice_in_a_group(nets: list[nn.Module]) -> torch.optim.Optimizer:
    optimizer = sgd(nets)
    members = optimizer.param_groups[0]["params"]
    members.append(members[0])
    return optimizer


def a_trunk_of_two(nets: list[nn.Module]) -> list[torch.optim.Optimizer]:
    """Both optimizers step the first layer."""
    (net,) = nets
    return [torch.optim.SGD([*net[0].parameters(), *part], lr=0.125) for part in ([], net[2].parameters())]  # type: ignore[index]


class EditsAroundStep(FusedSGD):
    """Reads gradients before its step and writes parameters after it, as subclasses in recipes do."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__(parameters(nets), lr=0.125, backend="eager")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch._foreach_clamp_min_([p.grad for p in params_of(self) if p.grad is not None], -0.001)
        loss = super().step(closure)
        torch._foreach_mul_(params_of(self), 0.5)
        return loss


def hooked(nets: list[nn.Module]) -> torch.optim.Optimizer:
    optimizer = fused_sgd(nets)
    optimizer.register_step_pre_hook(lambda one, *_: clip(params_of(one)))
    return optimizer


# Leaves that nobody prepared: they are unscaled in every pass that reaches them.


def fresh_inputs(loop: Loop) -> Iterator[None]:
    """Adversarial training: some passes need the gradient of their inputs, and some do not."""
    for seed in range(8):
        x = batch(seed)
        if seed % 3:
            loop.leaf(x.requires_grad_())
        with loop.forward():
            loss = loop.output(x).square().mean()
        loop.backward(loss)
        yield
        loop.step()


def one_input_in_two_passes(loop: Loop) -> Iterator[None]:
    x = loop.leaf(batch(0).requires_grad_())
    for _ in range(4):
        with loop.forward():
            loss = loop.output(x).square().mean()
        loop.backward(loss)
        yield
        loop.step()


def criterion(loop: Loop) -> Iterator[None]:
    """A criterion with weights of its own, such as a center loss, which joins after a warm-up."""
    centers = loop.leaf(nn.Parameter(torch.linspace(-1, 1, 18).reshape(6, 3)))
    other = torch.optim.SGD([centers], lr=0.5)
    for seed in range(8):
        with loop.forward():
            output = loop.output(batch(seed))
            loss = output.square().mean()
            if seed > 2:
                loss = loss + (output - centers).square().mean()
        loop.backward(loss)
        yield
        loop.step()
        other.step()
        if seed % 2:
            other.zero_grad()


def late_layer(loop: Loop) -> Iterator[None]:
    """A layer that the model gets inside a window, and no optimizer."""
    for seed in range(6):
        if seed == 2:
            torch.manual_seed(5)
            net: Any = loop.nets[0]
            net.append(nn.Linear(3, 3, dtype=net[2].weight.dtype))
            for parameter in net[3].parameters():
                loop.leaf(parameter)
        loop.backward(loss_of(loop, seed))
        yield
        loop.step()


def of_the_last_layer(nets: list[nn.Module]) -> torch.optim.Optimizer:
    """The first layer is in no optimizer."""
    return torch.optim.Adam(nets[0][2].parameters(), lr=0.01, eps=1e-4)  # type: ignore[index,operator]


def new_shapes(loop: Loop, side: Side) -> Iterator[None]:
    """``torch.compile`` traces while there are gradients: in a window, or because they are zeroed after the forward pass."""
    for seed, size in enumerate((3, 5, 5, 1, 4, 6)):  # traced anew in the first, second and fourth pass
        loss = loss_of(loop, seed, size=size)
        if seed in (3, 5):
            loop.zero_grad(side)
        loop.backward(loss)
        yield
        loop.step()


ONE = {"scale": 1.0}
WINDOW = {"every": 3}
GAN = (generator, critic)

CASES: dict[str, Case] = {
    "each step": Case(steps),
    "each step of torch's fused": Case(steps, makes=torchs_fused),
    "windows, clipped": Case(
        steps, options={"every": 3, "clip": 0.05}, levels=[x for x in LEVELS if x != "O3"]
    ),
    "a scale of 1": Case(steps, options=ONE),
    "a fused optimizer, unscaled": Case(steps, makes=fused_adamw),
    "a fused optimizer with a step of its own": Case(steps_alone, makes=EditsAroundStep),
    "a fused optimizer with a hook before its step": Case(steps_alone, makes=hooked),
    "windows of a fused optimizer": Case(steps, makes=fused_sgd, options=WINDOW),
    **{
        f"{edit.__name__} on the {side}'s side": Case(partial(edited, edit=edit, side=side), options=WINDOW)
        for edit in EDITS
        for side in SIDES
    },
    **{
        f"{edit.__name__} of a fused optimizer's": Case(
            partial(edited, edit=edit, side="model"), makes=fused_adamw
        )
        for edit in EDITS
    },
    "past the engine, mixed": Case(past_the_engine, options={"scale": 1.0, "every": 2}),
    "past the engine, mixed with scaled passes": Case(past_the_engine, options={"every": 2}),
    "past the engine, alone": Case(past_the_engine, options=ONE, levels=["O0"]),
    "a graph twice": Case(one_graph_twice),
    **{
        f"{side}.zero_grad({none}) after the forward pass": Case(
            partial(zeroed_after_the_forward_pass, side=side, set_to_none=none), options=WINDOW
        )
        for side in SIDES
        for none in (True, False)
    },
    **{
        f"a GAN, zeroes={zeroes!r}, generator first={first}, joint={joint}": Case(
            partial(gan, zeroes=zeroes, generator_first=first, joint=joint), GAN, sgd
        )
        for zeroes in ("", "model", "optimizer")
        for first in (True, False)
        for joint in (True, False)
    },
    **{
        f"a GAN of {makes.__name__}, scales={scales}, generator first={first}": Case(
            partial(gan, zeroes="", generator_first=first, joint=False),
            GAN,
            makes,
            apart=[{"scale": scale} for scale in scales],
        )
        for makes in (sgd, fused_sgd)
        for scales in ((SCALE, 1.0), (1.0, SCALE), (1.0, 1.0), (SCALE, 2 * SCALE))
        for first in (True, False)
    },
    "a GAN of one engine, in turns": Case(
        partial(gan_of_one, joint=False), (lambda: generator() + critic(),), each
    ),
    "a GAN of one engine, together": Case(
        partial(gan_of_one, joint=True), (lambda: generator() + critic(),), each
    ),
    "a forward pass before the step of another optimizer": Case(
        forward_before_the_step_of_another, (lambda: generator() + critic(),), each
    ),
    "a trunk of two engines, in turns": Case(in_turns, one_trunk(), sgd, levels=("O1", "O4")),
    "a trunk of two engines, together": Case(both_then_step, one_trunk(), sgd, levels=("O1", "O4")),
    "a trunk of two optimizers": Case(steps, makes=a_trunk_of_two),
    "a penalty on gradients": Case(penalty_on_gradients, makes=sgd),
    "a penalty on gradients, at a scale of 1": Case(penalty_on_gradients, makes=sgd, options=ONE),
    "a penalty on gradients, FusedSGD": Case(penalty_on_gradients, makes=fused_sgd),
    "passes that keep graphs": Case(added_to_a_graph, makes=sgd),
    "sparse, complex and float64": Case(
        sparse_steps, (kinds,), lambda nets: torch.optim.SGD(nets[0].parameters(), lr=0.5)
    ),
    "windows of sparse, complex and float64": Case(
        sparse_steps,
        (kinds,),
        lambda nets: torch.optim.SGD(nets[0].parameters(), lr=0.5),
        {"every": 2},
        levels=[level for level in LEVELS if level != "O3"],  # torch adds no sparse float16 tensors
    ),
    "a parameter twice in a group": Case(steps, makes=twice_in_a_group),
    "tied weights": Case(steps, (tied,), options=WINDOW),
    "fresh inputs": Case(fresh_inputs),
    "fresh inputs in windows": Case(fresh_inputs, options=WINDOW),
    "one input": Case(one_input_in_two_passes),
    "a criterion with weights": Case(criterion, options={"every": 2}),
    "a layer in no optimizer": Case(steps, makes=of_the_last_layer),
    "a layer that comes later": Case(late_layer, options=WINDOW),
    "windows beside a layer in no optimizer": Case(steps, makes=of_the_last_layer, options=WINDOW),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@rows(CASES)
def test_gradients(case: Case, level: str) -> None:
    run(case, level)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_weight_of_two_engines_has_a_master_in_each_and_one_gradient(level: str) -> None:
    """Where each engine steps it in turn, its other master follows."""
    ours, plain = (generator() + critic() for _ in range(2))
    for one, other in (ours, plain):
        other[0] = nn.Linear(4, 5)  # type: ignore[index,operator]
        other[0].weight = one[0].weight  # type: ignore[index,union-attr]
        other[2] = nn.Linear(5, 1)  # type: ignore[index,operator]
        with torch.no_grad():
            for parameter in list(other.parameters())[1:]:
                parameter.fill_(0.25)
    engines = [
        halfpeak.prepare(net, sgd([net]), halfpeak.LEVELS[level].replace(loss_scale=SCALE)) for net in ours
    ]
    optimizers = [sgd([net]) for net in plain]
    for seed in range(6):
        for net, engine, model, optimizer in zip(ours, engines, plain, optimizers, strict=True):
            engine.backward(net(batch(seed)).float().square().mean())
            model(batch(seed)).square().mean().backward()
            for parameter, expected in zip(net.parameters(), model.parameters(), strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=0.1, atol=0.02)
            engine.step()
            optimizer.step()
            model.zero_grad()
    for net, model in zip(ours, plain, strict=True):
        for one, other in zip(net.state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0.02)


COMPILED = {
    f"{side}.zero_grad": Case(partial(new_shapes, side=side), options={"every": 2}, ours={"compiles": True})
    for side in SIDES
}


@pytest.mark.filterwarnings("ignore:the gradients of each pass inside a window")
# torch.compile itself reads ``.grad`` of its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@rows(COMPILED)
def test_gradients_of_a_compiled_model_that_meets_new_shapes(case: Case, level: str) -> None:
    run(case, level)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_two_engines_in_two_threads(level: str) -> None:
    """Each pass begins while one of the other thread is open."""
    meet = threading.Barrier(2, timeout=60)

    def steps_in_turn(loop: Loop) -> Iterator[None]:
        for seed in range(6):
            loss = loss_of(loop, seed)
            if isinstance(loop, Prepared):
                meet.wait()
                loss.register_hook(lambda grad: (meet.wait(), grad)[1])
            loop.backward(loss)
            yield
            loop.step()

    # Made here, because torch's random state is that of the process.
    made = [[nets() for _ in range(2)] for nets in (two_layers, generator)]
    cases = [Case(steps_in_turn, (iter(nets).__next__,)) for nets in made]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, case, level) for case in cases]:
            done.result()


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_goes_over_to_another_thread_while_a_pass_is_open_here(level: str) -> None:
    """As where all engines are prepared in the main thread, and one of them is trained in it."""
    here, there = Prepared(level, two_layers(), sgd), Prepared(level, generator(), sgd, scale=64.0)
    hand = ByHand(level, generator(), sgd, scale=64.0)

    def pass_there(grad: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: there.backward(loss_of(there))).result()
        return grad

    loss = loss_of(here)
    loss.register_hook(pass_there)
    here.backward(loss)
    hand.backward(loss_of(hand))
    assert_same(hand, there)


# The exception of promise 1: an optimizer of halfpeak.fused that clips in its own step reads gradients where autograd has
# left them, scaled, until ``engine.unscale()`` or the step.

NORMS: dict[str, Any] = {"no clip": None, "clip": 0.05, "loose clip": 1e6}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", NORMS)
@pytest.mark.parametrize("makes", [fused_adamw, fused_sgd])
def test_unscaling_what_is_left_for_a_fused_step_changes_no_bit(level: str, clip: str, makes: Any) -> None:
    ends: list[list[Tensor]] = []
    for unscales in (lambda seed: False, lambda seed: seed % 2 == 1, lambda seed: True):
        loop = Prepared(level, two_layers(), makes, clip=NORMS[clip])
        for seed in range(5):
            loop.backward(loss_of(loop, seed))
            assert loop.engine.parts.windows[0].held is not None
            if unscales(seed):
                loop.unscale()
                assert loop.engine.parts.windows[0].held is None
            assert loop.step()
        ends.append(loop.values())
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


WRITES: dict[str, Callable[[list[Tensor]], object]] = {
    "clip": lambda tensors: nn.utils.clip_grad_norm_(tensors, 0.01),
    "mask": mask,
    "replace": lambda tensors: setattr(tensors[0], "grad", torch.ones_like(tensors[0].grad)),  # type: ignore[arg-type]
    "a pass past the engine": lambda tensors: None,
}
LOOKS: dict[str, Callable[[Prepared], object]] = {
    "step": Prepared.step,
    "the next pass": lambda loop: loop.backward(loss_of(loop, 1)),
    "state_dict": lambda loop: loop.engine.state_dict(),
    "unscale": Prepared.unscale,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("look", LOOKS)
def test_gradients_written_while_they_are_left_scaled_are_refused(
    level: str, side: Side, write: str, look: str
) -> None:
    loop, calm = (Prepared(level, two_layers(), fused_adamw) for _ in range(2))
    for one in (loop, calm):
        train(one)
    loop.backward(loss_of(loop, 1))
    WRITES[write](loop.holders(side))
    if write == "a pass past the engine":
        loop.past(loss_of(loop, 2))
    for _ in range(2):  # it is still refused
        with pytest.raises(OrderError, match=r"while they were still scaled.*engine\.unscale\(\) before"):
            LOOKS[look](loop)
    assert same(loop.values(), calm.values())
    train(Prepared(level, two_layers(), fused_adamw))  # another engine goes on
    loop.engine.abort()
    for one in (loop, calm):
        train(one, 3)
    assert same(loop.values(), calm.values())


def write_zeros(loop: Prepared, side: Side) -> None:
    for tensor in loop.holders(side):
        if tensor.grad is not None:
            tensor.grad.zero_()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("make", [fused_sgd, fused_adamw])
@pytest.mark.parametrize("drop", [write_zeros, Prepared.zero_grad])
def test_zeros_and_zero_grad_drop_what_is_left_for_a_fused_step(
    level: str, side: Side, make: Any, drop: Callable[[Prepared, Side], None]
) -> None:
    loop, calm = (Prepared(level, two_layers(), make) for _ in range(2))
    for seed in range(4):
        loop.backward(loss_of(loop, seed + 50))
        drop(loop, side)
        for one in (loop, calm):
            train(one, seed)
    assert same(loop.values(), calm.values())


def add_more(loop: Prepared) -> None:
    loop.backward(loss_of(loop, 9))


def drop_first(loop: Prepared) -> None:
    loop.tensors("model")[0].grad = None


def freeze_first(loop: Prepared) -> None:
    loop.tensors("model")[0].requires_grad_(False)


def write_weights(loop: Prepared) -> None:
    with torch.no_grad():
        for tensor in loop.tensors("model"):
            tensor.clamp_(-0.25, 0.25)


def load_states(loop: Prepared) -> None:
    (net,), (optimizer,) = loop.nets, loop.optimizers
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def hook_the_step(loop: Prepared) -> None:
    def limit(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for main in params_of(optimizer):
            if main.grad is not None:
                main.grad.clamp_(-0.001, 0.001)

    loop.optimizers[0].register_step_pre_hook(limit)


def add_a_group(loop: Prepared) -> None:
    loop.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


ACTS: dict[str, Callable[[Prepared], object]] = {
    "another pass": add_more,
    "a gradient dropped": drop_first,
    "a parameter frozen": freeze_first,
    "weights written": write_weights,
    "states loaded": load_states,
    "a hook before the step": hook_the_step,
    "a group added": add_a_group,
    "saved": lambda loop: loop.engine.state_dict(),
    "overflow": lambda loop: loop.backward(loss_of(loop) * torch.inf),
    "looked at": lambda loop: (loop.engine.memory(), loop.engine.is_open, loop.engine.main_params()),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", ACTS)
def test_what_else_is_done_before_a_fused_step_ends_as_with_unscaled_gradients(level: str, act: str) -> None:
    ends: list[list[Tensor]] = []
    for unscales in (True, False):
        loop = Prepared(level, two_layers(), fused_sgd)
        train(loop)
        loop.backward(loss_of(loop, 1))
        if unscales:
            loop.unscale()
        ACTS[act](loop)
        loop.step()
        train(loop, 2)
        ends.append(loop.values())
    for one, other in zip(*ends, strict=True):
        # torch's kernels round the last elements of a piece differently, and pieces may differ.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_removed_in_its_window_leaves_no_scaled_gradient(level: str) -> None:
    loop = Prepared(level, two_layers(), fused_adamw)
    loop.backward(loss_of(loop))
    loop.engine.remove()
    assert all(p.grad is None for p in loop.nets[0].parameters())


@pytest.mark.parametrize(
    "level", ["O0", "O2", "O3", "O5"]
)  # at O1 the graph saves casts, which no step writes
@pytest.mark.parametrize("makes", [sgd, fused_sgd])
def test_a_graph_from_before_a_step_is_refused_by_autograd(level: str, makes: Any) -> None:
    loop = Prepared(level, two_layers(), makes)
    loss = loss_of(loop)
    loop.backward(loss, retain_graph=True)
    loop.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loop.backward(loss)


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("front", ["engine", "amp"])
def test_zero_grad_clears_a_backward_pass_for_the_gradient_of_an_input(
    level: str, none: bool, front: str
) -> None:
    """As in adversarial training: that pass also leaves gradients on the weights, and knows nothing of masters."""
    made: list[list[Tensor]] = []
    for attacks in (True, False):
        torch.manual_seed(0)
        (model,) = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = halfpeak.prepare(model, optimizer, level) if front == "engine" else None
        if engine is None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for seed in range(3):
            x = batch(seed).to(next(model.parameters()).dtype)
            if attacks:
                x.requires_grad_()
                model(x).float().square().sum().backward()
                assert x.grad is not None
                optimizer.zero_grad(set_to_none=none)
                assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            loss = model(x.detach()).float().square().mean()
            if engine is None:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
        made.append([p.detach().clone() for p in model.parameters()])
    assert same(*made)
