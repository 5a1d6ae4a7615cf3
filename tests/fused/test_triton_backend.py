"""The Triton kernels, compared with the rules, with the schedule of the loss scale, and with a second run."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from fused.reference import CASES, LAYERWISE, Reference, agree, give
from halfpeak.core.errors import ConfigError
from halfpeak.core.schedule import NONFINITE_LOSS, ScaleConfig, advance
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedNovoGrad, FusedSGD
from halfpeak.fused.backends import triton_tables
from halfpeak.fused.backends.triton_tables import hyper_row
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepDecision, StepInputs
from halfpeak.ops.reference import clip_coef
from halfpeak.ops.triton import kernels
from support.triton import (
    AGAIN,
    DEVICES,
    INTERPRETER_WARNS,
    NEEDS_TRITON,
    ExactRoots,
    bits_of,
    check_a_skip,
    decision_inputs,
    everything,
    gradients_on,
    parameters_on,
)

pytestmark = INTERPRETER_WARNS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = 4.0
"""Roundings of the largest number, because sums have another order and enter the weights by one factor."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for i, name in enumerate(CASES)
        for dtype in (torch.float32, DTYPES[1 + (i % 2 if name not in LAYERWISE else 0)])
    ],
)
def test_the_update_is_the_rule(name: str, dtype: torch.dtype, device: str) -> None:
    """Bitwise, except for rules with a sum over a layer, whose order differs."""
    kind, options = CASES[name]
    parameters = parameters_on(device, dtype)
    optimizer = kind(parameters, backend="triton", **options)
    reference = Reference(optimizer)
    for _ in range(2):
        give(parameters, gradients_on(device, parameters, dtype))
        with ExactRoots():
            wanted = reference.step()
        optimizer.step()
        agree(optimizer, wanted, ulps=BOUND if name in LAYERWISE else 0)
    assert optimizer.backend == "triton"


COMPACT = {"8 bits": (FusedAdamW, {"lr": 0.1, "master": "remainder8", "moments": "int8"})}
SKIPS = {
    "AdamW": (1.0, 2.0, math.inf, math.nan, -1.0),
    "LAMB": (1.0, math.nan),
    "NovoGrad": (2.0, math.inf),
    "8 bits": (2.0, math.nan),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "found_inf"), [(name, value) for name, values in SKIPS.items() for value in values]
)
def test_anything_but_zero_keeps_all_as_it_is(name: str, found_inf: float, device: str) -> None:
    kind, options = {**CASES, **COMPACT}[name]
    dtype = torch.bfloat16 if name in COMPACT else torch.float32
    parameters = parameters_on(device, dtype)
    optimizer = kind(parameters, backend="triton", **options)
    check_a_skip(optimizer, parameters, found_inf)
    assert optimizer.backend == "triton"
    assert float(optimizer.state[parameters[0]]["step"]) == 3


def ready(device: str) -> tuple[FusedOptimizer, list[torch.nn.Parameter]]:
    """Make an optimizer and let it take a step, so that it has chosen its backend."""
    parameters = [
        torch.nn.Parameter(torch.ones(5, device=device)),
        torch.nn.Parameter(torch.ones(3, device=device)),
    ]
    optimizer = FusedSGD(parameters, lr=0.0, backend="triton")
    give(parameters, [torch.zeros_like(parameter) for parameter in parameters])
    optimizer.step()
    return optimizer, parameters


CONFIGS = {
    "default": ScaleConfig(init=2.0**8, interval=3),
    "static": ScaleConfig.static(128.0),
    "hysteresis": ScaleConfig(init=2.0**8, interval=2, hysteresis=3),
    "refilled by growth": ScaleConfig(init=2.0**8, interval=3, hysteresis=2, refill="growth"),
    "bounds": ScaleConfig(init=2.0**4, interval=1, floor=4.0, ceiling=32.0),
    "beyond float32": ScaleConfig(init=2.0**126, interval=1, growth=2.0**10, ceiling=2.0**127),
    "recovers": ScaleConfig(init=2.0**8, interval=13, floor=1.0, recovers=True),
    "recovers in small steps": ScaleConfig(init=2.0**8, interval=2, floor=1.0, hysteresis=2, recovers=True),
    "crooked": ScaleConfig(init=1000.0, interval=2, growth=1.7, backoff=0.3),
}


def test_every_number_that_moves_the_scale_is_varied_above() -> None:
    """For each field of :class:`ScaleConfig`, a row of ``CONFIGS`` differs from the default."""
    default, fields = ScaleConfig(), {field.name for field in dataclasses.fields(ScaleConfig)} - {"patience"}
    rows = CONFIGS.values()
    assert [n for n in fields if all(getattr(row, n) == getattr(default, n) for row in rows)] == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_control_moves_the_loss_scale_as_the_schedule_does(name: str, device: str) -> None:
    config = CONFIGS[name]
    optimizer, parameters = ready(device)
    state = expected = config.start(device)
    history = random.Random(name)
    counts = {"num_steps": torch.zeros((), dtype=torch.int32, device=device)}
    counts["num_skipped"] = counts["num_steps"]
    for _ in range(25):
        bad = history.random() < 0.4
        gradients = [torch.full_like(parameter, math.inf if bad else 1.0) for parameter in parameters]
        optimizer.set_step_inputs(None)
        one = torch.ones((), device=device)
        known = one * NONFINITE_LOSS * (bad and history.random() < 0.3)
        decision = optimizer.decide(
            StepInputs(gradients, parameters, one),
            decision_inputs(device, config, state, found_inf=known, **counts),
        )
        assert isinstance(decision, StepDecision)
        expected = advance(config, expected, known if known else decision.found_inf)
        state = decision.scale_state
        counts = {"num_steps": decision.num_steps, "num_skipped": decision.num_skipped}
        assert bool(decision.found_inf) is bad
        assert [part.dtype for part in state] == [part.dtype for part in expected]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(state, expected, strict=True))
    assert int(counts["num_steps"]) + int(counts["num_skipped"]) == 25


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [0.01, 1.0, 1e6, math.inf, None])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-3, 1e19, math.nan])
def test_control_clips_as_the_engine_does(value: float, limit: float | None, device: str) -> None:
    optimizer, parameters = ready(device)
    gradients = [torch.full_like(parameter, value) for parameter in parameters]
    factor = torch.tensor(0.125, device=device)
    inputs = StepInputs(gradients, parameters, factor)
    config = ScaleConfig()
    decision = optimizer.decide(inputs, decision_inputs(device, config, config.start(device), max_norm=limit))
    assert decision is not None
    optimizer.set_step_inputs(None)
    squares, found_inf = optimizer.measure(inputs)
    norm = squares.sqrt()
    if limit is None:
        assert bool(decision.found_inf) is bool(found_inf)
        assert torch.equal(decision.multiplier, factor)
        return
    assert torch.equal(decision.grad_norm, norm) or value != value
    assert bool(decision.found_inf) is (not math.isfinite(float(norm)))
    if not bool(decision.found_inf):
        assert torch.equal(decision.multiplier, factor * clip_coef(norm, limit))


@pytest.mark.parametrize("device", DEVICES)
def test_found_inf_from_outside_skips_clean_gradients(device: str) -> None:
    optimizer, parameters = ready(device)
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    config = ScaleConfig()
    known = decision_inputs(device, config, config.start(device), found_inf=torch.tensor(2.0, device=device))
    decision = optimizer.decide(StepInputs(gradients, parameters, torch.ones((), device=device)), known)
    assert decision is not None
    assert (float(decision.found_inf), int(decision.num_steps), int(decision.num_skipped)) == (1.0, 0, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_hook_changes_after_the_account_is_honoured(device: str) -> None:
    steps: list[torch.Tensor] = []
    for change in (False, True):
        parameters = [torch.nn.Parameter(torch.ones(5, device=device))]
        optimizer = FusedSGD(parameters, lr=1.0 if change else 0.25, backend="triton")
        give(parameters, [torch.zeros(5, device=device)])
        optimizer.step()
        config = ScaleConfig()
        inputs = StepInputs([torch.ones(5, device=device)], parameters, torch.ones((), device=device))
        decision = optimizer.decide(inputs, decision_inputs(device, config, config.start(device)))
        assert decision is not None
        if change:
            optimizer.param_groups[0]["lr"] = 0.25
        optimizer.set_step_inputs(inputs._replace(multiplier=decision.multiplier))
        optimizer.found_inf = decision.found_inf
        optimizer.step()
        steps.append(parameters[0].detach())
    assert torch.equal(*steps)
    assert float(steps[0][0]) == 0.75


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [0, 1, 9, 999, 123_456, 2**24])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD momentum", *LAYERWISE])
def test_constants_are_those_of_the_host(name: str, step: int, device: str) -> None:
    kind, options = CASES[name]
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = kind([weight], backend="triton", **options)
    rule, group = optimizer.rule(optimizer.param_groups[0]), optimizer.param_groups[0]
    module = kernels()
    count = torch.full((), float(step), device=device)
    rows = torch.tensor([[0, count.data_ptr(), 0]], dtype=torch.int64, device=device)
    settings = rule.kernel_config()
    assert settings is not None
    numbers = torch.zeros((1, module.NUMBERS), device=device)
    module.control(
        None,
        torch.tensor(0.5, device=device),
        torch.zeros((), device=device),
        rows,
        torch.tensor([hyper_row(rule, group, 9)], dtype=torch.float64, device=device),
        numbers,
        torch.zeros(6, device=device),
        torch.zeros(5, dtype=torch.int32, device=device),
        rule=settings.rule,
    )
    sign = -1.0 if group["maximize"] else 1.0
    expected = torch.tensor([0.5 * sign, *map(float, rule.constants(group, float(step + 1)))])
    # Equal, because one rounding of float64 changes the float32 in one of half a billion cases.
    assert torch.equal(numbers[0, : len(expected)].cpu(), expected)
    assert float(numbers[0, -1]) == float(torch.tensor(step + 1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_measuring_and_stepping_read_one_table_of_addresses(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[triton_tables.AddressTables] = []

    def recording(*args: Any) -> triton_tables.AddressTables:
        made.append(triton_tables.AddressTables(*args))
        return made[-1]

    monkeypatch.setattr("halfpeak.fused.backends.triton.AddressTables", recording)
    parameters = parameters_on(device)
    optimizer = FusedAdamW(parameters, lr=0.01, backend="triton")
    inputs = StepInputs(
        gradients_on(device, parameters, torch.float32), parameters, torch.ones((), device=device)
    )
    for _ in range(3):
        optimizer.measure(inputs)
        optimizer.set_step_inputs(inputs)
        optimizer.step()
    assert len(made) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLAMB, FusedNovoGrad])
def test_the_same_bits_a_hundred_times(kind: type[FusedOptimizer], device: str) -> None:
    shapes = ((5,), (1030,), (2048,), *([(40_000,)] if device == "cuda" else []))
    masters = parameters_on(device, shapes=shapes)
    gradients = gradients_on(device, masters, torch.bfloat16)
    start = [master.detach().clone() for master in masters]
    found: set[tuple[bytes, ...]] = set()
    config = ScaleConfig()
    one = torch.ones((), device=device)
    for _ in range(AGAIN[device]):
        with torch.no_grad():
            for master, value in zip(masters, start, strict=True):
                master.copy_(value)
        lows = [master.detach().to(torch.bfloat16) for master in masters]
        optimizer = kind(masters, lr=0.01, backend="triton")
        inputs = StepInputs(gradients, lows, one)
        squares = optimizer.measure(inputs).sum_squares
        decision = optimizer.decide(
            inputs, decision_inputs(device, config, config.start(device), max_norm=1.0)
        )
        assert decision is not None
        optimizer.set_step_inputs(inputs._replace(multiplier=decision.multiplier))
        optimizer.found_inf = decision.found_inf
        optimizer.step()
        found.add(bits_of([squares, decision.grad_norm, decision.multiplier, *everything(optimizer), *lows]))
    assert len(found) == 1


@NEEDS_TRITON
def test_where_it_does_not_lead_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    give(parameters, [torch.ones(2)])
    monkeypatch.setattr(kernels(), "is_interpreted", lambda: True)
    wide = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]
    give(wide, [torch.ones(2, dtype=torch.float64)])
    with pytest.raises(ConfigError, match=r"no kernel for SGDRule on torch\.float64"):
        FusedSGD(wide, backend="triton").step()
    monkeypatch.setattr(kernels(), "is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match=r"kernels run on CUDA devices.*backend='auto'"):
        FusedSGD(parameters, backend="triton").step()
    assert torch.equal(parameters[0], torch.ones(2))


def test_auto_takes_it_on_no_cpu() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    give(parameters, [torch.ones(2)])
    optimizer = FusedSGD(parameters)
    optimizer.step()
    assert optimizer.backend == "eager"


def test_a_table_keeps_its_memory_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay writes to what a capture has allocated, also to what was freed in it before the table was made."""
    table = triton_tables.DeviceTable(torch.device("cpu"), torch.int64, 2)
    first = table.put([1, 2])
    monkeypatch.setattr(triton_tables, "is_capturing", lambda _: True)
    assert table.put([3, 4]) is first
    assert first.tolist() == [[1, 2]]
    table.flush()
    assert first.tolist() == [[3, 4]]
    with pytest.raises(RuntimeError, match="step once before"):
        table.put([1, 2, 3, 4])
