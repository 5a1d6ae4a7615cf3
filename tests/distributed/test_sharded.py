"""Sharded training on two ranks (gloo): equal to one process to rounding, and bitwise equal between ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from distributed.launching import Seen, check_refusals, launched
from distributed.sharded_ranks import ADVERSARIAL, INTERRUPTED, LOW, STEPS, cases, one_process
from support.states import same

CLOSE = {"O0": 1e-6, "O1": 2e-4, "O2": 2e-4, "O4": 5e-3, "O5": 5e-3}
"""Largest distance of a weight to that of one process, which sums losses in another order in the level's dtype."""

ranks = launched("distributed.sharded_ranks")


@cache
def alone(level: str, layout: str, every: int, poisoned: bool, optimizer: str) -> dict[str, Any]:
    return one_process(level, layout, every, poisoned, optimizer)


@pytest.mark.parametrize(("level", "layout", "every", "poisoned", "optimizer"), list(cases()))
def test_ranks_train_as_one_process(
    ranks: Seen, level: str, layout: str, every: int, poisoned: bool, optimizer: str
) -> None:
    first, other = ranks[f"{level} {layout} {every} {poisoned} {optimizer}"]
    one = alone(level, layout if layout in ("kept", "float8") else "shards", every, poisoned, optimizer)
    assert all(torch.equal(first["values"][name], value) for name, value in other["values"].items())
    for seen in (first, other):
        assert seen["outcomes"] == one["outcomes"] == [not (poisoned and i == 1) for i in range(STEPS)]
        assert (seen["counters"], seen["scale"]) == (one["counters"], one["scale"])
        assert str(seen["norms"]) == str(first["norms"])  # nan where a loss was inf
        # The float32 shards are the masters: no parameter is converted or copied. Low ones have remainders; norms are float32.
        assert seen["masters"] == 0
        low = {"O2": "torch.float16", "O5": "torch.bfloat16"}.get(level) if layout in LOW else None
        assert set(seen["dtypes"]) == {"torch.float32", *([low] if low else [])}
    distances = [(first["values"][name] - value.float()).abs().max() for name, value in one["values"].items()]
    coarser = 10 if optimizer.endswith(("bfloat16", "8 bits")) or layout == "float8" else 1
    assert max(map(float, distances)) < CLOSE[level] * coarser
    for norm, expected in zip(first["norms"], one["norms"], strict=True):
        assert norm == pytest.approx(expected, rel=2e-2, nan_ok=True)


@pytest.mark.parametrize(("level", "how"), INTERRUPTED)
def test_nothing_is_left_of_an_interrupted_window(ranks: Seen, level: str, how: str) -> None:
    for seen in ranks[f"interrupted {level} {how}"]:
        assert same(seen["interrupted"], seen["calm"])


@pytest.mark.parametrize(("level", "order"), [*ADVERSARIAL, ("O2", "late")])
def test_a_loss_leaves_the_window_of_another_network_alone(ranks: Seen, level: str, order: str) -> None:
    """FSDP2 holds the gradients of that window outside of ``.grad``."""
    for seen in ranks[f"adversarial {level} {order}"]:
        assert same(seen["trainable"], seen["frozen"])
        assert same(seen["two engines"], seen["frozen"])


def test_plain_parameters_of_a_sharded_model_add_up_before_a_hook_reduces_them(ranks: Seen) -> None:
    assert same(*ranks["adapted"])


def test_low_shards_have_float32_values(ranks: Seen) -> None:
    assert ranks["low values"] == [[True, True]] * 2


def test_the_state_of_an_engine_over_shards_loads_in_memory(ranks: Seen) -> None:
    assert ranks["in memory"] == [True, True]


def test_a_grad_scaler_skips_on_all_ranks(ranks: Seen) -> None:
    """``test_matrix.py`` covers the other front ends."""
    assert ranks["GradScaler"] == [[True, False, True]] * 2


def test_a_fused_step_writes_each_shard_once_in_shared_buffers(ranks: Seen) -> None:
    assert ranks["buffers"] == [[[18, 18]]] * 2


def test_what_would_train_nothing_is_refused(ranks: Seen) -> None:
    check_refusals(ranks["refusals"], 22)
