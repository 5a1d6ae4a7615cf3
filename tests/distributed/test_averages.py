"""``halfpeak.AveragedModel`` on two ranks (gloo): with DistributedDataParallel and with FSDP2."""

from __future__ import annotations

import pytest
import torch

from distributed.launching import Seen, check_refusals, launched
from support.nets import LEVELS
from support.states import same

two = launched("distributed.averages_ranks")


@pytest.mark.parametrize("level", LEVELS)
def test_averages_of_a_model_in_ddp(two: Seen, level: str) -> None:
    """Each rank averages by itself, and all have the same bits."""
    first, second = two[f"parallel {level}"]
    assert same(first["averages"], second["averages"])
    assert torch.equal(first["output"], second["output"])
    for one in (first, second):
        assert one["same"]
        assert one["distance"] < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_averages_of_shards(two: Seen, level: str) -> None:
    """Each rank averages its shards, if the copy is sharded like the model."""
    first, second = two[f"sharded {level}"]
    assert same(first["averages"], second["averages"])
    for one in (first, second):
        assert one["same"]
        assert one["close"]
        assert one["distance"] < 1e-6


def test_what_is_refused(two: Seen) -> None:
    check_refusals(two["refused"], 2)
