"""The user's optimizer.step(): which optimizers skip, how the scale moves, closures, and schedules."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import halfpeak
from halfpeak import amp
from support.nets import LEVELS, LOW, MASTERED, PURE, make_batch, make_net
from support.snapshot import values
from support.states import same

DYNAMIC = {"loss_scale": "dynamic", "max_loss_scale": 256.0}
"""A scale at which float16 gradients of about 1 do not overflow."""
SKIPPING = ("O1", "O2", "O5")


def setup(level: str, count: int = 1, **options: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    nets = [make_net(seed) for seed in range(count)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, **{"verbosity": 0, **options})
    return list(nets), list(optimizers)


def backward(net: nn.Module, optimizers: Any, *, overflow: bool = False, **options: Any) -> None:
    x, y = make_batch(0)
    with amp.scale_loss(mse_loss(net(x), y), optimizers, **options) as scaled:
        scaled.backward()
        if overflow:
            next(p for p in net.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")


def scales() -> list[float]:
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


# Overflows.


@pytest.mark.parametrize("level", SKIPPING)
def test_one_step_is_skipped_and_one_line_printed_however_many_blocks_overflowed(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (net,), (optimizer,) = setup(level, num_losses=2, verbosity=1, **DYNAMIC)
    capsys.readouterr()
    before = values(net, optimizer)
    for overflow in (True, True, False):  # the last block does not count the overflow again
        backward(net, optimizer, overflow=overflow, loss_id=-1)
    assert list(amp.state_dict().values()) == [
        {"loss_scale": 256.0, "unskipped": 0},
        {"loss_scale": 64.0, "unskipped": 1},
    ]
    assert optimizer.step() is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Gradient overflow")
    assert line.endswith("Skipping step, loss scaler 1 reducing loss scale to 64.0")
    assert float(amp.last_step(optimizer).scale) == 64.0
    assert values(net, optimizer) == before
    optimizer.zero_grad()
    backward(net, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).stepped()


@pytest.mark.parametrize("level", SKIPPING)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_overflow_skips_the_next_step_although_its_gradients_are_dropped(
    level: str, set_to_none: bool
) -> None:
    """As in apex, which replaces the next ``optimizer.step`` when the block ends."""
    (net,), (optimizer,) = setup(level, **DYNAMIC)
    stepped: list[bool] = []
    backward(net, optimizer, overflow=True)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(net, optimizer)
        optimizer.step()
        stepped.append(amp.last_step(optimizer).stepped())
    assert stepped == [False, True]
    assert scales() == [128.0]


@pytest.mark.parametrize("how", ["after zero_grad", "assigned", "through .data", "as .data"])
@pytest.mark.parametrize("level", SKIPPING)
def test_gradients_that_the_script_wrote_are_checked(level: str, how: str) -> None:
    """PCGrad collects the gradients of each loss, drops them, and writes the sum of their projections."""
    (net,), (optimizer,) = setup(level, **DYNAMIC)
    before = values(net, optimizer)
    collected: list[list[Tensor]] = []
    for overflow in (True, False):
        optimizer.zero_grad()
        backward(net, optimizer, overflow=overflow)
        collected.append([parameter.grad.clone() for parameter in amp.master_params(optimizer)])
    if how == "after zero_grad":
        optimizer.zero_grad()
    for parameter, one, other in zip(amp.master_params(optimizer), *collected, strict=True):
        if how == "through .data":
            parameter.grad.data.copy_(one + other)
        elif how == "as .data":
            parameter.grad.data = one + other
        else:
            parameter.grad = one + other
    optimizer.step()
    assert not amp.last_step(optimizer).stepped()
    assert values(net, optimizer) == before


class Counting(torch.optim.SGD):
    """Counts its steps around the step of its base class."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["begun"] = self.param_groups[0].get("begun", 0) + 1
        super().step(closure)
        self.param_groups[0]["ended"] = self.param_groups[0].get("ended", 0) + 1


@pytest.mark.parametrize("level", SKIPPING)
def test_a_skipped_step_around_that_of_a_base_class(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = make_net()
    torch.optim.SGD(net.parameters())  # from now on torch calls the hooks in the step of the base class, too
    optimizer = Counting(net.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(net, optimizer, opt_level=level, **DYNAMIC)
    capsys.readouterr()
    before = values(net, optimizer)
    for overflow in (True, False, True):
        optimizer.zero_grad()
        backward(net, optimizer, overflow=overflow)
        optimizer.step()
        assert amp.last_step(optimizer).stepped() is not overflow
        assert (values(net, optimizer) == before) is overflow
        before = values(net, optimizer)
        assert capsys.readouterr().out.count("Gradient overflow") == overflow
    group = optimizer.param_groups[0]
    assert (group["begun"], group["ended"]) == (1, 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", ["dynamic", 1.0])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("meanwhile", ["", "a clean block", "dropped, and a clean block"])
def test_an_overflow_skips_the_next_step_of_every_listed_optimizer(
    level: str, scale: Any, first: int, meanwhile: str
) -> None:
    nets, optimizers = setup(level, 2, loss_scale=scale, max_loss_scale=256.0)
    x, y = make_batch(0)
    with amp.scale_loss(mse_loss(nets[0](x), y) + mse_loss(nets[1](x), y), optimizers) as scaled:
        scaled.backward()
        next(nets[0].parameters()).grad[0, 0] = float("inf")
    if "dropped" in meanwhile:
        optimizers[1].zero_grad()
    if meanwhile:
        backward(nets[1], optimizers[1])
    for number in (first, 1 - first):
        optimizers[number].step()
    assert [amp.last_step(one).stepped() for one in optimizers] == [False, False]
    assert scales() == [128.0 if scale == "dynamic" else 1.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", ["", "delay_unscale", "delay_overflow_check"])
def test_a_clip_and_a_clean_block_take_no_overflow_back(level: str, delay: str) -> None:
    """The clip writes the gradients of an optimizer whose own were finite."""
    nets, optimizers = setup(level, 2, **DYNAMIC)
    x, y = make_batch(0)
    for factor in (float("inf"), 1.0):
        loss = mse_loss(nets[0](x), y) + mse_loss(nets[1](x), y) * factor
        with amp.scale_loss(loss, optimizers, **({delay: factor == 1.0} if delay else {})) as scaled:
            scaled.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizers[0]), 0.5)
    for optimizer in optimizers:
        optimizer.step()
    assert not any(amp.last_step(optimizer).stepped() for optimizer in optimizers)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_batch_norms_of_one_model_do_not_follow_the_skip_of_another(level: str) -> None:
    """The generator's forward pass comes before the discriminator's step, and counts even if that step is skipped."""
    torch.manual_seed(0)
    net_g = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net_d = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    opt_g = torch.optim.SGD(net_g.parameters(), lr=0.1)
    opt_d = torch.optim.SGD(net_d.parameters(), lr=0.1)
    amp.initialize([net_g, net_d], [opt_g, opt_d], opt_level=level, num_losses=2, verbosity=0)
    start = {name: buffer.clone() for name, buffer in net_d[1].named_buffers()}

    fake = net_g(torch.randn(8, 3))
    with amp.scale_loss(net_d(fake.detach()).mean() * float("inf"), opt_d, loss_id=0) as loss:
        loss.backward()
    opt_d.step()
    assert not amp.last_step(opt_d).stepped()
    assert all(torch.equal(buffer, start[name]) for name, buffer in net_d[1].named_buffers())
    with amp.scale_loss(fake.float().square().mean(), opt_g, loss_id=1) as loss:
        loss.backward()
    opt_g.step()
    assert int(net_g[1].num_batches_tracked) == 1

    # The other way round: an overflow in the generator's forward pass, and a clean step of the discriminator in between.
    seen = {name: buffer.clone() for name, buffer in net_g[1].named_buffers()}
    net_d.zero_grad()
    fake = net_g(torch.full((8, 3), float("inf")))
    with amp.scale_loss(net_d(torch.randn(8, 4)).mean(), opt_d, loss_id=0) as loss:
        loss.backward()
    opt_d.step()
    assert amp.last_step(opt_d).stepped()
    with amp.scale_loss(net_d(fake).float().mean(), opt_g, loss_id=1) as loss:
        loss.backward()
    opt_g.step()
    assert not amp.last_step(opt_g).stepped()
    assert all(torch.equal(buffer, seen[name]) for name, buffer in net_g[1].named_buffers())
    assert all(torch.isfinite(buffer).all() for buffer in net_d.buffers())


def test_the_scale_grows_after_2000_clean_blocks() -> None:
    (net,), (optimizer,) = setup("O1")
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler._scale_seq_len == 2000
    scaler._unskipped = 1998
    for expected in ((65536.0, 1999), (131072.0, 0)):
        with amp.scale_loss(net[4].bias.sum(), optimizer) as scaled:
            scaled.backward()
        assert (scaler.loss_scale(), scaler._unskipped) == expected


@pytest.mark.parametrize(
    ("level", "floor", "lowest"), [*((level, 64.0, 6) for level in LEVELS), ("O2", None, -126)]
)
def test_a_scale_that_cannot_fall_ends_the_run_after_patience_and_the_run_can_go_on(
    level: str, floor: float | None, lowest: int
) -> None:
    """Without a floor it falls to the smallest normal float32."""
    (net,), (optimizer,) = setup(
        level, loss_scale="dynamic", min_loss_scale=floor, max_loss_scale=256.0, patience=3
    )
    before = values(net, optimizer)
    for expected in (*(2.0**n for n in range(7, lowest - 1, -1)), 2.0**lowest, 2.0**lowest):
        backward(net, optimizer, overflow=True)
        optimizer.step()
        assert scales() == [expected]
    backward(net, optimizer, overflow=True)
    with pytest.raises(halfpeak.LossScaleCollapse, match=r"0\.weight") as caught:
        optimizer.step()
    assert caught.value.parameters == ("0.weight",)
    assert isinstance(caught.value, (RuntimeError, ArithmeticError))
    assert values(net, optimizer) == before
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is (
        LOW[level] if level in ("O1", "O4") else torch.float32
    )
    backward(net, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).stepped()


def test_without_patience_it_goes_on() -> None:
    (net,), (optimizer,) = setup("O2", min_loss_scale=1.0, max_loss_scale=1.0, patience=None)
    before = values(net, optimizer)
    for _ in range(150):
        with amp.scale_loss(net[4].bias.sum(), optimizer) as scaled:
            scaled.backward()
            net[4].bias.grad[0] = float("nan")
        optimizer.step()
    assert values(net, optimizer) == before


# Schedules.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("first_overflows", [True, False])
def test_a_schedule_gives_no_false_alarm(level: str, made: str, first_overflows: bool) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if made == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, **DYNAMIC)
    if made == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            backward(net, optimizer, overflow=first_overflows and step == 0)
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_schedule_that_asks_counts_real_updates_only() -> None:
    (net,), (optimizer,) = setup("O2", **DYNAMIC)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for one in (optimizer, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)):
        with pytest.raises(RuntimeError, match="not stepped"):
            amp.last_step(one)
    for overflow in (True, False, True, False):
        optimizer.zero_grad()
        backward(net, optimizer, overflow=overflow)
        optimizer.step()
        result = amp.last_step(optimizer)
        assert result.stepped() is not overflow
        assert float(result.scale) == scales()[0]
        if result.stepped():
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


# Closures: apex refused them at O2 and let an inf through elsewhere.

PASS: dict[str, Callable[[torch.optim.Optimizer, Callable[[], Any]], Any]] = {
    "by position": lambda optimizer, closure: optimizer.step(closure),
    "by name": lambda optimizer, closure: optimizer.step(closure=closure),
}
WIDE = tuple(level for level in LEVELS if level not in PURE)


def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 6, generator=generator)
    return x, x @ torch.linspace(-1, 1, 18).reshape(6, 3)


def lbfgs(level: str, max_iter: int = 8, **options: Any) -> tuple[nn.Linear, torch.optim.LBFGS]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=max_iter)
    options = {"loss_scale": "dynamic", "max_loss_scale": 64.0, **options}
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)


def make_closure(
    net: nn.Linear, optimizer: torch.optim.Optimizer, overflow_at: tuple[int, ...] = ()
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
@pytest.mark.parametrize("level", WIDE)
@pytest.mark.parametrize("at", [(), (0, 1, 9)])
def test_lbfgs_converges_and_runs_a_closure_that_overflows_again(
    level: str, how: str, at: tuple[int, ...]
) -> None:
    net, optimizer = lbfgs(level)
    closure = make_closure(net, optimizer, at)
    first = float(PASS[how](optimizer, closure))
    for _ in range(4):
        last = float(PASS[how](optimizer, closure))
    limit = {None: 1e-8, torch.float16: 1e-4, torch.bfloat16: 2e-3}[LOW.get(level)]
    assert last < (5e-3 if at else limit) < first
    for parameter in amp.master_params(optimizer):
        assert parameter.dtype is torch.float32
        assert bool(parameter.isfinite().all())
    assert scales() == [64.0 / 2 ** len(at)]


def test_lbfgs_converges_in_pure_half_by_single_steps() -> None:
    """With several inner steps per call, the inner products of L-BFGS overflow float16."""
    net, optimizer = lbfgs("O3", max_iter=1)
    closure = make_closure(net, optimizer)
    losses = [float(optimizer.step(closure)) for _ in range(10)]
    assert losses[-1] < 1e-3 < losses[0]


@pytest.mark.parametrize("level", MASTERED)
def test_a_closure_past_scale_loss_is_refused(level: str) -> None:
    net, optimizer = lbfgs(level)
    x, y = regression()
    before = values(net, optimizer)[:2]

    def closure() -> Tensor:
        loss = mse_loss(net(x), y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="scale_loss"):
        optimizer.step(closure)
    assert values(net, optimizer)[:2] == before


def test_a_closure_past_scale_loss_gives_up_on_gradients_that_no_scale_changes() -> None:
    net, optimizer = lbfgs("O1")

    def closure() -> Tensor:
        loss = net(torch.ones(1, 6)).sum() * float("inf")
        loss.backward()
        return loss

    with pytest.raises(halfpeak.LossScaleCollapse, match="weight"):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("level", "options"),
    [
        *((level, {"loss_scale": 1.0}) for level in ("O0", "O3")),
        ("O2", {"min_loss_scale": 32.0, "patience": 3}),
    ],
)
def test_a_closure_whose_scale_cannot_fall_gives_up(level: str, options: dict[str, Any]) -> None:
    net, optimizer = lbfgs(level, **options)
    before = values(net, optimizer)[:2]
    with pytest.raises(halfpeak.LossScaleCollapse, match="weight"):
        optimizer.step(make_closure(net, optimizer, overflow_at=tuple(range(1000))))
    assert values(net, optimizer)[:2] == before


class Sharpness(torch.optim.SGD):
    """Climbs by the gradients that it finds, and descends by those that its closure makes there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        starts = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p, _ in starts]).norm()
        for p, _ in starts:
            p.add_(p.grad * 0.05 / norm)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, start in starts:
            p.data = start
        super().step()


@pytest.mark.parametrize("level", WIDE)
def test_sam_climbs_by_finite_gradients_although_the_pass_before_its_step_has_overflowed(level: str) -> None:
    def run(*, overflows: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = Sharpness(net.parameters(), lr=0.1, momentum=0.9)
        amp.initialize(
            net, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic", max_loss_scale=64.0
        )
        x, y = regression()

        def backward(factor: float = 1.0) -> None:
            with amp.scale_loss(mse_loss(net(x).float(), y) * factor, optimizer) as scaled:
                scaled.backward()

        for step in range(3):
            optimizer.zero_grad()
            backward(float("inf") if overflows and step == 1 else 1.0)
            optimizer.step(backward)
        assert scales() == [32.0 if overflows else 64.0]
        return list(net.state_dict().values())

    assert same(run(overflows=True), run(overflows=False))


def test_an_overflow_that_was_dropped_does_not_end_a_step_with_a_closure() -> None:
    """Also at a static scale, where another one would: the closure makes the gradients of its step."""
    (net,), (optimizer,) = setup("O2", loss_scale=8.0)
    backward(net, optimizer, overflow=True)
    optimizer.zero_grad()
    before = values(net, optimizer)
    optimizer.step(lambda: backward(net, optimizer))
    assert values(net, optimizer) != before


@pytest.mark.parametrize("level", WIDE)
def test_an_exception_in_the_closure_leaves_a_run_that_goes_on(level: str) -> None:
    net, optimizer = lbfgs(level)
    before = values(net, optimizer)[:2]

    def fail() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    assert values(net, optimizer)[:2] == before
    closure = make_closure(net, optimizer)
    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("how", PASS)
def test_the_closure_computes_its_loss_under_the_casts(level: str, how: str) -> None:
    net, optimizer = lbfgs(level)
    seen: list[torch.dtype] = []
    inner = make_closure(net, optimizer)

    def closure() -> Tensor:
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return inner()

    PASS[how](optimizer, closure)
    assert set(seen) == {LOW[level]}


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_sees_gradients_as_in_plain_torch(level: str) -> None:
    """It may return a loss whose backward pass has run, and what it does not zero adds up."""

    def run(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        x, y = regression()

        def backward() -> Tensor:
            loss = mse_loss(net(x).float(), y)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            return loss.detach()

        for _ in range(3):
            optimizer.zero_grad()
            loss = backward()
            if how == "adds up":
                optimizer.step(backward)
            else:
                backward()
                optimizer.step(None if how == "no closure" else lambda loss=loss: loss)
        return list(net.state_dict().values())

    assert same(run("adds up"), run("no closure"))
    assert same(run("has run"), run("no closure"))


@pytest.mark.parametrize("level", SKIPPING)
def test_a_pass_that_a_closure_replaces_leaves_no_batch_norm_statistics(level: str) -> None:
    """SAM reads the gradients of a pass before its step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, **DYNAMIC)

    def closure(x: Tensor) -> None:
        optimizer.zero_grad()
        with amp.scale_loss(net(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()

    closure(torch.full((8, 3), float("inf")))
    optimizer.step(lambda: closure(torch.randn(8, 3)))  # type: ignore[arg-type]
    assert all(bool(buffer.isfinite().all()) for buffer in net.buffers())
    assert int(net[1].num_batches_tracked) == 2  # a call instead of that pass, and the optimizer's own


@pytest.mark.parametrize("level", SKIPPING)
def test_a_skip_publishes_what_the_optimizer_has_put_back_through_data(level: str) -> None:
    """As SAM does: it moves the parameters, and puts them back by ``p.data = old`` before the step that is skipped."""
    (net,), (optimizer,) = setup(level, **DYNAMIC)
    before = [weight.detach().clone() for weight in net.parameters()]
    olds = [main.data.clone() for main in amp.master_params(optimizer)]
    with torch.no_grad():
        for main in amp.master_params(optimizer):
            main.add_(1.0)
    backward(net, optimizer, overflow=True)
    for main, old in zip(amp.master_params(optimizer), olds, strict=True):
        main.data = old
    optimizer.step()
    assert all(torch.equal(weight, old) for weight, old in zip(net.parameters(), before, strict=True))


def test_an_optimizer_that_is_gone_keeps_nobody_from_training() -> None:
    nets = [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets[:2]]
    amp.initialize(nets[:2], optimizers, opt_level="O2", verbosity=0)
    del optimizers[1]
    gc.collect()
    optimizers[0].add_param_group({"params": list(nets[2].parameters())})
    optimizers[0].zero_grad()
