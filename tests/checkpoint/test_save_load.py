"""``save`` and ``load``: values round-trip, and ``save`` refuses what cannot before it touches a file."""

from __future__ import annotations

import enum
import os
import stat
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfpeak.checkpoint import inspect, load, previous_path, save, verify
from halfpeak.checkpoint.plain import MAX_DEPTH
from halfpeak.core.errors import CheckpointError, ConfigTypeError
from support.states import identical

Pair = namedtuple("Pair", "left right")
Colour = enum.IntEnum("Colour", "RED GREEN")


class Tagged(torch.Tensor):
    pass


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_round_trip(tmp_path: Path) -> None:
    state = {
        "tensors": [torch.randn(3, 4).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)],
        "ints": [0, -1, 2**40, -(2**1999)],
        "odd": (torch.empty(0), torch.tensor(3.5), torch.eye(4)[:, 1], torch.arange(6).view(2, 3).t()),
        "plain": OrderedDict(b=None, a=True, c=1e-300, d="ü\n\0", e=b"\xff\x00", f=float("inf")),
        3: (),
        None: {True: [], 2.5: {}, b"k": ""},
        "complex": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse().coalesce(),
        "nested": {"a": [{"b": ({"c": [torch.arange(3)]},)}]},
    }
    path = tmp_path / "last.pt"
    save(path, state)
    loaded = load(path)
    sparse = loaded.pop("sparse")
    assert torch.equal(sparse.to_dense(), state.pop("sparse").to_dense())
    assert identical(loaded, state)
    assert names(tmp_path) == {"last.pt"}


def test_shared_storage_stays_shared(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    same_list = [1]
    save(tmp_path / "a", {"head": flat[:4], "tail": flat[4:], "one": same_list, "two": same_list})
    loaded = load(tmp_path / "a")
    assert loaded["head"].untyped_storage().data_ptr() == loaded["tail"].untyped_storage().data_ptr()
    assert torch.equal(loaded["tail"], flat[4:])
    assert loaded["one"] is loaded["two"]


def test_state_dicts_of_torch_come_back_with_their_versions(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "a", {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()})
    loaded = load(tmp_path / "a")
    assert loaded["model"]._metadata == model.state_dict()._metadata
    assert identical(loaded["optimizer"], optimizer.state_dict())
    weight = loaded["model"]["0.weight"]
    assert type(weight) is torch.Tensor
    assert not weight.requires_grad
    assert torch.equal(weight, model[0].weight)


def test_attributes_and_graphs_stay_behind(tmp_path: Path) -> None:
    tagged = torch.ones(2)
    tagged.note = object()  # type: ignore[attr-defined]
    graph = torch.ones(2, requires_grad=True) * 2
    save(tmp_path / "a", {"tagged": tagged, "graph": graph})
    loaded = load(tmp_path / "a")
    assert not vars(loaded["tagged"])
    assert torch.equal(loaded["graph"], graph)


def nest(levels: int) -> Any:
    inner: Any = 1
    for _ in range(levels):
        inner = [inner]
    return inner


def loop() -> list[Any]:
    items: list[Any] = [1]
    items.append({"again": items})
    return items


REFUSED = {
    "function": print,
    "NumPy scalar": np.float64(0.1),
    "object": object(),
    "set": {1},
    "complex": 1j,
    "empty bytes": b"",
    "long int": 2**2001,
    "namedtuple": Pair(1, 2),
    "enum": Colour.RED,
    "subclass": torch.ones(1).as_subclass(Tagged),
    "meta": torch.empty(1, device="meta"),
    "module": nn.Linear(1, 1),
    "tuple key": {(1, 2): 3},
    "loop": loop(),
    "deep": nest(MAX_DEPTH + 1),
    "very deep": nest(20_000),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_refused_before_a_file_is_touched(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "last.pt"
    save(path, {"step": 1})
    before = path.stat()
    with pytest.raises(CheckpointError, match=r"state\['model'\]\[0\]\['x'\]"):
        save(path, {"model": [{"x": value}]})
    assert path.stat() == before
    assert names(tmp_path) == {"last.pt"}


def test_everything_that_is_accepted_can_be_read(tmp_path: Path) -> None:
    save(tmp_path / "a", {"deep": nest(MAX_DEPTH - 1), "int": 2**2000 - 1, "": -(2**2000) + 1})
    assert load(tmp_path / "a")["deep"] == nest(MAX_DEPTH - 1)


@pytest.mark.parametrize("state", [None, [1], torch.ones(1), 3])
def test_state_is_a_dict(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"save\(path, \{'name': value\}\)"):
        save(tmp_path / "a", state)


@pytest.mark.parametrize("path", [3, None, b"bytes"])
def test_path_of_another_type(path: Any) -> None:
    for call in (lambda: save(path, {}), lambda: load(path), lambda: verify(path)):
        with pytest.raises(ConfigTypeError):
            call()


def test_bad_places(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    bad = [
        tmp_path / "directory",
        tmp_path / "pipe",
        tmp_path / "none" / "a",
        tmp_path / "nul\0",
        tmp_path / ("x" * 300),
    ]
    for path in [*bad, Path("/"), Path("."), tmp_path / "..", Path("/dev/null")]:
        with pytest.raises(CheckpointError):
            save(path, {"a": 1})
        with pytest.raises(CheckpointError):
            load(path)
    assert names(tmp_path) == {"directory", "pipe"}


def test_previous_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    for step in range(4):
        save(path, {"step": step})
    assert load(path) == {"step": 3}
    assert load(previous_path(path)) == {"step": 2}
    save(path, {"step": 4}, keep_previous=False)
    assert load(path) == {"step": 4}
    assert load(previous_path(path)) == {"step": 2}
    assert names(tmp_path) == {"last.pt", "last.pt.previous"}


def test_previous_is_not_displaced_by_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save(path, {"step": 1})
    save(path, {"step": 2})
    path.write_bytes(path.read_bytes()[:-1])
    save(path, {"step": 3})
    assert load(path) == {"step": 3}
    assert load(previous_path(path)) == {"step": 1}


def test_a_foreign_file_in_the_way_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({"theirs": 1}, path)
    save(path, {"ours": 1})
    assert load(previous_path(path)) == {"theirs": 1}


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save(tmp_path / "a", {})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_symbolic_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    path = tmp_path / "last.pt"
    path.symlink_to("elsewhere")
    save(path, {"step": 1})
    assert not path.is_symlink()
    assert load(path) == {"step": 1}
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert previous_path(path).is_symlink()


def test_a_link_to_a_pipe_is_replaced_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "last.pt"
    save(previous_path(path), {"step": 1})
    path.symlink_to("pipe")
    with pytest.warns(RuntimeWarning, match="is read instead"):
        assert load(path, fall_back=True) == {"step": 1}
    save(path, {"step": 2})
    assert load(path) == {"step": 2}
    assert load(previous_path(path)) == {"step": 1}


def test_a_program_without_halfpeak_reads_the_file(tmp_path: Path) -> None:
    state = {"x": torch.randn(1000), "y": [1, (2, "three")]}
    save(tmp_path / "a", state)
    assert identical(torch.load(tmp_path / "a", weights_only=True), state)


def test_map_location(tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": torch.ones(2)})
    assert load(tmp_path / "a", map_location=None)["x"].device.type == "cpu"
    with pytest.raises(CheckpointError, match="is not a file of plain data: RuntimeError"):
        load(tmp_path / "a", map_location="nowhere")


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with pytest.raises(CheckpointError, match="cannot be opened") as caught:
        load(path, fall_back=True)
    assert isinstance(caught.value, FileNotFoundError)
    for reader in (verify, inspect):
        with pytest.raises(FileNotFoundError):
            reader(path)
    save(path, {"step": 1})
    path.rename(previous_path(path))
    with pytest.raises(FileNotFoundError, match="is intact: load that, or write fall_back=True"):
        load(path)
    with pytest.warns(RuntimeWarning, match="is read instead"):
        assert load(path, fall_back=True) == {"step": 1}


def test_verify_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", {"x": 1})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", fail)
    verify(tmp_path / "a")
    with pytest.raises(CheckpointError):
        verify(tmp_path / "b")


def test_only_our_stale_files_are_removed(tmp_path: Path) -> None:
    ours, living = (tmp_path / f".{name}.pt.{'0a' * 8}.halfpeak-tmp" for name in ("gone", "living"))
    keep = [".last.pt.tmp", "last.pt.halfpeak-tmp", ".x.0123.halfpeak-tmp", f".x.{'0A' * 8}.halfpeak-tmp"]
    for path in (ours, living, *(tmp_path / name for name in keep)):
        path.touch()
        os.utime(path, (0, 0) if path != living else None)
    save(tmp_path / "last.pt", {})
    assert names(tmp_path) == {*keep, living.name, "last.pt"}
