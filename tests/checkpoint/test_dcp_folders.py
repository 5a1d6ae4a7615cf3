"""Folders of torch.distributed.checkpoint: read without unpickling, and written so that torch can read them."""

from __future__ import annotations

import argparse
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import halfpeak
from checkpoint.loops import EngineLoop, EngineO2Loop
from halfpeak.checkpoint import convert, inspect, load, save
from halfpeak.checkpoint.dcp import METADATA, read_dcp, write_dcp
from halfpeak.core.errors import CheckpointError, StateError
from support.states import differences


def content() -> dict[str, Any]:
    return {
        "model": {
            "w": torch.arange(6.0).reshape(2, 3),
            "double": torch.ones(2).double(),
            "none": torch.empty(0, 3),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "epoch": 3,
        "mixed": [1, [2, torch.ones(2)]],
        "plain": [1, (2, "x")],
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dcp(tmp_path / "run", content())
    return tmp_path / "run"


def test_what_is_read_is_what_was_saved(folder: Path) -> None:
    tree, symbols = read_dcp(folder)
    assert not differences(
        {k: v for k, v in tree.items() if k != "float8"},
        {k: v for k, v in content().items() if k != "float8"},
    )
    assert tree["float8"].float().tolist() == [1.0] * 3
    assert [name for name in symbols if not name.startswith(("torch.", "collections."))] == []
    report = inspect(folder)
    assert (report.form, report.epoch, report.wants, report.findings) == ("recipe", 3, [], [])


def edited(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of the folder."""
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "version"])
def test_nothing_in_it_runs(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    if place == "planner_data":
        edited(folder, lambda m: m.planner_data.update(extra=Runs()))
    else:
        edited(folder, lambda m: setattr(m, place, Runs()))
    assert inspect(folder).wants == ["posix.mkdir"]
    convert(folder, "weights", "weights.pt", drop=["all"])
    assert not Path("ran").exists()


def place_of(metadata: Metadata, name: str) -> Any:
    return metadata.storage_data[MetadataIndex(name, (0, 0) if name == "model.w" else None)]


def moved(metadata: Metadata, **to: Any) -> None:
    vars(place_of(metadata, "model.w")).update(to)


def doubled(metadata: Metadata) -> None:
    """Double the rows of the tensor, and give both halves the same place in the file."""
    part, entry = place_of(metadata, "model.w"), metadata.state_dict_metadata["model.w"]
    entry.size = torch.Size((4, 3))  # type: ignore[union-attr]
    metadata.storage_data[MetadataIndex("model.w", (1, 0))] = part


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a file elsewhere": (
        lambda m: moved(m, relative_path="../run/__0_0.distcp"),
        "impossible file name or offset",
    ),
    "a file that is missing": (lambda m: moved(m, relative_path="__1_0.distcp"), "cannot be opened"),
    "beyond the end": (lambda m: moved(m, offset=10**9), "cut off"),
    "before the start": (lambda m: moved(m, offset=-1), "reach beyond its end"),
    "longer than the file": (lambda m: moved(m, length=10**12), "reach beyond its end"),
    "another part": (lambda m: moved(m, offset=0), "archive is broken|not a tensor|overlap|not whole"),
    "compressed": (lambda m: moved(m, transform_descriptors=["zstd"]), "compressed"),
    "a huge tensor": (
        lambda m: vars(m.state_dict_metadata["model.w"]).update(size=torch.Size((2**40, 2**20))),
        "not whole",
    ),
    "a tensor that is no shape": (
        lambda m: vars(m.state_dict_metadata["model.w"]).update(size="large"),
        "impossible shape",
    ),
    "parts that overlap": (doubled, "overlap"),
    "a part that is missing": (
        lambda m: m.storage_data.pop(MetadataIndex("model.w", (0, 0))),
        "another number of elements",
    ),
    "a list with gaps": (lambda m: m.planner_data.update({"mixed.0": ("mixed", 10**9)}), "list with gaps"),
    "a path through a value": (
        lambda m: m.planner_data.update({"model.w": ("epoch", "w")}),
        "through a value|two values",
    ),
    "a path that is none": (lambda m: m.planner_data.update({"epoch": 7}), "impossible path"),
    "no names": (lambda m: setattr(m, "state_dict_metadata", None), "has no table of entries and files"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_folder_that_lies_is_refused(folder: Path, name: str) -> None:
    change, said = LIES[name]
    edited(folder, change)
    with pytest.raises(CheckpointError, match=said):
        read_dcp(folder)
    report = inspect(folder)
    assert report.integrity == "damaged"
    with pytest.raises(CheckpointError, match="cannot be converted"):
        convert(folder, "weights", folder.parent / "weights.pt")


@pytest.mark.parametrize(
    "key", ["9" * 5000, "07", "\N{SUPERSCRIPT TWO}"], ids=["huge", "zero", "superscript"]
)
def test_a_name_that_is_no_number_of_a_parameter_stays_a_name(folder: Path, key: str) -> None:
    edited(
        folder,
        lambda m: m.planner_data.update({"optimizer.state.0.step": ("optimizer", "state", key, "step")}),
    )
    assert list(read_dcp(folder).tree["optimizer"]["state"]) == [key]
    assert "none of its groups lists" in " ".join(inspect(folder).findings)


def test_every_flipped_bit_is_damage_or_harmless(folder: Path) -> None:
    clean = read_dcp(folder).tree
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for position in range(1, len(whole), 97):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            try:
                tree = read_dcp(folder).tree
            except CheckpointError:
                continue
            assert path.name == METADATA or not differences(
                {k: v for k, v in tree.items() if k != "float8"},
                {k: v for k, v in clean.items() if k != "float8"},
            ), position
        path.write_bytes(whole)


@pytest.mark.parametrize("loop", [EngineLoop, EngineO2Loop])
def test_a_file_becomes_a_folder_that_an_engine_goes_on_from(loop: type[EngineLoop], tmp_path: Path) -> None:
    """``convert`` finds the names of parameters by their shapes, because ``dcp.load`` reads by name."""
    run, other = loop().run(range(4)), loop()
    save(tmp_path / "a.pt", run.save())
    done = convert(tmp_path / "a.pt", "dcp", tmp_path / "folder", drop=[])
    assert (done.target, done.dropped) == ("dcp", {})
    names = [name for name, _ in other.model.named_parameters()]
    weights = read_dcp(tmp_path / "folder").tree["engine"]["models"][0]
    assert list(weights) == names
    other.run(range(1))  # dcp.load reads into existing moments
    state = other.engine.state_dict()
    of_groups = [names[i] for i in (1, 3, 0, 2)]
    rows = state["optimizers"][0]["state"]
    state["optimizers"][0]["state"] = {of_groups[i]: row for i, row in rows.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"engine": state}, checkpoint_id=tmp_path / "folder", no_dist=True)
    rows = state["optimizers"][0]["state"]
    state["optimizers"][0]["state"] = {i: rows[name] for i, name in enumerate(of_groups)}
    state["optimizers"][0]["param_groups"] = run.optimizer.state_dict()["param_groups"]
    other.engine.load_state_dict(state)
    assert not differences(other.run(range(4, 9)).end(), run.run(range(4, 9)).end())


def test_names_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    """With equal shapes in two groups, the names depend on how user code made the groups."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": [part.weight, part.bias]} for part in model]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(tmp_path / "a.pt", state)
    with pytest.raises(StateError, match=r"unclear which weight each number is.*dcp.save"):
        convert(tmp_path / "a.pt", "dcp", tmp_path / "folder", scale=1.0)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_names_become_numbers_for_others(tmp_path: Path) -> None:
    optimizer = {"state": {"b": {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": ["a", "b"]}]}
    save(tmp_path / "a.pt", {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "optimizer": optimizer})
    convert(tmp_path / "a.pt", "grad_scaler", tmp_path / "b.pt", scale=1.0)
    written = load(tmp_path / "b.pt")["optimizer"]
    assert (list(written["state"]), written["param_groups"][0]["params"]) == ([1], [0, 1])


def test_an_optimizer_without_state_is_one(tmp_path: Path) -> None:
    """DCP leaves out empty dicts, such as the state of SGD without momentum and the losses of an empty window."""
    model = torch.nn.Linear(3, 2)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2")
    write_dcp(tmp_path / "run", {"engine": engine.state_dict()})
    convert(tmp_path / "run", "engine", tmp_path / "a.pt")
    engine.load_state_dict(load(tmp_path / "a.pt"))


def test_a_window_becomes_a_window(tmp_path: Path) -> None:
    """DCP turns the numbers of parameters and losses into text."""
    loop = EngineLoop()
    loop.run(range(2))
    with loop.engine.forward():
        loss = loop.model(torch.ones(2, 6)).mean()
    loop.engine.backward(loss)
    write_dcp(tmp_path / "run", {"engine": loop.save()})
    convert(tmp_path / "run", "engine", tmp_path / "a.pt")
    assert not differences(load(tmp_path / "a.pt")["window"], loop.save()["window"])
    loop.engine.load_state_dict(load(tmp_path / "a.pt"))
    assert loop.engine.is_open
    convert(tmp_path / "run", "dcp", tmp_path / "again", drop=["window"])
    convert(tmp_path / "again", "engine", tmp_path / "b.pt")
    loop.engine.load_state_dict(load(tmp_path / "b.pt"))
    assert not loop.engine.is_open


@pytest.mark.parametrize(("momentum", "size"), [(0.9, 3), (0.0, 4)])
def test_parameters_of_groups_in_another_order_are_not_named(
    momentum: float, size: int, tmp_path: Path
) -> None:
    """Without moments, or with weights of one shape, the order of the model would name them wrongly."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, size, bias=False))
    groups = [{"params": layer.parameters()} for layer in reversed(model)]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "a.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(StateError, match=r"it is unclear which weight each number is"):
        convert(tmp_path / "a.pt", "dcp", tmp_path / "b", scale=8.0)


def test_names_stay_names(tmp_path: Path) -> None:
    """Two groups with parameters of one shape, which numbers could not be told from."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    groups = [{"lr": 0.1, "params": ["1.weight"]}, {"lr": 0.2, "params": ["0.weight"]}]
    write_dcp(
        tmp_path / "run", {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": groups}}
    )
    convert(tmp_path / "run", "dcp", tmp_path / "again", scale=8.0)
    assert read_dcp(tmp_path / "again").tree["engine"]["optimizers"][0]["param_groups"] == groups


def test_objects_in_the_parts_are_reported(tmp_path: Path) -> None:
    write_dcp(tmp_path / "run", {**content(), "args": argparse.Namespace(lr=0.1)})
    assert inspect(tmp_path / "run").wants == ["argparse.Namespace"]
