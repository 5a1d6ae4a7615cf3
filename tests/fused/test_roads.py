"""Every road gives what the rule gives, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from fused.reference import CASES, Reference, agree, give, gradients_for, parameters_of
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedSGD
from halfpeak.fused.blocks import ARENA
from halfpeak.fused.optimizer import Feed, FusedOptimizer
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.roads.compiled import CompiledRoad
from halfpeak.fused.roads.device import EagerDeviceRoad
from halfpeak.fused.roads.eager import EagerRoad
from support.triton import INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""From the import of torch's own compiler."""

ROUNDINGS = 4
"""By how many roundings of the largest number a road may differ: torch's kernels use fused multiply-adds."""

CLIPPED = 16
"""The same behind a global norm, which is summed in another order and enters a second moment squared."""

COMPILED = {
    "SGD momentum": 0,
    "Adam amsgrad": ROUNDINGS,
    "AdamW": ROUNDINGS,
    "Adagrad": ROUNDINGS,
    "LAMB": CLIPPED,
    "NovoGrad": ROUNDINGS,
}
"""Roundings by which compiled kernels may differ: none where there is no root and no sum."""


def run(name: str, road: RoadName, dtype: torch.dtype, ulps: float, *, large: bool = False) -> FusedOptimizer:
    kind, options = CASES[name]
    parameters = parameters_of(dtype, large=large)
    strides = [parameter.stride() for parameter in parameters]
    optimizer = kind(parameters, road=road, **options)
    reference = Reference(optimizer)
    for _ in range(3):
        give(parameters, gradients_for(parameters))
        wanted = reference.step()
        optimizer.step()
        agree(optimizer, wanted, ulps=ulps)
    dense = [i for i in range(len(parameters)) if i != 8]
    assert [parameters[i].stride() for i in dense] == [strides[i] for i in dense]
    assert optimizer.road == road
    return optimizer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_eager_road_agrees_with_the_rule(name: str, dtype: torch.dtype) -> None:
    run(name, "eager", dtype, CLIPPED if name.startswith("LAMB") else ROUNDINGS)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("LAMB")])
def test_the_eager_road_steps_float64_in_float64(name: str) -> None:
    run(name, "eager", torch.float64, ROUNDINGS)


@pytest.mark.parametrize("name", CASES)
def test_the_road_of_devices_agrees_with_the_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on a CPU as well, and takes there what a device would have: a step that is a tensor, a skip by data."""
    monkeypatch.setattr("halfpeak.fused.optimizer.choose", lambda *_: EagerDeviceRoad())
    monkeypatch.setattr("halfpeak.fused.optimizer.leads_on", lambda *_: True)
    run(name, "eager", torch.float32, CLIPPED if name.startswith("LAMB") else ROUNDINGS)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "LAMB"])
def test_the_eager_road_agrees_on_parameters_longer_than_its_chunks(name: str) -> None:
    run(name, "eager", torch.float32, CLIPPED, large=True)


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_road_agrees_with_the_rule(name: str) -> None:
    run(name, "compiled", torch.float32, COMPILED[name])


def test_the_compiled_road_steps_low_parameters_with_float32_state() -> None:
    optimizer = run("AdamW", "compiled", torch.bfloat16, ROUNDINGS)
    assert {value.dtype for row in optimizer.state.values() for value in row.values()} == {torch.float32}


@pytest.mark.parametrize("road", ["eager", "compiled"])
def test_a_master_is_stepped_and_its_low_weight_follows(road: RoadName) -> None:
    masters = parameters_of()
    lows = [master.detach().to(torch.bfloat16) for master in masters]
    optimizer = FusedAdamW(masters, lr=0.01, road=road)
    reference = Reference(optimizer)
    for _ in range(2):
        gradients = [gradient.to(torch.bfloat16) for gradient in gradients_for(masters)]
        give(masters, [gradient.float() for gradient in gradients])
        wanted = reference.step(0.5)
        give(masters, [None] * len(masters))
        optimizer.feed(Feed(gradients, lows, torch.tensor(0.5)))
        optimizer.step()
        agree(optimizer, wanted, ulps=ROUNDINGS)
        assert all(torch.equal(low, master.to(low.dtype)) for low, master in zip(lows, masters, strict=True))


VALUES = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


@pytest.mark.parametrize("road", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measure_finds_whatever_is_not_finite_wherever_it_is(road: RoadName, dtype: torch.dtype) -> None:
    parameters = parameters_of()
    optimizer = FusedSGD(parameters, lr=0.1, road=road)
    gradients = [gradient.to(dtype) for gradient in gradients_for(parameters)]
    lows = [parameter.detach().to(dtype) for parameter in parameters]
    factor = torch.tensor(0.25)
    clean = optimizer.measure(Feed(gradients, lows, factor))
    expected = sum(float(gradient.double().mul(0.25).square().sum()) for gradient in gradients)
    assert float(clean.found_inf) == 0.0
    torch.testing.assert_close(float(clean.squares), expected, rtol=1e-5, atol=0.0)
    for which, gradient in enumerate(gradients):
        for place in {0, gradient.numel() // 2, gradient.numel() - 1} if gradient.numel() else ():
            for value in VALUES.values():
                bad = list(gradients)
                bad[which] = gradient.clone()
                bad[which].view(-1)[place] = value
                optimizer.feed(None)
                assert float(optimizer.measure(Feed(bad, lows, factor)).found_inf) == 1.0


@pytest.mark.parametrize("road", ["eager", "compiled"])
def test_measure_scales_before_it_squares(road: RoadName) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = FusedSGD([weight], lr=0.1, road=road)
    reading = optimizer.measure(Feed([torch.full((4,), 1e30)], [weight], torch.tensor(1e-30)))
    assert (float(reading.squares), float(reading.found_inf)) == (4.0, 0.0)
    reading = optimizer.measure(Feed([torch.full((4,), 1e30)], [weight], torch.tensor(1.0)))
    assert (float(reading.squares), float(reading.found_inf)) == (float("inf"), 0.0)


@pytest.mark.parametrize("road", ["eager", "compiled"])
def test_measure_of_nothing(road: RoadName) -> None:
    weight = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = FusedSGD([weight], lr=0.1, road=road)
    reading = optimizer.measure(Feed([torch.zeros(0, 3)], [weight], torch.ones(())))
    assert [float(reading.squares), float(reading.found_inf)] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "LAMB", "NovoGrad"])
def test_a_parameter_with_as_many_elements_as_its_rule_has_numbers(name: str) -> None:
    kind, options = CASES[name]
    like = kind([torch.nn.Parameter(torch.ones(2))], **options)
    size = 1 + len(like.rule(like.param_groups[0]).constants(like.param_groups[0], 1.0))
    parameter = torch.nn.Parameter(torch.randn(size))
    optimizer = kind([parameter], road="compiled", **options)
    reference = Reference(optimizer)
    give([parameter], gradients_for([parameter]))
    wanted = reference.step()
    optimizer.step()
    agree(optimizer, wanted, ulps=CLIPPED)


@pytest.mark.parametrize("road", ["eager", "compiled"])
def test_what_was_prepared_for_other_gradients_is_dropped(road: RoadName) -> None:
    parameters = [torch.nn.Parameter(torch.ones(64)) for _ in range(6)]
    optimizer = FusedAdamW(parameters, lr=0.1, road=road)
    sizes: list[int] = []
    for step in range(8):
        give(parameters[:3], [torch.ones(64)] * 3)
        give(parameters[3:], [torch.ones(64)] * 3 if step % 2 else [None] * 3)
        optimizer.step()
        way = optimizer._road
        assert isinstance(way, EagerRoad | CompiledRoad)
        sizes.append(len(way._gather._rooms) + (len(way._calls) if isinstance(way, CompiledRoad) else 0))
    assert max(sizes[4:]) == max(sizes[:4])


@pytest.mark.parametrize("road", ["eager", "compiled", pytest.param("triton", marks=INTERPRETED)])
def test_where_new_tensors_go_by_default_does_not_matter(road: RoadName) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(100)) for _ in range(2))
    with_default, without = (FusedAdamW([one], lr=0.1, road=road) for one in (ours, theirs))
    for _ in range(2):
        give([ours, theirs], [torch.ones(100), torch.ones(100)])
        without.step()
        with torch.device("meta"):
            with_default.step()
    assert torch.equal(ours, theirs)


def test_more_parameters_than_an_arena_holds() -> None:
    parameters = [torch.nn.Parameter(torch.randn(ARENA // 10)) for _ in range(12)]
    optimizer = FusedAdamW(parameters, lr=0.01, road="eager")
    reference = Reference(optimizer)
    give(parameters, gradients_for(parameters))
    wanted = reference.step()
    optimizer.step()
    agree(optimizer, wanted, ulps=ROUNDINGS)
    places = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    assert len(places) == 2


def test_a_layer_wise_rule_sees_no_neighbour_in_the_arena() -> None:
    alone, beside = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    neighbour = torch.nn.Parameter(torch.full((5,), 1e3))
    first = FusedLAMB([alone], lr=0.1, max_grad_norm=0, road="eager")
    second = FusedLAMB([neighbour, beside], lr=0.1, max_grad_norm=0, road="eager")
    give([alone, beside, neighbour], [torch.arange(5.0), torch.arange(5.0), torch.full((5,), 1e4)])
    first.step()
    second.step()
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("road", ["eager", "compiled"])
@pytest.mark.parametrize("size", [8, 300])
def test_a_lazily_negated_gradient_has_the_sign_that_it_shows(road: RoadName, size: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(size, size))
    grad = torch.linspace(-1, 1, size * size).view(size, size)
    weight.grad = torch._neg_view(-grad)
    assert torch.equal(weight.grad, grad)
    FusedSGD([weight], lr=1.0, road=road).step()
    assert torch.equal(weight.detach(), -grad)
