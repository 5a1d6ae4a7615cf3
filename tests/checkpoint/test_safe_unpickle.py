"""Files with pickled objects, read as data: their contents are reported, and none of their code runs."""

from __future__ import annotations

import argparse
import collections
import copyreg
import io
import json
import os
import pickle
import sys
from collections.abc import Iterator
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
    bomb,
    dense,
    grown,
    in_each_part,
    op,
    other_archives,
    seal,
    tensor,
)
from halfpeak.checkpoint import convert, inspect
from halfpeak.checkpoint.formats import TARGETS
from halfpeak.checkpoint.open import open_any
from halfpeak.checkpoint.safe_unpickle import Record, SafeUnpickler
from halfpeak.core.errors import CheckpointError, HalfpeakError, StateError
from support.forks import python
from support.states import identical

VALUES = {name: value for name, value in {**CODE, **OTHER_TYPES}.items() if name != "deep"}


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path for the file; asserts afterwards that the folder holds nothing but it and the converted file."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "last.pt"
    assert set(os.listdir(tmp_path)) <= {"last.pt", "out.pt"}, "the payload ran"


def attack(victim: Path, data: bytes) -> None:
    """Inspect the file and convert it."""
    victim.write_bytes(data)
    for look in (lambda: inspect(victim), lambda: convert(victim, "weights", "out.pt", drop=["all"])):
        with suppress(HalfpeakError):
            look()
    Path("out.pt").unlink(missing_ok=True)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_nothing_runs(victim: Path, value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = set(sys.modules)
    for data in in_each_part(value):
        victim.write_bytes(archive(data))
        inspect(victim)
    attack(victim, archive(data))
    attack(victim, seal(archive(data)))
    attack(victim, data)
    assert not {"antigravity", "runpy", "pty", "this"} & (set(sys.modules) - before)


@pytest.mark.parametrize("payload", other_archives().values(), ids=other_archives())
def test_nothing_runs_in_other_containers(victim: Path, payload: bytes) -> None:
    attack(victim, payload)


@pytest.mark.parametrize(
    "beside", [b"", op("y") + CODE["system"] + b"s"], ids=["read by torch", "read as data"]
)
def test_deep_nesting_ends(victim: Path, beside: bytes) -> None:
    weights = op("model") + b"}" + op("w") + tensor(2, (2,), (1,)) + b"ss"
    deep = op("x") + b"]" * 20_000 + b"K\x07" + b"a" * 20_000 + b"s"
    victim.write_bytes(archive(PROTO + b"}" + weights + deep + beside + b"."))
    assert inspect(victim).rest["x"] == "a list of 1"
    with pytest.raises(StateError, match=r"cannot hold .*'x'") as refused:
        convert(victim, "apex", "out.pt", scale=8.0)
    assert len(str(refused.value)) < 2000
    assert not Path("out.pt").exists()
    convert(victim, "weights", "out.pt", drop=["all"])
    assert torch.equal(torch.load("out.pt", weights_only=True)["w"], torch.zeros(2))


def test_inspect_names_what_a_file_would_run(victim: Path) -> None:
    victim.write_bytes(archive(next(in_each_part(CODE["system"]))))
    report = inspect(victim)
    assert report.wants == ["os.system"]
    assert "save as plain data in the script that wrote it" in report.advice[0]
    assert "os.system" in report.rest["model"] or report.rest["model"] == "a dict of 1"


def test_a_bomb_of_references_ends(victim: Path) -> None:
    for key in ("x", "master_params", "optimizer"):
        attack(victim, archive(PROTO + b"}" + op(key) + bomb() + b"s."))
        attack(victim, archive(PROTO + b"}" + op(key) + bomb() + b"s" + op("y") + CODE["system"] + b"s."))


def test_a_tensor_of_one_number_shown_often_is_not_unrolled(victim: Path) -> None:
    wide = tensor(2, (2**40,), (0,))
    attack(victim, archive(PROTO + b"}" + op("model") + b"}" + op("w") + wide + b"ss."))


@pytest.mark.parametrize(
    "storage",
    [
        tensor(2, (2**62, 4), (0, 0)),
        tensor(2, (2,), (1,), -1),
        tensor(2, (2,), (1, 1)),
        tensor(2, (3,), (1,)),
        tensor(3, (2,), (1,)),
        tensor(2, (2,), (1,), key="7"),
    ],
)
def test_a_tensor_that_lies_is_refused(victim: Path, storage: bytes) -> None:
    """The call of ``os.system`` beside the tensor keeps torch from reading the file first."""
    victim.write_bytes(archive(PROTO + b"}" + op("w") + storage + b"s" + op("x") + CODE["system"] + b"s."))
    opened = open_any(victim)
    assert opened.tree is None
    assert "read as data" in opened.unread


class Settings:
    def __init__(self) -> None:
        self.opt_level = "O2"


def everything() -> dict[str, Any]:
    """A state with all kinds of plain data, views and objects."""
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "model": nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).state_dict(),
        "view": base[1:, ::2],
        "transposed": base.t(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.ones(2)),
        "dtypes": [
            torch.ones(3).to(dtype)
            for dtype in (
                torch.float16,
                torch.bfloat16,
                torch.float64,
                torch.uint8,
                torch.bool,
                torch.complex64,
            )
        ],
        "numbers": [1, -1, 2**40, 10**30, 0.5, float("inf"), True, None, "text \u00e9", b"bytes"],
        "nested": {"tuple": (1, (2, (3,))), 7: {"x": []}},
        "shared": [base, base],
        "counter": collections.Counter({3: 1}),
        "default": collections.defaultdict(None, {"a": [1]}),
        "args": argparse.Namespace(lr=0.1),
        "settings": Settings(),
    }


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_is_read_is_what_was_saved(tmp_path: Path, new: bool, protocol: int) -> None:
    saved = everything()
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    opened = open_any(tmp_path / "a.pt")
    assert opened.unread == ""
    objects = {"args": saved.pop("args"), "settings": saved.pop("settings")}
    for name, made in objects.items():
        record = opened.tree.pop(name)
        assert isinstance(record, Record)
        assert record.state == vars(made)
    assert opened.tree.keys() == saved.keys()
    assert not [key for key in saved if not identical(opened.tree[key], plain_of(saved[key]))]
    assert set(opened.symbols) == {"argparse.Namespace", f"{Settings.__module__}.Settings"}


def plain_of(value: Any) -> Any:
    return dict(value) if isinstance(value, (collections.Counter, collections.defaultdict)) else value


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.save({"best": numpy.float64(0.5), "n": numpy.int64(7), "s": {1}}, tmp_path / "a.pt")
    tree = open_any(tmp_path / "a.pt").tree
    assert (tree["best"], tree["n"]) == (0.5, 7)
    assert tree["s"].name.endswith("builtin__.set")


def test_broken_pickles_are_refused() -> None:
    whole = PROTO + op({"a": [1, (2, 3)], "b": "text"}) + b"."
    for length in range(len(whole)):
        with pytest.raises(CheckpointError, match="the pickle is broken"):
            read(whole[:length])
    for position in range(2, len(whole)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[position] ^= change
            with suppress(CheckpointError):
                read(bytes(damaged))


def read(pickled: bytes) -> Any:
    return SafeUnpickler(io.BytesIO(pickled), len(pickled)).read_value()


def test_a_packed_record_is_not_unpacked(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", PROTO + b"}" + op("x") + CODE["system"] + b"s.")
        file.writestr("archive/data/0", b"\0" * 1_000_000)
    opened = open_any(tmp_path / "a.pt")
    assert "torch.save never does" in opened.unread


@pytest.mark.parametrize("form", TARGETS)
def test_a_file_of_nothing_converts_to_nothing(victim: Path, form: str) -> None:
    torch.save({}, victim)
    with pytest.raises(HalfpeakError):
        convert(victim, form, "out.pt")
    assert not Path("out.pt").exists()


LIMITED = Path(__file__).with_name("limited.py")


@pytest.mark.timeout(1300)
def test_small_files_cannot_take_for_ever_or_all_memory(tmp_path: Path) -> None:
    """``limited.py`` reads attacks by hashes, copies, depth, counts and false lengths, each in a limited process."""
    names: dict[str, str] = {}
    many = 1_000_000 if os.environ.get("HALFPEAK_THOROUGH") == "1" else 100_000
    for number, (name, value) in enumerate({**grown(), **dense(many)}.items()):
        pickled = PROTO + b"}" + op("x") + value + b"s."
        # One reader serves all three containers, so not every value needs each.
        kinds = {"zip": archive(pickled)}
        if number % 4 == 0:
            kinds["sealed"] = seal(archive(pickled))
        if name.endswith("as a key"):
            kinds["bare"] = pickled
        for kind, data in kinds.items():
            path = tmp_path / f"{number}.{kind}"
            path.write_bytes(data)
            names[path.name] = f"{name}, {kind}"
    done = python(str(LIMITED), *(str(tmp_path / file) for file in names))
    assert done.returncode == 0, done.stderr
    ends = {names[file]: said for file, said in json.loads(done.stdout).items()}
    answered = ("CheckpointError: ", "StateError: ", "[")
    assert not {name: said for name, said in ends.items() if not said.startswith(answered)}
    assert all(
        "as a key" not in name or "has a key of more than 1000 values" in said for name, said in ends.items()
    )


def test_many_ordinary_keys_are_read() -> None:
    pickled = pickle.dumps({**{f"key {n}": n for n in range(100_000)}, **dict.fromkeys(range(100000))})
    assert len(read(pickled)) == 200_000


def test_the_extension_registry_is_not_asked() -> None:
    """Python's unpickler takes a class from its extension cache without calling ``find_class``."""
    copyreg.add_extension("os", "system", 200)
    try:
        assert pickle.loads(b"\x82\xc8.") is os.system
        assert read(b"\x82\xc8.").name == "copyreg.extension_200"
    finally:
        copyreg.remove_extension("os", "system", 200)


@pytest.mark.parametrize("state", [{"__class__": 1, "made_by": 2}, ({"args": 1}, {"name": 2}), 5])
def test_building_sets_no_attribute(state: Any) -> None:
    """In Python's unpickler, BUILD would fill ``__dict__`` or call ``__setstate__``."""
    record = read(PROTO + b"cx\ny\n)R" + op(state) + b"b.")
    assert (record.name, record.args, record.state) == ("x.y", (), state)
    assert read(PROTO + op([1]) + op(state) + b"b.") == [1]
