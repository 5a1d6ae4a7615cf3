"""A small run for the tests of resuming: with noisy data and dropout, every random number shows in the result."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from halfpeak import runner
from halfpeak.core.step_result import StepResult
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from support import states

SAMPLES, BATCH, EPOCHS = 11, 3, 3
LENGTH = EPOCHS * -(-SAMPLES // BATCH)


class Noisy(Dataset[Tensor]):
    """Augments each sample from torch's own generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), index / SAMPLES) + 0.1 * torch.randn(3)


class Model(nn.Module):
    """Dropout and batch norm between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).tanh()))

    def train_step(self, data: Tensor, optimizer: Any, **kwargs: Any) -> dict[str, Any]:
        loss = self(data).float().square().mean()
        return {"loss": loss, "log_vars": {"loss": loss}, "num_samples": len(data)}

    def val_step(self, data: Tensor, optimizer: Any = None, **kwargs: Any) -> dict[str, Any]:
        return self.train_step(data, optimizer)


class Overflow(runner.Hook):
    """Makes the loss of the given iterations infinite."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def after_train_iter(self, runner: Any) -> None:
        if runner.iter in self.numbers:
            runner.outputs = {**runner.outputs, "loss": runner.outputs["loss"] * float("inf")}


def result(overflow: bool = False, boundary: bool = True) -> StepResult:
    return StepResult(torch.tensor(float(overflow)), torch.tensor(1.0), boundary=boundary)


class Results(runner.Hook):
    """Sets a given ``step_result`` in each iteration."""

    def __init__(self, *results: StepResult | None) -> None:
        self.results = results

    def after_train_iter(self, runner: Any) -> None:
        runner.step_result = self.results[runner.iter]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CLIP = {"max_norm": 1.0}
SETUPS: dict[str, tuple[Any, Any]] = {
    "plain": (sgd, {"grad_clip": CLIP, "skip_nonfinite": True}),
    "accumulated": (
        sgd,
        {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 4, "skip_nonfinite": True},
    ),
    "fp16": (sgd, {"type": "Fp16OptimizerHook", "mode": "master", "loss_scale": "dynamic"}),
    "autocast, accumulated": (
        sgd,
        {
            "type": "GradientCumulativeFp16OptimizerHook",
            "cumulative_iters": 2,
            "grad_clip": CLIP,
            "mode": "autocast",
            "loss_scale": {"init_scale": 2.0**20, "growth_interval": 2},
        },
    ),
    "fp16, accumulated": (
        sgd,
        {
            "type": "GradientCumulativeFp16OptimizerHook",
            "cumulative_iters": 4,
            "mode": "master",
            "loss_scale": 64.0,
        },
    ),
    "wrapper": (
        lambda m: OptimWrapper(sgd(m), accumulative_counts=4, clip_grad=CLIP, skip_nonfinite=True),
        {},
    ),
    "amp": (
        lambda m: AmpOptimWrapper(
            {"init_scale": 2.0**15, "growth_interval": 2},
            "float16",
            optimizer=sgd(m),
            accumulative_counts=2,
            clip_grad=CLIP,
        ),
        {},
    ),
    "apex": (lambda m: ApexOptimWrapper("O2", optimizer=sgd(m), accumulative_counts=2), {}),
}


PASS = -(-SAMPLES // BATCH)
"""Iterations of a pass over the data; every window of the setups ends with one."""


def quiet() -> logging.Logger:
    logger = logging.getLogger("quiet")
    logger.setLevel(logging.CRITICAL)
    return logger


def build(kind: str, folder: Path, setup: str = "plain", **options: Any) -> Any:
    """A runner with schedules, an average of the weights, text logs, and a checkpoint after each iteration."""
    model = Model()
    make_optimizer, config = SETUPS[setup]
    length = {"max_epochs": EPOCHS} if kind == "EpochBasedRunner" else {"max_iters": LENGTH}
    made = getattr(runner, kind)(
        model, optimizer=make_optimizer(model), work_dir=folder, logger=quiet(), meta={"seed": 3}, **length
    )
    made.register_hook(Overflow(6), "ABOVE_NORMAL")
    made.register_training_hooks(
        {"policy": "poly", "by_epoch": False, "warmup": "linear", "warmup_iters": 4},
        config,
        {"interval": 1, "by_epoch": False, **options},
        {"interval": 2, "hooks": [{"type": "TextLoggerHook"}]},
        {"policy": "cyclic"},
        custom_hooks_config=[{"type": "EMAHook", "momentum": 0.1}],
    )
    return made


def run(made: Any) -> Any:
    """Run a runner; return the checkpoint of its end."""
    made.run([DataLoader(Noisy(), batch_size=BATCH, shuffle=True)], [("train", 1)])
    return made.checkpoint()


def differences(first: Any, second: Any) -> list[str]:
    """The paths at which two states differ in any bit, except clocks and the names of folders."""
    return states.differences(lasting(first), lasting(second))


def lasting(state: Any) -> Any:
    if isinstance(state, dict):
        kept = state.keys() - {"time", "data_time", "hook_msgs"}
        return {key: lasting(value) for key, value in state.items() if key in kept}
    return [lasting(value) for value in state] if isinstance(state, (list, tuple)) else state
