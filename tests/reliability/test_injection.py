"""inf, -inf and nan in every gradient, at every step and micro-batch: nothing moves but the scale, and training goes on
as if the window had never been.

One engine trains calmly. Its twin suffers, before each window, a poisoned one for every (parameter, micro-batch, value).
After each of these its parameters, masters, optimizer state and batch-norm statistics must be unchanged to the bit, and
its loss scale and counters must be what the rule says, worked out here by hand. Then scale and counters are put back and
the twin takes the window that the calm engine takes: they must agree to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import halfpeak
from halfpeak.core.schedule import ScaleState
from reliability.support import LEVELS, OPTIMIZERS, batch, net, state_hash

WINDOWS = 4
VALUES = (float("inf"), -float("inf"), float("nan"))
CLIPS = {
    "no clip": None,
    "clip norm": halfpeak.ClipNorm(max_norm=0.1),
    "clip value": halfpeak.ClipValue(value=0.01),
}


class Case(NamedTuple):
    level: str
    optimizer: str
    accumulate: int
    clip: str


def cases() -> list[Case]:
    """Every level with every optimizer; accumulation and clipping go round so that each pair of columns meets."""
    chosen: list[Case] = []
    for i, level in enumerate(LEVELS):
        for j, optimizer in enumerate(("SGD", "AdamW", "AdamW fused", "FusedAdamW")):
            chosen.append(Case(level, optimizer, (1, 3)[(i + j) % 2], list(CLIPS)[(i + 2 * j) % 3]))
            chosen.append(Case(level, optimizer, (3, 1)[(i + j) % 2], list(CLIPS)[(i + 2 * j + 1) % 3]))
    return chosen


def build(case: Case) -> halfpeak.Engine:
    model = net(norm="batch")
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    # Low enough that nothing overflows by itself.
    scale = halfpeak.ScaleConfig(init=1024.0)
    return halfpeak.prepare(
        model, optimizer, case.level, accumulate=case.accumulate, clip=CLIPS[case.clip], scale=scale
    )


def save_window(engine: halfpeak.Engine, window: int, poisoned: int | None = None) -> halfpeak.StepResult:
    """One window of backward passes and its step; ``poisoned`` is the backward pass that hooks may spoil."""
    every = engine.config.accumulation.every
    result = None
    for micro in range(every):
        POISON.now = micro == poisoned
        with engine.forward():
            loss = engine.model(batch(every * window + micro)).float().square().mean()
        engine.backward(loss)
        POISON.now = False
        result = engine.step()
    assert result is not None
    return result


class Poison:
    """A gradient hook that spoils the last element in the backward passes for which it is switched on."""

    now = False
    value = 0.0

    def __call__(self, grad: Tensor) -> Tensor:
        if not self.now:
            return grad
        spoilt = grad.clone()
        spoilt.view(-1)[-1] = self.value
        return spoilt


POISON = Poison()


def by_hand(before: ScaleState, *, dynamic: bool) -> list[float]:
    """The rule after one overflow: the scale halves if it may move; a static one is counted as stuck."""
    if dynamic:
        return [float(before.scale) / 2, 0, int(before.grace) - 1, 0]
    return [float(before.scale), 0, int(before.grace), 1]


@pytest.mark.parametrize("case", cases(), ids=lambda case: " ".join(map(str, case)))
def test_a_poisoned_window_never_was(case: Case) -> None:
    calm, twin = build(case), build(case)
    scaler = twin.scalers[0]
    parameters = list(twin.model.parameters())
    tensors = (*twin.models, *twin.optimizers, [master for _, master in twin.masters])
    # The first step of a fused kernel makes zeros of state, even if it skips; see the test below.
    save_window(calm, 0)
    save_window(twin, 0)
    for window in range(1, WINDOWS):
        before, scale = state_hash(tensors), scaler.state
        counters = (twin.num_steps, twin.num_skipped, twin.micro_step)
        for parameter in parameters:
            handle = parameter.register_hook(POISON)
            for POISON.value in VALUES:
                for micro in range(case.accumulate):
                    result = save_window(twin, window, poisoned=micro)
                    assert not result.stepped()
                    assert state_hash(tensors) == before
                    assert [float(part) for part in scaler.state] == by_hand(
                        scale, dynamic=scaler.config.dynamic
                    )
                    assert (int(twin.num_steps), int(twin.num_skipped)) == (
                        int(counters[0]),
                        int(counters[1]) + 1,
                    )
                    assert twin.micro_step == counters[2] + case.accumulate
                    scaler.state = scale
                    twin.context.record.use_counters(*counters[:2])
                    twin.context.record.micro_step = counters[2]
            handle.remove()
        assert save_window(calm, window).stepped()
        assert save_window(twin, window).stepped()
        assert state_hash(calm) == state_hash(twin) != before


def test_the_first_overflows_of_a_run_and_the_scale_that_fits() -> None:
    """A scale that starts far too high comes down by itself, and only then does anything move."""
    model = net()
    scale = halfpeak.ScaleConfig(init=2.0**24)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", scale=scale)
    before = state_hash(engine.models)
    skips = 0
    while not save_window(engine, 0).stepped():
        skips += 1
        assert state_hash(engine.models) == before
        assert engine.read_scale() == 2.0 ** (24 - skips)
    assert skips >= 1
    assert state_hash(engine.models) != before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_begins_with_poison(level: str, optimizer: str) -> None:
    calm, twin = (build(Case(level, optimizer, 1, "no clip")) for _ in range(2))
    scale, counters = twin.scalers[0].state, (twin.num_steps, twin.num_skipped, twin.micro_step)
    handles = [parameter.register_hook(POISON) for parameter in twin.model.parameters()]
    POISON.value = float("nan")
    assert not save_window(twin, 0, poisoned=0).stepped()
    for handle in handles:
        handle.remove()
    twin.scalers[0].state = scale
    twin.context.record.use_counters(*counters[:2])
    twin.context.record.micro_step = counters[2]
    for window in range(3):
        save_window(calm, window)
        save_window(twin, window)
    assert state_hash(calm) == state_hash(twin)
