"""What front ends ask of a window: what each pass has found, a verdict, gradients that stay after a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.parts.build import build
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.scaled_pass import ScaledPass
from halfpeak.parts.window import loss_facts

SCALE = 8.0


class Alone:
    """A weight of [1, 2] and its window, under a static loss scale."""

    def __init__(
        self, *, looks: bool = True, scale: float = SCALE, dtype: torch.dtype = torch.float16
    ) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.parts = build(Policy(masters=True), [], [self.optimizer], looks_at_each_pass=looks)
        self.scaler = LossScaler(ScaleConfig.static(scale))
        self.parts.scalers = [self.scaler]
        (self.window,) = self.parts.windows

    def train(self, factor: float = 1.0, scaler: LossScaler | None = None) -> dict[LossScaler, Tensor]:
        """A pass whose gradient is ``[factor, factor]``; returns what it has found."""
        scaled_pass = ScaledPass(self.parts, self.weight.float().sum() * factor, scaler or self.scaler)
        with scaled_pass:
            scaled_pass.loss.backward()
        return scaled_pass.learned[self.window]

    def skips(self) -> bool:
        return bool(self.parts.found_inf())


@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_pass_is_told_what_it_has_found_itself(scale: float, dtype: torch.dtype) -> None:
    """A second overflow counts, and a clean pass after an overflow is clean, although the sum is not finite."""
    alone = Alone(scale=scale, dtype=dtype)
    found: list[float] = []
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        ((loss, value),) = alone.train(factor).items()
        assert loss is alone.scaler
        found.append(float(value))
        assert alone.skips() is (len(found) > 1)
    assert found == [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_a_look_at_each_pass_a_scale_of_1_adds_in_place_and_the_step_looks(
    dtype: torch.dtype,
) -> None:
    alone = Alone(looks=False, scale=1.0, dtype=dtype)
    alone.train()
    held = alone.weight.grad
    alone.train(math.inf)
    assert alone.weight.grad is held
    assert alone.skips()


@pytest.mark.parametrize("how", ["none", "none through the model", "zeros", "zeros through the model"])
def test_a_verdict_outlives_gradients_that_are_zeroed_or_dropped(how: str) -> None:
    """What passes have found goes with them."""
    alone = Alone()
    scaler, other = alone.scaler, LossScaler(ScaleConfig.static(2.0))
    alone.train(math.inf)
    alone.train(math.inf, other)
    alone.window.note_until_step(other, torch.ones(()))
    if "model" not in how:
        alone.window.optimizer.zero_grad(set_to_none=how == "none")
    elif how.startswith("none"):
        alone.weight.grad = None
    else:
        assert alone.weight.grad is not None
        alone.weight.grad.zero_()
    alone.parts.agree()
    assert [loss for loss, noted in alone.window.losses.items() if bool(noted.found)] == [other]
    alone.train()
    assert alone.skips()
    facts = loss_facts([alone.window], torch.zeros(()), [scaler, other])
    assert {loss: float(one.found) for loss, one in facts.items()} == {scaler: 0.0, other: 1.0}
    # Its scale has moved already: it is below the first one of the passes, whatever it is.
    assert (float(facts[other].first), facts[other].counts) == (math.inf, False)
    alone.window.close()
    assert not alone.skips()


def test_a_clean_verdict_takes_no_overflow_back() -> None:
    alone = Alone()
    alone.train()
    alone.window.note_until_step(alone.scaler, torch.ones(()))
    alone.window.note_until_step(alone.scaler, torch.zeros(()))
    assert alone.skips()


def test_gradients_that_stay_after_a_step_are_looked_at_again() -> None:
    alone = Alone()
    for factor in (1.0, math.inf):
        alone.train(factor)
        before = alone.weight.grad
        alone.window.close()
        assert alone.weight.grad is before
        assert not alone.window.losses
        assert alone.skips() is (factor != 1.0)


def test_a_closed_window_is_open_again_once_its_gradients_are_written() -> None:
    alone = Alone()
    other = Alone()
    for write in ("pass", "in place", "assign", "drop"):
        alone.train()
        assert not alone.window.is_closed
        alone.window.close()
        other.train()  # a pass that does not reach these parameters
        alone.parts.agree()
        assert alone.window.is_closed
        assert alone.weight.grad is not None
        if write == "pass":
            alone.train()
        elif write == "in place":
            alone.weight.grad.mul_(0.5)
        else:
            alone.weight.grad = torch.ones(2) if write == "assign" else None
        alone.parts.agree()
        assert not alone.window.is_closed, write


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scaled_gradients_of_a_pass_by_hand_become_true(dtype: torch.dtype) -> None:
    """As of ``(loss * scale).backward()``, of which nobody was told."""
    alone = Alone(dtype=dtype)
    scaler = alone.scaler
    scale = scaler.state.scale
    for factor, found in ((1.0, 0.0), (math.inf, 1.0)):
        alone.weight.grad = None
        (alone.weight.float().sum() * factor * SCALE).backward()
        alone.window.hold({scaler: scale}, scale, reduced=True)
        assert {loss: float(one) for loss, one in alone.window.unscale().items()} == {scaler: found}
        assert alone.window.unscale() == {}
        assert alone.weight.grad is alone.window.mains[0].grad
        assert alone.weight.grad is not None
        assert (alone.weight.grad.dtype, alone.weight.grad.tolist()) == (torch.float32, [factor, factor])
        assert alone.skips() is bool(found)
