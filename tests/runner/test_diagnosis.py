"""DiagnosisHook: a run with a fault writes a report that names the fault, whichever hook steps the optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak.runner as hr
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from runner import zoo

ITERS, FAULT = 6, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        nn.init.constant_(self.last.weight, 1.0)

    def forward(self, x: Tensor, return_loss: bool = True) -> Tensor:
        return self.last(self.first(x).abs())

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        loss = self(data).float().mean()
        if data[0, 0] == 3:
            loss = loss + (loss - loss).log()
        return {"loss": loss * 1e-3}


SETUPS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "float32": (lambda sgd: sgd, {"grad_clip": None, "skip_nonfinite": True}),
    "stepping": (lambda sgd: sgd, {}),
    "masters": (lambda sgd: sgd, {"type": "Fp16OptimizerHook", "loss_scale": "dynamic"}),
    "autocast": (
        lambda sgd: sgd,
        {"type": "Fp16OptimizerHook", "loss_scale": 8.0, "mode": "autocast", "dtype": "float16"},
    ),
    "accumulated": (
        lambda sgd: sgd,
        {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 2, "skip_nonfinite": True},
    ),
    "OptimWrapper": (lambda sgd: OptimWrapper(sgd, skip_nonfinite=True), {}),
    "AmpOptimWrapper": (lambda sgd: AmpOptimWrapper(optimizer=sgd, dtype="float16"), {}),
    "ApexOptimWrapper": (lambda sgd: ApexOptimWrapper("O2", optimizer=sgd), {}),
}
FAULTS = {
    "batch": (torch.nan, ("input", "", "nan")),
    "loss": (3.0, ("loss", "", "inf")),
    "layer": (4e4, ("forward", "last", "overflow")),
    "none": (1.0, None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_a_run_leaves_the_report_that_names_its_fault(setup: str, fault: str, tmp_path: Path) -> None:
    optimizer, config = SETUPS[setup]
    value, expected = FAULTS[fault]
    if fault == "layer" and setup in ("float32", "stepping", "accumulated", "OptimWrapper"):
        expected = None  # only float16 overflows here
    if fault == "loss" and setup == "stepping":
        expected = ("weight", "first", "nan")  # which the step has ruined
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    runner = hr.IterBasedRunner(
        model, optimizer=optimizer(sgd), work_dir=tmp_path, max_iters=ITERS, logger=zoo.quiet()
    )
    runner.register_training_hooks(None, config, custom_hooks_config=[{"type": "DiagnosisHook"}])
    data = torch.ones(ITERS, 2, 4)
    data[FAULT] = value
    runner.run([list(data)], [("train", 1)])
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("diagnosis-*.json"))]
    assert [(one["where"], one["module"], one["reason"]) for one in found] == [expected] * bool(expected)
    assert len(list(tmp_path.glob("diagnosis-*.html"))) == len(found)
