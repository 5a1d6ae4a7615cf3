"""``inspect``: names the library that wrote a checkpoint, its contents, and what no healthy run saves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, ModuleType
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
from halfpeak.checkpoint import convert, inspect, load, save
from halfpeak.checkpoint.inspection import ScalerReport
from halfpeak.core.errors import CheckpointError, HalfpeakError
from runner import zoo
from support.damage import flip
from support.states import same


@pytest.mark.parametrize(
    "loop", [EngineLoop, EngineO2Loop, AmpLoop, AmpO2Loop, ScalerLoop, MmengineLoop, Fp16Loop]
)
def test_a_healthy_run_of_each_library(loop: type[Loop], tmp_path: Path) -> None:
    made = loop().run(range(4))
    torch.save(made.save(), tmp_path / "a.pt")
    report = inspect(tmp_path / "a.pt")
    assert (report.form, report.level) == (
        made.form,
        getattr(loop, "level", None) if "Engine" in loop.__name__ else None,
    )
    assert [(one.scale, one.clean) for one in report.scalers] == [made.scale()]
    (model,), (optimizer,) = report.models, report.optimizers
    assert (model.tensors, model.dtypes) == (4, {"float16" if loop is Fp16Loop else "float32": 83})
    assert (optimizer.groups, optimizer.parameters, optimizer.steps) == (2, 4, 3)
    assert optimizer.size == 4 * (2 * 83 + 4)
    assert [one.tensors for one in report.masters] == [4] * (loop is Fp16Loop)
    assert (report.integrity, report.findings, report.wants) == ("checksums right", [], [])


def test_a_run_of_the_runner(tmp_path: Path) -> None:
    zoo.run(zoo.build("EpochBasedRunner", tmp_path, "fp16"))
    report = inspect(next(tmp_path.glob("iter_*.pth")))
    assert (report.form, report.scalers[0].where) == ("runner", "meta.fp16")
    assert report.iteration is not None


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
            "rest": {"meta.mmcv_version": "a str"},
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
        {"epoch": 4, "rest": {"max_accuracy": "a float", "lr_scheduler": "a dict of 1"}},
    ),
    "arguments": (
        {"model": {"w": W}, "optimizer": sgd(W), "amp": APEX, "args": argparse.Namespace(opt_level="O1")},
        "apex",
        {"wants": ["argparse.Namespace"]},
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


def fp16(*masters: torch.Tensor) -> dict[str, Any]:
    """The state of an ``FP16_Optimizer``."""
    return {"optimizer_state_dict": sgd(*masters), "fp32_from_fp16": [list(masters)], "loss_scaler": APEX}


BAD = torch.tensor([1.0, float("nan")])
HALF = {"a": W.half(), "b": W.half()}

WRONG: dict[str, tuple[Any, str]] = {
    "nan in a weight": (script(model={"w": W, "b": BAD}), "nan or inf in the weights in model: b"),
    "inf in the state": (
        script(model=HALF, optimizer=adam(exp_avg=W / 0)),
        "nan or inf in the optimizer state in optimizer: exp_avg of parameter 0, exp_avg of parameter 1",
    ),
    "nan in a master": (script(optimizer=fp16(BAD)), "nan or inf in optimizer.fp32_from_fp16: 0"),
    "scale 0": (
        script(scaler=grad_scaler(scale=0.0)),
        "the loss scale in scaler is impossible: state['scale'] is 0.0 ",
    ),
    "scale inf": (
        script(scaler=grad_scaler(scale=float("inf"))),
        "the loss scale in scaler is impossible: state['scale'] is inf ",
    ),
    "scale below one": (script(scaler=grad_scaler(scale=2**-10)), "has fallen to 0.000976562"),
    "half weights": (script(model=HALF), "the weights are low-precision, without masters"),
    "masters of another step": (
        script(model={"w": W.half()}, optimizer=fp16(W + 1)),
        "the masters in optimizer.fp32_from_fp16 do not fit the weights: master 0 of shape (8, 10) rounds to no weight",
    ),
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


def test_a_key_of_a_large_table_costs_few_calls(tmp_path: Path) -> None:
    """A file may hold a million keys. Calls inside torch, which reads it after the checks, do not count."""

    def calls_for(keys: int) -> int:
        torch.save({**script(), "table": {f"key {i}": i for i in range(keys)}}, tmp_path / "a.pt")
        calls = 0

        def count(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call" and "/torch/" not in frame.f_code.co_filename

        sys.setprofile(count)
        try:
            inspect(tmp_path / "a.pt")
        finally:
            sys.setprofile(None)
        return calls

    assert calls_for(3000) - calls_for(1000) < 2000 * 6


def test_a_window_is_reported(tmp_path: Path) -> None:
    loop = EngineLoop()
    with loop.engine.forward():
        loss = loop.model(torch.ones(2, 6)).mean()
    loop.engine.backward(loss)
    save(tmp_path / "a.pt", loop.save())
    assert "saved inside an accumulation window" in inspect(tmp_path / "a.pt").findings[0]


def test_an_engine_of_another_version_and_a_folder_of_dcp_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {**EngineLoop().save(), "version": 1})
    report = inspect(tmp_path / "a.pt")
    assert not report.readable
    assert "the state of an engine in version 1" in report.findings[0]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").touch()
    with pytest.raises(CheckpointError, match="dcp_to_torch_save"):
        inspect(tmp_path / "folder")


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for name in ("a" * 300, "a\0b", "absent"):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            inspect(tmp_path / name)
    assert not inspect(tmp_path).readable


def test_safetensors(tmp_path: Path) -> None:
    written, path = pytest.importorskip("safetensors.torch"), tmp_path / "m.safetensors"
    written.save_file({"w": W, "h": W.half(), "n": torch.tensor(3)}, path, metadata={"format": "pt"})
    report = inspect(path)
    assert (report.form, report.container) == ("weights", "a safetensors file")
    assert report.models[0].dtypes == {"float32": 80, "float16": 80, "int64": 1}
    path.write_bytes(path.read_bytes()[:-8])
    assert "SafetensorError" in inspect(path).findings[0]


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
    flip(tmp_path / "scaler.pt", 100)
    assert inspect(tmp_path).integrity == "damaged"


def test_a_folder_of_transformers_with_its_model_in_two_files(tmp_path: Path) -> None:
    torch.save({"w": W}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"v": W}, tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save(sgd(W), tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text("{}")
    report = inspect(tmp_path)
    assert report.form == "accelerate"
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
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.empty(4, 4, device="meta"),
        lambda: torch.ones((1,) * 70),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["float8", "sparse", "meta", "70 dimensions", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_unusual_tensors_are_described(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    weight = make()
    state = {"state": {0: {"step": weight, "exp_avg": weight}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = {"model": {"w": weight}, "optimizer": state, "x": [weight], "epoch": 1}
    torch.save(tree, tmp_path / "a.pt")
    report = inspect(tmp_path / "a.pt")
    assert report.form in ("recipe", "unknown")
    assert report.form == "recipe" or report.findings
    for form in ("weights", "apex"):
        with suppress(HalfpeakError):
            convert(tmp_path / "a.pt", form, tmp_path / form, drop=["all"], scale=1.0)


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
