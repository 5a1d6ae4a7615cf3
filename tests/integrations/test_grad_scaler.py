"""GradScaler in the order of torch's page: its calls and numbers are torch's, and what it adds holds."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from support.nets import OPTIMIZERS, make_batch, make_net, poison
from support.snapshot import values
from support.states import same

Make = Callable[..., Any]
SCALE = 2.0**16


def torchs(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def ours(**options: Any) -> halfpeak.GradScaler:
    return halfpeak.GradScaler("cpu", **options)


def one_weight(**kind: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.ones(2, **kind))
    return weight, torch.optim.SGD([weight], lr=0.5)


def train_once(scaler: Any, weight: Tensor, optimizer: Optimizer, factor: float = 1.0) -> None:
    scaler.scale(weight.sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# The class and its constructor.


def test_it_is_a_grad_scaler_with_torchs_signatures() -> None:
    assert issubclass(halfpeak.GradScaler, torch.amp.GradScaler)
    names = [name for name in vars(torch.amp.GradScaler) if not name.startswith("_")]
    for name in (*names, "__init__"):
        theirs = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
        mine = inspect.signature(getattr(halfpeak.GradScaler, name)).parameters
        assert list(mine)[: len(theirs)] == list(theirs)
        assert all(mine[p].default == theirs[p].default for p in theirs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": float("inf")}, "init_scale=inf"),
        ({"growth_factor": 0.5}, "growth=0.5"),
        ({"backoff_factor": 2.0}, "backoff=2.0"),
        ({"growth_interval": 0}, "interval=0"),
        ({"floor": 8.0, "ceiling": 4.0}, "floor=8.0 is above ceiling=4.0"),
        ({"patience": 0}, "patience=0"),
        ({"device": 65536.0}, "device=65536.0"),
        ({"group": "world"}, "init_process_group"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(halfpeak.ConfigError, match=words):
        halfpeak.GradScaler(**options)


def test_it_scales_where_the_loss_is_without_cuda_too() -> None:
    weight, optimizer = one_weight()
    scaler = halfpeak.GradScaler()
    assert scaler.is_enabled()
    train_once(scaler, weight, optimizer)
    assert weight.tolist() == [0.5, 0.5]
    scaler.update(torch.tensor(8.0))
    assert scaler.get_scale() == 8.0


# The whole loop: bits of torch's.

FUSED: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "adam-fused": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
}


def train(make: Make, name: str, *, clip: bool, every: int = 1) -> list[Any]:
    """Twelve passes, with overflows in the first and in later ones; the scale grows and falls."""
    # With torch's scaler, an overflow in the first step leaves uninitialised memory as momentum in torch's fused SGD.
    overflows = (5, 6) if name == "sgd-fused" else (0, 5, 6)
    model = make_net()
    optimizer = FUSED[name](model.parameters())
    scaler = make(init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    seen: list[Any] = []
    for number in range(12):
        x, y = make_batch(number)
        scaler.scale(nn.functional.mse_loss(model(x), y) / every).backward()
        if number in overflows:
            poison(model[0].weight)
        if (number + 1) % every:
            continue
        if clip:
            scaler.unscale_(optimizer)
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [scaler.get_scale(), scaler.state_dict(), *values(model, optimizer)]
    return seen


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("name", FUSED)
def test_parameters_and_state_are_torchs_bit_for_bit(name: str, clip: bool, every: int) -> None:
    assert repr(train(ours, name, clip=clip, every=every)) == repr(
        train(torchs, name, clip=clip, every=every)
    )


def test_a_loop_that_skips_by_itself_has_torchs_scales() -> None:
    """It steps only if the norm is finite, so several overflows in a row are counted by ``update`` alone."""
    histories: list[list[Any]] = []
    for scaler in (ours(growth_interval=2), torchs(growth_interval=2)):
        weight, optimizer = one_weight()
        history: list[Any] = []
        for value in (torch.inf, torch.inf, 1.0, 1.0, torch.inf, 1.0):
            scaler.scale(weight.sum() * value).backward()
            scaler.unscale_(optimizer)
            if torch.isfinite(nn.utils.clip_grad_norm_([weight], 100.0)):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append((scaler.get_scale(), weight.tolist()))
        histories.append(history)
    assert histories[0] == histories[1]


def test_a_disabled_scaler_passes_everything_through() -> None:
    scaler = ours(enabled=False)
    weight, optimizer = one_weight(dtype=torch.float16)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({"anything": 1})
    assert weight.tolist() == [0.5, 0.5]
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    assert scaler.last is not None
    assert scaler.last.stepped()


# unscale_


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_every_dtype_is_divided_and_checked(dtype: torch.dtype) -> None:
    weight, optimizer = one_weight(dtype=dtype)
    scaler = ours(init_scale=2.0**10)
    for overflows, expected in ((False, 0.5), (True, 0.5), (False, 0.0)):
        scaler.scale((weight * 1).abs().sum() if dtype.is_complex else weight.sum()).backward()
        if overflows:
            poison(weight)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.real.tolist() == [expected, expected]
    assert scaler.get_scale() == 2.0**9


def test_a_float16_gradient_is_divided_in_float32_and_rounded_once() -> None:
    weight, optimizer = one_weight(dtype=torch.float16)
    scaler = ours(init_scale=2.0**-14)
    scaler.scale(weight.sum()).backward()
    weight.grad = torch.tensor(
        [1.5 * 2.0**-24, 2.0**-24], dtype=torch.float16
    )  # subnormal: 2**14 is no float16
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [2.0**-9, 2.0**-10]


@pytest.mark.parametrize("overflow", [False, True])
def test_sparse_gradients_with_duplicates(overflow: bool) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    scaler = ours()
    scaler.scale(table(torch.tensor([1, 1, 3])).sum() * (torch.inf if overflow else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    counts = torch.tensor([[0.0], [2.0], [0.0], [1.0]])
    assert torch.equal(table.weight.detach(), before if overflow else before - 0.5 * counts.expand(4, 2))


def test_the_order_of_calls_is_torchs() -> None:
    weight, optimizer = one_weight()
    scaler = ours()
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        scaler.unscale_(optimizer)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("make", [ours, torchs])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_call_that_was_refused_begins_no_iteration(call: str, make: Make) -> None:
    scaler = make()
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        getattr(scaler, call)(one_weight()[1])
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_update_ends_an_iteration_that_an_exception_has_ended(value: float) -> None:
    """As docs/integrations.md says: wherever it was raised, the next iteration is a clean one."""
    for where in ("forward", "backward", "clip"):
        weight, optimizer = one_weight()
        scaler = ours()
        if where != "forward":
            scaler.scale(weight.sum() * value).backward()
        if where == "clip":
            scaler.unscale_(optimizer)
        scaler.update()
        optimizer.zero_grad()
        train_once(scaler, weight, optimizer)
        assert weight.tolist() == [0.5, 0.5]


# step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_gradients_is_stepped(name: str) -> None:
    model, used = make_net(), make_net(1)
    unused, optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](used.parameters())
    scaler = ours()
    x, y = make_batch(0)
    scaler.scale(nn.functional.mse_loss(used(x), y)).backward()
    scaler.unscale_(unused)
    scaler.step(unused)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE
    assert same(model.parameters(), make_net().parameters())
    assert not same(used.parameters(), make_net(1).parameters())


def test_two_optimizers_each_skip_for_themselves_and_the_scale_falls_once() -> None:
    (first, one), (second, two) = one_weight(), one_weight()
    scaler = ours()
    scaler.scale(first.sum() + second.sum() * torch.inf).backward()
    stepped: list[bool] = []
    for optimizer in (one, two):
        scaler.unscale_(optimizer)
    for optimizer in (one, two):
        scaler.step(optimizer)
        assert scaler.last is not None
        stepped.append(scaler.last.stepped())
    scaler.update()
    assert (first.tolist(), second.tolist(), stepped) == ([0.5, 0.5], [1.0, 1.0], [True, False])
    assert scaler.get_scale() == SCALE / 2


class Fused(torch.optim.Optimizer):
    """Takes found_inf as torch's fused kernels do, which skip at exactly 1."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(float(self.found_inf))  # type: ignore[attr-defined]
        assert self.grad_scale is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("unscales", [False, True])
def test_found_inf_is_one_however_often_it_was_found(unscales: bool) -> None:
    weights = [nn.Parameter(torch.ones(1, dtype=d)) for d in (torch.float32, torch.float16, torch.complex64)]
    optimizer = Fused(weights)
    scaler = ours()
    scaler.scale(torch.stack([(w * 1).abs().float().sum() for w in weights]).sum() * torch.inf).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.seen == [1.0]
    assert [float(found) for found in scaler._found_inf_per_device(optimizer).values()] == [1.0]


@pytest.mark.parametrize("name", FUSED)
def test_after_a_step_that_raised_no_scaled_gradient_is_stepped(name: str) -> None:
    """With torch's the next step would take its gradients for unscaled ones. ``update`` ends the iteration."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = FUSED[name]([weight])
    scaler = ours()
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
    scaler.scale(weight.sum()).backward()
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    handle.remove()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="since the last update"):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0]
    scaler.update()
    optimizer.zero_grad()
    train_once(scaler, weight, optimizer)
    assert 0 < 1 - weight[0].item() < 0.1


def test_a_first_fused_overflow_leaves_no_momentum() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
    scaler = ours()
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert not optimizer.state
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_is_refused(as_keyword: bool) -> None:
    """torch refuses the keyword, and with a positional one steps gradients that are 65 536 times too large."""
    weight, optimizer = one_weight()
    scaler = ours()

    def closure() -> Tensor:
        scaler.scale(weight.sum()).backward()
        return weight.sum()

    with pytest.raises(halfpeak.ClosureError, match=r"engine\.step\(closure\)"):
        scaler.step(optimizer, closure=closure) if as_keyword else scaler.step(optimizer, closure)
    assert weight.tolist() == [1.0, 1.0]
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer, None)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("has_gradient", [True, False])
def test_an_overflow_of_another_rank_of_the_group_skips_here(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, has_gradient: bool
) -> None:
    """A rank without gradients takes part in the collective, too."""
    weight, optimizer = one_weight()
    other = torch.ones(())
    scaler = ours(group="world")

    def all_reduce(found_inf: Tensor, op: Any, group: Any) -> None:
        found_inf.copy_(torch.maximum(found_inf, other))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for found, expected in ((1.0, False), (0.0, True)):
        other.fill_(found)
        loss = scaler.scale(weight.sum())
        if has_gradient:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.last is not None
        assert scaler.last.stepped() is expected
    assert weight.tolist() == ([0.5, 0.5] if has_gradient else [1.0, 1.0])
    assert scaler.get_scale() == SCALE / 2


# update


def test_the_default_rule_is_torchs_down_to_the_floor() -> None:
    scaler, reference = ours(), torchs()
    assert halfpeak.GradScaler().state_dict() == scaler.state_dict() == reference.state_dict()
    weight, optimizer = one_weight()
    for _ in range(30):
        for each in (scaler, reference):
            train_once(each, weight, optimizer, torch.inf)
    assert (scaler.get_scale(), reference.get_scale()) == (2.0**-14, 2.0**-14)
    assert scaler.state_dict() == reference.state_dict()


def test_the_scale_stays_in_its_bounds_and_a_hopeless_run_ends() -> None:
    weight, optimizer = one_weight()
    scaler = ours(init_scale=4.0, floor=1.0, patience=3)
    for _ in range(4):
        train_once(scaler, weight, optimizer, torch.inf)
    with pytest.raises(halfpeak.LossScaleCollapse, match="cannot fall any further") as caught:
        train_once(scaler, weight, optimizer, torch.inf)
    assert caught.value.parameters == ("param_groups[0]['params'][0]",)
    assert (scaler.get_scale(), weight.tolist()) == (1.0, [1.0, 1.0])
    grows = ours(init_scale=4.0, ceiling=8.0, growth_interval=1)
    for _ in range(3):
        train_once(grows, weight, optimizer)
    assert grows.get_scale() == 8.0


@pytest.mark.parametrize("recovers", [False, True])
def test_a_scale_that_fell_far_may_recover(recovers: bool) -> None:
    weight, optimizer = one_weight()
    scaler = ours(recovers=recovers)
    for overflows in (10, 0):
        for _ in range(overflows or 15):
            train_once(scaler, weight, optimizer, torch.inf if overflows else 0.0)
    assert scaler.get_scale() == SCALE * (2.0**-8 if recovers else 2.0**-10)
    resumed = ours(recovers=recovers)
    resumed.load_state_dict(scaler.state_dict())
    for _ in range(20):
        for each in (scaler, resumed):
            train_once(each, weight, optimizer, 0.0)
    assert resumed.state_dict() == scaler.state_dict()


def test_update_sets_the_scale() -> None:
    weight, optimizer = one_weight()
    scaler = ours()
    train_once(scaler, weight, optimizer)
    for value in (8.0, 4, torch.tensor(16.0), torch.tensor([32.0], dtype=torch.float64)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)
    for wrong in (0.0, float("nan"), torch.tensor(torch.inf)):
        with pytest.raises(halfpeak.ConfigError, match="new_scale"):
            scaler.update(wrong)
    assert scaler.get_scale() == 32.0


def test_setters() -> None:
    weight, optimizer = one_weight()
    scaler = ours(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    scaler.set_growth_factor(2.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(1)
    for factor, expected in ((torch.inf, 4.0), (1.0, 8.0)):
        train_once(scaler, weight, optimizer, factor)
        assert scaler.get_scale() == expected
    scaler.set_growth_interval(0)
    with pytest.raises(halfpeak.ConfigError, match="interval=0"):
        train_once(scaler, weight, optimizer)


# state_dict


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_states_load_both_ways(steps: int) -> None:
    sources = [ours(init_scale=64.0, growth_interval=4), torchs(init_scale=64.0, growth_interval=4)]
    weight, optimizer = one_weight()
    for source in sources:
        for _ in range(steps):
            train_once(source, weight, optimizer)
    states = [source.state_dict() for source in sources]
    assert states[0] == states[1]
    for make in (ours, torchs):
        fresh = make()
        given = dict(states[0])
        fresh.load_state_dict(states[0])
        assert fresh.state_dict() == states[0] == given


@pytest.mark.parametrize(
    "state",
    [
        {},
        {**torchs().state_dict(), "scale": float("nan")},
        {**torchs().state_dict(), "growth_interval": 0},
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(state: Any) -> None:
    scaler = ours(init_scale=32.0)
    with pytest.raises(halfpeak.StateError):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("make", [ours, torchs])
def test_a_state_loaded_between_unscale_and_step_unscales_nothing_again(make: Make) -> None:
    scaler = make(init_scale=1024.0)
    weight, optimizer = one_weight()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_stand_where_the_scaler_stands(duplicate: Callable[[Any], Any]) -> None:
    """Between two iterations, as torch's."""
    scaler = ours(init_scale=16.0, growth_interval=2)
    weight, optimizer = one_weight()
    train_once(scaler, weight, optimizer)
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    train_once(twin, weight, optimizer)
    assert (twin.get_scale(), scaler.get_scale()) == (32.0, 16.0)
