"""``decide_on_host`` computes in Python numbers the bits that operations on tensors give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halfpeak.core.schedule import ScaleConfig, ScaleState, advance
from halfpeak.fused.decision import DecisionInputs, decide_on_host
from halfpeak.ops.reference import clip_coef
from support.states import same

CONFIG = ScaleConfig(init=2.0**10, interval=2)


def integer(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def inputs_with(limit: float | None, state: ScaleState, found_inf: float = 0.0) -> DecisionInputs:
    return DecisionInputs(CONFIG, state, integer(5), integer(3), torch.tensor(found_inf), limit)


@pytest.mark.parametrize("limit", [None, 0.1, 1.0, 3.3, math.inf])
def test_numbers_on_the_host_are_those_of_tensors(limit: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    state = CONFIG.start()
    for power in range(-12, 13):
        squares, factor = torch.rand(2, generator=generator).unbind()
        squares = squares * 10.0**power
        decision = decide_on_host(inputs_with(limit, state), squares, torch.zeros(()), factor)
        assert decision is not None
        times = factor if limit is None else factor * clip_coef(squares.sqrt(), limit)
        assert torch.equal(decision.grad_norm, squares.sqrt())
        assert torch.equal(decision.multiplier, times)
        assert decision.found_inf == 0
        state = advance(CONFIG, state, torch.zeros(()))
        assert same(decision.scale_state, state)
        assert [int(decision.num_steps), int(decision.num_skipped)] == [6, 3]


@pytest.mark.parametrize(
    ("squares", "measured", "known", "limit", "skips"),
    [
        (4.0, 1.0, 0.0, 1.0, True),
        (4.0, 0.0, 1.0, None, True),
        (math.inf, 0.0, 0.0, 1.0, True),  # clipping needs a finite norm
        (math.inf, 0.0, 0.0, None, False),
        (math.nan, 1.0, 0.0, 1.0, True),
        (0.0, 0.0, 0.0, 1.0, False),
    ],
)
def test_what_skips_a_step(
    squares: float, measured: float, known: float, limit: float | None, skips: bool
) -> None:
    decision_inputs = inputs_with(limit, CONFIG.start(), known)
    decision = decide_on_host(
        decision_inputs, torch.tensor(squares), torch.tensor(measured), torch.tensor(0.5)
    )
    assert decision is not None
    assert float(decision.found_inf) == skips
    assert [int(decision.num_steps), int(decision.num_skipped)] == ([5, 4] if skips else [6, 3])
    expected = advance(CONFIG, CONFIG.start(), torch.tensor(float(skips)))
    assert same(decision.scale_state, expected)


def test_numbers_that_are_not_in_host_memory_are_left_to_tensors() -> None:
    decision_inputs = inputs_with(1.0, CONFIG.start())
    assert decide_on_host(decision_inputs, torch.ones(1), torch.zeros(()), torch.ones(())) is None
