"""Cases recorded with mmcv's runners and repeated with halfpeak's: one script that takes either package."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

EPOCHS, BATCHES = 4, 5

LR: dict[str, dict[str, Any]] = {
    "fixed": {"policy": "fixed"},
    "fixed, constant warm-up": {"policy": "fixed", "warmup": "constant", "warmup_iters": 3},
    "fixed, warm-up by epoch": {
        "policy": "fixed",
        "warmup": "linear",
        "warmup_iters": 2,
        "warmup_by_epoch": True,
    },
    "step": {"policy": "step", "step": [1, 3]},
    "step, every": {"policy": "step", "step": 2, "gamma": 0.3, "min_lr": 0.035},
    "step, linear warm-up": {"policy": "step", "step": [1, 2], "warmup": "linear", "warmup_iters": 7},
    "step by iteration": {"policy": "step", "step": [4, 9], "by_epoch": False},
    "exp": {"policy": "exp", "gamma": 0.9},
    "exp by iteration": {
        "policy": "exp",
        "gamma": 0.9,
        "by_epoch": False,
        "warmup": "exp",
        "warmup_iters": 6,
    },
    "poly": {"policy": "poly", "power": 0.9, "min_lr": 1e-3},
    "poly by iteration": {
        "policy": "poly",
        "power": 2,
        "by_epoch": False,
        "warmup": "exp",
        "warmup_iters": 7,
        "warmup_ratio": 0.2,
    },
    "inv": {"policy": "inv", "gamma": 0.1, "power": 2, "by_epoch": False},
    "cosine": {"policy": "CosineAnnealing", "min_lr": 1e-3},
    "cosine by iteration": {"policy": "CosineAnnealing", "min_lr_ratio": 0.01, "by_epoch": False},
    "linear": {"policy": "LinearAnnealing", "min_lr": 1e-3},
    "flat cosine": {"policy": "FlatCosineAnnealing", "start_percent": 0.5, "min_lr": 0.01, "by_epoch": False},
    "flat cosine by epoch": {"policy": "FlatCosineAnnealing", "start_percent": 0.3, "min_lr_ratio": 0.01},
    "restarts": {
        "policy": "CosineRestart",
        "periods": [10, 4, 6],
        "restart_weights": [1, 0.5, 0.25],
        "min_lr": 0.01,
        "by_epoch": False,
    },
    "cyclic": {"policy": "cyclic", "cyclic_times": 2, "target_ratio": (10, 1e-2)},
    "cyclic, linear": {"policy": "cyclic", "cyclic_times": 3, "anneal_strategy": "linear", "gamma": 0.5},
    "cyclic, one ratio": {"policy": "cyclic", "target_ratio": 5.0, "step_ratio_up": 0.25},
    "one cycle": {"policy": "OneCycle", "max_lr": 0.2, "pct_start": 0.4},
    "one cycle, three phases": {
        "policy": "OneCycle",
        "max_lr": 0.2,
        "three_phase": True,
        "anneal_strategy": "linear",
        "div_factor": 10,
    },
    "one cycle, longer": {"policy": "OneCycle", "max_lr": 0.2, "total_steps": 33, "final_div_factor": 100.0},
}
MOMENTUM: dict[str, dict[str, Any]] = {
    "step": {"policy": "step", "step": 1, "warmup": "linear", "warmup_iters": 7},
    "step, floor": {"policy": "step", "step": [2], "gamma": 0.1, "min_momentum": 0.2, "by_epoch": False},
    "cosine": {
        "policy": "CosineAnnealing",
        "min_momentum_ratio": 0.99,
        "by_epoch": False,
        "warmup": "exp",
        "warmup_iters": 7,
        "warmup_ratio": 0.8,
    },
    "linear": {"policy": "LinearAnnealing", "min_momentum": 0.8, "warmup": "constant", "warmup_iters": 3},
    "cyclic": {"policy": "cyclic", "cyclic_times": 3, "gamma": 0.5},
    "cyclic, linear": {"policy": "cyclic", "target_ratio": (0.8, 1.0), "anneal_strategy": "linear"},
    "one cycle": {"policy": "OneCycle", "pct_start": 0.4},
    "one cycle, three phases": {"policy": "OneCycle", "three_phase": True, "anneal_strategy": "linear"},
}
WORKFLOWS: dict[str, tuple[str, list[tuple[str, int]]]] = {
    "epochs": ("EpochBasedRunner", [("train", 1)]),
    "epochs, validated": ("EpochBasedRunner", [("train", 2), ("val", 1)]),
    "validated first": ("EpochBasedRunner", [("val", 1), ("train", 3)]),
    "iterations": ("IterBasedRunner", [("train", 1)]),
    "iterations, validated": ("IterBasedRunner", [("train", 4), ("val", 2)]),
}
LOGS: dict[str, tuple[str, list[tuple[str, int]], dict[str, Any]]] = {
    "epochs": ("EpochBasedRunner", [("train", 1)], {"interval": 2}),
    "epochs, validated": ("EpochBasedRunner", [("train", 1), ("val", 1)], {"interval": 3}),
    "the last too": ("EpochBasedRunner", [("train", 1)], {"interval": 2, "ignore_last": False}),
    "iterations": ("IterBasedRunner", [("train", 1)], {"interval": 4}),
    "iterations, validated": ("IterBasedRunner", [("train", 3), ("val", 2)], {"interval": 2}),
    "names of the experiment": ("EpochBasedRunner", [("train", 1)], {"interval": 2, "interval_exp_name": 4}),
}


class Model(nn.Module):
    """Two layers; the steps return what models written for mmcv return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, return_loss: bool = True) -> Any:
        return self.second(torch.tanh(self.first(x)))

    def train_step(self, data: Tensor, optimizer: Any, **kwargs: Any) -> dict[str, Any]:
        loss = self(data).square().mean()
        return {"loss": loss, "log_vars": {"loss": loss.item(), "size": 12.5}, "num_samples": len(data)}

    def val_step(self, data: Tensor, optimizer: Any = None, **kwargs: Any) -> dict[str, Any]:
        loss = self(data).square().mean()
        return {"loss": loss, "log_vars": {"loss": loss.item(), "acc": 0.25}, "num_samples": len(data)}


def loader(batches: int = BATCHES) -> Any:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(torch.randn(2 * batches - 1, 3, generator=generator), batch_size=2)


def make(package: Any, kind: str = "EpochBasedRunner", optimizer: Any = None, **options: Any) -> Any:
    """A runner of either package over a fresh model."""
    model = Model()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    length = {"max_epochs": EPOCHS} if kind == "EpochBasedRunner" else {"max_iters": EPOCHS * BATCHES}
    logger = logging.getLogger("quiet")
    logger.setLevel(logging.ERROR)
    return getattr(package, kind)(model, optimizer=optimizer, **{"logger": logger, **length, **options})


def watch(package: Any, see: Any, stages: tuple[str, ...] = ("after_train_iter",)) -> Any:
    """A hook that records ``see(runner, stage)`` at each stage."""

    class Watch(package.Hook):
        def __init__(self) -> None:
            self.seen: list[Any] = []

    for stage in stages:
        setattr(Watch, stage, lambda self, runner, stage=stage: self.seen.append(see(runner, stage)))
    return Watch()


def curve(package: Any, config: dict[str, Any], which: str) -> list[float]:
    runner = make(package)
    getattr(runner, f"register_{which}_hook")(dict(config))
    read = {"lr": "current_lr", "momentum": "current_momentum"}[which]
    hook = watch(package, lambda runner, stage: getattr(runner, read)()[0])
    runner.register_hook(hook, "LOWEST")
    runner.run([loader()], [("train", 1)])
    return hook.seen


def stages(package: Any, kind: str, workflow: list[tuple[str, int]]) -> list[Any]:
    runner = make(package, kind)
    names = tuple(stage for stage in package.Hook.stages)
    hook = watch(package, lambda r, stage: [stage, r.epoch, r.iter, r.inner_iter, r.max_iters, r.mode], names)
    runner.register_hook(hook)
    runner.run([loader(), loader(2)][: len(workflow)], workflow)
    return hook.seen


def training(package: Any, kind: str) -> dict[str, Any]:
    """Train with schedules, clipping and an average of the weights; return the numbers of every iteration."""
    runner = make(package, kind)
    runner.register_training_hooks(
        {"policy": "step", "step": [2], "warmup": "linear", "warmup_iters": 3},
        optimizer_config={"grad_clip": {"max_norm": 0.5}},
        custom_hooks_config=[{"type": "EMAHook", "momentum": 0.1, "warm_up": 5, "priority": "ABOVE_NORMAL"}],
    )
    weight = watch(package, lambda r, stage: r.model.first.weight.flatten().tolist(), ("after_train_iter",))
    swapped = watch(package, lambda r, stage: r.model.first.weight.flatten().tolist(), ("after_train_epoch",))
    runner.register_hook(weight, "LOWEST")
    runner.register_hook(swapped, "LOWEST")
    runner.run([loader()], [("train", 1)])
    order = [type(hook).__name__ for hook in runner.hooks]
    norms = runner.log_buffer.val_history["grad_norm"]
    return {
        "weights": weight.seen,
        "swapped": swapped.seen if kind == "EpochBasedRunner" else [],
        "order": order,
        "norms": [float(norm) for norm in norms],
    }


def logs(package: Any, kind: str, workflow: list[tuple[str, int]], options: dict[str, Any]) -> dict[str, Any]:
    """The lines of the text log and of its JSON twin, without the times in them."""
    lines: list[str] = []
    logger = logging.getLogger(f"oracle.{kind}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [Lines(lines)]
    with tempfile.TemporaryDirectory() as folder:
        meta = {"exp_name": "trial", "seed": 3}
        runner = make(package, kind, work_dir=folder, logger=logger, meta=meta)
        runner.register_training_hooks(
            {"policy": "poly"},
            {"grad_clip": {"max_norm": 5.0}},
            None,
            {"interval": 10, "hooks": [{"type": "TextLoggerHook", **options}]},
        )
        runner.run([loader(), loader(2)][: len(workflow)], workflow)
        written = next(Path(folder).glob("*.log.json")).read_text().splitlines()
    times = re.compile(r"eta: [\d:]+|time: [\d.]+|data_time: [\d.]+")
    rows = [json.loads(line) for line in written]
    return {
        "text": [times.sub("*", line) for line in lines if re.match(r"Epoch|Iter|Exp", line)],
        "json": [
            [[k, v] for k, v in row.items() if k not in ("time", "data_time", "memory")] for row in rows
        ],
    }


class Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def checkpoints(package: Any, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The files that are left, their counters, and the contents of the last one."""
    with tempfile.TemporaryDirectory() as folder:
        runner = make(package, kind, work_dir=folder, meta={"seed": 0})
        runner.model.CLASSES = ("cat", "dog")
        runner.register_training_hooks({"policy": "fixed"}, {}, options)
        runner.run([loader()], [("train", 1)])
        files = sorted(path.name for path in Path(folder).iterdir())
        states = {name: torch.load(Path(folder) / name, weights_only=True) for name in files}
        metas = {name: state["meta"] for name, state in states.items()}
        last = Path(runner.meta["hook_msgs"]["last_ckpt"]).name
    return {
        "files": files,
        "counters": {n: [m["epoch"], m["iter"]] for n, m in metas.items()},
        "last": last,
        "keys": sorted(states[last]),
        "meta": sorted(metas[last]),
        "weights": list(states[last]["state_dict"]),
        "optimizer": sorted(states[last]["optimizer"]),
        "classes": list(metas[last]["CLASSES"]),
    }


CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "every epoch": ("EpochBasedRunner", {"interval": 1}),
    "every third": ("EpochBasedRunner", {"interval": 3}),
    "not the last": ("EpochBasedRunner", {"interval": 3, "save_last": False}),
    "two are kept": ("EpochBasedRunner", {"interval": 1, "max_keep_ckpts": 2}),
    "only the last": ("EpochBasedRunner", {}),
    "iterations": ("IterBasedRunner", {"interval": 6}),
}


def everything(package: Any) -> dict[str, Any]:
    hooks = make(package)
    hooks.register_training_hooks(
        {"policy": "step", "step": [1]},
        {},
        {"interval": 1},
        {"interval": 10, "hooks": [{"type": "TextLoggerHook"}]},
        {"policy": "cyclic"},
    )
    return {
        "lr": {name: curve(package, config, "lr") for name, config in LR.items()},
        "momentum": {name: curve(package, config, "momentum") for name, config in MOMENTUM.items()},
        "stages": {name: stages(package, *case) for name, case in WORKFLOWS.items()},
        "training": {kind: training(package, kind) for kind in ("EpochBasedRunner", "IterBasedRunner")},
        "logs": {name: logs(package, *case) for name, case in LOGS.items()},
        "checkpoints": {name: checkpoints(package, *case) for name, case in CHECKPOINTS.items()},
        "hook info": hooks.get_hook_info(),
    }
