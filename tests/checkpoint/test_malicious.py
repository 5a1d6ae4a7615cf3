"""Malicious files with a correct digest: none of their code runs, whatever the environment variables say."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint.payloads import (
    CODE,
    OTHER_TYPES,
    PROTO,
    archive,
    bomb,
    in_each_part,
    op,
    other_archives,
    seal,
    tensor,
)
from halfpeak.checkpoint import load, load_plain
from halfpeak.core.errors import CheckpointError

ENVIRONMENT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@pytest.fixture(params=[None, "1"], ids=["environment as is", "environment opened"])
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    if request.param is not None:
        monkeypatch.setenv(ENVIRONMENT, request.param)


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path for the file; asserts afterwards that the working directory holds nothing else."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "last.pt"
    assert set(os.listdir(tmp_path)) <= {"last.pt"}, "the payload ran"


def test_the_harness_makes_files_that_load(victim: Path) -> None:
    for data in in_each_part(tensor(2, (2,), (1,))):
        victim.write_bytes(seal(archive(data)))
        found = [part["x"] for part in load(victim).values() if isinstance(part["x"], torch.Tensor)]
        assert len(found) == 1
        assert torch.equal(found[0], torch.zeros(2))


def test_the_harness_makes_payloads_that_run(victim: Path, tmp_path: Path) -> None:
    data = next(in_each_part(CODE["mkdir"]))
    pickle.loads(data)
    assert (tmp_path / "MARKER").is_dir()
    (tmp_path / "MARKER").rmdir()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("value", CODE.values(), ids=CODE)
def test_code_and_lies_are_refused(victim: Path, value: bytes) -> None:
    for data in in_each_part(value):
        victim.write_bytes(seal(archive(data)))
        with pytest.raises(CheckpointError, match="is intact, but cannot be read as plain data") as caught:
            load(victim)
        assert "weights_only" not in str(caught.value), "torch's advice to turn the protection off"
        with pytest.raises(CheckpointError, match="is not a file of plain data"):
            load_plain(victim)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("value", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_only_what_save_writes_is_read(victim: Path, value: bytes) -> None:
    for data in in_each_part(value):
        victim.write_bytes(seal(archive(data)))
        with pytest.raises(CheckpointError):
            load(victim)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("payload", other_archives().values(), ids=other_archives())
def test_other_containers_are_refused(victim: Path, payload: bytes) -> None:
    victim.write_bytes(seal(payload))
    with pytest.raises(CheckpointError):
        load(victim)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", ["bare pickle", "before torch 1.6", "tar", "torchscript", "nothing"])
def test_old_formats_run_nothing(victim: Path, name: str) -> None:
    victim.write_bytes(other_archives()[name])
    with pytest.raises(CheckpointError):
        load_plain(victim)


def test_a_second_pickle_in_the_archive_is_not_run(victim: Path) -> None:
    harmless = PROTO + op({"x": 1}) + b"."
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = archive(harmless, **{"data.pkl": PROTO + CODE["system"] + b"."})
    victim.write_bytes(seal(twice))
    with pytest.raises(CheckpointError):
        load(victim)


def test_names_that_lead_outside_are_not_extracted(victim: Path) -> None:
    outside = archive(PROTO + op({"x": 1}) + b".", **{"..__..__MARKER": b"x"})
    victim.write_bytes(seal(outside))
    assert load(victim) == {"x": 1}


def test_names_that_shadow_methods_are_dropped(victim: Path) -> None:
    shadow = (
        b"ccollections\nOrderedDict\n)R"
        + op("key")
        + op(1)
        + b"s"
        + op({"items": 1, "keys": 2, "_metadata": {}})
        + b"b"
    )
    on_tensor = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n"
    arguments = tensor(2, (2,), (1,)).partition(b"_rebuild_tensor_v2\n")[2][:-1]
    on_tensor += arguments + op({"copy_": 1}) + b"tR"
    victim.write_bytes(seal(archive(PROTO + b"}" + op("a") + shadow + b"s" + op("b") + on_tensor + b"s.")))
    loaded = load(victim)
    assert list(loaded["a"].items()) == [("key", 1)]
    assert vars(loaded["a"]) == {"_metadata": {}}
    assert not vars(loaded["b"])


def test_a_bomb_of_references_stays_small(victim: Path) -> None:
    victim.write_bytes(seal(archive(PROTO + b"}" + op("x") + bomb() + b"s.")))
    assert len(load(victim)["x"]) == 10
