"""Compact optimizer state over shards: bitwise that of one process on every number of ranks, and so are its checkpoints."""

from __future__ import annotations

import pytest
import torch

from distributed.compact_ranks import FORMS, MOVES, SIZES
from distributed.launching import Seen, launched
from support.states import differences

ranks = launched("distributed.compact_ranks", ranks=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", [*SIZES[1:], *(f"{source} to {size}" for source, size in MOVES)])
def test_every_number_of_ranks_has_the_bits_of_one_process(ranks: Seen, how: str, form: str) -> None:
    one, several = ranks[f"{form} alone"][0], ranks[f"{form} {how}"][0]
    assert not differences(one, several)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_have_8_bit_moments_and_vectors_do_not(ranks: Seen, form: str) -> None:
    state = ranks[f"{form} 4"][0]["straight"]
    assert state["head.weight exp_avg"].dtype is torch.int8
    assert state["head.weight exp_avg_sq"].dtype is torch.uint8
    shapes = {name: tuple(value.shape) for name, value in state.items() if name.endswith("exp_avg_scale")}
    assert shapes["gain exp_avg_scale"] == (1, 3)
    assert shapes["blocks.0.down.weight exp_avg_scale"] == (48, 1)
    assert shapes["head.weight exp_avg_scale"] == (7, 1)
    assert not any("bias" in name for name in shapes)
