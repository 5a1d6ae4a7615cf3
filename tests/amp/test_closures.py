"""Closures under loss scaling: apex refused them at O2 and let an inf through elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import halfpeak
from halfpeak import amp
from support.nets import LEVELS, LOW, MASTERED, PURE
from support.snapshot import values
from support.states import same

PASS: dict[str, Callable[[torch.optim.Optimizer, Callable[[], Any]], Any]] = {
    "by position": lambda optimizer, closure: optimizer.step(closure),
    "by name": lambda optimizer, closure: optimizer.step(closure=closure),
}


def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 6, generator=generator)
    return x, x @ torch.linspace(-1, 1, 18).reshape(6, 3)


def setup(level: str, **options: Any) -> tuple[nn.Module, torch.optim.LBFGS]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=8)
    options.setdefault("loss_scale", "dynamic")
    options.setdefault("max_loss_scale", 64.0)
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)


def make_closure(
    net: nn.Module, optimizer: torch.optim.Optimizer, overflow_at: tuple[int, ...] = ()
) -> Callable[[], Tensor]:
    x, y = regression()
    calls = iter(range(10**6))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(net(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if next(calls) in overflow_at:
                net.weight.grad[0, 0] = float("inf")
        return loss.detach()

    return closure


@pytest.mark.parametrize("how", PASS)
@pytest.mark.parametrize("level", [level for level in LEVELS if level not in PURE])
def test_lbfgs_converges(level: str, how: str) -> None:
    net, optimizer = setup(level)
    closure = make_closure(net, optimizer)
    first = float(PASS[how](optimizer, closure))
    for _ in range(4):
        last = PASS[how](optimizer, closure)
    limit = {None: 1e-8, torch.float16: 1e-4, torch.bfloat16: 2e-3}[LOW.get(level)]
    assert float(last) < limit < first
    for parameter in amp.master_params(optimizer):
        assert parameter.dtype is torch.float32
        assert bool(parameter.isfinite().all())


def test_lbfgs_converges_in_pure_half_by_single_steps() -> None:
    """With several inner steps per call, the inner products of L-BFGS overflow float16."""
    net, optimizer = setup("O3")
    optimizer.param_groups[0]["max_iter"] = 1
    closure = make_closure(net, optimizer)
    losses = [float(optimizer.step(closure)) for _ in range(10)]
    assert losses[-1] < 1e-3 < losses[0]


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in PURE])
@pytest.mark.parametrize("at", [(0,), (3,), (0, 1, 9)])
def test_an_overflow_inside_is_not_stepped_and_the_closure_runs_again(
    level: str, at: tuple[int, ...]
) -> None:
    net, optimizer = setup(level)
    closure = make_closure(net, optimizer, overflow_at=at)
    for _ in range(5):
        last = optimizer.step(closure)
        assert all(bool(p.isfinite().all()) for p in amp.master_params(optimizer))
    assert float(last) < 5e-3
    assert amp._amp_state.loss_scalers[0].loss_scale() == 64.0 / 2 ** len(at)


@pytest.mark.parametrize("level", MASTERED)
def test_a_backward_past_scale_loss_is_refused(level: str) -> None:
    net, optimizer = setup(level)
    x, y = regression()
    before = values(net, optimizer)[:2]

    def closure() -> Tensor:
        loss = mse_loss(net(x), y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="scale_loss"):
        optimizer.step(closure)
    assert values(net, optimizer)[:2] == before


@pytest.mark.parametrize(
    ("level", "options"),
    [
        *((level, {"loss_scale": 1.0}) for level in ("O0", "O3")),
        ("O2", {"min_loss_scale": 32.0, "patience": 3}),
    ],
)
def test_a_scale_that_cannot_fall_gives_up(level: str, options: dict[str, Any]) -> None:
    net, optimizer = setup(level, **options)
    before = values(net, optimizer)[:2]
    with pytest.raises(halfpeak.LossScaleCollapse, match="weight"):
        optimizer.step(make_closure(net, optimizer, overflow_at=tuple(range(1000))))
    assert values(net, optimizer)[:2] == before


class Failure(Exception):
    pass


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in PURE])
def test_an_exception_in_the_closure_leaves_a_run_that_goes_on(level: str) -> None:
    net, optimizer = setup(level)
    before = values(net, optimizer)[:2]

    def fail() -> Tensor:
        raise Failure

    with pytest.raises(Failure):
        optimizer.step(fail)
    assert values(net, optimizer)[:2] == before
    closure = make_closure(net, optimizer)
    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_the_closure_computes_its_loss_under_the_casts(level: str) -> None:
    net, optimizer = setup(level)
    seen: list[torch.dtype] = []
    inner = make_closure(net, optimizer)

    def closure() -> Tensor:
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return inner()

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert set(seen) == {torch.float16 if level == "O1" else torch.bfloat16}


def test_a_try_that_overflows_leaves_no_trace_in_the_batch_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    clean = torch.randn(16, 4)
    inputs = [torch.full((16, 4), float("inf")), clean]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs.pop(0)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    optimizer.step(closure)
    assert not inputs
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
    assert int(model[1].num_batches_tracked) == 1


def test_a_late_overflow_restores_the_statistics_of_the_steps_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    passes = iter(range(1000))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).float().square().mean()
        loss = loss * float("inf") if next(passes) == overflow_at else loss
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    overflow_at = -1
    for _ in range(3):
        optimizer.step(closure)
    tracked, overflow_at = int(model[1].num_batches_tracked), next(passes) + 1
    optimizer.step(closure)
    clean = next(passes) - overflow_at - 1
    assert int(model[1].num_batches_tracked) == tracked + clean
    assert amp.last_step(optimizer).stepped()


def test_an_optimizer_that_an_engine_steps_takes_no_closure_of_user_code() -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(net.parameters())
    engine = halfpeak.prepare(net, optimizer, "O2")
    before = values(net, optimizer)
    with pytest.raises(halfpeak.OrderError, match=r"engine\.step\(closure\)"):
        optimizer.step(make_closure(net, optimizer))
    assert values(net, optimizer) == before
    engine.remove()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero_grad", ["none", "optimizer", "model"])
def test_gradients_of_before_a_closure_are_those_of_plain_torch(level: str, zero_grad: str) -> None:
    """A closure may zero them, or return a loss whose backward pass has run.

    The reference is plain torch at O0, and a run without a closure at other levels.
    """

    def plain() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x, y = regression()
        for _ in range(3):
            optimizer.zero_grad()
            mse_loss(net(x) * 2.0, y).backward()
            optimizer.step()
        return list(net.state_dict().values())

    def run(zero_grad: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        x, y = regression()

        def backward(factor: float) -> Tensor:
            loss = mse_loss(net(x).float() * factor, y)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            return loss.detach()

        def closure() -> Tensor:
            {"optimizer": optimizer, "model": net}[zero_grad].zero_grad()
            return backward(2.0)

        for _ in range(3):
            if zero_grad in ("optimizer", "model"):
                backward(1.0)
                optimizer.step(closure)
            else:
                optimizer.zero_grad()
                loss = backward(2.0)
                optimizer.step(None if zero_grad == "no closure" else lambda loss=loss: loss)
        return list(net.state_dict().values())

    assert same(run(zero_grad), plain() if level == "O0" else run("no closure"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_of_the_engine_needs_no_zero_grad(level: str) -> None:
    def run(zeroes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        engine = halfpeak.prepare(net, optimizer, halfpeak.LEVELS[level].replace(loss_scale=64.0))
        x, y = regression()

        def closure() -> Tensor:
            if zeroes:
                optimizer.zero_grad()
            with engine.forward():
                loss = mse_loss(net(x).float(), y)
            engine.backward(loss)
            return loss.detach()

        engine.step(closure)
        return list(net.state_dict().values())

    assert same(run(False), run(True))
