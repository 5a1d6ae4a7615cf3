"""Checkpoint files: their contents, which files load, and the messages about what does not fit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak.runner as hr
from halfpeak.checkpoint import verify
from halfpeak.core.errors import CheckpointError, ConfigTypeError, StateError
from halfpeak.runner.checkpoint import link_latest
from runner import zoo


def made(kind: str = "EpochBasedRunner", folder: Path | None = None, **options: Any) -> Any:
    model = zoo.Model()
    length = {"max_epochs": 2} if kind == "EpochBasedRunner" else {"max_iters": 8}
    return getattr(hr, kind)(model, optimizer=zoo.sgd(model), work_dir=folder, **{**length, **options})


def mmcv_file(path: Path, **meta: Any) -> dict[str, Any]:
    """Write a checkpoint as mmcv 1.7.2 does, after one training step."""
    torch.manual_seed(9)
    model = zoo.Model()
    optimizer = zoo.sgd(model)
    for parameter in model.parameters():
        parameter.data.normal_()
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = OrderedDict((f"module.{key}", value) for key, value in model.state_dict().items())
    checkpoint = {
        "meta": {"epoch": 3, "iter": 40, "mmcv_version": "1.7.2", "time": "now", **meta},
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
    }
    torch.save(checkpoint, path)
    return checkpoint


def test_a_file_of_mmcv_is_resumed_by_epochs(tmp_path: Path) -> None:
    saved = mmcv_file(tmp_path / "epoch_3.pth", config="model = 1", hook_msgs={"last_ckpt": "epoch_2.pth"})
    runner = made()
    runner.resume(tmp_path / "epoch_3.pth")
    assert (runner.epoch, runner.iter) == (3, 40)
    assert runner.meta["hook_msgs"] == {"last_ckpt": "epoch_2.pth"}
    assert torch.equal(runner.model.first.weight, saved["state_dict"]["module.first.weight"])
    momentum = runner.optimizer.state[runner.model.first.weight]["momentum_buffer"]
    assert torch.equal(momentum, torch.ones_like(momentum))


def test_a_file_of_mmcv_by_iterations_says_one_less(tmp_path: Path) -> None:
    mmcv_file(tmp_path / "iter_4.pth", iter=3, epoch=2)
    runner = made("IterBasedRunner")
    runner.resume(tmp_path / "iter_4.pth")
    assert (runner.epoch, runner.iter) == (1, 4)
    seen: list[int] = []
    runner.register_hook(hr.ClosureHook("before_train_iter", lambda runner: seen.append(runner.iter)))
    zoo.run(runner)
    assert seen == [4, 5, 6, 7]


@pytest.mark.parametrize("strict", [False, True])
def test_weights_alone(strict: bool, tmp_path: Path) -> None:
    saved = mmcv_file(tmp_path / "a.pth")
    runner = made()
    given = runner.load_checkpoint(tmp_path / "a.pth", strict=strict)
    assert given["meta"]["epoch"] == 3
    assert (runner.epoch, runner.iter) == (0, 0)
    assert torch.equal(runner.model.last.bias, saved["state_dict"]["module.last.bias"])
    bare = tmp_path / "bare.pth"
    torch.save(given["state_dict"], bare)
    other = made()
    other.load_checkpoint(bare, strict=strict)
    assert torch.equal(other.model.last.bias, runner.model.last.bias)


def test_what_does_not_fit_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = zoo.Model().state_dict()
    del state["first.bias"]
    state["last.weight"] = torch.ones(5, 8)
    state["head.weight"] = torch.ones(1)
    torch.save(state, tmp_path / "a.pth")
    runner = made()
    before = {key: value.clone() for key, value in runner.model.state_dict().items()}
    with pytest.raises(
        StateError, match=r"unexpected key.*head.weight.*missing.*first.bias.*last.weight is \(5, 8\)"
    ):
        runner.load_checkpoint(tmp_path / "a.pth", strict=True)
    runner.model.norm.weight.data.fill_(7)
    runner.load_checkpoint(tmp_path / "a.pth")
    assert "do not match exactly" in caplog.text
    for text in (
        "head.weight",
        "first.bias",
        "last.weight is (5, 8) in the checkpoint and (2, 8) in the model",
    ):
        assert text in caplog.text
    assert all(torch.equal(before[key], value) for key, value in runner.model.state_dict().items())


def changed(model: nn.Module) -> nn.Module:
    """Every weight and buffer one greater, because all new models have the same."""
    for value in model.state_dict().values():
        value.add_(1)
    return model


def test_keys_are_revised(tmp_path: Path) -> None:
    saved = changed(zoo.Model()).state_dict()
    torch.save({f"backbone.{key}.x": value for key, value in saved.items()}, tmp_path / "a.pth")
    runner = made()
    runner.load_checkpoint(tmp_path / "a.pth", strict=True, revise_keys=[(r"^backbone\.", ""), (r"\.x$", "")])
    assert not zoo.differences(saved, runner.model.state_dict())


def test_a_wrapped_model_is_saved_and_loaded_without_its_wrapper(tmp_path: Path) -> None:
    class Wrapped(nn.DataParallel):
        def train_step(self, *args: Any) -> Any:
            return self.module.train_step(*args)

    model = changed(zoo.Model())
    saved = copy.deepcopy(model.state_dict())
    runner = hr.EpochBasedRunner(Wrapped(model), max_epochs=1)
    runner.save_checkpoint(tmp_path)
    bare = made()
    bare.load_checkpoint(tmp_path / "epoch_1.pth", strict=True)
    assert not zoo.differences(saved, bare.model.state_dict())
    changed(model)
    runner.load_checkpoint(tmp_path / "epoch_1.pth", strict=True)
    assert not zoo.differences(saved, model.state_dict())


@pytest.mark.parametrize(("kind", "name"), [("EpochBasedRunner", "epoch"), ("IterBasedRunner", "iter")])
def test_a_file_at_any_time(kind: str, name: str, tmp_path: Path) -> None:
    runner = made(kind, meta={"note": "mine", "seed": 1})
    runner.model.CLASSES = ("cat", "dog")
    runner.save_checkpoint(tmp_path / "deep", meta={"note": "less", "more": 2})
    path = tmp_path / "deep" / f"{name}_1.pth"
    verify(path)
    assert (tmp_path / "deep" / "latest.pth").resolve() == path
    meta = torch.load(path, weights_only=True)["meta"]
    assert meta.pop("time")
    assert meta == {"note": "mine", "seed": 1, "more": 2, "CLASSES": ("cat", "dog"), "epoch": 0, "iter": 0}
    runner.save_checkpoint(tmp_path, "x_{}.pth", save_optimizer=False, create_symlink=False)
    assert "optimizer" not in torch.load(tmp_path / "x_1.pth", weights_only=True)
    assert not (tmp_path / "latest.pth").exists()


def test_a_directory_called_latest_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "latest.pth").mkdir()
    with pytest.raises(CheckpointError, match="cannot be made a link"):
        link_latest(tmp_path / "epoch_1.pth")
    assert [one.name for one in tmp_path.iterdir()] == ["latest.pth"]


def test_several_optimizers(tmp_path: Path) -> None:
    model = zoo.Model()

    def two() -> dict[str, torch.optim.Optimizer]:
        return {"a": zoo.sgd(model.first), "b": torch.optim.Adam(model.last.parameters(), lr=0.3)}

    runner = hr.EpochBasedRunner(model, optimizer=two(), max_epochs=1)
    runner.save_checkpoint(tmp_path)
    again = hr.EpochBasedRunner(model, optimizer=two(), max_epochs=1)
    again.optimizer["b"].param_groups[0]["lr"] = 9.0
    again.resume(tmp_path / "epoch_1.pth")
    assert again.current_lr() == {"a": [0.1], "b": [0.3]}
    again.optimizer = {"a": again.optimizer["a"], "c": again.optimizer["b"]}
    with pytest.raises(StateError, match=r"optimizers \['a', 'b'\], but the runner has \['a', 'c'\]"):
        again.resume(tmp_path / "epoch_1.pth")
    hr.EpochBasedRunner(model, optimizer=zoo.sgd(model), max_epochs=1).save_checkpoint(tmp_path)
    with pytest.raises(StateError, match=r"has one optimizer, but the runner has \['a', 'c'\]"):
        again.resume(tmp_path / "epoch_1.pth")


def test_a_file_taken_inside_a_stage_counts_it_as_over(tmp_path: Path) -> None:
    """Hooks of user code call ``save_checkpoint`` themselves."""
    found: list[tuple[int, int]] = []

    class Save(hr.Hook):
        def after_train_iter(self, runner: Any) -> None:
            runner.save_checkpoint(tmp_path, "i.pth{}")
            self.read("i.pth", runner)

        def after_train_epoch(self, runner: Any) -> None:
            runner.save_checkpoint(tmp_path, "e.pth{}")
            self.read("e.pth", runner)

        def read(self, name: str, runner: Any) -> None:
            meta = torch.load(tmp_path / f"{name}{runner.epoch + 1}", weights_only=True)["meta"]
            found.append((meta["epoch"], meta["iter"]))

    runner = made(max_epochs=1)
    runner.register_hook(Save(), "LOWEST")
    zoo.run(runner)
    assert found == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 4)]
    again = made(max_epochs=2)
    again.resume(tmp_path / "e.pth1")
    assert (again.epoch, again.iter) == (1, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {}}, "in 'meta', 'epoch' and 'iter'; call load_checkpoint"),
        ({"state_dict": {}, "meta": {"epoch": 1}}, "no checkpoint of a run"),
        ({"meta": {"epoch": 1, "iter": 2}}, "no checkpoint of a run"),
        ([1, 2], "holds a list; a checkpoint is a dict"),
    ],
)
def test_files_that_are_no_run(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises((StateError, CheckpointError), match=message):
        made().resume(tmp_path / "a.pth")


def test_meta_must_be_plain_data(tmp_path: Path) -> None:
    runner = made(meta={"config": {"path": Path("x")}})
    with pytest.raises(CheckpointError, match=r"state\['meta'\]\['config'\]\['path'\] is a PosixPath"):
        runner.save_checkpoint(tmp_path)
    with pytest.raises(ConfigTypeError, match="meta must be a dict, not list"):
        runner.save_checkpoint(tmp_path, meta=[1])
    assert not list(tmp_path.glob("*.pth"))


def test_another_version_is_refused(tmp_path: Path) -> None:
    runner = made()
    runner.save_checkpoint(tmp_path)
    state = torch.load(tmp_path / "epoch_1.pth", weights_only=True)
    state["loop"]["version"] = 99
    torch.save(state, tmp_path / "b.pth")
    with pytest.raises(StateError, match="format version 99, and this halfpeak reads version 2"):
        runner.resume(tmp_path / "b.pth")
