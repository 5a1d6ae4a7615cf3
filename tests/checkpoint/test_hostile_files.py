"""Hostile and strange files are read as data or refused by one typed error, in bounded time and memory; none of it runs.

A part of the generated files by default, all with ``HALFPEAK_THOROUGH=1``.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import pickle
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.payloads import (
    CODE,
    OTHER_TYPES,
    PROTO,
    archive,
    containers,
    dense,
    grown,
    in_each_part,
    legacy,
    op,
    tensor,
)
from halfpeak.checkpoint import convert, inspect, load
from halfpeak.checkpoint.formats import TARGETS
from halfpeak.checkpoint.read import Unknown, read_file
from halfpeak.core.errors import CheckpointError, HalfpeakError
from support.damage import damaged
from support.forks import python
from support.states import identical

THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"
LIMITED = Path(__file__).with_name("limited.py")


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path for the file; asserts afterwards that the folder holds nothing but it, and that nothing was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = set(sys.modules)
    yield tmp_path / "last.pt"
    assert set(os.listdir(tmp_path)) <= {"last.pt", "out.pt"}, "the payload ran"
    assert not {"antigravity", "runpy", "pty", "this"} & (set(sys.modules) - before)


def attack(victim: Path, data: bytes) -> list[str]:
    """Load the file, inspect it and convert it; what was said."""
    victim.write_bytes(data)
    said: list[str] = []
    for look in (load, inspect, lambda path: convert(path, "weights", "out.pt", drop=["all"])):
        try:
            look(victim)
        except HalfpeakError as error:
            said.append(str(error))
    Path("out.pt").unlink(missing_ok=True)
    return said


def test_the_harness_makes_files_that_load_and_payloads_that_run(victim: Path) -> None:
    for data in in_each_part(tensor(2, (2,), (1,))):
        victim.write_bytes(archive(data))
        found = [part["x"] for part in load(victim).values() if isinstance(part["x"], torch.Tensor)]
        assert [one.tolist() for one in found] == [[0.0, 0.0]]
    pickle.loads(next(in_each_part(CODE["mkdir"])))
    Path("MARKER").rmdir()


@pytest.mark.parametrize("value", CODE.values(), ids=CODE)
def test_code_and_lies_are_refused(victim: Path, value: bytes) -> None:
    for data in in_each_part(value):
        victim.write_bytes(archive(data))
        with pytest.raises(CheckpointError, match="is not a file of plain data: ") as caught:
            load(victim)
        assert "weights_only" not in str(caught.value), "torch's advice to turn the protection off"
        inspect(victim)
    attack(victim, archive(data))
    attack(victim, legacy(data))


@pytest.mark.parametrize("value", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_other_values_are_read_or_refused(victim: Path, value: bytes) -> None:
    for data in in_each_part(value):
        attack(victim, archive(data))


@pytest.mark.parametrize("name", containers())
def test_containers_of_others_are_refused(victim: Path, name: str) -> None:
    said = attack(victim, containers()[name])
    assert len(said) == 2
    assert all("last.pt is" in one for one in said)
    assert not inspect(victim).readable


@pytest.mark.timeout(1300)
def test_small_files_cannot_take_for_ever_or_all_memory(tmp_path: Path) -> None:
    """``limited.py`` reads attacks by hashes, copies, depth, counts and false lengths, each in a limited process."""
    names: dict[str, str] = {}
    values = {**grown(), **dense(1_000_000 if THOROUGH else 100_000)}
    for number, (name, value) in enumerate(values.items()):
        pickled = PROTO + b"}" + op("x") + value + b"s."
        kinds = {"zip": archive(pickled)} | (
            {"legacy": legacy(pickled)} if number % 3 == 0 and name in grown() else {}
        )
        for kind, data in kinds.items():
            path = tmp_path / f"{number}.{kind}"
            path.write_bytes(data)
            names[path.name] = f"{name}, {kind}"
    ends = in_limits(*(tmp_path / file for file in names))
    refused = {names[file] for file, said in ends.items() if "is not a file of plain data" in said}
    assert {name for name in names.values() if name.rpartition(",")[0] in grown()} == refused
    assert all(said == "[]" for file, said in ends.items() if names[file] not in refused)


def in_limits(*paths: Path) -> dict[str, str]:
    """What ``limited.py`` says of each file."""
    done = python(str(LIMITED), *map(str, paths))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_tensor_of_one_number_shown_often_is_not_unrolled(victim: Path) -> None:
    wide = tensor(2, (2**40,), (0,))
    for key in ("model", "master_params"):
        attack(victim, archive(PROTO + b"}" + op(key) + b"}" + op("w") + wide + b"ss."))


def test_names_that_shadow_methods_are_dropped(victim: Path) -> None:
    shadow = (
        b"ccollections\nOrderedDict\n)R" + op("key") + op(1) + b"s" + op({"items": 1, "_metadata": {}}) + b"b"
    )
    on_tensor = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n"
    on_tensor += tensor(2, (2,), (1,)).partition(b"_rebuild_tensor_v2\n")[2][:-1] + op({"detach": 1}) + b"tR"
    victim.write_bytes(archive(PROTO + b"}" + op("a") + shadow + b"s" + op("b") + on_tensor + b"s."))
    loaded = load(victim)
    assert list(loaded["a"].items()) == [("key", 1)]
    assert vars(loaded["a"]) == {"_metadata": {}}
    assert not vars(loaded["b"])


class Settings:
    def __init__(self) -> None:
        self.opt_level = "O2"


class Config(dict[str, Any]):
    """A dict with attributes, as of yacs and mmengine."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.is_frozen = True


def everything() -> dict[str, Any]:
    """A state with all kinds of plain data, views and objects, and what is read of it."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "model": nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).state_dict(),
        "view": base[1:, ::2],
        "parameter": nn.Parameter(torch.ones(2)),
        "dtypes": [
            torch.ones(3).to(one) for one in (torch.float16, torch.bfloat16, torch.bool, torch.complex64)
        ],
        "numbers": [1, -1, 2**40, 10**30, 0.5, float("inf"), True, None, "text \u00e9", b"bytes"],
        "nested": {"tuple": (1, (2, (3,))), 7: {"x": []}, (1, 2): 3},
        "shared": [base, base],
        "counter": collections.Counter({3: 1}),
        "default": collections.defaultdict(list, {"a": [1]}),
        "queue": collections.deque([1, 2], 5),
        "config": Config(a=Config(b=1)),
        "args": argparse.Namespace(lr=0.1),
        "settings": Settings(),
    }


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before 1.6"])
def test_what_is_read_is_what_was_saved(tmp_path: Path, new: bool) -> None:
    """Nothing of what the file names is imported: containers of other classes are read as dicts and lists."""
    saved, path = everything(), tmp_path / "a.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError, match=r"loading it would import argparse\.Namespace"):
        load(path)
    tree, _, wants = read_file(path, as_data=True)
    for name in ("args", "settings"):
        assert isinstance(tree[name], Unknown)
        assert tree.pop(name).state == vars(saved.pop(name))
    inner = OrderedDict(b=1)
    read = {"default": OrderedDict(a=[1]), "queue": [1, 2], "config": OrderedDict(a=inner)}
    assert not [key for key in saved if not identical(tree[key], read.get(key, saved[key]))]
    here = Settings.__module__
    assert set(wants) == {"argparse.Namespace", "collections.deque", f"{here}.Settings", f"{here}.Config"}


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.save({"best": numpy.float64(0.5), "n": numpy.int64(7), "array": numpy.ones(2)}, tmp_path / "a.pt")
    tree = read_file(tmp_path / "a.pt", as_data=True).tree
    assert (tree["best"], tree["n"]) == (0.5, 7)
    assert tree["array"].name.endswith("multiarray._reconstruct")


def checkpoint() -> dict[str, Any]:
    """A checkpoint with momentum, as a script with apex writes it."""
    model = nn.Linear(3, 2)
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


def of_pickle(rng: random.Random) -> bytes:
    """An archive with right checksums around a damaged pickle."""
    pickled = pickle.dumps(
        {"model": {"w": [1, 2]}, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}, 2
    )
    return archive(bytes_damaged(pickled, rng))


def of_state(rng: random.Random) -> bytes:
    """An undamaged file of a damaged state; draws again if torch cannot save the state."""
    with suppress(RecursionError, AttributeError, pickle.PicklingError, RuntimeError, NotImplementedError):
        return saved(damaged(checkpoint(), rng)[1])
    return of_state(rng)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "archive": lambda rng: bytes_damaged(saved(checkpoint()), rng),
    "before torch 1.6": lambda rng: bytes_damaged(
        saved(checkpoint(), _use_new_zipfile_serialization=False), rng
    ),
    "pickle": of_pickle,
    "state": of_state,
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_each_file_gets_an_answer(tmp_path: Path, kind: str) -> None:
    """``limited.py`` inspects each file and converts it to three forms, each in a process with limits."""
    torch.manual_seed(0)
    cases = 400 if THOROUGH else 8
    for case in range(cases):
        data = KINDS[kind](random.Random(f"{kind} {case}"))
        for form in ("read", *random.Random(case).sample(sorted(TARGETS), 3)):
            (tmp_path / f"{case}.{form}").write_bytes(data)
    ends = in_limits(*sorted(tmp_path.iterdir()))
    assert len(ends) == 4 * cases
    answered = ("CheckpointError: ", "StateError: ", "ConfigError: ", "[", "read")
    assert not {name: said for name, said in ends.items() if not said.startswith(answered)}
