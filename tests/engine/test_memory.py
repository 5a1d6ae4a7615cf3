"""``Engine.memory()`` reports the bytes that an engine holds, compared with the live tensors and the CUDA allocator."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

import halfpeak
from halfpeak.fused import FusedAdamW

SHAPES = ((400, 768),) * 6 + ((16,),)
COUNT = sum(map(math.prod, SHAPES))

FIXED = 2**21
"""Upper bound of scratch memory, in bytes. It does not grow with the model."""


class Sum(nn.Module):
    """A model without activations to keep: its loss is a sum over its weights."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in SHAPES]
        )
        self.register_buffer("table", torch.ones(100, device=device))

    def forward(self) -> Tensor:
        return torch.stack([weight.float().square().sum() for weight in self.weights]).sum()


def live() -> int:
    """Bytes of all storages that the garbage collector knows."""
    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter):
                for tensor in (thing, thing.grad):
                    if tensor is not None:
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.fixture(scope="module")
def live_before() -> int:
    return live()


def trained(
    level: str, make: Callable[..., Optimizer], *, device: str = "cpu", **options: Any
) -> halfpeak.Engine:
    """An engine after two steps and one more backward pass."""
    model = Sum(device)
    engine = halfpeak.prepare(
        model,
        make(model.parameters()),
        halfpeak.LEVELS[level].replace(loss_scale="dynamic"),
        clip=1.0,
        **options,
    )
    for step in range(3):
        with engine.forward():
            loss = model()
        engine.backward(loss)
        del loss
        if step < 2:
            engine.step()
    return engine


def fused(**options: Any) -> Callable[..., Optimizer]:
    return partial(FusedAdamW, backend="eager", **options)


def foreach(parameters: Any) -> Optimizer:
    return AdamW(parameters, eps=1e-4, foreach=True)


CASES: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "torch": (foreach, {}),
    "fused": (fused(), {}),
    "remainder": (fused(master="remainder"), {}),
    "compact": (fused(master="remainder8", moments="int8"), {}),
    "window": (fused(master="remainder"), {"accumulate": 4}),
}


@pytest.mark.parametrize(
    ("level", "case"),
    [
        *(("O5", case) for case in CASES),
        *((level, case) for level in ("O0", "O2", "O3") for case in ("torch", "fused")),
        *zip(
            ("O0", "O1", "O1", "O4", "O4"), ("window", "torch", "compact", "fused", "remainder"), strict=True
        ),
    ],
)
def test_the_report_is_what_is_held(level: str, case: str, live_before: int) -> None:
    make, options = CASES[case]
    engine = trained(level, make, **options)
    memory = engine.memory()
    # The tolerance is for scalar tensors of the step, which are created and freed.
    assert memory.total == pytest.approx(live() - live_before, abs=4096)
    assert memory.parameters == COUNT
    assert memory.total == sum(getattr(memory, kind) for kind in memory.per_parameter() if kind != "total")
    shown = {kind: float(each) for kind, each in map(str.split, str(memory).splitlines()[1:])}
    expected = {kind: getattr(memory, kind) / COUNT for kind in memory.per_parameter()}
    assert shown == pytest.approx({kind: each for kind, each in expected.items() if each}, abs=6e-4)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (fused(), {"weights": 2, "masters": 4, "moments": 8, "gradients": 2, "total": 16}),
        (
            fused(master="remainder"),
            {"weights": 2, "remainders": 2, "moments": 8, "gradients": 2, "total": 14},
        ),
        (fused(master="remainder", moments=torch.bfloat16), {"remainders": 2, "moments": 4, "total": 10}),
        (fused(master="remainder8", moments="int8"), {"remainders": 1, "moments": 2.0625, "total": 7.0625}),
        (foreach, {"weights": 2, "masters": 4, "moments": 8, "gradients": 4, "total": 18}),
    ],
    ids=["masters", "remainders", "bfloat16 moments", "compact", "torch"],
)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_bytes_per_parameter_with_clipping_and_a_dynamic_scale(
    level: str, make: Callable[..., Optimizer], expected: dict[str, float]
) -> None:
    memory = trained(level, make).memory()
    found = memory.per_parameter()
    assert memory.scratch < FIXED
    found["total"] -= memory.scratch / COUNT
    assert {kind: found[kind] for kind in expected} == pytest.approx(expected, abs=0.002)


@pytest.mark.filterwarnings("ignore:.*profiler")
@pytest.mark.parametrize("case", ["fused", "remainder", "compact"])
def test_a_step_needs_room_that_does_not_grow_with_the_model(case: str) -> None:
    engine = trained("O5", CASES[case][0])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine.step()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            peak = max(peak, held)
    assert peak < 8 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_report_is_what_the_allocator_has_given_out(case: str) -> None:
    make, options = CASES[case]
    torch.cuda.synchronize()
    before = requested("current")
    engine = trained("O5", make, device="cuda", **options)
    held = requested("current") - before
    # The tolerance is for scalar tensors of the step, which are created and freed.
    assert engine.memory().total == pytest.approx(held, abs=4096)
    torch.cuda.reset_peak_memory_stats()
    engine.step()
    assert requested("peak") - before - held < 64 * 2**20


def requested(when: str) -> int:
    """Bytes requested from the allocator, which gives out more: it rounds pieces of over 1 MB up by half a megabyte."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
