"""The decider as a kernel gives the bits of the decider in tensors."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch

from halfpeak.core.decide import LossFacts, _decide_tensors
from halfpeak.core.schedule import NONFINITE_LOSS, ScaleConfig, ScaleState, advance
from halfpeak.ops.triton import kernels
from support.states import same
from support.triton import DEVICES, NEEDS_TRITON

CONFIGS = [
    ScaleConfig(init=2.0**16, interval=2, recovers=True),
    ScaleConfig(init=2.0**10, interval=3, hysteresis=2, refill="growth"),
    ScaleConfig(init=3.3, growth=1.1, backoff=0.9, interval=1, floor=3.0, ceiling=3.5, patience=2),
    ScaleConfig.static(128.0),
]


def test_every_field_of_a_configuration_has_two_values_here() -> None:
    for field in fields(ScaleConfig):
        assert len({getattr(config, field.name) for config in CONFIGS}) > 1, field.name


@NEEDS_TRITON
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_kernel_decides_as_tensors_do(device: str, count: int) -> None:
    draw = random.Random(count)
    for _ in range(40):
        losses: list[LossFacts] = []
        for _ in range(count):
            config = draw.choice(CONFIGS)
            state = config.start(device)
            for _ in range(draw.randrange(4)):
                state = advance(config, state, torch.tensor(draw.choice([0.0, 1.0])))
            found = draw.choice([0.0, 0.0, 1.0, NONFINITE_LOSS, -1.0])
            first = draw.choice([float(state.scale), 2.0**17, math.inf])
            losses.append(
                LossFacts(
                    config,
                    ScaleState(*(one.to(device) for one in state)),
                    torch.tensor(first, device=device),
                    torch.tensor(found, device=device),
                    draw.random() < 0.7,
                    draw.random() < 0.7,
                )
            )
        found = torch.tensor(draw.choice([0.0, 0.0, 1.0]), device=device)
        size = draw.choice([None, 0.0, 3.3, 1e-9, math.inf, math.nan])
        norm = None if size is None else torch.tensor(size, device=device)
        limit = draw.choice([None, 0.1, 1.0])
        counters = (
            torch.tensor(5, dtype=torch.int32, device=device),
            torch.tensor(3, dtype=torch.int32, device=device),
        )
        one = kernels().decide(found, losses, norm, limit, counters)
        other = _decide_tensors(found, losses, norm, limit, counters)
        assert float(one.skip) == float(other.skip)
        assert [int(one.num_steps), int(one.num_skipped)] == [int(other.num_steps), int(other.num_skipped)]
        if not float(one.skip):
            assert float(one.coef) == float(other.coef)
        for ours, theirs in zip(one.states, other.states, strict=True):
            assert same(ours, theirs)
