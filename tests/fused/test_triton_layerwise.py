"""LAMB and NovoGrad in Triton, compared with the rules: norms in a fixed order, clipping and skipping by data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fused.reference import CASES, LAYERWISE, Reference, agree, give
from fused.test_triton_backend import BOUND
from halfpeak.core.schedule import ScaleConfig
from halfpeak.fused import FusedLAMB
from halfpeak.fused.backends.choose import BackendName
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from support.triton import (
    BACKENDS,
    DEVICES,
    INTERPRETER_WARNS,
    ExactRoots,
    decision_inputs,
    gradients_on,
    parameters_on,
)

pytestmark = [
    *INTERPRETER_WARNS,
    # Importing torch's compiler raises it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERWISE)
def test_a_parameter_of_many_parts(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two chunks per load, so that these sums take several loads, as those of over a million elements do.
    monkeypatch.setattr("halfpeak.ops.triton.launch._PARTS", 2)
    kind, options = CASES[name]
    parameters = [torch.nn.Parameter(torch.randn(n).to(device)) for n in (7 * 1024 + 5, 4 * 1024, 9)]
    optimizer = kind(parameters, backend="triton", **options)
    reference = Reference(optimizer)
    give(parameters, gradients_on(device, parameters, torch.float32))
    with ExactRoots():
        wanted = reference.step()
    optimizer.step()
    agree(optimizer, wanted, ulps=BOUND)


@pytest.mark.parametrize("device", DEVICES)
def test_only_groups_with_decay_trust(device: str) -> None:
    parameters = parameters_on(device)
    groups = [{"params": parameters[:5], "weight_decay": 0.0}, {"params": parameters[5:]}]
    optimizer = FusedLAMB(groups, lr=0.01, backend="triton")
    reference = Reference(optimizer)
    for step in range(2):
        give(parameters, gradients_on(device, parameters, torch.float32))
        with ExactRoots():
            wanted = reference.step()
        optimizer.step()
        agree(optimizer, wanted, ulps=BOUND)
        assert float(optimizer.state[parameters[0]]["step"]) == step + 1
        assert float(optimizer.state[parameters[-1]]["step"]) == step + 1


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_a_weight_or_a_move_of_zero_is_left_its_own_step(backend: BackendName, device: str) -> None:
    zero, still = (torch.nn.Parameter(torch.full((4,), value, device=device)) for value in (0.0, 2.0))
    optimizer = FusedLAMB(
        [zero, still], lr=0.1, weight_decay=0.0, use_nvlamb=True, max_grad_norm=0, backend=backend
    )
    give([zero, still], [torch.ones(4, device=device), torch.zeros(4, device=device)])
    optimizer.step()
    torch.testing.assert_close(zero.detach().cpu(), torch.full((4,), -0.1))
    assert torch.equal(still.detach().cpu(), torch.full((4,), 2.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["LAMB", "NovoGrad", "NovoGrad inf"])
def test_without_an_engine_a_gradient_that_is_no_number_goes_through(name: str, device: str) -> None:
    kind, options = CASES[name]
    parameters = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (1030, 3)]
    optimizer = kind(
        parameters, backend="triton", **{**options, "max_grad_norm": 0.0} if name == "LAMB" else options
    )
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    gradients[0][7] = math.nan
    give(parameters, gradients)
    optimizer.step()
    assert bool(parameters[0].isnan().all())
    assert not bool(parameters[1].isnan().any())


def decided(optimizer: FusedOptimizer, inputs: StepInputs, device: str, limit: float | None) -> torch.Tensor:
    """Take a step as an engine does, and return its ``found_inf``."""
    config = ScaleConfig()
    decision = optimizer.decide(inputs, decision_inputs(device, config, config.start(device), max_norm=limit))
    assert decision is not None
    optimizer.set_step_inputs(inputs._replace(multiplier=decision.multiplier))
    optimizer.found_inf = decision.found_inf
    optimizer.step()
    optimizer.set_step_inputs(None)
    return decision.found_inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("name", LAYERWISE)
def test_an_engines_step_is_the_rule_on_unscaled_clipped_gradients(
    name: str, limit: float | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = CASES[name]
    masters = parameters_on(device)
    lows = [master.detach().to(torch.bfloat16) for master in masters]
    optimizer = kind(masters, backend="triton", **options)
    give(masters, [torch.zeros_like(master) for master in masters])
    optimizer.step()
    reference = Reference(optimizer, dict.fromkeys(masters, 1))
    gradients = gradients_on(device, masters, torch.bfloat16)
    norm = math.sqrt(sum(float(gradient.double().mul(0.25).square().sum()) for gradient in gradients))
    clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
    give(masters, [gradient.float() for gradient in gradients])
    with ExactRoots():
        wanted = reference.step(0.25 * clip)
    give(masters, [None] * len(masters))
    read = optimizer._backend._kernels.measure
    reads: list[Any] = []
    monkeypatch.setattr(optimizer._backend._kernels, "measure", lambda *args: reads.append(read(*args)))
    skips = decided(optimizer, StepInputs(gradients, lows, torch.tensor(0.25, device=device)), device, limit)
    assert not bool(skips)
    agree(optimizer, wanted, ulps=2 * BOUND)
    assert all(torch.equal(low, master.to(low.dtype)) for low, master in zip(lows, masters, strict=True))
    # Gradients are measured once, although both the optimizer and the engine may clip.
    assert len(reads) == 1
