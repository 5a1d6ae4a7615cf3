"""Every damaged file is refused with CheckpointError or read as it was, and the previous one is used."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halfpeak.checkpoint import inspect, load, previous_path, save, verify
from halfpeak.core.errors import CheckpointError
from support.states import identical


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((300,), 0.5 + step), "text": "x" * 50}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of step 2, its previous one of step 1."""
    for step in (1, 2):
        save(tmp_path / "last.pt", state(step))
    return tmp_path / "last.pt"


def by_flips(good: bytes, other: bytes) -> Iterator[bytes]:
    for bit in random.Random(6).sample(range(8 * len(good)), 500):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << bit % 8
        yield bytes(broken)


def by_cuts(good: bytes, other: bytes) -> Iterator[bytes]:
    lengths = (0, 1, 21, 22, len(good) - 22, len(good) - 1, *random.Random(7).sample(range(len(good)), 100))
    yield from (good[:length] for length in lengths)


def by_mixing(good: bytes, other: bytes) -> Iterator[bytes]:
    rng = random.Random(8)
    for _ in range(30):
        start, stop = sorted(rng.sample(range(0, len(good), 64), 2))
        yield good[:start] + bytes(stop - start) + good[stop:]
        yield good[stop:] + good[:stop]
    yield from (good[:cut] + other[cut:] for cut in rng.sample(range(300, len(good) - 52), 20))
    yield from (good + good, good + b"\0", b"\0" + good, good + other, good[:-22], good[-22:])
    yield from (b"halfpeak", b"\0" * len(good), b"PK\x03\x04" * 100)


@pytest.mark.parametrize("damage", [by_flips, by_cuts, by_mixing])
def test_damage_is_found_or_harmless(path: Path, damage: Any) -> None:
    """Checksums cover neither names nor padding: a file that differs only there is read as it was."""
    good, other = path.read_bytes(), previous_path(path).read_bytes()
    harmless = 0
    for broken in damage(good, other):
        path.write_bytes(broken)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            loaded = load(path, fall_back=True)
        assert identical(loaded, state(1 if caught else 2))
        assert len(caught) < 2
        harmless += not caught
        report = inspect(path)
        assert report.readable != bool(report.findings)
        assert report.readable or "damaged" in report.integrity or report.form == "unknown"
    assert not (harmless and damage is by_cuts)


def test_flips_in_data_are_found(path: Path) -> None:
    good, weights = path.read_bytes(), state(2)["weights"].numpy().tobytes()
    start = good.index(weights)
    for position in range(start, start + len(weights), 41):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CheckpointError, match=r"is damaged: the checksum .* is intact: load that"):
            load(path)
        with pytest.raises(CheckpointError, match="is damaged"):
            verify(path)
        assert inspect(path).integrity == "damaged"


def test_both_damaged(path: Path) -> None:
    path.write_bytes(b"")
    previous_path(path).write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged: it is empty"):
        load(path, fall_back=True)


def test_checksums_are_written_where_torch_was_told_not_to(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save(path, state(3))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    verify(path)
