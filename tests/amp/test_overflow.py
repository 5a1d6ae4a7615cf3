"""Overflow: which optimizers skip, how the scale moves, and its bounds."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import halfpeak
from halfpeak import amp
from support.nets import LEVELS, make_batch, make_net
from support.snapshot import values

DYNAMIC = {"loss_scale": "dynamic", "max_loss_scale": 256.0}
"""A scale at which float16 gradients of about 1 do not overflow."""
SKIPPING = [level for level in LEVELS if level in ("O1", "O2", "O5")]


def setup(level: str, count: int = 1, **options: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    nets = [make_net(seed) for seed in range(count)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    options.setdefault("verbosity", 0)
    amp.initialize(nets, optimizers, opt_level=level, **options)
    return list(nets), list(optimizers)


def backward(
    net: nn.Module, optimizers: Any, *, overflow: bool = False, seed: int = 0, **options: Any
) -> None:
    x, y = make_batch(seed)
    with amp.scale_loss(mse_loss(net(x), y), optimizers, **options) as scaled:
        scaled.backward()
        if overflow:
            next(p for p in net.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")


def scales() -> list[float]:
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


class TestSkippedStep:
    def test_a_load_drops_an_overflow_that_has_not_moved_the_scale(self) -> None:
        (net,), (optimizer,) = setup("O2", **DYNAMIC)
        state = amp.state_dict()
        backward(net, optimizer, overflow=True, delay_overflow_check=True)
        amp.load_state_dict(state)
        optimizer.zero_grad()
        backward(net, optimizer)
        assert scales() == [256.0]

    def test_the_line_and_the_result_are_of_the_loss_that_overflowed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (net,), (optimizer,) = setup("O2", num_losses=2, verbosity=1, **DYNAMIC)
        backward(net, optimizer, overflow=True, loss_id=0)
        optimizer.step()
        assert "loss scaler 0 reducing loss scale to 128.0" in capsys.readouterr().out
        for overflow in (True, True, False):
            backward(net, optimizer, overflow=overflow, loss_id=-1)
        optimizer.step()
        assert "loss scaler 1 reducing loss scale to 64.0" in capsys.readouterr().out
        assert float(amp.last_step(optimizer).scale) == scales()[1] == 64.0

    @pytest.mark.parametrize("level", SKIPPING)
    def test_only_one_step_is_skipped_however_many_blocks_overflowed(self, level: str) -> None:
        (net,), (optimizer,) = setup(level, **DYNAMIC)
        before = values(net, optimizer)
        for _ in range(3):
            backward(net, optimizer, overflow=True)
        assert scales() == [32.0]
        assert optimizer.step() is None
        assert values(net, optimizer) == before
        optimizer.zero_grad()
        backward(net, optimizer)
        optimizer.step()
        assert amp.last_step(optimizer).stepped()
        assert values(net, optimizer) != before

    @pytest.mark.parametrize("level", SKIPPING)
    def test_later_blocks_do_not_count_it_again(self, level: str) -> None:
        (net,), (optimizer,) = setup(level, **DYNAMIC)
        backward(net, optimizer, overflow=True)
        backward(net, optimizer)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 1}

    @pytest.mark.parametrize("level", SKIPPING)
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_who_does_not_step_after_an_overflow_loses_no_later_step(
        self, level: str, set_to_none: bool
    ) -> None:
        """In apex the next good step was skipped instead."""
        (net,), (optimizer,) = setup(level, **DYNAMIC)
        backward(net, optimizer, overflow=True)
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(net, optimizer)
        optimizer.step()
        assert amp.last_step(optimizer).stepped()

    @pytest.mark.parametrize("how", ["after zero_grad", "assigned", "through .data", "as .data"])
    @pytest.mark.parametrize("level", SKIPPING)
    def test_gradients_that_the_script_wrote_are_checked(self, level: str, how: str) -> None:
        """PCGrad collects the gradients of each loss, drops them, and writes the sum of their projections."""
        (net,), (optimizer,) = setup(level, **DYNAMIC)
        before = values(net, optimizer)
        collected: list[list[torch.Tensor]] = []
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

    @pytest.mark.parametrize("level", SKIPPING)
    def test_the_line_shows_the_first_loss_and_the_scale_as_it_is_by_then(
        self, level: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (net,), (optimizer,) = setup(level, num_losses=2, verbosity=1, **DYNAMIC)
        capsys.readouterr()
        backward(net, optimizer, overflow=True, loss_id=1)
        backward(net, optimizer, overflow=True, loss_id=1)
        optimizer.step()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("Gradient overflow")
        assert "skip" in lines[0].lower()
        assert "loss scaler 1" in lines[0]
        assert lines[0].endswith(" 64.0")


class Counting(torch.optim.SGD):
    """Counts its steps around the step of its base class."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["begun"] = self.param_groups[0].get("begun", 0) + 1
        super().step(closure)
        self.param_groups[0]["ended"] = self.param_groups[0].get("ended", 0) + 1


@pytest.mark.parametrize("level", SKIPPING)
def test_a_skipped_step_around_that_of_a_base_class(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = make_net()
    torch.optim.SGD(
        net.parameters(), lr=0.1
    )  # from now on torch calls the hooks in the step of the base class, too
    optimizer = Counting(net.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(net, optimizer, opt_level=level, **DYNAMIC)
    capsys.readouterr()
    before = values(net, optimizer)
    for overflow in (True, False, True):
        optimizer.zero_grad()
        backward(net, optimizer, overflow=overflow)
        optimizer.step()
        assert amp.last_step(optimizer).stepped() is not overflow
        if overflow:
            assert values(net, optimizer) == before
        before = values(net, optimizer)
        assert capsys.readouterr().out.count("Gradient overflow") == overflow
    group = optimizer.param_groups[0]
    assert (group["begun"], group["ended"]) == (1, 1)


class TestSeveralLossesAndOptimizers:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("first", [0, 1])
    @pytest.mark.parametrize("zeroed", [True, False])
    def test_an_overflow_skips_every_listed_optimizer_unless_its_gradients_are_zeroed(
        self, level: str, first: int, zeroed: bool
    ) -> None:
        nets, optimizers = setup(level, 2, **DYNAMIC)
        x, y = make_batch(0)
        with amp.scale_loss(mse_loss(nets[0](x), y) + mse_loss(nets[1](x), y), optimizers) as scaled:
            scaled.backward()
            next(nets[0].parameters()).grad[0, 0] = float("inf")
        if zeroed:
            optimizers[1].zero_grad()
            backward(nets[1], optimizers[1])
        for number in (first, 1 - first):
            optimizers[number].step()
        assert [amp.last_step(one).stepped() for one in optimizers] == [False, zeroed]
        assert scales() == [128.0]

    @pytest.mark.parametrize("overflow", [False, True])
    @pytest.mark.parametrize("level", LEVELS)
    def test_a_forward_pass_before_another_optimizers_step(self, level: str, overflow: bool) -> None:
        """A DCGAN uses one batch of fakes in two backward passes, and the discriminator steps or skips in between."""
        torch.manual_seed(0)
        net_d = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        net_g = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        plain_d, plain_g = copy.deepcopy(net_d), copy.deepcopy(net_g)
        noise, zero, one = torch.randn(16, 2), torch.zeros(16, 1), torch.ones(16, 1)
        step_d, step_g = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (net_d, net_g))
        amp.initialize(
            [net_d, net_g], [step_d, step_g], opt_level=level, num_losses=2, verbosity=0, **DYNAMIC
        )

        fake = net_g(noise)
        loss_d = binary_cross_entropy_with_logits(net_d(fake.detach()).float(), zero)
        with amp.scale_loss(loss_d, step_d, loss_id=0) as scaled:
            scaled.backward()
            if overflow:
                net_d[0].weight.grad[0, 0] = float("inf")
        step_d.step()
        loss_g = binary_cross_entropy_with_logits(net_d(fake).float(), one)
        with amp.scale_loss(loss_g, step_g, loss_id=1) as scaled:
            scaled.backward()
        step_g.step()

        assert [amp.last_step(o).stepped() for o in (step_d, step_g)] == [not overflow, True]
        fake = plain_g(noise)
        if not overflow:
            binary_cross_entropy_with_logits(plain_d(fake.detach()), zero).backward()
            with torch.no_grad():
                for parameter in plain_d.parameters():
                    parameter -= 0.1 * parameter.grad
        binary_cross_entropy_with_logits(plain_d(fake), one).backward()
        with torch.no_grad():
            for parameter in plain_g.parameters():
                parameter -= 0.1 * parameter.grad
        for ours, theirs in ((net_d, plain_d), (net_g, plain_g)):
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.allclose(a.float(), b, atol=1e-5 if level == "O0" else 1e-2)


class TestScaleHistory:
    def test_grows_after_2000_clean_blocks(self) -> None:
        (net,), (optimizer,) = setup("O1")
        scaler = amp._amp_state.loss_scalers[0]
        assert scaler._scale_seq_len == 2000
        scaler._unskipped = 1998
        for expected in ((65536.0, 1999), (131072.0, 0)):
            with amp.scale_loss(net[4].bias.sum(), optimizer) as scaled:
                scaled.backward()
            assert (scaler.loss_scale(), scaler._unskipped) == expected

    @pytest.mark.parametrize(
        ("low", "high", "start"),
        [
            (None, 2.0**24, 65536.0),
            (None, 1024.0, 1024.0),
            (2.0**20, 2.0**24, 65536.0),
            (1.0, 2.0**16, 65536.0),
        ],
    )
    def test_start(self, low: float | None, high: float, start: float) -> None:
        setup("O2", min_loss_scale=low, max_loss_scale=high)
        assert scales() == [start]
        assert amp._amp_state.min_loss_scale == low
        assert amp._amp_state.max_loss_scale == high


class TestCollapse:
    @pytest.mark.parametrize("level", LEVELS)
    def test_names_the_parameters_after_patience(self, level: str) -> None:
        (net,), (optimizer,) = setup(
            level, loss_scale="dynamic", min_loss_scale=64.0, max_loss_scale=256.0, patience=3
        )
        before = values(net, optimizer)
        for expected in (128.0, 64.0, 64.0, 64.0):
            backward(net, optimizer, overflow=True)
            optimizer.step()
            optimizer.zero_grad()
            assert scales() == [expected]
        backward(net, optimizer, overflow=True)
        with pytest.raises(halfpeak.LossScaleCollapse, match=r"0\.weight") as caught:
            optimizer.step()
        assert caught.value.parameters == ("0.weight",)
        assert isinstance(caught.value, (RuntimeError, ArithmeticError))
        assert values(net, optimizer) == before
        casts = {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is casts
        optimizer.zero_grad()
        backward(net, optimizer)
        optimizer.step()
        assert amp.last_step(optimizer).stepped()

    def test_without_patience_it_goes_on(self) -> None:
        (net,), (optimizer,) = setup("O2", min_loss_scale=1.0, max_loss_scale=1.0, patience=None)
        before = values(net, optimizer)
        for _ in range(150):
            with amp.scale_loss(net[4].bias.sum(), optimizer) as scaled:
                scaled.backward()
                net[4].bias.grad[0] = float("nan")
            optimizer.step()
        assert values(net, optimizer) == before


class TestSchedulers:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("made", ["before", "after"])
    @pytest.mark.parametrize("first_overflows", [True, False])
    def test_no_false_alarm(self, level: str, made: str, first_overflows: bool) -> None:
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

    def test_a_schedule_that_asks_counts_real_updates_only(self) -> None:
        (net,), (optimizer,) = setup("O2", **DYNAMIC)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
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

    def test_last_step_before_any(self) -> None:
        _, (optimizer,) = setup("O2")
        with pytest.raises(RuntimeError, match="not stepped"):
            amp.last_step(optimizer)
        with pytest.raises(RuntimeError, match="not stepped"):
            amp.last_step(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


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
