"""Every backend, compared with the rule that runs tensor by tensor (``reference.py``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fused.reference import (
    CASES,
    SHAPES,
    Reference,
    agree,
    give,
    gradients_for,
    parameters_of,
    step_as_on_a_device,
)
from halfpeak import fused
from halfpeak.fused import FusedAdamW, FusedSGD
from halfpeak.fused.backends.choose import BackendName
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from halfpeak.fused.flat.buffers import MAX_BUCKET
from support.triton import BACKENDS, INTERPRETED, INTERPRETER_WARNS, ExactRoots, gradients_on, parameters_on

pytestmark = [
    *INTERPRETER_WARNS,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
"""Importing torch's compiler raises the last warning."""

ROUNDINGS = 4
"""Roundings of the largest number by which a backend may differ, because torch's kernels use fused multiply-adds."""

CLIPPED = 16
"""The same after clipping by a global norm: its sum has another order, and it enters a second moment squared."""

COMPILED = {
    "SGD momentum": 0,
    "Adam amsgrad": ROUNDINGS,
    "AdamW": ROUNDINGS,
    "Adagrad": ROUNDINGS,
    "LAMB": CLIPPED,
    "NovoGrad": ROUNDINGS,
    "NovoGrad inf": ROUNDINGS,
}
"""Roundings by which compiled kernels may differ: none for a rule without a root and without a sum."""


def run(
    name: str, backend: BackendName, dtype: torch.dtype, ulps: float, *, large: bool = False
) -> FusedOptimizer:
    kind, options = CASES[name]
    parameters = parameters_of(dtype, large=large)
    strides = [parameter.stride() for parameter in parameters]
    optimizer = kind(parameters, backend=backend, **options)
    reference = Reference(optimizer)
    for _ in range(3):
        give(parameters, gradients_for(parameters))
        wanted = reference.step()
        optimizer.step()
        agree(optimizer, wanted, ulps=ulps)
    dense = [i for i in range(len(parameters)) if i != len(SHAPES) + 1]
    assert [parameters[i].stride() for i in dense] == [strides[i] for i in dense]
    assert optimizer.backend == backend
    return optimizer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_eager_backend_agrees_with_the_rule(name: str, dtype: torch.dtype) -> None:
    run(name, "eager", dtype, CLIPPED if name.startswith("LAMB") else ROUNDINGS)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("LAMB")])
def test_the_eager_backend_steps_float64_in_float64(name: str) -> None:
    run(name, "eager", torch.float64, ROUNDINGS)


@pytest.mark.parametrize("name", CASES)
def test_the_backend_of_devices_agrees_with_the_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the inputs of a device: the step is a tensor, and a skip is decided by data."""
    step_as_on_a_device(monkeypatch)
    run(name, "eager", torch.float32, CLIPPED if name.startswith("LAMB") else ROUNDINGS)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "LAMB"])
def test_the_eager_backend_agrees_on_parameters_longer_than_its_chunks(name: str) -> None:
    run(name, "eager", torch.float32, CLIPPED, large=True)


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_backend_agrees_with_the_rule(name: str) -> None:
    run(name, "compiled", torch.float32, COMPILED[name])


def test_the_compiled_backend_steps_low_parameters_with_float32_state() -> None:
    optimizer = run("AdamW", "compiled", torch.bfloat16, ROUNDINGS)
    assert {value.dtype for row in optimizer.state.values() for value in row.values()} == {torch.float32}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_master_is_stepped_and_its_low_weight_follows(
    low: torch.dtype, backend: BackendName, device: str
) -> None:
    masters = parameters_on(device)
    lows = [master.detach().to(low) for master in masters]
    # One model parameter is float32, so there are two kinds of launches and one counter of steps.
    lows[3] = masters[3]
    optimizer = FusedAdamW(masters, lr=0.01, backend=backend)
    reference = Reference(optimizer)
    for step in range(2):
        gradients = gradients_on(device, masters, low)
        gradients[3] = gradients[3].float()
        give(masters, [gradient.float() for gradient in gradients])
        with ExactRoots():
            wanted = reference.step(0.5)
        give(masters, [None] * len(masters))
        optimizer.set_step_inputs(StepInputs(gradients, lows, torch.tensor(0.5, device=device)))
        optimizer.step()
        agree(optimizer, wanted, ulps=0 if backend == "triton" else ROUNDINGS)
        assert all(torch.equal(low, master.to(low.dtype)) for low, master in zip(lows, masters, strict=True))
        assert float(optimizer.state[masters[0]]["step"]) == step + 1


VALUES = (float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measure_finds_whatever_is_not_finite_wherever_it_is(
    dtype: torch.dtype, backend: BackendName, device: str
) -> None:
    """Tries every value at every place; with Triton, whose interpreter is slow, one value at each place."""
    parameters = parameters_on(device)
    optimizer = FusedSGD(parameters, lr=0.1, backend=backend)
    gradients = gradients_on(device, parameters, dtype)
    lows = [parameter.detach().to(dtype) for parameter in parameters]
    factor = torch.tensor(0.25, device=device)
    clean = optimizer.measure(StepInputs(gradients, lows, factor))
    expected = sum(float(gradient.double().mul(0.25).square().sum()) for gradient in gradients)
    assert float(clean.found_inf) == 0.0
    torch.testing.assert_close(float(clean.sum_squares), expected, rtol=1e-5, atol=0.0)
    places = [
        (w, i) for w, g in enumerate(gradients) for i in {0, g.numel() // 2, g.numel() - 1} if g.numel()
    ]
    for turn, (which, place) in enumerate(places):
        for value in VALUES if backend != "triton" else VALUES[turn % 3 : turn % 3 + 1]:
            bad = list(gradients)
            bad[which] = gradients[which].clone()
            bad[which].view(-1)[place] = value
            optimizer.set_step_inputs(None)
            assert float(optimizer.measure(StepInputs(bad, lows, factor)).found_inf) == 1.0


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_measure_scales_before_it_squares(backend: BackendName, device: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = FusedSGD([weight], lr=0.1, backend=backend)
    for factor, squares in ((1e-30, 4.0), (1.0, float("inf"))):
        large = torch.full((4,), 1e30, device=device)
        stats = optimizer.measure(StepInputs([large], [weight], torch.tensor(factor, device=device)))
        assert (float(stats.sum_squares), float(stats.found_inf)) == (squares, 0.0)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("sizes", [[3], [16, 3]])
def test_measure_reads_the_gradients_that_it_is_given(
    sizes: list[int], backend: BackendName, device: str
) -> None:
    weights = [torch.nn.Parameter(torch.zeros(n, 1, device=device)) for n in sizes for _ in range(2)]
    groups = [{"params": weights[start : start + 2]} for start in range(0, len(weights), 2)]
    optimizer = FusedSGD(groups, lr=0.1, backend=backend)
    for value in (1.0, 2.0):
        grads = [torch.full_like(weight, value) for weight in weights]
        stats = optimizer.measure(StepInputs(grads, weights, torch.ones((), device=device)))
        assert float(stats.sum_squares) == 2 * sum(sizes) * value**2


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_measure_of_nothing(backend: BackendName) -> None:
    weight = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = FusedSGD([weight], lr=0.1, backend=backend)
    stats = optimizer.measure(StepInputs([torch.zeros(0, 3)], [weight], torch.ones(())))
    assert [float(stats.sum_squares), float(stats.found_inf)] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "LAMB", "NovoGrad"])
def test_a_parameter_with_as_many_elements_as_its_rule_has_numbers(name: str) -> None:
    kind, options = CASES[name]
    like = kind([torch.nn.Parameter(torch.ones(2))], **options)
    size = 1 + len(like.rule(like.param_groups[0]).constants(like.param_groups[0], 1.0))
    parameter = torch.nn.Parameter(torch.randn(size))
    optimizer = kind([parameter], backend="compiled", **options)
    reference = Reference(optimizer)
    give([parameter], gradients_for([parameter]))
    wanted = reference.step()
    optimizer.step()
    agree(optimizer, wanted, ulps=CLIPPED)


@pytest.mark.parametrize("backend", ["eager", "compiled", pytest.param("triton", marks=INTERPRETED)])
def test_where_new_tensors_go_by_default_does_not_matter(backend: BackendName) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(100)) for _ in range(2))
    with_default, without = (FusedAdamW([one], lr=0.1, backend=backend) for one in (ours, theirs))
    for _ in range(2):
        give([ours, theirs], [torch.ones(100), torch.ones(100)])
        without.step()
        with torch.device("meta"):
            with_default.step()
    assert torch.equal(ours, theirs)


def test_more_parameters_than_an_arena_holds() -> None:
    parameters = [torch.nn.Parameter(torch.randn(MAX_BUCKET // 10)) for _ in range(12)]
    optimizer = FusedAdamW(parameters, lr=0.01, backend="eager")
    reference = Reference(optimizer)
    give(parameters, gradients_for(parameters))
    wanted = reference.step()
    optimizer.step()
    agree(optimizer, wanted, ulps=ROUNDINGS)
    places = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    assert len(places) == 2


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("size", [8, 300])
def test_a_lazily_negated_gradient_has_the_sign_that_it_shows(
    size: int, backend: BackendName, device: str
) -> None:
    weight = torch.nn.Parameter(torch.zeros(size, size, device=device))
    grad = torch.linspace(-1, 1, size * size, device=device).view(size, size)
    weight.grad = torch._neg_view(-grad)
    assert torch.equal(weight.grad, grad)
    FusedSGD([weight], lr=1.0, backend=backend).step()
    assert torch.equal(weight.detach(), -grad)


def test_every_optimizer_has_a_case_and_is_named_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fused.md").read_text()
    table = page.partition("| class | rule of |")[2].partition("\n\n")[0]
    assert {kind.__name__ for kind, _ in CASES.values()} == set(fused.__all__), "CASES in reference.py"
    assert set(re.findall(r"`(Fused\w+)`", table)) == set(fused.__all__), "the table of docs/fused.md"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [1, 2, 100])
def test_constants_are_the_same_from_a_step_that_only_the_device_knows(name: str, step: int) -> None:
    kind, options = CASES[name]
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], **options)
    group = optimizer.param_groups[0]
    rule = optimizer.rule(group)
    known = [float(number) for number in rule.constants(group, float(step))]
    found = rule.constants(group, torch.tensor(float(step), dtype=torch.float64))
    assert [float(number) for number in found] == pytest.approx(known, rel=1e-6)
