"""Functions that mmcv scripts call around a run: optimizers from a config, weights in files, modules, seeds, loggers."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import halfpeak
from halfpeak.core.errors import CheckpointError, ConfigError, ConfigTypeError, RegistryError
from halfpeak.runner import (
    BaseModule,
    DefaultOptimizerConstructor,
    EpochBasedRunner,
    IterBasedRunner,
    MMDataParallel,
    ModuleDict,
    ModuleList,
    OptimizerHook,
    Sequential,
    build_optimizer,
    get_host_info,
    get_time_str,
    load_checkpoint,
    save_checkpoint,
    set_random_seed,
)
from halfpeak.runner.optimizer_builder import OPTIMIZER_BUILDERS
from halfpeak.runner.parallel import is_module_wrapper
from halfpeak.runner.utilities import get_logger, mkdir_or_exist, symlink


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


SGD = {"type": "SGD", "lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}


def groups(paramwise_cfg: dict[str, Any]) -> dict[str, tuple[float, float]]:
    model = Net()
    optimizer = build_optimizer(model, {**SGD, "paramwise_cfg": paramwise_cfg})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(group["params"][0])] for group in optimizer.param_groups] == list(names.values())
    return {
        names[id(group["params"][0])]: (round(group["lr"], 8), round(group["weight_decay"], 8))
        for group in optimizer.param_groups
    }


def test_groups_of_an_optimizer_are_those_of_mmcv() -> None:
    """As mmcv 1.7.2 made them."""
    plain = (0.1, 0.01)
    multipliers = {
        "bias_lr_mult": 2.0,
        "bias_decay_mult": 0.5,
        "norm_decay_mult": 0.0,
        "dwconv_decay_mult": 0.1,
    }
    assert groups(multipliers) == {
        "scale": plain,
        "backbone.0.weight": plain,
        "backbone.0.bias": (0.2, 0.005),
        "backbone.1.weight": (0.1, 0.0),
        "backbone.1.bias": (0.1, 0.0),
        "depthwise.weight": (0.1, 0.001),
        "depthwise.bias": (0.2, 0.001),
        "norm.weight": (0.1, 0.0),
        "norm.bias": (0.1, 0.0),
        "head.weight": plain,
        "head.bias": (0.2, 0.005),
        "frozen.weight": plain,
        "frozen.bias": plain,
    }
    keys = {
        "backbone": {"lr_mult": 0.1, "decay_mult": 0.9},
        "backbone.0": {"lr_mult": 0.5},
        ".scale": {"decay_mult": 0.0},
    }
    found = groups({"custom_keys": keys})
    assert found["scale"] == (0.1, 0.0)
    assert found["backbone.0.weight"] == found["backbone.0.bias"] == (0.05, 0.01)
    assert found["backbone.1.weight"] == found["backbone.1.bias"] == (0.01, 0.009)
    assert found["head.weight"] == plain


def test_an_optimizer_without_paramwise_has_one_group() -> None:
    cfg = {**SGD, "paramwise_cfg": None}
    model = MMDataParallel(Net(), device_ids=[-1])
    (group,) = build_optimizer(model, cfg).param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    assert cfg == {**SGD, "paramwise_cfg": None}


def test_shared_parameters_keep_their_first_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match="1 is duplicate. It is skipped since bypass_duplicate=True"):
        optimizer = build_optimizer(model, {**SGD, "paramwise_cfg": {"bypass_duplicate": True}})
    assert len(optimizer.param_groups) == 3


def test_a_registered_constructor() -> None:
    class Halved(DefaultOptimizerConstructor):
        def add_params(self, params: Any, module: Any, prefix: str = "", is_dcn_module: Any = None) -> None:
            params.append(
                {"params": list(module.parameters()), "lr": self.base_lr * self.paramwise_cfg["rate"]}
            )

    OPTIMIZER_BUILDERS.register_module(module=Halved)
    cfg = {**SGD, "constructor": "Halved", "paramwise_cfg": {"rate": 0.5}}
    assert build_optimizer(Net(), cfg).param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("cfg", "error", "match"),
    [
        (["SGD"], ConfigTypeError, "cfg must be a dict"),
        ({"type": "SDG", "lr": 0.1}, RegistryError, "did you mean 'SGD'"),
        ({**SGD, "constructor": "Unknown"}, RegistryError, "optimizer constructor"),
        ({**SGD, "momentun": 0.9}, ConfigTypeError, "did you mean 'momentum'"),
        ({**SGD, "paramwise_cfg": {"norm_decay": 0.0}}, ConfigTypeError, "norm_decay_mult"),
        ({**SGD, "paramwise_cfg": {"flat_decay_mult": 0.0}}, ConfigTypeError, "takes no 'flat_decay_mult'"),
        ({"type": "SGD", "lr": 0.1, "paramwise_cfg": {"norm_decay_mult": 0.0}}, ConfigError, "weight_decay"),
    ],
)
def test_wrong_optimizers_are_refused(cfg: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build_optimizer(Net(), cfg)


def test_weights_come_back_from_a_file(tmp_path: Path) -> None:
    model, optimizer = nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "below" / "weights.pth"
    save_checkpoint(MMDataParallel(model, device_ids=[-1]), path, optimizer=optimizer, meta={"epoch": 3})
    other = nn.Linear(2, 1)
    found = load_checkpoint(other, path, map_location="cpu", strict=True)
    assert torch.equal(other.weight, model.weight)
    assert found["meta"]["epoch"] == 3
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.1
    several = {"one": optimizer, "two": optimizer}
    save_checkpoint(model, path, optimizer=several)
    assert load_checkpoint(other, path)["optimizer"].keys() == several.keys()


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"https://.* is a URL"):
        load_checkpoint(nn.Linear(1, 1), "https://example.com/weights.pth")
    with pytest.raises(CheckpointError):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "none.pth")
    with pytest.raises(ConfigTypeError, match="meta must be a dict"):
        save_checkpoint(nn.Linear(1, 1), tmp_path / "x.pth", meta=3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class Layer(BaseModule):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.weight = nn.Parameter(torch.zeros(2))
        self.times = 0

    def init_weights(self) -> None:
        super().init_weights()
        self.times += 1


def test_modules_initialise_their_children_once() -> None:
    layers = [Layer() for _ in range(3)]
    model = Sequential(ModuleList([layers[0]]), ModuleDict({"a": layers[1]}), nn.ReLU(), layers[2])
    assert isinstance(model, nn.Sequential)
    assert len(list(model.parameters())) == 3
    assert not model.is_init
    model.init_weights()
    model.init_weights()
    assert [layer.times for layer in layers] == [1, 1, 1]
    assert model.is_init


def test_an_init_cfg_is_read_by_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sequential(nn.Linear(2, 2), init_cfg={"type": "Constant", "layer": "Linear", "val": 0.5})
    monkeypatch.setitem(sys.modules, "mmengine.model", None)
    with pytest.raises(ConfigError, match="pip install mmengine-lite"):
        model.init_weights()
    assert not model.is_init
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.init_weights()
    assert torch.equal(model[0].weight, torch.full((2, 2), 0.5))


@pytest.fixture
def random_states() -> Iterator[None]:
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def test_set_random_seed_seeds_python_torch_and_numpy(
    random_states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    np = pytest.importorskip("numpy")
    set_random_seed(3, deterministic=True)
    first = (random.random(), float(torch.rand(())), float(np.random.rand()))
    set_random_seed(3, use_rank_shift=True)
    assert (random.random(), float(torch.rand(())), float(np.random.rand())) == first
    assert torch.backends.cudnn.deterministic


def test_small_helpers(tmp_path: Path) -> None:
    mkdir_or_exist(tmp_path / "a" / "b")
    mkdir_or_exist("")
    (tmp_path / "a/b/one").write_text("1")
    symlink("one", tmp_path / "a/b/latest")
    symlink("one", tmp_path / "a/b/latest")
    assert (tmp_path / "a/b/latest").read_text() == "1"
    assert "@" in get_host_info()
    assert len(get_time_str()) == len("20260101_000000")


def test_a_logger_writes_to_its_file(tmp_path: Path) -> None:
    logger = get_logger("test_around", tmp_path / "run.log")
    try:
        assert get_logger("test_around") is logger
        assert get_logger("test_around.child").handlers == []
        logger.info("hello")
        assert "test_around - INFO - hello" in (tmp_path / "run.log").read_text()
        assert len(logger.handlers) == 2
    finally:
        for handler in list(logger.handlers):
            handler.close()
            logger.removeHandler(handler)


class Model(nn.Linear):
    def train_step(self, data: torch.Tensor, optimizer: Any) -> dict[str, Any]:
        return {"loss": self(data).square().mean()}

    def val_step(self, data: torch.Tensor) -> dict[str, Any]:
        return {"loss": self(data).square().mean()}


def test_a_parallel_wrapper_around_one_device() -> None:
    model = MMDataParallel(Model(2, 1), device_ids=[-1])
    assert model.train_step(torch.ones(1, 2), None)["loss"].requires_grad
    assert model.val_step(torch.ones(1, 2)).keys() == {"loss"}
    assert torch.equal(model(torch.ones(1, 2)), model.module(torch.ones(1, 2)))
    assert is_module_wrapper(model)
    assert not is_module_wrapper(model.module)
    with pytest.raises(ConfigError, match="must name one device; use torchrun"):
        MMDataParallel(Model(2, 1), device_ids=[0, 1])


def test_a_hook_that_steps_by_itself_may_use_a_prepared_optimizer() -> None:
    model = Model(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, level="O2")

    class Own(OptimizerHook):
        def after_train_iter(self, runner: Any) -> None:
            engine.backward(runner.outputs["loss"])
            engine.step()

    before = model.weight.detach().clone()
    runner = EpochBasedRunner(model, optimizer=optimizer, max_epochs=1)
    runner.register_optimizer_hook(Own())
    runner.run([DataLoader(torch.ones(4, 2), batch_size=2)], [("train", 1)])  # type: ignore[arg-type]
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("tmpl", [None, "my_{}.pth"])
def test_save_checkpoint_of_a_subclass_is_called(tmp_path: Path, tmpl: str | None) -> None:
    class Own(EpochBasedRunner):
        def save_checkpoint(  # type: ignore[override]
            self,
            out_dir: str,
            filename_tmpl: str = "own_{}.pth",
            save_optimizer: bool = True,
            meta: Any = None,
        ) -> None:
            assert save_optimizer
            torch.save({"epoch": self.epoch + 1}, Path(out_dir) / filename_tmpl.format(self.epoch + 1))

    model = Model(2, 1)
    runner = Own(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), work_dir=tmp_path, max_epochs=2
    )
    config = {"interval": 1} if tmpl is None else {"interval": 1, "filename_tmpl": tmpl}
    runner.register_training_hooks({"policy": "fixed"}, {}, config)
    runner.run([DataLoader(torch.ones(4, 2), batch_size=2)], [("train", 1)])  # type: ignore[arg-type]
    names = ("own_{}.pth" if tmpl is None else tmpl).format
    saved = [torch.load(tmp_path / names(epoch), weights_only=True)["epoch"] for epoch in (1, 2)]
    assert saved == [1, 2]


@pytest.mark.parametrize(
    "config", [{}, {"type": "Fp16OptimizerHook", "mode": "autocast"}, {"type": "Fp16OptimizerHook"}]
)
def test_a_file_that_save_checkpoint_of_a_subclass_wrote_is_resumed(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """As SemiIterBasedRunner and the runners of mmgeneration, which count the iteration that mmcv did not."""

    class Own(IterBasedRunner):
        def save_checkpoint(  # type: ignore[override]
            self, out_dir: str, filename_tmpl: str = "iter_{}.pth", save_optimizer: bool = True
        ) -> None:
            meta = {"iter": self.iter + 1, "epoch": self.epoch + 1, **self.meta}
            path = Path(out_dir) / filename_tmpl.format(self.iter + 1)
            save_checkpoint(self.model, path, optimizer=self.optimizer, meta=meta)

    def train(folder: str, file: Path | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = Model(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        runner = Own(model, optimizer=optimizer, work_dir=tmp_path / folder, max_iters=6)
        runner.register_training_hooks({"policy": "poly"}, config, {"interval": 1})
        if file is not None:
            runner.resume(file)
            assert (runner.epoch, runner.iter) == (1, 4)
        runner.run([torch.ones(2, 4, 2)], [("train", 1)])
        return model

    whole, again = train("whole"), train("again", tmp_path / "whole" / "iter_4.pth")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
