"""Orders of calls and kinds of gradients with which torch.amp.GradScaler raises, never recovers or is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from support.nets import OPTIMIZERS, make_batch, make_net, poison
from support.states import same

SCALE = 2.0**16


def scaler_of(**options: Any) -> halfpeak.GradScaler:
    return halfpeak.GradScaler("cpu", **options)


def one_weight(**kind: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.ones(2, **kind))
    return weight, torch.optim.SGD([weight], lr=0.5)


def unscaled(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.SGD, halfpeak.GradScaler]:
    """One weight, its optimizer and its scaler after a backward pass and ``unscale_``."""
    weight, optimizer = one_weight()
    scaler = scaler_of()
    scaler.scale(weight.sum() * value).backward()
    scaler.unscale_(optimizer)
    return weight, optimizer, scaler


def gradient(weight: Tensor) -> list[float]:
    assert weight.grad is not None
    return weight.grad.tolist()


def test_unscaling_twice_divides_once() -> None:
    weight, optimizer, scaler = unscaled()
    for _ in range(2):
        assert gradient(weight) == [1.0, 1.0]
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)
    assert gradient(weight) == [1.0, 1.0]
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


def test_what_a_later_backward_pass_adds_is_divided_as_it_arrives() -> None:
    """A loop that clips in a pass that does not end the window; torch would step 65 536 times too far."""
    weight, optimizer, scaler = unscaled()
    nn.utils.clip_grad_value_([weight], 0.5)
    scaler.scale(3 * weight.sum()).backward()
    assert gradient(weight) == [3.5, 3.5]
    assert not scaler._arrival_hooks
    scaler.step(optimizer)
    assert gradient(weight) == [3.5, 3.5]
    scaler.update()


def test_a_plain_backward_pass_after_unscaling_is_added_as_it_is() -> None:
    weight, _, scaler = unscaled()
    weight.sum().backward()
    (same,) = torch.autograd.grad(scaler.scale(weight.sum()), [weight])
    assert gradient(weight) == [2.0, 2.0]
    assert same.tolist() == [SCALE, SCALE]


def test_an_overflow_that_arrives_later_skips_the_step() -> None:
    weight, optimizer, scaler = unscaled()
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("zero", ["before", "after"])
@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_dropped_window_leaves_nothing_behind(zero: str, value: float) -> None:
    """An exception between unscale_ and step drops the iteration; the next one runs as if it had never begun."""
    weight, optimizer, scaler = unscaled(value)
    if zero == "before":
        optimizer.zero_grad()
        loss = scaler.scale(weight.sum())
    else:
        loss = scaler.scale(weight.sum())
        optimizer.zero_grad()
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last is not None
    assert scaler.last.stepped()
    assert weight.tolist() == [0.5, 0.5]
    assert scaler.get_scale() == SCALE


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_that_skips_by_itself_has_torchs_scales(set_to_none: bool) -> None:
    """It steps only if the norm is finite, so several overflows in a row are counted by ``update`` alone."""
    histories: list[list[Any]] = []
    for scaler in (scaler_of(growth_interval=2), torch.amp.GradScaler("cpu", growth_interval=2)):
        weight, optimizer = one_weight()
        history: list[Any] = []
        for value in (torch.inf, torch.inf, 1.0, 1.0, torch.inf, 1.0):
            scaler.scale(weight.sum() * value).backward()
            scaler.unscale_(optimizer)
            if torch.isfinite(nn.utils.clip_grad_norm_([weight], 100.0)):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
            history.append((scaler.get_scale(), weight.tolist()))
        histories.append(history)
    assert histories[0] == histories[1]


def test_a_step_after_an_update_finds_its_gradients_unscaled() -> None:
    weight, optimizer, scaler = unscaled()
    scaler.update()
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_steps_before_an_update(set_to_none: bool) -> None:
    weight, optimizer = one_weight()
    scaler = scaler_of(growth_interval=1)
    for expected in (0.5, 0.0):
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        assert weight.tolist() == [expected, expected]
    scaler.update()
    assert scaler.get_scale() == 2 * SCALE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_gradients_is_no_event(name: str) -> None:
    model = make_net()
    used, unused = make_net(1), OPTIMIZERS[name](model.parameters())
    optimizer = OPTIMIZERS[name](used.parameters())
    scaler = scaler_of(growth_interval=1)
    for passes in range(2):
        scaler.unscale_(unused)
        scaler.step(unused)
        scaler.update()
        assert scaler.get_scale() == SCALE * 2**passes
        x, y = make_batch(passes)
        scaler.scale(nn.functional.mse_loss(used(x), y)).backward()
        scaler.step(optimizer)
        scaler.step(unused)
        scaler.update()
        optimizer.zero_grad()
    assert same(model.parameters(), make_net().parameters())


def test_gradients_of_a_loss_that_was_never_scaled_are_refused() -> None:
    weight, optimizer = one_weight()
    weight.sum().backward()
    with pytest.raises(halfpeak.OrderError, match=r"scaler\.scale\(loss\)\.backward"):
        scaler_of().step(optimizer)
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_every_dtype_is_divided_and_checked(dtype: torch.dtype) -> None:
    weight, optimizer = one_weight(dtype=dtype)
    scaler = scaler_of(init_scale=2.0**10)
    for expected in (0.5, 0.5, 0.0):
        scaler.scale((weight * 1).abs().sum() if dtype.is_complex else weight.sum()).backward()
        if expected == 0.5 and weight.real[0] == 0.5:
            poison(weight)
            expected = 0.5
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.real.tolist() == [expected, expected]
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("overflow", [False, True])
def test_sparse_gradients_with_duplicates(overflow: bool) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    scaler = scaler_of()
    scaler.scale(table(torch.tensor([1, 1, 3])).sum() * (torch.inf if overflow else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    counts = torch.tensor([[0.0], [2.0], [0.0], [1.0]])
    assert torch.equal(table.weight.detach(), before if overflow else before - 0.5 * counts.expand(4, 2))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")  # once per process
def test_gradients_with_a_graph_are_divided() -> None:
    weight, optimizer = one_weight()
    scaler = scaler_of()
    scaler.scale(weight.square().sum()).backward(create_graph=True)
    scaler.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]
    optimizer.zero_grad()


def test_a_parameter_of_two_optimizers_is_divided_once_and_checked_twice() -> None:
    weight, first = one_weight()
    second = torch.optim.SGD([weight], lr=0.25)
    scaler = scaler_of()
    for value, expected in ((1.0, 0.25), (float("inf"), 0.25)):
        scaler.scale(weight.sum() * value).backward()
        scaler.unscale_(first)
        scaler.unscale_(second)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        for optimizer in (first, second):
            optimizer.zero_grad()
        assert weight.tolist() == [expected, expected]


class Fused(torch.optim.Optimizer):
    """Takes found_inf as torch's fused kernels do, which skip at exactly 1."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(float(self.found_inf))  # type: ignore[attr-defined]
        assert self.grad_scale is None  # type: ignore[attr-defined]


def test_found_inf_is_one_however_often_it_was_found() -> None:
    weights = [nn.Parameter(torch.ones(1, dtype=d)) for d in (torch.float32, torch.float16, torch.complex64)]
    optimizer = Fused(weights)
    scaler = scaler_of()
    scaler.scale(torch.stack([(w * 1).abs().float().sum() for w in weights]).sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert [float(f) for f in scaler._found_inf_per_device(optimizer).values()] == [1.0]
    scaler.step(optimizer)
    assert optimizer.seen == [1.0]
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_a_fused_step_that_raises_leaves_nothing_on_the_optimizer() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = scaler_of()
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    scaler.scale(weight.sum()).backward()
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    assert "found_inf" not in vars(optimizer)
    handle.remove()
    scaler.step(optimizer)  # the same gradients, still unscaled
    assert gradient(weight) == [1.0, 1.0]


def test_a_first_fused_overflow_leaves_no_momentum() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
    scaler = scaler_of()
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert not optimizer.state
    assert weight.tolist() == [1.0, 1.0]


def test_two_optimizers_each_skip_for_themselves_and_the_scale_falls_once() -> None:
    (first, one), (second, two) = one_weight(), one_weight()
    scaler = scaler_of()
    scaler.scale(first.sum() + second.sum() * torch.inf).backward()
    for optimizer in (one, two):
        scaler.unscale_(optimizer)
    for optimizer in (one, two):
        scaler.step(optimizer)
    scaler.update()
    assert (first.tolist(), second.tolist()) == ([0.5, 0.5], [1.0, 1.0])
    assert scaler.get_scale() == SCALE / 2


def test_the_scale_stays_in_its_bounds_and_a_hopeless_run_ends() -> None:
    weight, optimizer = one_weight()
    scaler = scaler_of(init_scale=4.0, floor=1.0, patience=3)

    def train() -> None:
        for _ in range(20):
            scaler.scale(weight.sum() * torch.inf).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(halfpeak.LossScaleCollapse, match="cannot fall any further") as caught:
        train()
    assert caught.value.parameters == ("param_groups[0]['params'][0]",)
    assert (scaler.get_scale(), weight.tolist()) == (1.0, [1.0, 1.0])
    grows = scaler_of(init_scale=4.0, ceiling=8.0, growth_interval=1)
    for _ in range(3):
        optimizer.zero_grad()
        grows.scale(weight.sum()).backward()
        grows.step(optimizer)
        grows.update()
    assert grows.get_scale() == 8.0


def lbfgs(weight: nn.Parameter) -> Optimizer:
    return torch.optim.LBFGS([weight], lr=0.5, max_iter=4)


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("build", [lbfgs, lambda w: torch.optim.SGD([w], lr=0.5)])
def test_closures(build: Callable[[nn.Parameter], Optimizer], as_keyword: bool) -> None:
    """The second evaluation overflows once; it is repeated at half the scale, and the result is that without scaling."""

    def train(scaler: halfpeak.GradScaler) -> list[float]:
        weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = build(weight)
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = (weight - 3).pow(4).sum()
            scaled = scaler.scale(loss)
            scaled.backward()
            if calls == 2 and scaler.is_enabled():
                poison(weight)
            return loss

        for _ in range(3):
            result = (
                scaler.step(optimizer, closure=closure) if as_keyword else scaler.step(optimizer, closure)
            )
            assert result.item() > 0
            scaler.update()
        return weight.tolist()

    scaler = scaler_of()
    assert train(scaler) == train(scaler_of(enabled=False))
    assert scaler.get_scale() == SCALE / 2
    assert scaler.last is not None
    assert scaler.last.stepped()


def test_a_closure_that_does_not_scale_or_never_ends_overflowing() -> None:
    weight, optimizer = one_weight()
    scaler = scaler_of(init_scale=2.0, floor=1.0, patience=2)
    scaler.scale(weight.sum())

    def plain() -> Tensor:
        weight.sum().backward()
        return weight.sum()

    with pytest.raises(halfpeak.ClosureError, match="did not scale its loss"):
        scaler.step(optimizer, plain)

    def broken() -> Tensor:
        loss = weight.sum() * torch.inf
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(halfpeak.LossScaleCollapse):
        scaler.step(optimizer, broken)
    assert weight.tolist() == [1.0, 1.0]


def test_scale_compiles() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler = scaler_of()
    scaler.scale(weight.sum())
    compiled = torch.compile(lambda w: scaler.scale((w * 2).sum()), backend="eager")
    assert compiled(weight).item() == 4 * SCALE
    torch._dynamo.reset()


def test_an_aborted_backward_pass_leaves_no_hook() -> None:
    weight, _, scaler = unscaled()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise KeyError("in the middle")

    with pytest.raises(KeyError):
        scaler.scale(Broken.apply(weight).sum()).backward()  # type: ignore[attr-defined]
    scaler.update()
    assert not scaler._arrival_hooks
    weight.sum().backward()
    assert gradient(weight) == [2.0, 2.0]
