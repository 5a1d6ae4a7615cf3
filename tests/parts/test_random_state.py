"""Random generators: a restored state draws the same numbers again, and a state that does not fit changes nothing."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch

from halfpeak.core.errors import StateError
from halfpeak.parts import random_state
from reliability.support import state_hash
from support.damage import damaged


def draw() -> tuple[object, ...]:
    return random.random(), random.gauss(), torch.rand(3).tolist(), numpy.random.rand(), numpy.random.randn()


def test_every_generator_is_put_back() -> None:
    state = random_state.capture()
    drawn = draw()
    random_state.restore(state)
    assert draw() == drawn


def test_damaged_states_change_no_generator() -> None:
    refused = 0
    for case in range(300):
        good = copy.deepcopy(random_state.capture())
        what, state = damaged(good, random.Random(f"generators {case}"))
        try:
            random_state.restore(state)
        except StateError:
            refused += 1
            assert state_hash(random_state.capture()) == state_hash(good), what
        except Exception as error:
            raise AssertionError(what) from error
        draw()
        random_state.restore(good)
    assert refused > 100


@pytest.mark.parametrize("place", [-1, 625, 10**6])
def test_a_place_outside_of_numpys_words_is_refused(place: int) -> None:
    """NumPy would accept the index and draw from memory beyond its words."""
    state = random_state.capture()
    state["numpy"][2] = place
    with pytest.raises(StateError, match="624 words"):
        random_state.restore(state)
