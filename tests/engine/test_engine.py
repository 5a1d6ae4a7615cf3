"""The public interface of ``Engine``: windows, losses, several optimizers, order of calls, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
import halfpeak.fused
from halfpeak import Accumulation
from reliability.support import LEVELS, batch, net, state_hash, train

SCALE = halfpeak.ScaleConfig(init=1024.0)


def prepared(level: str = "O0", **options: Any) -> halfpeak.Engine:
    model = net()
    options.setdefault("scale", SCALE)
    return halfpeak.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), level, **options
    )


def loss_of(engine: halfpeak.Engine, step: int) -> torch.Tensor:
    with engine.forward():
        return engine.models[0](batch(step)).float().square().mean()


class TestAccumulation:
    @pytest.mark.parametrize("total", [None, 8, 7, 6, 1])
    def test_it_steps_at_the_end_of_each_window_and_of_the_run(self, total: int | None) -> None:
        engine = prepared(accumulate=Accumulation(every=3, total=total))
        boundaries = []
        for step in range(total or 6):
            engine.backward(loss_of(engine, step))
            boundaries.append(engine.step().boundary)
        count = total or 6
        assert boundaries == [(i + 1) % 3 == 0 or i + 1 == total for i in range(count)]
        assert int(engine.num_steps) == sum(boundaries)
        assert engine.micro_step == count


class TestLosses:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("clip", [None, 1.0, halfpeak.ClipNorm(max_norm=1.0, norm_type=1.0)])
    @pytest.mark.parametrize("kind", [torch.optim.SGD, halfpeak.fused.FusedSGD])
    @pytest.mark.parametrize("overflows", [0, 1])
    def test_one_loss_overflows_then_the_other_passes_then_a_clipped_step(
        self, level: str, clip: Any, kind: Any, overflows: int
    ) -> None:
        """The norm of the sum is not finite, but only the scale of the loss that overflowed falls."""
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        engine = halfpeak.prepare(
            model, optimizer, level, num_losses=2, clip=clip, loss_scale="dynamic", scale=SCALE
        )
        for loss_id in range(2):
            engine.backward(
                loss_of(engine, 0) * (float("inf") if loss_id == overflows else 1.0), loss_id=loss_id
            )
        assert not engine.step().stepped()
        assert [engine.read_scale(loss_id) for loss_id in range(2)] == [
            512.0 if loss_id == overflows else 1024.0 for loss_id in range(2)
        ]

    @pytest.mark.parametrize("loss_id", [2, -3, 99])
    def test_a_loss_that_there_is_not(self, loss_id: int) -> None:
        engine = prepared(num_losses=2)
        before = state_hash(engine)
        with pytest.raises(halfpeak.LossIdError, match="num_losses=2"):
            engine.backward(loss_of(engine, 0), loss_id=loss_id)
        assert state_hash(engine) == before
        assert all(p.grad is None for p in engine.model.parameters())


class TestSeveralOptimizers:
    @staticmethod
    def pair(level: str, **options: Any) -> tuple[halfpeak.Engine, list[torch.optim.Optimizer]]:
        models = [net(seed=1), net(seed=2)]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models
        ]
        return halfpeak.prepare(models, optimizers, level, scale=SCALE, **options), optimizers

    @pytest.mark.parametrize("level", LEVELS)
    def test_only_the_named_ones_step(self, level: str) -> None:
        engine, (first, second) = self.pair(level)
        before = [state_hash(model) for model in engine.models]
        for number, named in enumerate((first, [second])):
            with engine.forward():
                loss = engine.models[number](batch(0)).float().square().mean()
            engine.backward(loss, optimizers=named)
            assert engine.step(optimizers=named).stepped()
            moved = [state_hash(model) != old for model, old in zip(engine.models, before, strict=True)]
            assert moved == [True, number == 1]

    @pytest.mark.parametrize("level", LEVELS)
    def test_one_found_inf_for_all_that_step_together(self, level: str) -> None:
        engine, _ = self.pair(level)
        before = state_hash(engine.models, engine.optimizers)
        with engine.forward():
            good = engine.models[0](batch(0)).float().square().mean()
            bad = engine.models[1](batch(0)).float().square().mean() * float("inf")
        engine.backward(good)
        engine.backward(bad)
        assert not engine.step().stepped()
        assert state_hash(engine.models, engine.optimizers) == before

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("factor", [float("inf"), 1e30])
    def test_an_overflow_skips_only_the_optimizers_that_got_gradients(
        self, level: str, factor: float
    ) -> None:
        """A GAN's loop need not say which of its losses is for which optimizer."""
        engine, optimizers = self.pair(level)
        for model, optimizer, by in zip(engine.models, optimizers, (factor, 1.0), strict=True):
            with engine.forward():
                loss = model(batch(0)).float().square().mean() * by * by
            engine.backward(loss)
            assert engine.step(optimizers=optimizer).stepped() == (by == 1.0)

    def test_a_stranger_is_refused_and_nothing_changes(self) -> None:
        engine, _ = self.pair("O2")
        stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        before = state_hash(engine)
        for call in (engine.step, engine.abort):
            with pytest.raises(halfpeak.OrderError, match="not prepared by this engine"):
                call(optimizers=stranger)
        with pytest.raises(halfpeak.OrderError, match="not prepared by this engine"):
            engine.backward(loss_of(engine, 0), optimizers=[stranger])
        assert state_hash(engine) == before

    def test_the_model_of_several_is_ambiguous(self) -> None:
        engine, _ = self.pair("O0")
        with pytest.raises(halfpeak.OrderError, match=r"engine\.models"):
            _ = engine.model


class TestOrder:
    @pytest.mark.parametrize("zero", ["optimizer", "model", "both"])
    @pytest.mark.parametrize("level", LEVELS)
    def test_zero_grad_after_an_overflow_forgets_the_gradients(self, level: str, zero: str) -> None:
        engine, calm = prepared(level), prepared(level)
        engine.backward(loss_of(engine, 0) * float("inf"))
        if zero != "model":
            engine.optimizers[0].zero_grad()
        if zero != "optimizer":
            engine.model.zero_grad()
        train(engine, range(2))
        train(calm, range(2))
        assert state_hash(engine.models, engine.optimizers) == state_hash(calm.models, calm.optimizers)
        assert int(engine.num_steps) == 2
        # The loss scale still falls.
        assert engine.read_scale() == calm.read_scale() / (2 if engine.scalers[0].config.dynamic else 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_frozen_inside_a_window_belongs_to_it(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, level, accumulate=2)
    inputs = torch.randn(5, 3)

    def micro_step(factor: float) -> halfpeak.StepResult:
        with engine.forward():
            loss = model(inputs).float().square().mean() * factor
        engine.backward(loss)
        return engine.step()

    before = copy.deepcopy(model.state_dict())
    micro_step(float("inf"))
    model[0].weight.requires_grad_(False)
    assert not micro_step(1.0).stepped()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for _ in range(2):
        micro_step(1.0)
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    assert not torch.equal(model.state_dict()["1.weight"], before["1.weight"])


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_plain_backward_beside_the_engines_is_refused(level: str) -> None:
    model = nn.Linear(3, 1)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    engine.backward(model(torch.ones(2, 3)).mean())
    model(torch.ones(2, 3)).mean().backward()
    with pytest.raises(halfpeak.OrderError, match="did not go through"):
        engine.step()


def test_models_that_share_a_part_are_prepared_together() -> None:
    trunk = nn.Linear(3, 3)
    one, other = nn.Sequential(trunk, nn.Linear(3, 1)), nn.Sequential(trunk, nn.Linear(3, 2))
    halfpeak.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1), "O2")
    for again in (other, trunk):
        with pytest.raises(halfpeak.OrderError, match="in one call"):
            halfpeak.prepare(again, torch.optim.SGD(again.parameters(), lr=0.1), "O2")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_weights_written_before_a_step_with_a_closure_are_what_it_moves(level: str) -> None:
    model = net()
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5**20), level)
    train(engine, [0])

    def closure() -> torch.Tensor:
        loss = loss_of(engine, 1)
        engine.backward(loss)
        return loss

    with torch.no_grad():
        model[0].weight.fill_(0.25)
    engine.step(closure)
    assert torch.allclose(model.state_dict()["0.weight"], torch.tensor(0.25), atol=1e-4)


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [(3.0, TypeError, "a tensor"), (torch.ones(2, requires_grad=True), ValueError, r"loss\.mean")],
)
def test_what_is_no_loss_is_refused(loss: Any, error: type[Exception], match: str) -> None:
    engine = prepared("O2")
    with pytest.raises(error, match=match):
        engine.backward(loss)
    assert not engine.is_open


def test_an_engine_shows_where_it_stands() -> None:
    engine = prepared("O2")
    assert repr(engine) == "Engine(O2, cpu, scale=1024, num_steps=0, num_skipped=0)"
    assert repr(engine.scalers[0]) == "LossScaler(scale=1024, dynamic)"


class Counting(torch.optim.SGD):
    """Counts its steps in the groups, as schedulefree and pytorch_optimizer do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("front_end", ["engine", "amp"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_skipped_step_is_not_counted_in_the_groups(level: str, front_end: str) -> None:
    model = net()
    optimizer = Counting(model.parameters(), lr=1.0)
    engine = halfpeak.prepare(model, optimizer, level, scale=SCALE) if front_end == "engine" else None
    if engine is None:
        halfpeak.amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    counts: list[Any] = []
    for factor in (float("inf"), 1.0, float("inf"), 1.0):
        if engine is not None:
            engine.backward(loss_of(engine, 0) * factor)
            engine.step()
        else:
            optimizer.zero_grad()
            with halfpeak.amp.scale_loss(model(batch(0)).float().mean() * factor, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        counts.append((optimizer.param_groups[0].get("step"), optimizer.param_groups[0]["lr"]))
    assert counts == [(None, 1.0), (1, 0.5), (1, 0.5), (2, 0.25)]
