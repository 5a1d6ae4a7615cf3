"""Damaged files of every kind are described or refused by one typed error, in bounded time and memory.

Forty files by default, 2000 with ``HALFPEAK_THOROUGH=1``. ``test_damage.py`` tests files with a digest.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfpeak.checkpoint.conversion import TARGETS
from support.damage import damaged
from support.forks import python

CASES = 400 if os.environ.get("HALFPEAK_THOROUGH") == "1" else 8
LIMITED = Path(__file__).with_name("limited.py")


def checkpoint() -> dict[str, Any]:
    """A checkpoint with momentum, as a script with apex writes it."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    amp = {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp, "epoch": 3}


def saved(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def bytes_damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage the bytes: a flipped bit, a cut, zeros, a part twice, a part in another place, or other bytes."""
    start, stop = sorted(rng.randrange(len(data)) for _ in range(2))
    changed = bytearray(data)
    changed[start] ^= 1 << rng.randrange(8)
    return rng.choice(
        (
            bytes(changed),
            data[:stop],
            data[:start] + bytes(stop - start) + data[stop:],
            data[:stop] + data[start:],
            data[stop:] + data[:stop],
            data[:start] + rng.randbytes(8) + data[start + 8 :],
        )
    )


def of_state(rng: random.Random) -> bytes:
    """An undamaged file of a damaged state; draws again if torch cannot save the state."""
    try:
        return saved(damaged(checkpoint(), rng)[1])
    except (RecursionError, AttributeError, pickle.PicklingError, RuntimeError, NotImplementedError):
        return of_state(rng)


def of_header(rng: random.Random) -> bytes:
    """A safetensors file with a damaged header."""
    header = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
    }
    try:
        text = json.dumps(damaged(header, rng)[1]).encode()
    except (TypeError, ValueError, RecursionError):
        return of_header(rng)
    return struct.pack("<Q", len(text)) + text + bytes(32)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "archive": lambda rng: bytes_damaged(saved(checkpoint()), rng),
    "before torch 1.6": lambda rng: bytes_damaged(
        saved(checkpoint(), _use_new_zipfile_serialization=False), rng
    ),
    "state": of_state,
    "safetensors": of_header,
    "safetensors, bytes": lambda rng: bytes_damaged(of_header(rng), rng),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_each_file_gets_an_answer(tmp_path: Path, kind: str) -> None:
    """``limited.py`` inspects each file and converts it to three forms, each in a process with limits."""
    torch.manual_seed(0)
    for case in range(CASES):
        data = KINDS[kind](random.Random(f"{kind} {case}"))
        for form in ("read", *random.Random(case).sample(sorted(TARGETS), 3)):
            (tmp_path / f"{case}.{form}").write_bytes(data)
    done = python(str(LIMITED), *map(str, sorted(tmp_path.iterdir())))
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert len(ends) == 4 * CASES
    answered = ("CheckpointError: ", "StateError: ", "ConfigError: ", "[", "read")
    assert not {name: said for name, said in ends.items() if not said.startswith(answered)}
