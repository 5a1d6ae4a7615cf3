"""``convert``: a run continues in another library as in its own, and nothing is dropped without ``drop=``."""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import halfpeak
from checkpoint.loops import (
    AmpLoop,
    AmpO2Loop,
    EngineLoop,
    EngineO2Loop,
    Fp16Loop,
    Loop,
    MmengineLoop,
    ScalerLoop,
    make_model,
    make_optimizer,
)
from halfpeak.amp.optimizers import FusedAdam
from halfpeak.checkpoint import convert, load, save
from halfpeak.checkpoint.formats import TARGETS
from halfpeak.checkpoint.match_params import match_params
from halfpeak.checkpoint.parts import FORMS
from halfpeak.core.errors import CheckpointError, ConfigError, HalfpeakError, StateError
from halfpeak.core.state_checks import ENGINE_VERSION
from runner import zoo
from support.damage import flip
from support.states import differences

FLOAT32 = (EngineLoop, AmpLoop, ScalerLoop, MmengineLoop)
O2 = (EngineO2Loop, AmpO2Loop)
AMP = AmpLoop().save()
ENGINE = EngineLoop().save()


def saved(loop: Loop, path: Path, steps: int = 4) -> Path:
    torch.save(loop.run(range(steps)).save(), path)
    return path


def open_window() -> dict[str, Any]:
    """The state of an engine inside an accumulation window."""
    loop = EngineLoop()
    with loop.engine.forward():
        loss = loop.model(torch.ones(2, 6)).mean()
    loop.engine.backward(loss)
    return loop.save()


@pytest.mark.parametrize("after", FLOAT32)
@pytest.mark.parametrize("before", FLOAT32)
def test_a_run_in_float32_changes_library(before: type[Loop], after: type[Loop], tmp_path: Path) -> None:
    loop = before()
    source = saved(loop, tmp_path / "a.pt")
    convert(source, after.form, tmp_path / "b.pt", drop=["all"])
    whole = loop.run(range(4, 9)).end()
    assert whole["scale"] == (64.0, 1), "two overflows, the last in step 7"
    other = after()
    other.load(load(tmp_path / "b.pt"))
    assert not differences(other.run(range(4, 9)).end(), whole)


@pytest.mark.parametrize("after", O2)
@pytest.mark.parametrize("before", [*O2, Fp16Loop])
def test_a_run_with_masters_changes_library(before: type[Loop], after: type[Loop], tmp_path: Path) -> None:
    loop = before()
    source = saved(loop, tmp_path / "a.pt")
    drop = ["epoch"] if (before, after.form) == (Fp16Loop, "engine") else []
    convert(source, after.form, tmp_path / "b.pt", drop=drop)
    whole = loop.run(range(4, 9)).end()
    other = after()
    other.load(load(tmp_path / "b.pt"))
    end = other.run(range(4, 9)).end()
    if before is Fp16Loop:
        end = {name: v.half().float() if isinstance(v, Tensor) else v for name, v in end.items()}
    assert not differences(end, whole)


@pytest.mark.parametrize("form", [form for form in TARGETS if form != "weights"])
@pytest.mark.parametrize("loop", [EngineLoop, EngineO2Loop])
def test_an_engine_survives_every_form(loop: type[EngineLoop], form: str, tmp_path: Path) -> None:
    """Other libraries keep neither the level nor the number of skipped steps."""
    source = saved(loop(), tmp_path / "a.pt")
    convert(source, form, tmp_path / "there")
    drop = [] if form in ("engine", "apex", "grad_scaler", "accelerate") else ["iter"]
    drop = ["global_step"] if form == "lightning" else drop
    convert(tmp_path / "there", "engine", tmp_path / "back.pt", drop=drop, level=loop.level)
    there, back = load(source), load(tmp_path / "back.pt")
    if form != "engine":
        assert back.pop("counters")["num_steps"] == there.pop("counters")["num_steps"]
    assert not differences(there, back)
    loop().load(load(tmp_path / "back.pt"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_dcp_goes_through_a_file(tmp_path: Path) -> None:
    """DCP leaves empty dicts out, as of masters and windows."""
    state = EngineO2Loop().run(range(4)).save()
    dcp.save({"engine": state}, checkpoint_id=tmp_path / "folder", no_dist=True)
    with pytest.raises(CheckpointError, match=r"torch runs what its .metadata says; .*dcp_to_torch_save"):
        convert(tmp_path / "folder", "weights", tmp_path / "w.pt")
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "all.pt")
    convert(tmp_path / "all.pt", "weights", tmp_path / "w.pt")
    assert not differences(dict(load(tmp_path / "w.pt")), dict(state["models"][0]))
    convert(tmp_path / "all.pt", "engine", tmp_path / "e.pt")
    assert {key: load(tmp_path / "e.pt")[key] for key in ("parameters", "window")} == {
        key: state[key] for key in ("parameters", "window")
    }


@pytest.mark.parametrize(
    ("loop", "dropped"),
    [
        (Fp16Loop, ["optimizer state", "the counter 1"]),
        (AmpO2Loop, ["optimizer state"]),
        (EngineO2Loop, ["optimizer state"]),
    ],
)
def test_weights_are_the_masters_under_their_names(
    loop: type[Loop], dropped: list[str], tmp_path: Path
) -> None:
    made = loop()
    source = saved(made, tmp_path / "a.pt")
    done = convert(source, "weights", tmp_path / "w.pt")
    weights = load(tmp_path / "w.pt")
    assert list(weights) == list(make_model().state_dict())
    by_shape = {tuple(p.shape): p for g in made.optimizer.param_groups for p in g["params"]}
    assert all(torch.equal(value, by_shape[tuple(value.shape)].detach()) for value in weights.values())
    assert all(value.dtype == torch.float32 for value in weights.values())
    assert not all(torch.equal(value.half().float(), value) for value in weights.values())
    assert list(done.dropped.values()) == dropped
    make_model().load_state_dict(weights)


def test_weights_without_masters_are_widened(tmp_path: Path) -> None:
    low = {name: value.to(torch.bfloat16) for name, value in make_model().state_dict().items()}
    torch.save({"state_dict": {**low, "count": torch.tensor(3)}, "epoch": 4}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt")
    expected = {**{name: value.float() for name, value in low.items()}, "count": torch.tensor(3)}
    assert not differences(dict(load(tmp_path / "w.pt")), expected)


def test_the_input_is_not_changed(tmp_path: Path) -> None:
    source = saved(AmpLoop(), tmp_path / "a.pt")
    before = source.read_bytes()
    convert(source, "grad_scaler", tmp_path / "b.pt")
    with pytest.raises(ConfigError, match=r"exists already; name one that does not"):
        convert(source, "grad_scaler", source)
    with pytest.raises(ConfigError, match=r"there is no directory"):
        convert(source, "grad_scaler", tmp_path / "absent" / "b.pt")
    assert source.read_bytes() == before


def test_what_has_no_place_is_refused_and_named(tmp_path: Path) -> None:
    state = {**ScalerLoop().save(), "lr_scheduler": {"milestones": Counter([3])}, "best": 0.5, "epoch": 3}
    state["scaler"]["growth_interval"] = 100
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(StateError, match=r"cannot hold 'lr_scheduler' \(a dict of 1\); 'best' \(a float\)"):
        convert(tmp_path / "a.pt", "mmengine", tmp_path / "b.pt")
    with pytest.raises(StateError, match=r"'rule' \(growth 2, backoff 0.5, interval 100\).*--drop rule"):
        convert(tmp_path / "a.pt", "apex", tmp_path / "b.pt")
    with pytest.raises(ConfigError, match=r"drop names \['typo'\].*cannot hold is 'rule'"):
        convert(tmp_path / "a.pt", "apex", tmp_path / "b.pt", drop=["typo"])
    with pytest.raises(ConfigError, match=r"must be a list of names"):
        convert(tmp_path / "a.pt", "apex", tmp_path / "b.pt", drop="rule")
    assert os.listdir(tmp_path) == ["a.pt"]
    done = convert(tmp_path / "a.pt", "apex", tmp_path / "b.pt", drop=["rule", "best"])
    assert done.dropped == {"rule": "growth 2, backoff 0.5, interval 100", "best": "a float"}
    kept = load(tmp_path / "b.pt")
    assert set(kept) == {"model", "optimizer", "amp", "lr_scheduler", "epoch"}
    assert (kept["epoch"], kept["lr_scheduler"]) == (3, {"milestones": {3: 1}})
    convert(tmp_path / "a.pt", "mmengine", tmp_path / "c.pt", drop=["lr_scheduler", "best"])
    assert load(tmp_path / "c.pt")["optimizer"]["loss_scaler"]["growth_interval"] == 100


FP16 = {"optimizer_state_dict": AMP["optimizer"], "fp32_from_fp16": "no list", "loss_scaler": AMP["amp"]}
RUN = {"meta": {}, "state_dict": AMP["model"], "optimizer": {**AMP["optimizer"], "own": 5}}
BESIDE = {
    "it is inside an engine": ({"engine": {**ENGINE, "best": 0.9}}, "apex", "engine.best"),
    "it is of a second engine": ({"g": ENGINE, "d": ENGINE}, "weights", "d.models[0]"),
    "it counts what is counted twice": ({**AMP, "epoch": 4, "start_epoch": 5}, "mmcv", "start_epoch"),
    "it is in an optimizer": (RUN, "accelerate", "optimizer.own"),
    "it is in an FP16_Optimizer": ({**AMP, "optimizer": FP16}, "apex", "optimizer.fp32_from_fp16"),
    "the form has its key": ({**AMP, "scaler": {"mean": 3.0}}, "grad_scaler", "scaler"),
    "it is an open window": (open_window(), "apex", "window"),
    "its key has a dot": ({"meta": {}, "state_dict": AMP["model"], "own.key": 3}, "mmcv", "own.key"),
    "it has the name of a version": ({**AMP, "mmcv_version": {"own": 1}}, "accelerate", "mmcv_version"),
    "it has tensors as values": ({**AMP, "rng_state": {"a": torch.ones(1)}}, "mmcv", "rng_state"),
    "it is a second scale": (
        {**AMP, "amp": {f"loss_scaler{i}": {"loss_scale": 2.0, "unskipped": i} for i in range(2)}},
        "grad_scaler",
        "amp.1",
    ),
}


@pytest.mark.parametrize("why", BESIDE)
def test_no_entry_is_lost_in_silence(why: str, tmp_path: Path) -> None:
    state, form, name = BESIDE[why]
    save(tmp_path / "a.pt", state)
    with pytest.raises(StateError, match=re.escape(repr(name))):
        convert(tmp_path / "a.pt", form, tmp_path / "b.pt")
    assert name in convert(tmp_path / "a.pt", form, tmp_path / "b.pt", drop=["all"]).dropped


def test_a_file_of_a_folder_that_cannot_be_read_is_not_lost_in_silence(tmp_path: Path) -> None:
    source = tmp_path / "folder"
    convert(saved(ScalerLoop(), tmp_path / "a.pt"), "accelerate", source)
    (source / "optimizer.bin").write_bytes(b"no checkpoint")
    with pytest.raises(StateError, match=r"'optimizer.bin' \(cannot be read: .*--drop optimizer.bin"):
        convert(source, "weights", tmp_path / "w.pt")
    convert(source, "weights", tmp_path / "w.pt", drop=["optimizer.bin"])
    (source / "optimizer.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer.bin is damaged"):
        convert(source, "weights", tmp_path / "v.pt", drop=["optimizer.bin"])


@pytest.mark.parametrize(
    ("form", "head"),
    [("lightning", {"pytorch-lightning_version": "2.6.6"}), ("mmcv", {"meta": {"mmcv_version": "1.7.2"}})],
)
def test_tensors_beside_the_weights_of_a_library_are_no_weights(
    form: str, head: dict[str, Any], tmp_path: Path
) -> None:
    """A callback or a hook may save tensors, and they may precede the weights."""
    model, own = AMP["model"], {"centre": torch.ones(2)}
    save(tmp_path / "a.pt", {**head, "prototypes": own, "state_dict": model})
    convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt")
    assert not differences(dict(load(tmp_path / "w.pt")), dict(model))
    convert(tmp_path / "a.pt", form, tmp_path / "b.pt")
    assert not differences(load(tmp_path / "b.pt")["prototypes"], own)


def test_a_script_keeps_its_own_keys(tmp_path: Path) -> None:
    state = {"net_G": AMP["model"], "net_D": AMP["model"], "opt_G": AMP["optimizer"], "amp": AMP["amp"]}
    save(tmp_path / "a.pt", state)
    convert(tmp_path / "a.pt", "grad_scaler", tmp_path / "b.pt")
    assert set(load(tmp_path / "b.pt")) == {"net_G", "net_D", "opt_G", "scaler"}
    with pytest.raises(StateError, match=r"'net_D' \(weights\)"):
        convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt")
    convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt", drop=["net_G"])
    assert not differences(dict(load(tmp_path / "w.pt")), dict(AMP["model"]))


AVERAGES = ["avg", "swa", "swa_model", "model_avg", "avg_model", "polyak", "ema", "averaged", "ema_model"]


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_beside_the_model_is_no_second_model(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {name: AMP["model"], **AMP})
    done = convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt")
    assert name in done.dropped
    convert(tmp_path / "a.pt", "grad_scaler", tmp_path / "b.pt")
    found = load(tmp_path / "b.pt")
    for each in ("model", name):
        assert not differences(found[each], AMP["model"])


@pytest.mark.parametrize("name", ["avg_pool_net", *AVERAGES])
def test_what_may_be_an_average_is_the_model_if_there_is_no_other(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {name: AMP["model"], "epoch": 3})
    convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt")
    assert not differences(dict(load(tmp_path / "w.pt")), dict(AMP["model"]))


@pytest.mark.parametrize("form", ["grad_scaler", "weights"])
@pytest.mark.parametrize("step", [None, "linear", [1], torch.tensor([3, 4])])
def test_a_step_of_a_group_that_is_no_number_is_left_there(step: Any, form: str, tmp_path: Path) -> None:
    group = {"lr": 0.1, "params": [0], "step": step}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [group]}
    save(tmp_path / "a.pt", {"model": {"w": torch.ones(2)}, "optimizer": optimizer, "amp": AMP["amp"]})
    convert(tmp_path / "a.pt", form, tmp_path / "b.pt")
    if form == "grad_scaler":
        assert not differences(load(tmp_path / "b.pt")["optimizer"], optimizer)


def test_the_steps_of_apexs_fused_adam_are_where_torch_looks_for_them(tmp_path: Path) -> None:
    model, results = make_model(), list[Any]()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    assert not any("step" in row for row in state["state"].values())
    save(tmp_path / "a.pt", {"model": model.state_dict(), "optimizer": state, "amp": AMP["amp"]})
    convert(tmp_path / "a.pt", "grad_scaler", tmp_path / "b.pt")
    for make, file in ((FusedAdam, "a.pt"), (torch.optim.AdamW, "b.pt")):
        fresh = make_model()
        fresh.load_state_dict(load(tmp_path / file)["model"])
        own = make(fresh.parameters(), lr=0.01)
        own.load_state_dict(load(tmp_path / file)["optimizer"])
        fresh(torch.ones(2, 6)).sum().backward()
        own.step()
        results.append(list(fresh.state_dict().values()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_run_of_the_runner_goes_to_a_script_and_back(tmp_path: Path) -> None:
    zoo.run(zoo.build("EpochBasedRunner", tmp_path / "run", "fp16"))
    source = tmp_path / "run" / "iter_8.pth"
    with pytest.raises(StateError, match=r"cannot hold 'hooks' \(a dict of 1\); 'loop' .*; 'random' "):
        convert(source, "apex", tmp_path / "a.pt")
    convert(source, "apex", tmp_path / "a.pt", drop=["all"])
    convert(tmp_path / "a.pt", "mmcv", tmp_path / "b.pth")
    other = zoo.build("EpochBasedRunner", tmp_path / "other", "fp16")
    other.resume(tmp_path / "b.pth")
    saved, back = load(source), load(tmp_path / "b.pth")
    assert (other.epoch, other.iter) == (saved["meta"]["epoch"], saved["meta"]["iter"])
    assert not differences(dict(other.model.state_dict()), dict(saved["state_dict"]))
    assert not differences(
        back["optimizer"], {key: saved["optimizer"][key] for key in ("state", "param_groups")}
    )
    assert back["meta"]["fp16"]["loss_scaler"]["scale"] == saved["meta"]["fp16"]["loss_scaler"]["cur_scale"]


def test_masters_need_one_model(tmp_path: Path) -> None:
    parts = Fp16Loop().save()
    del parts["model"]
    save(tmp_path / "a.pt", parts)
    save(tmp_path / "c.pt", {**parts, "g": AMP["model"], "d": AMP["model"]})
    for name, models in (("a.pt", r"\(none\)"), ("c.pt", "g, d")):
        with pytest.raises(
            StateError, match=f"optimizer.fp32_from_fp16, .* the models {models}; pass --drop"
        ):
            convert(tmp_path / name, "apex", tmp_path / "b.pt")


def test_several_losses_are_several_scales(tmp_path: Path) -> None:
    scalers = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}
    save(tmp_path / "a.pt", {**AMP, "amp": scalers})
    convert(tmp_path / "a.pt", "engine", tmp_path / "e.pt")
    assert [one["scale"] for one in load(tmp_path / "e.pt")["scalers"]] == [1.0, 2.0, 4.0]


def test_weights_with_extra_state_are_weights(tmp_path: Path) -> None:
    """``Module.get_extra_state`` puts other values beside the tensors of a ``state_dict``."""
    save(tmp_path / "a.pt", {**AMP, "model": {**AMP["model"], "0._extra_state": {"calls": 3}}})
    convert(tmp_path / "a.pt", "weights", tmp_path / "w.pt")
    assert load(tmp_path / "w.pt")["0._extra_state"] == {"calls": 3}


def test_names_of_parameters_become_numbers(tmp_path: Path) -> None:
    """An engine of several ranks saves names."""
    optimizer = {"state": {"b": {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": ["a", "b"]}]}
    save(tmp_path / "a.pt", {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "optimizer": optimizer})
    convert(tmp_path / "a.pt", "grad_scaler", tmp_path / "b.pt", scale=1.0)
    written = load(tmp_path / "b.pt")["optimizer"]
    assert (list(written["state"]), written["param_groups"][0]["params"]) == ([1], [0, 1])


@pytest.mark.parametrize("scale", [None, 0.0, float("inf"), float("nan"), -1.0])
def test_a_first_scale_where_there_is_none_or_an_impossible_one(scale: float | None, tmp_path: Path) -> None:
    amp = {} if scale is None else {"amp": {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}}
    torch.save({"model": AMP["model"], "optimizer": AMP["optimizer"], **amp}, tmp_path / "a.pt")
    said = r"needs a loss scale.*pass --scale 65536" if scale is None else "loss_scale"
    with pytest.raises(StateError, match=said):
        convert(tmp_path / "a.pt", "engine", tmp_path / "b.pt")
    convert(tmp_path / "a.pt", "engine", tmp_path / "b.pt", drop=[*amp], scale=256.0, level="O2")
    state = load(tmp_path / "b.pt")
    assert (state["scalers"][0]["scale"], state["level"]) == (256.0, "O2")
    with pytest.raises(ConfigError, match=r"scale=8.0 .* this one has it in scalers.* --drop scalers"):
        convert(tmp_path / "b.pt", "apex", tmp_path / "c.pt", scale=8.0)


@pytest.mark.parametrize("form", TARGETS)
@pytest.mark.parametrize("state", [{}, {"seed": 3}])
def test_a_file_with_nothing_in_it_wants_no_scale(form: str, state: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "a.pt", state)
    with pytest.raises(StateError, match=r"no model weights, optimizer state or loss scale to convert$"):
        convert(tmp_path / "a.pt", form, tmp_path / "b.pt")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_an_open_window_stays_one_in_an_engine(tmp_path: Path) -> None:
    state = open_window()
    save(tmp_path / "a.pt", state)
    convert(tmp_path / "a.pt", "engine", tmp_path / "c.pt")
    assert not differences(load(tmp_path / "c.pt")["window"], state["window"])


def test_an_engine_begins_a_whole_window_where_another_library_ended_a_step(tmp_path: Path) -> None:
    """A file of another library counts steps of the optimizer, and not the backward passes of each."""
    convert(saved(ScalerLoop(), tmp_path / "a.pt"), "engine", tmp_path / "b.pt", drop=["all"])
    model = make_model()
    engine = halfpeak.prepare(model, make_optimizer(model), "O0", accumulate=2)
    engine.load_state_dict(load(tmp_path / "b.pt"))
    assert int(engine.num_steps) == 3, "one of four is skipped"
    assert engine.micro_step % 2 == 0


@pytest.mark.parametrize("version", [1, 2, None, "3"])
def test_an_engine_of_another_version_is_refused_by_name(version: Any, tmp_path: Path) -> None:
    for state in ({**ENGINE, "version": version}, {"engine": {**ENGINE, "version": version}, "epoch": 1}):
        save(tmp_path / "a.pt", state)
        with pytest.raises(
            CheckpointError,
            match=f"an engine in version {version}, and this halfpeak reads version {ENGINE_VERSION}",
        ):
            convert(tmp_path / "a.pt", "weights", tmp_path / "b.pt")


def test_an_unknown_form_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", AMP)
    with pytest.raises(ConfigError, match=r"form='deepspeed' must be one of engine, lightning"):
        convert(tmp_path / "a.pt", "deepspeed", tmp_path / "b.pt")
    flip(tmp_path / "a.pt", 200)
    with pytest.raises(CheckpointError, match=r"a.pt is damaged: "):
        convert(tmp_path / "a.pt", "weights", tmp_path / "b.pt")


def test_a_folder_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(ScalerLoop(), tmp_path / "a.pt")
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(HalfpeakError, match="no space"):
        convert(source, "accelerate", tmp_path / "folder")
    assert os.listdir(tmp_path) == ["a.pt"]


class TestMasters:
    def weights(self, dtype: torch.dtype) -> tuple[OrderedDict[str, Tensor], list[Tensor]]:
        torch.manual_seed(0)
        masters = [torch.randn(3, 4), torch.randn(3), torch.randn(3, 4), torch.randn(3)]
        names = ["a.weight", "a.bias", "b.weight", "b.bias"]
        return OrderedDict(zip(names, (m.to(dtype) for m in masters), strict=True)), masters

    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("widened", [False, True])
    def test_in_any_order_of_groups(self, order: tuple[int, ...], dtype: torch.dtype, widened: bool) -> None:
        weights, masters = self.weights(dtype)
        stored = {name: value.float() if widened else value for name, value in weights.items()}
        found = match_params(stored, [masters[i] for i in order])
        assert all(torch.equal(found[name], masters[i]) for i, name in enumerate(weights))

    def test_norms_in_float32_have_none_or_themselves(self) -> None:
        weights, masters = self.weights(torch.float16)
        weights["norm.weight"] = torch.randn(3)
        weights["norm.num_batches_tracked"] = torch.tensor(5)
        assert set(match_params(weights, masters)) == {"a.weight", "a.bias", "b.weight", "b.bias"}
        assert "norm.weight" in match_params(weights, [*masters, weights["norm.weight"].clone()])

    def test_a_master_of_another_step_is_refused(self) -> None:
        weights, masters = self.weights(torch.float16)
        masters[2] = masters[2] + 0.01
        with pytest.raises(StateError, match=r"master 2 of shape \(3, 4\) rounds to no weight of that shape"):
            match_params(weights, masters)
        with pytest.raises(StateError, match=r"master 0 of shape \(5,\) rounds to no weight"):
            match_params(weights, [torch.ones(5)])

    def test_weights_that_are_not_finite_have_masters_too(self) -> None:
        weights, masters = self.weights(torch.float16)
        broken = [torch.full_like(master, float("nan")) for master in masters[:1]] + masters[1:]
        weights[next(iter(weights))] = broken[0].half()
        assert list(match_params(weights, broken)) == list(weights)

    def test_equal_weights_with_different_masters_are_refused(self) -> None:
        """The masters are not in the model's order, so equal weights do not tell which master is whose."""
        weights = {"a": torch.zeros(2).half(), "b": torch.ones(2).half(), "c": torch.zeros(2).half()}
        tiny = torch.full((2,), 1e-9)
        with pytest.raises(StateError, match="master 2 fits 'a' as well as 'c'"):
            match_params(weights, [torch.ones(2), torch.zeros(2), tiny])
        assert torch.equal(match_params(weights, [torch.zeros(2), torch.ones(2), tiny])["c"], tiny)
        assert set(match_params(weights, [torch.ones(2), torch.zeros(2), torch.zeros(2)])) == {"a", "b", "c"}


def test_the_page_names_every_form() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.strip(" `").replace("-", "_") for cell in first for name in cell.split(",")}
    assert named == (FORMS.keys() - {"unknown"}) | TARGETS.keys()
