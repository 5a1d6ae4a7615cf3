"""Random generators: what is put back draws the same numbers again."""

from __future__ import annotations

import random

import numpy
import torch

from halfpeak.state import random_state


def test_every_generator_is_put_back() -> None:
    state = random_state.capture()
    drawn = random.random(), torch.rand(3), numpy.random.rand()
    random_state.restore(state)
    assert random.random() == drawn[0]
    assert torch.equal(torch.rand(3), drawn[1])
    assert numpy.random.rand() == drawn[2]
