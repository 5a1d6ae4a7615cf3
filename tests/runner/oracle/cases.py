"""Cases recorded with mmcv and repeated with halfpeak: configurations, a model, and the loop around a hook."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

SCALERS: list[dict[str, Any]] = [
    {},
    {"init_scale": 8.0, "scale_window": 3},
    {"init_scale": 2.0, "scale_window": 2, "scale_factor": 4.0},
    {"init_scale": 2.0**20, "scale_window": 5},
    {"init_scale": 512.0, "mode": "static"},
    {"init_scale": 1.0, "scale_window": 1},
]
WINDOWS = [
    (3, 6, 0),
    (3, 8, 0),
    (3, 10, 0),
    (3, 10, 5),
    (3, 8, 3),
    (4, 1, 0),
    (1, 4, 0),
    (3, 2, 0),
    (5, 13, 2),
]

CLIP = {"max_norm": 0.5, "norm_type": 2}
RUNS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "plain": ("OptimizerHook", {}, ()),
    "clipped": ("OptimizerHook", {"grad_clip": CLIP}, ()),
    "accumulated": ("GradientCumulativeOptimizerHook", {"cumulative_iters": 4}, ()),
    "accumulated, clipped": (
        "GradientCumulativeOptimizerHook",
        {"cumulative_iters": 3, "grad_clip": CLIP},
        (),
    ),
}
FP16_RUNS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "static": ("Fp16OptimizerHook", {}, ()),
    "static, clipped": ("Fp16OptimizerHook", {"grad_clip": CLIP, "loss_scale": 64.0}, ()),
    "dynamic": (
        "Fp16OptimizerHook",
        {"loss_scale": {"init_scale": 256.0, "mode": "dynamic", "scale_window": 3}},
        (2, 7),
    ),
    "dynamic from 2**32": ("Fp16OptimizerHook", {"loss_scale": "dynamic"}, ()),
    "accumulated": (
        "GradientCumulativeFp16OptimizerHook",
        {"cumulative_iters": 4, "loss_scale": {"init_scale": 256.0, "scale_window": 2}},
        (1,),
    ),
}
ITERATIONS = 14


class Model(nn.Module):
    """Linear, batch norm, ReLU, Linear, with weights that no random number generator made."""

    def __init__(self) -> None:
        super().__init__()
        self.fp16_enabled = False
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        for index, layer in enumerate((self.first, self.last)):
            for parameter in layer.parameters():
                ramp = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
                parameter.data.copy_(torch.sin(ramp * 1.7 + index) * 0.6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def make_model(decorator: Any = None) -> Model:
    """The model; its forward decorated, if a decorator factory is given."""
    if decorator is None:
        return Model()
    forward = decorator(apply_to=("x",))(Model.forward)
    return type("Decorated", (Model,), {"forward": forward})()


def batch(iteration: int) -> tuple[Tensor, Tensor]:
    ramp = torch.arange(24, dtype=torch.float32)
    return torch.cos(ramp * 0.9 + iteration).reshape(8, 3), torch.sin(ramp[:16] + iteration).reshape(8, 2)


class Log:
    """The log buffer of a runner, as far as hooks use it."""

    def __init__(self) -> None:
        self.entries: list[tuple[dict[str, Any], float]] = []

    def update(self, values: dict[str, Any], count: float = 1) -> None:
        self.entries.append((values, count))


class Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Loop:
    """The part of a runner that optimizer hooks use."""

    def __init__(self, model: nn.Module, *, max_iters: int = ITERATIONS, iteration: int = 0) -> None:
        self.model: Any = model
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.max_iters = self._max_iters = max_iters
        self.iter = iteration
        self.meta: Any = {}
        self.hook: Any = None
        self.outputs: Any = {}
        self.log_buffer: Any = Log()
        self.logger: Any = logging.Logger("loop")
        self.handler = Handler()
        self.logger.addHandler(self.handler)


def loss_of(model: nn.Module, iteration: int, *, overflow: bool = False) -> Tensor:
    x, y = batch(iteration)
    loss = mse_loss(model(x).float(), y)
    return loss * 1e30 if overflow else loss


def train(hook: Any, model: nn.Module, *, overflows: tuple[int, ...] = ()) -> dict[str, Any]:
    """Run a hook over all iterations; return the final parameters, the log entries, and the scale after each iteration."""
    loop = Loop(model)
    hook.before_run(loop)
    scales: list[Any] = []
    for iteration in range(ITERATIONS):
        loop.iter = iteration
        loop.outputs = {"loss": loss_of(model, iteration, overflow=iteration in overflows), "num_samples": 8}
        hook.after_train_iter(loop)
        state = loop.meta.get("fp16", {}).get("loss_scaler", {})
        scales.append(float(state["cur_scale"]) if "cur_scale" in state else None)
    parameters = [p for group in loop.optimizer.param_groups for p in group["params"]]
    return {
        "parameters": [p.detach().double().flatten().tolist() for p in parameters],
        "model": [p.detach().double().flatten().tolist() for p in model.parameters()],
        "statistics": [b.double().flatten().tolist() for b in model.buffers()],
        "logged": [
            [{key: float(v) for key, v in values.items()}, count] for values, count in loop.log_buffer.entries
        ],
        "scales": scales,
        "lines": loop.handler.lines,
    }
