"""Every damaged file is refused with CheckpointError, and the previous one is used (700 flips, 300 cuts, mix-ups)."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfpeak.checkpoint import load, previous_path, save
from halfpeak.core.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of step 2, its previous one of step 1."""
    for step in (1, 2):
        save(tmp_path / "last.pt", {"step": step, "weights": torch.randn(300), "text": "x" * 50})
    return tmp_path / "last.pt"


def damaged_by_flips(good: bytes, count: int) -> Iterator[bytes]:
    rng = random.Random(6)
    for bit in rng.sample(range(8 * len(good)), count):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << bit % 8
        yield bytes(broken)


def damaged_by_cuts(good: bytes, count: int) -> Iterator[bytes]:
    rng = random.Random(7)
    for length in (
        0,
        1,
        21,
        22,
        51,
        52,
        53,
        len(good) - 52,
        len(good) - 1,
        *rng.sample(range(len(good)), count - 9),
    ):
        yield good[:length]


def damaged_by_mixing(good: bytes, other: bytes) -> Iterator[bytes]:
    rng = random.Random(8)
    for _ in range(40):
        start, stop = sorted(rng.sample(range(0, len(good), 64), 2))
        yield good[:start] + bytes(stop - start) + good[stop:]
        yield good[stop:] + good[:stop]
    for cut in rng.sample(range(300, len(good) - 52), 20):
        yield good[:cut] + other[cut:]
    yield from (
        good + good,
        good + b"\0",
        b"\0" + good,
        good[:-52] + good,
        other[:-52] + good[-52:],
        good[-52:],
    )
    yield from (b"halfpeak", b"\0" * len(good), b"PK\x03\x04" * 100)


def check_refused(path: Path, broken: bytes) -> None:
    path.write_bytes(broken)
    with pytest.raises(CheckpointError, match="is intact: load that"):
        load(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load(path, fall_back=True)["step"] == 1
    assert [warning.category for warning in caught] == [RuntimeWarning]


def test_bit_flips(path: Path) -> None:
    for broken in damaged_by_flips(path.read_bytes(), 700):
        check_refused(path, broken)


def test_every_bit_of_the_trailer(path: Path) -> None:
    good = path.read_bytes()
    for bit in range(8 * (len(good) - 52), 8 * len(good)):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << bit % 8
        check_refused(path, bytes(broken))


def test_truncations(path: Path) -> None:
    for broken in damaged_by_cuts(path.read_bytes(), 300):
        check_refused(path, broken)


def test_swapped_and_duplicated_parts(path: Path) -> None:
    good, other = path.read_bytes(), previous_path(path).read_bytes()
    assert len(good) == len(other)
    for broken in damaged_by_mixing(good, other):
        check_refused(path, broken)


def test_both_damaged(path: Path) -> None:
    path.write_bytes(b"")
    previous_path(path).write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged: it is empty$"):
        load(path, fall_back=True)


def test_the_message_says_what_is_wrong(path: Path) -> None:
    good = path.read_bytes()
    for broken, message in (
        (good[:200] + b"?" + good[201:], "do not fit the digest"),
        (
            good[:-60] + good[-52:],
            f"it holds {len(good) - 60} bytes of data, and {len(good) - 52} were written",
        ),
        (good[:-10], "damaged or foreign"),
        (b"", "it is empty"),
    ):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=message):
            load(path)
