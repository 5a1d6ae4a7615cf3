"""The eager backend for devices: skips by data, and elementwise updates a chunk at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fused.reference import CASES, give, step_as_on_a_device
from halfpeak.fused import FusedAdamW
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from support.states import same
from support.triton import check_a_skip, everything, gradients_on, parameters_on

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "remainders": {"master": "remainder"},
    "remainders, bfloat16 moments": {"master": "remainder", "moments": torch.bfloat16},
    "8 bits": {"master": "remainder8", "moments": "int8"},
}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    step_as_on_a_device(monkeypatch)


def train(optimizer: FusedOptimizer, parameters: list[torch.nn.Parameter], steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        device, dtype = str(parameters[0].device), parameters[0].dtype
        give(parameters, gradients_on(device, parameters, dtype))
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.nan])
@pytest.mark.parametrize("name", ["LAMB", "NovoGrad", "AdamW", "SGD momentum", "Adagrad"])
def test_anything_but_zero_keeps_all_as_it_is(name: str, found_inf: float, device: str) -> None:
    kind, options = CASES[name]
    parameters = parameters_on(device)
    # "triton" makes ``step`` leave ``found_inf`` to the backend; otherwise the host reads one on the CPU.
    optimizer = kind(parameters, backend="triton", **options)
    check_a_skip(optimizer, parameters, found_inf)


@pytest.mark.parametrize("device", DEVICES)
def test_a_skip_leaves_the_low_weights_of_masters(device: str) -> None:
    masters = parameters_on(device)
    lows = [torch.full_like(master, 7.0, dtype=torch.bfloat16) for master in masters]
    optimizer = FusedAdamW(masters, lr=0.01, backend="triton")
    grads = gradients_on(device, masters, torch.bfloat16)
    optimizer.set_step_inputs(StepInputs(grads, lows, torch.ones((), device=device)))
    optimizer.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(bool((low == 7.0).all()) for low in lows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_a_chunk_at_a_time_is_the_same(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[torch.Tensor]] = []
    for chunk in (2**22, 512):
        monkeypatch.setattr("halfpeak.fused.backends.eager_device.CHUNK", chunk)
        torch.manual_seed(0)
        parameters = parameters_on(device, torch.bfloat16)
        optimizer = FusedAdamW(parameters, lr=0.01, **FORMS[form])
        train(optimizer, parameters, 2)
        optimizer.found_inf = torch.tensor(2.0, device=device)
        train(optimizer, parameters, 1)
        runs.append(everything(optimizer))
    assert same(*runs)
