"""``install("mmcv")`` without mmcv, beside mmcv 2, and beside mmcv 1.

mmcv 1 cannot be installed with today's torch, and mmcv 2 is large, so short stand-ins have their layout.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak.optim
import halfpeak.runner
import halfpeak.shim
from halfpeak import ConfigError, StateError
from support.forks import python

SCRIPT = Path(__file__).with_name("mmcv_detection")


@pytest.fixture
def clean() -> Iterator[None]:
    """No module of mmcv before and after the test, and the same finders."""
    assert find_spec("mmcv") is None
    path = list(sys.meta_path)
    yield
    halfpeak.shim.uninstall()
    assert sys.meta_path == path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mmcv"]:
        del sys.modules[name]


@pytest.fixture
def installed(clean: None) -> Iterator[None]:
    halfpeak.shim.install("mmcv")
    yield
    halfpeak.shim.uninstall("mmcv")
    assert not [name for name in sys.modules if name.partition(".")[0] == "mmcv"]
    assert find_spec("mmcv") is None


def test_mmcv_runner_has_every_name_of_halfpeak_runner(installed: None) -> None:
    runner: Any = importlib.import_module("mmcv.runner")
    # mmcv has these in mmcv.parallel, or not at all.
    others = {"DiagnosisHook", "MMDataParallel", "MMDistributedDataParallel", "OptimWrapperHook"}
    assert {*halfpeak.runner.__all__} - others <= {*runner.__all__}


def test_the_state_of_a_wrapped_model_is_that_of_the_model(installed: None) -> None:
    """mmdetection's own ``save_checkpoint`` calls this."""
    checkpoint: Any = importlib.import_module("mmcv.runner.checkpoint")
    model = torch.nn.Linear(2, 2)
    wrapped = halfpeak.runner.MMDataParallel(model)
    assert list(checkpoint.get_state_dict(wrapped)) == ["weight", "bias"]
    found: dict[str, Any] = {}
    checkpoint.get_state_dict(model, found, prefix="a.", keep_vars=True)
    assert found["a.weight"] is model.weight


def test_a_backbone_reads_pretrained_weights_and_renames_them(installed: None, tmp_path: Path) -> None:
    runner: Any = importlib.import_module("mmcv.runner")
    weights = {f"backbone.{key}": value for key, value in torch.nn.Linear(2, 2).state_dict().items()}
    torch.save({"state_dict": {**weights, "head.weight": torch.ones(1)}, "epoch": 3}, tmp_path / "a.pth")
    found = runner._load_checkpoint(tmp_path / "a.pth", map_location="cpu", logger=logging.getLogger("test"))
    assert found["epoch"] == runner.CheckpointLoader.load_checkpoint(tmp_path / "a.pth")["epoch"] == 3
    model = torch.nn.Linear(2, 2)
    runner.load_state_dict(
        model, runner._load_checkpoint_with_prefix("backbone", tmp_path / "a.pth"), strict=True
    )
    assert torch.equal(model.weight, weights["backbone.weight"])
    with pytest.raises(StateError, match=r"no weights below 'neck', only backbone\.weight"):
        runner._load_checkpoint_with_prefix("neck", tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=r"torchvision://resnet50 is a URL"):
        runner._load_checkpoint("torchvision://resnet50")


def test_names_of_mmcv_utils_are_those_of_mmengine(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    mmcv: Any = importlib.import_module("mmcv")
    assert (mmcv.is_list_of([1], int), mmcv.utils.to_2tuple(3)) == (True, (3, 3))
    layers: Any = importlib.import_module("mmcv.utils.parrots_wrapper")
    assert isinstance(torch.nn.BatchNorm2d(1), layers._BatchNorm)
    mmcv.dump({"a": 1}, tmp_path / "a.json")
    assert mmcv.load(tmp_path / "a.json") == {"a": 1}
    mmcv.utils.print_log("printed")
    mmcv.print_log("silent", "silent")
    with caplog.at_level(logging.INFO):
        mmcv.print_log("logged", logging.getLogger("test"))
    assert (capsys.readouterr().out, caplog.messages) == ("printed\n", ["logged"])


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("from mmcv.runner import obj_from_dict", "use build_from_cfg of mmcv.utils"),
        ("from mmcv.engine import single_gpu_test", "use EvalHook or DistEvalHook"),
        (
            "from mmcv.runner import WandbLoggerHook",
            "use TextLoggerHook, TensorboardLoggerHook, or a LoggerHook of yours",
        ),
        (
            "from mmcv.runner.hooks import MlflowLoggerHook",
            "use TextLoggerHook, TensorboardLoggerHook, or a LoggerHook of yours",
        ),
    ],
)
def test_a_name_that_is_not_here_says_what_to_use(installed: None, line: str, hint: str) -> None:
    with pytest.raises(ImportError, match=f"halfpeak does not provide mmcv.*; {hint}"):
        exec(line, {})


def test_it_says_which_version_it_stands_for(installed: None) -> None:
    mmcv: Any = importlib.import_module("mmcv")
    assert mmcv.__version__ == "1.7.2"
    assert importlib.metadata.version("mmcv").startswith("1.7.2")
    assert mmcv.runner.hooks.optimizer.Fp16OptimizerHook is halfpeak.runner.Fp16OptimizerHook


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_mmcv_2_gets_the_modules_that_it_lacks(
    clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "mmcv/__init__.py": "__version__ = '2.2.0'\n",
            "mmcv/cnn.py": "ConvModule = 'theirs'\n",
            "mmcv/utils/__init__.py": "collect_env = 'theirs'\n",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mmcv: Any = importlib.import_module("mmcv")
    before = dict(vars(mmcv))
    halfpeak.shim.install("mmcv")
    assert mmcv.__version__ == "2.2.0"
    assert importlib.import_module("mmcv.runner").EpochBasedRunner is halfpeak.runner.EpochBasedRunner
    assert mmcv.parallel.MMDataParallel is halfpeak.runner.MMDataParallel
    theirs: Any = importlib.import_module("mmcv.cnn")
    assert theirs.ConvModule == "theirs"
    utils: Any = importlib.import_module("mmcv.utils")
    assert utils.__file__ == str(tmp_path / "mmcv/utils/__init__.py")
    assert utils.collect_env == "theirs"
    assert (utils.Registry, utils.to_2tuple(3)) == (halfpeak.optim.Registry, (3, 3))
    halfpeak.shim.uninstall("mmcv")
    assert not hasattr(utils, "Registry")
    own = {"cnn", "utils"}  # modules of its own, which this test has imported
    assert {name: value for name, value in vars(mmcv).items() if name not in own} == before
    with pytest.raises(ModuleNotFoundError, match=r"mmcv\.runner"):
        importlib.import_module("mmcv.runner")


MMCV_1 = """
class Registry:
    def __init__(self):
        self.module_dict = {}

    def register_module(self, name=None, force=False, module=None):
        if name in self.module_dict and not force:
            raise KeyError(name)
        self.module_dict[name] = module

    def build(self, cfg):
        arguments = dict(cfg)
        return self.module_dict[arguments.pop("type")](**arguments)


class Hook:
    def before_run(self, runner):
        pass

    def after_train_iter(self, runner):
        pass

    def after_run(self, runner):
        pass


HOOKS = Registry()
for _name in ("OptimizerHook", "Fp16OptimizerHook", "GradientCumulativeOptimizerHook", "LoggerHook"):
    HOOKS.register_module(_name, module=type(_name, (Hook,), {}))


class LogBuffer:
    def __init__(self):
        self.val_history = {}

    def update(self, values, count=1):
        for name, value in values.items():
            self.val_history.setdefault(name, []).append(value)


class EpochBasedRunner:
    def __init__(self, model, optimizer, logger, max_iters):
        self.model, self.optimizer, self.logger, self.max_iters = model, optimizer, logger, max_iters
        self.meta, self.iter, self.log_buffer, self.hooks = None, 0, LogBuffer(), []

    def register_optimizer_hook(self, cfg):
        hook = HOOKS.build(cfg)
        assert isinstance(hook, Hook)
        assert not hasattr(hook, "priority")
        hook.priority = 40
        self.hooks.append(hook)

    def run(self, loader):
        self.call("before_run")
        for batch in loader:
            self.outputs = self.model.train_step(batch, self.optimizer)
            self.call("after_train_iter")
            self.iter += 1
        self.call("after_run")

    def call(self, stage):
        for hook in self.hooks:
            getattr(hook, stage)(self)
"""


@pytest.fixture
def mmcv_1(clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"mmcv/__init__.py": "__version__ = '1.7.2'\n", "mmcv/runner/__init__.py": MMCV_1}
    write(tmp_path, files)
    monkeypatch.syspath_prepend(str(tmp_path))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        x, y = data
        return {"loss": nn.functional.cross_entropy(self(x).float(), y), "num_samples": len(x)}


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shape = (6, 16, 8)
    return list(
        zip(
            torch.randn(shape, generator=generator),
            torch.randint(4, shape[:2], generator=generator),
            strict=True,
        )
    )


CONFIGS: dict[str, dict[str, Any]] = {
    "OptimizerHook": {"grad_clip": {"max_norm": 0.5}},
    "Fp16OptimizerHook": {"grad_clip": {"max_norm": 0.5}, "loss_scale": 512.0},
    "GradientCumulativeOptimizerHook": {"cumulative_iters": 4},
    "GradientCumulativeFp16OptimizerHook": {"cumulative_iters": 2, "loss_scale": 256.0},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_runner_of_mmcv_1_steps_through_our_hooks(mmcv_1: None, name: str) -> None:
    halfpeak.shim.install("mmcv")
    theirs: Any = importlib.import_module("mmcv.runner")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    runner = theirs.EpochBasedRunner(model, optimizer, logging.getLogger("test"), 6)
    runner.register_optimizer_hook({"type": name, **CONFIGS[name]})
    runner.run(batches())

    other = Model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    ours = halfpeak.runner.EpochBasedRunner(other, optimizer=optimizer, max_epochs=1)
    ours.register_optimizer_hook({"type": name, **CONFIGS[name]})
    ours.run([batches()], [("train", 1)])

    before = Model().state_dict()
    after = other.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in after)
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())
    norms = runner.log_buffer.val_history.get("grad_norm", [])
    assert len(norms) == (6 if "grad_clip" in CONFIGS[name] else 0)
    assert all(isinstance(norm, float) for norm in norms)
    assert ("fp16" in (runner.meta or {})) == ("Fp16" in name)


@pytest.mark.parametrize("when", ["before", "after"])
def test_its_registry_is_given_back(mmcv_1: None, when: str) -> None:
    if when == "before":
        halfpeak.shim.install("mmcv")
    theirs: Any = importlib.import_module("mmcv.runner")
    if when == "after":
        halfpeak.shim.install("mmcv")
    for name in CONFIGS:
        registered = theirs.HOOKS.module_dict[name]
        assert issubclass(registered, getattr(halfpeak.runner, name))
        assert issubclass(registered, theirs.Hook)
    halfpeak.shim.uninstall("mmcv")
    # The original order; the one hook that the stand-in does not have is gone.
    assert list(theirs.HOOKS.module_dict) == [
        "OptimizerHook",
        "Fp16OptimizerHook",
        "GradientCumulativeOptimizerHook",
        "LoggerHook",
    ]
    assert all(cls.__mro__[1] is theirs.Hook for cls in theirs.HOOKS.module_dict.values())
    assert importlib.import_module("mmcv.runner") is theirs


def detect(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the script as a user would."""
    options = ("--shim", "apex", "--shim", "mmcv", str(SCRIPT), "--work-dir", str(folder))
    done = python("-m", "halfpeak", "run", *options, *arguments, folder=folder.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for path in folder.glob("*.log.json") for line in path.read_text().splitlines()]
    return {
        **json.loads((folder / "result.json").read_text()),
        "loss": [line["loss"] for line in lines if line.get("mode") == "train"],
        "weights": torch.load(folder / "weights.pth", weights_only=True),
    }


@pytest.mark.parametrize(
    "arguments", [("--fp16", "hook"), ("--fp16", "apex", "--opt-level", "O2")], ids=["hook", "apex O2"]
)
def test_a_detection_script_of_mmcv_1_runs_unedited(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    whole = detect(tmp_path / "whole", *arguments)
    assert whole["dtype"] == "torch.float16"
    assert whole["iter"] == len(whole["loss"]) == 30
    assert sum(whole["loss"][-3:]) < sum(whole["loss"][:3]) * 0.65
    rest = detect(tmp_path / "rest", *arguments, "--resume-from", str(tmp_path / "whole/epoch_2.pth"))
    assert len(rest["loss"]) == 10
    assert rest["loss"] == whole["loss"][20:]
    assert all(torch.equal(value, rest["weights"][key]) for key, value in whole["weights"].items())
