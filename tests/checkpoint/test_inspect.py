"""``inspect``: names the library that wrote a checkpoint, its contents, and each known defect."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.loops import (
    AmpLoop,
    AmpO2Loop,
    EngineLoop,
    EngineO2Loop,
    Fp16Loop,
    Loop,
    MmengineLoop,
    ScalerLoop,
)
from checkpoint.payloads import archive
from halfpeak.checkpoint import Report, convert, inspect, load, save, trailer
from halfpeak.checkpoint.formats import FORMS
from halfpeak.checkpoint.inspection import ScalerReport
from halfpeak.core.errors import CheckpointError, HalfpeakError
from runner import zoo
from support.damage import flip
from support.states import same


@pytest.mark.parametrize(
    ("loop", "level"),
    [
        (EngineLoop, "O0, as the file says"),
        (EngineO2Loop, "O2, as the file says"),
        (AmpLoop, "not named; float32 weights and a loss scale, as of O1, or O2 with exact masters"),
        (AmpO2Loop, "not named; float32 weights and a loss scale, as of O1, or O2 with exact masters"),
        (ScalerLoop, "not named; float32 weights and torch's loss scale, as of torch.autocast in float16"),
        (MmengineLoop, "not named; float32 weights and torch's loss scale, as of torch.autocast in float16"),
        (Fp16Loop, "not named; float16 weights, as of O2 or O3 with masters"),
    ],
)
def test_a_healthy_run_of_each_library(loop: type[Loop], level: str, tmp_path: Path) -> None:
    made = loop().run(range(4))
    torch.save(made.save(), tmp_path / "a.pt")
    report = inspect(tmp_path / "a.pt")
    assert (report.form, report.level) == (made.form, level)
    assert [(one.scale, one.clean) for one in report.scalers] == [made.scale()]
    (model,), (optimizer,) = report.models, report.optimizers
    assert (model.tensors, model.elements) == (4, 83)
    assert (optimizer.kind, optimizer.groups, optimizer.parameters, optimizer.steps) == ("Adam", 2, 4, 3)
    assert optimizer.size == 4 * (2 * 83 + 4)
    assert report.integrity == "zip checksums right"
    assert not report.findings
    assert not report.wants
    if loop is Fp16Loop:
        assert report.masters[0].match == "4 fit the weights, bit for bit after rounding"
        assert model.dtypes == {"float16": 83}


def test_a_run_of_the_runner(tmp_path: Path) -> None:
    zoo.run(zoo.build("EpochBasedRunner", tmp_path, "fp16"))
    report = inspect(next(tmp_path.glob("iter_*.pth")))
    assert report.form == "runner"
    assert report.iteration is not None
    assert report.scalers[0].where == "meta.fp16"
    assert report.integrity == "digest right"


def grad_scaler(**changes: Any) -> dict[str, Any]:
    return {**torch.amp.GradScaler("cpu").state_dict(), **changes}


def sgd(*parameters: torch.Tensor) -> dict[str, Any]:
    return torch.optim.SGD([nn.Parameter(one) for one in parameters], lr=0.1).state_dict()


W = torch.linspace(0.1, 1, 80).reshape(8, 10)
APEX = {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 5}}

FOREIGN: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "Lightning 2": (
        {
            "pytorch-lightning_version": "2.6.6",
            "epoch": 2,
            "global_step": 9,
            "state_dict": {"net.w": W},
            "optimizer_states": [sgd(W), sgd(W)],
            "lr_schedulers": [],
            "MixedPrecision": grad_scaler(scale=4.0),
            "callbacks": {"EMA": {"net.w": W}},
            "hyper_parameters": {"class_weights": W},
        },
        "lightning",
        {
            "epoch": 2,
            "iteration": 9,
            "rest": {"callbacks": "a dict of 1", "hyper_parameters": "a dict of 1"},
        },
    ),
    "Lightning 1 with apex": (
        {"pytorch-lightning_version": "1.5.0", "state_dict": {"w": W}, "amp_scaling_state": APEX, "epoch": 1},
        "lightning",
        {"epoch": 1},
    ),
    "mmcv": (
        {
            "meta": {"epoch": 3, "iter": 30, "mmcv_version": "1.7.2", "fp16": {"loss_scaler": grad_scaler()}},
            "state_dict": {"w": W},
            "optimizer": sgd(W),
        },
        "mmcv",
        {"epoch": 3, "iteration": 30, "made_by": "a run of mmcv 1.x, version 1.7.2"},
    ),
    "Swin's detection": (
        {
            "meta": {"epoch": 3, "iter": 30, "mmcv_version": "1.2"},
            "state_dict": {"w": W},
            "optimizer": sgd(W),
            "amp": APEX,
        },
        "mmcv",
        {
            "scalers": [ScalerReport(where="amp", kind="apex", scale=64.0, clean=5)],
            "rest": {"meta.mmcv_version": "a str of length 3"},
        },
    ),
    "mmengine with apex": (
        {"meta": {"epoch": 3, "iter": 30}, "state_dict": {"w": W}, "optimizer": {**sgd(W), "apex_amp": APEX}},
        "mmengine_apex",
        {},
    ),
    "Swin": (
        {
            "model": {"w": W},
            "optimizer": sgd(W),
            "amp": APEX,
            "epoch": 4,
            "max_accuracy": 80.5,
            "lr_scheduler": {"t": 1},
        },
        "apex",
        {"epoch": 4, "rest": {"max_accuracy": "the number 80.5", "lr_scheduler": "a dict of 1"}},
    ),
    "DeepLearningExamples": (
        {"model": {"w": W.half()}, "optimizer": sgd(W), "master params": [W], "amp": APEX},
        "apex",
        {},
    ),
    "arguments": (
        {"model": {"w": W}, "optimizer": sgd(W), "amp": APEX, "args": argparse.Namespace(opt_level="O1")},
        "apex",
        {"level": "O1, as the file says", "wants": ["argparse.Namespace"]},
    ),
    "plain torch": ({"state_dict": {"w": W}, "optimizer": sgd(W), "epoch": 7}, "recipe", {"epoch": 7}),
    "generators and averages": (
        {"model": {"w": W}, "rng_state": {"cpu": torch.get_rng_state()}, "model_ema": {"w": W}},
        "recipe",
        {"rest": {"rng_state": "a dict of 1", "model_ema": "a dict of 1"}},
    ),
    "weights": ({"w": W, "b": torch.ones(3)}, "weights", {}),
    "an optimizer": (sgd(W), "optimizer", {}),
    "a scaler": (grad_scaler(), "scaler", {}),
    "a list": ([1, 2], "unknown", {"rest": {"(the file)": "a list of 2"}}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_forms_of_others(name: str, tmp_path: Path) -> None:
    tree, form, told = FOREIGN[name]
    torch.save(tree, tmp_path / "a.pt")
    report = inspect(tmp_path / "a.pt")
    assert report.form == form
    assert {key: getattr(report, key) for key in told} == told
    assert json.loads(json.dumps(asdict(report)))["form"] == form


def script(**changes: Any) -> dict[str, Any]:
    state = {"model": {"w": W.clone()}, "optimizer": sgd(W), "scaler": grad_scaler(), "epoch": 1}
    return {key: value for key, value in {**state, **changes}.items() if value is not None}


def adam(steps: tuple[float, ...] = (3.0, 3.0), **state: torch.Tensor) -> dict[str, Any]:
    parameters = [nn.Parameter(W.clone()) for _ in steps]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter, step in zip(parameters, steps, strict=True):
        optimizer.state[parameter] = {"step": torch.tensor(step), "exp_avg": W, "exp_avg_sq": W, **state}
    return optimizer.state_dict()


BAD = torch.tensor([1.0, float("nan")])
HALF = {"a": W.half(), "b": W.half()}

WRONG: dict[str, tuple[Any, str]] = {
    "nan in a weight": (script(model={"w": W, "b": BAD}), "nan or inf in the weights in model: b"),
    "inf in the state": (
        script(model=HALF, optimizer=adam(exp_avg=W / 0)),
        "nan or inf in the optimizer state in optimizer: exp_avg of parameter 0, exp_avg of parameter 1",
    ),
    "nan in a master": (script(master_params=[BAD]), "nan or inf in master_params: master 0"),
    "scale 0": (script(scaler=grad_scaler(scale=0.0)), "the loss scale in scaler is impossible: scale=0.0"),
    "scale inf": (
        script(scaler=grad_scaler(scale=float("inf"))),
        "the loss scale in scaler is impossible: scale=inf",
    ),
    "scale below one": (script(scaler=grad_scaler(scale=2**-10)), "has fallen to 0.000976562"),
    "claims O2, holds half": (
        script(opt_level="O2", model=HALF, args={"opt_level": "O2"}),
        "the file says O2, but the weights in model are float16 and there are no masters",
    ),
    "half weights": (script(model=HALF), "the weights in model are float16 without masters"),
    "widened half weights": (
        script(model={"w": W.half().float()}),
        "the float32 weights in model are all float16 numbers: they were widened",
    ),
    "widened bfloat16 weights": (script(model={"w": W.bfloat16().float()}), "are all bfloat16 numbers"),
    "masters of another step": (
        script(model={"w": W.half()}, master_params=[W + 1]),
        "the masters in master_params do not fit the weights: master 0 of shape (8, 10) rounds to none",
    ),
    "masters without weights": (script(model=None, master_params=[W]), "and no weights to match them with"),
    "no optimizer": (script(optimizer=None), "there is no optimizer state in it"),
    "no weights": (script(model=None), "there are no weights in it"),
    "no scaler at O1": (
        script(scaler=None, args={"opt_level": "O1"}),
        "the file says O1, and there is no loss scale in it",
    ),
    "too many parameters": (
        script(optimizer=sgd(W, W)),
        "list 2 parameters, and the weights have 1 floating-point tensors",
    ),
    "state of strangers": (
        script(optimizer={"state": {5: {}}, "param_groups": [{"lr": 0.1, "params": [0]}]}),
        "has state for parameters that none of its groups lists: [5]",
    ),
    "a parameter twice": (
        script(
            optimizer={"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [0]}]}
        ),
        "lists a parameter twice",
    ),
    "steps apart": (script(model=HALF, optimizer=adam((3.0, 9.0))), "have stepped between 3 and 9 times"),
    "steps below zero": (script(model=HALF, optimizer=adam((-1.0,))), "an impossible number of steps"),
    "state of another shape": (
        script(model=HALF, optimizer=adam(exp_avg=torch.ones(2, 2))),
        "2 tensors of the optimizer state in optimizer have the shape of no weight",
    ),
    "half moments": (
        script(model=HALF, optimizer=adam(exp_avg=W.half())),
        "the optimizer state in optimizer is float16",
    ),
    "an epoch below zero": (script(epoch=-1), "the counter epoch is -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    tree, words = WRONG[name]
    torch.save(tree, tmp_path / "a.pt")
    found = inspect(tmp_path / "a.pt").findings
    assert any(words in finding for finding in found), found


def test_a_healthy_script_has_no_findings(tmp_path: Path) -> None:
    for tree in (
        script(),
        script(model={"a": W, "b": W}, optimizer=adam()),
        script(model={"n": torch.ones(9, 9)}),
    ):
        torch.save(tree, tmp_path / "a.pt")
        assert inspect(tmp_path / "a.pt").findings == []


def test_mmcv_is_one_iteration_short(tmp_path: Path) -> None:
    tree = FOREIGN["mmcv"][0]
    torch.save(tree, tmp_path / "iter_31.pth")
    assert "one less than its name" in inspect(tmp_path / "iter_31.pth").findings[0]


def test_a_window_is_reported(tmp_path: Path) -> None:
    loop = EngineLoop()
    with loop.engine.forward():
        loss = loop.model(torch.ones(2, 6)).mean()
    loop.engine.backward(loss)
    save(tmp_path / "a.pt", loop.save())
    assert "saved inside an accumulation window" in inspect(tmp_path / "a.pt").findings[0]


@pytest.mark.parametrize("kind", ["halfpeak", "zip"])
def test_every_flipped_bit_is_damage_or_harmless(kind: str, tmp_path: Path) -> None:
    """zip checksums cover neither names nor padding; a flip in anything that they cover must be found."""
    path = tmp_path / "a.pt"
    torch.save(script(), path) if kind == "zip" else save(path, script())
    whole, clean = path.read_bytes(), asdict(inspect(path))
    for position in range(3, len(whole), 29):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        report = inspect(path)
        told = "damaged" in report.integrity or report.findings
        assert told or (kind == "zip" and asdict(report) == clean), position


def test_objects_in_a_file_of_the_older_format(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({**script(), "args": argparse.Namespace(lr=0.1)}, path, _use_new_zipfile_serialization=False)
    report = inspect(path)
    assert (report.readable, report.wants) == (True, ["argparse.Namespace"])


def test_a_cut_file_and_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(script(), path)
    whole = path.read_bytes()
    for length in (0, 1, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        report = inspect(path)
        assert report.findings
        assert report.form == "unknown"
    with pytest.raises(CheckpointError, match="cannot be opened"):
        inspect(tmp_path / "absent.pt")


def test_a_name_does_not_make_a_file_damaged(tmp_path: Path) -> None:
    """``inspect`` must not search the error for words, because it contains the path. Another version is no damage."""
    path = tmp_path / "this is damaged.pt"
    save(path, script())
    data = bytearray(path.read_bytes())
    data[-trailer.SIZE + len(trailer.MAGIC)] = 7
    path.write_bytes(data)
    report = inspect(path)
    assert ("damaged" in report.integrity, report.readable) == (False, False)
    assert "format version" in report.findings[0]


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for name in ("a" * 300, "a\0b", "absent"):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            inspect(tmp_path / name)


def test_other_containers_are_told_apart(tmp_path: Path) -> None:
    def container(data: bytes) -> Report:
        (tmp_path / "a").write_bytes(data)
        return inspect(tmp_path / "a")

    assert container(b"\x89HDF\r\n\x1a\n" + bytes(40)).container == "an HDF5 file"
    assert container(b"hello").container == "a file of an unknown kind"
    assert container(bytes(257) + b"ustar" + bytes(300)).container.startswith("a tar archive")
    assert (
        container(archive(b"\x80\x02}.", **{"constants.pkl": b"\x80\x02)."})).container
        == "a TorchScript archive"
    )


def test_safetensors(tmp_path: Path) -> None:
    written = pytest.importorskip("safetensors.torch")
    tensors = {
        "w": W,
        "h": W.half(),
        "b": W.bfloat16(),
        "n": torch.tensor(3),
        "e": torch.empty(0, 4),
        "t": torch.tensor([True]),
    }
    written.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    report = inspect(tmp_path / "m.safetensors")
    assert report.form == "weights"
    assert report.models[0].dtypes == {"float32": 80, "float16": 80, "bfloat16": 80, "int64": 1, "bool": 1}
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert "offsets that do not fit its shape and dtype" in inspect(tmp_path / "m.safetensors").findings[0]


def test_a_folder_of_accelerate(tmp_path: Path) -> None:
    for name, state in {
        "pytorch_model.bin": {"w": W},
        "optimizer.bin": sgd(W),
        "scaler.pt": grad_scaler(),
    }.items():
        torch.save(state, tmp_path / name)
    torch.save({"step": 3}, tmp_path / "random_states_0.pkl")
    (tmp_path / "readme.txt").write_text("not a checkpoint")
    report = inspect(tmp_path)
    assert (report.form, report.scalers[0].scale, report.findings) == ("accelerate", 65536.0, [])
    assert report.rest == {"random_states_0.pkl": "a dict of 1"}
    flip(tmp_path / "scaler.pt", 200)
    assert inspect(tmp_path).integrity == "damaged: scaler.pt"


def test_a_folder_of_transformers_with_its_model_in_two_files(tmp_path: Path) -> None:
    torch.save({"w": W}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"v": W}, tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save(sgd(W), tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text("{}")
    report = inspect(tmp_path)
    assert (report.form, report.optimizers[0].kind) == ("accelerate", "SGD")
    assert [(model.where, model.tensors) for model in report.models] == [("pytorch_model", 2)]
    torch.save([1], tmp_path / "pytorch_model-00002-of-00002.bin")
    assert inspect(tmp_path).rest == {"pytorch_model-00002-of-00002.bin": "a list of 1"}


def test_the_folder_of_a_run_stands_for_its_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": {"w": W}, "optimizer": sgd(W)}, tmp_path / "checkpoint.pt")
    torch.save({}, tmp_path / "other.pt")
    assert inspect(tmp_path).path == str(tmp_path / "checkpoint.pt")
    assert inspect(tmp_path).form == "recipe"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 4).to(torch.float8_e4m3fn),
        lambda: torch.ones(4, 4).to(torch.float8_e5m2),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.empty(4, 4, device="meta"),
        lambda: torch.empty(0, 2**40),
        lambda: torch.ones((1,) * 70),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["float8 e4m3", "float8 e5m2", "sparse", "CSR", "meta", "empty and huge", "70 dimensions", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_unusual_tensors_are_described(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    weight = make()
    state = {"state": {0: {"step": weight, "exp_avg": weight}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = {"model": {"w": weight}, "optimizer": state, "master_params": [weight], "x": [weight], "epoch": 1}
    torch.save(tree, tmp_path / "a.pt")
    report = inspect(tmp_path / "a.pt")
    assert report.form in ("recipe", "unknown")
    assert report.form == "recipe" or report.findings
    for form in ("weights", "apex"):
        with suppress(HalfpeakError):
            convert(tmp_path / "a.pt", form, tmp_path / form, drop=["all"], scale=1.0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}, "an impossible shape or offset"),
        ({"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}, "an impossible shape or offset"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "an impossible shape or offset"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}, "an impossible shape or offset"),
        ({"dtype": "F32", "shape": [0, 2**80], "data_offsets": [0, 0]}, "an impossible shape or offset"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "is broken"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "overlap"),
        (3, "is broken"),
    ],
)
def test_a_safetensors_header_is_checked(entry: Any, words: str, tmp_path: Path) -> None:
    header = json.dumps({"a": entry, "b": entry}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert words in inspect(tmp_path / "m.safetensors").findings[0]


def test_every_form_has_a_name() -> None:
    assert {form for _, form, _ in FOREIGN.values()} <= FORMS.keys()


def test_a_scaler_that_apex_pickled_as_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """apex's ``FP16_Optimizer`` pickled the scaler object in its state; ``inspect`` reads the numbers in it."""
    module = ModuleType("apex.amp.scaler")
    kind = type("LossScaler", (), {"__module__": "apex.amp.scaler"})
    setattr(module, "LossScaler", kind)  # noqa: B010
    made = Fp16Loop().run(range(4))
    state = made.save()
    state["optimizer"]["loss_scaler"] = scaler = kind()
    vars(scaler).update(
        _loss_scale=512.0, _unskipped=3, dynamic=True, _overflow_buf=torch.zeros(1, dtype=torch.int32)
    )
    with monkeypatch.context() as patch:
        for name in ("apex", "apex.amp"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "apex.amp.scaler", module)
        torch.save(state, tmp_path / "a.pt")
    report = inspect(tmp_path / "a.pt")
    assert (report.form, report.wants) == ("fp16_optimizer", ["apex.amp.scaler.LossScaler"])
    assert [(one.scale, one.clean) for one in report.scalers] == [(512.0, 3)]
    convert(tmp_path / "a.pt", "engine", tmp_path / "e.pt", drop=["epoch"], level="O2")
    engine = EngineO2Loop()
    engine.load(load(tmp_path / "e.pt"))
    assert engine.scale() == (512.0, 3)
    masters = [master for group in state["optimizer"]["fp32_from_fp16"] for master in group]
    held = [p.detach() for group in engine.optimizer.param_groups for p in group["params"]]
    assert same(held, masters)


@pytest.mark.timeout(60)
def test_the_time_is_proportional_to_the_number_of_parameters(tmp_path: Path) -> None:
    """With a set of all parameters made for each of them, this takes minutes."""
    groups = [{"lr": 0.1, "params": list(range(100_000))}]
    torch.save({"state": {i: {} for i in range(100_000)}, "param_groups": groups}, tmp_path / "a.pt")
    assert inspect(tmp_path / "a.pt").optimizers[0].parameters == 100_000
