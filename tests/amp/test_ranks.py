"""Windows of several blocks on two gloo ranks, whose gradients are reduced once: by DDP, or by the script's own hand."""

from __future__ import annotations

import pytest
import torch

from amp.ranks import PASSES, WINDOWS
from distributed.launching import Seen, launched
from support.nets import TYPICAL
from support.states import same

two = launched("amp.ranks")
TOLERANCE = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O5": 2e-2}


@pytest.mark.parametrize("level", TYPICAL)
def test_the_script_reduces_what_delay_unscale_has_left(level: str, two: Seen) -> None:
    """UNITER's loop: inside the last block ``.grad`` is the scaled sum of the window."""
    first, second = two[f"{level} by hand"]
    assert same(first["parameters"], second["parameters"])
    whole = two[f"{level} one process"][0]
    for mine, theirs in zip(first["parameters"], whole["parameters"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE[level])


@pytest.mark.parametrize("how", ["by hand", "ddp"])
@pytest.mark.parametrize("level", TYPICAL)
def test_gradients_that_are_not_reduced_are_not_stepped(level: str, how: str, two: Seen) -> None:
    for seen in two[f"{level} {how}"]:
        assert "no_sync, or with delay_unscale" in seen["refused"]


@pytest.mark.parametrize("how", ["by hand", "ddp"])
@pytest.mark.parametrize("level", TYPICAL)
def test_an_overflow_of_one_rank_skips_on_all(level: str, how: str, two: Seen) -> None:
    """It counts once, in the block that reduces, so loss scales stay equal."""
    first, second = two[f"{level} {how} overflow"]
    assert same(first["parameters"], second["parameters"])
    for seen in (first, second):
        assert seen["stepped"] == [window != 1 for window in range(WINDOWS)]
        assert seen["scale"] == {"loss_scale": 32.0, "unskipped": WINDOWS - 2}


def test_what_ddp_has_reduced_is_stepped_also_with_delay_unscale(two: Seen) -> None:
    first, second = two["reduced in each pass"]
    assert same(first[True], first[False])
    assert same(first[True], second[True])


def test_the_windows_have_several_passes() -> None:
    assert PASSES > 2
