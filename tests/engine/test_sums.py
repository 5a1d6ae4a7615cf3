"""Accumulated gradients: compiled kernels give the bits of torch's operations, and sums of many passes are float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import halfpeak
from halfpeak.engine.gradients.accumulate import CompiledKernels, kernels_for
from halfpeak.fused import FusedSGD
from halfpeak.ops import foreach
from support.nets import make_batch, make_net

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""The import of torch's compiler gives this warning."""

LOW = [torch.float16, torch.bfloat16]
SCALES = [1.0, 2.0**-16, 2.0**-24, 1 / 3, 3.0, 1e-30]
SHAPES = [(2**14,), (129, 131), (300, 200), (4,), (2**16 + 1,)]
INF, NAN = float("inf"), float("nan")


def gradients(dtype: torch.dtype, size: float) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=random) * size for shape in SHAPES]
    wide.append(torch.randn(128, 256, generator=random).t() * size)
    return [grad.to(dtype) for grad in wide]


def assert_bits(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("scale", "size"),
    [
        *((scale, 1.0) for scale in SCALES),
        (1.0, 2.0**40),
        (1 / 3, 2.0**12),
        (2.0**-24, 2.0**40),
        (3.0, 2.0**-20),
    ],
)
def test_sums_and_first_addends(dtype: torch.dtype, scale: float, size: float) -> None:
    grads, inv_scale = gradients(dtype, size), torch.tensor(scale)
    totals: list[list[Tensor]] = []
    flags: list[tuple[float, float]] = []
    for sums in (CompiledKernels(), foreach):
        first, later = torch.zeros(()), torch.zeros(())
        fresh = sums.unscaled(grads, [torch.float32] * len(grads), inv_scale, first)  # type: ignore[union-attr]
        into = [total.neg() * 0.7 for total in fresh]
        sums.accumulate_(into, grads, inv_scale, later)  # type: ignore[union-attr]
        totals.append([*fresh, *into])
        flags.append((float(first), float(later)))
    assert_bits(*totals)
    assert flags[0] == flags[1]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("where", [0, 2**13 + 5, -1])
def test_one_bad_element_raises_the_flag_for_good(dtype: torch.dtype, value: float, where: int) -> None:
    grad = torch.ones(2**14 + 3, dtype=dtype)
    grad[where] = value
    sums, found_inf, one = CompiledKernels(), torch.zeros(()), torch.ones(())
    sums.accumulate_([torch.zeros(grad.shape)], [grad], one, found_inf)
    assert found_inf.item() == 1.0
    sums.accumulate_([torch.zeros(grad.shape)], [torch.ones_like(grad)], one, found_inf)
    assert found_inf.item() == 1.0
    found_inf.zero_()
    sums.unscaled([grad], [torch.float32], one, found_inf)
    assert found_inf.item() == 1.0


def test_a_product_that_overflows_is_found_and_a_sum_is_not() -> None:
    found_inf, large = torch.zeros(()), torch.full((2**14,), 3e38)
    sums = CompiledKernels()
    sums.accumulate_([large.clone()], [large.bfloat16()], torch.ones(()), found_inf)
    assert found_inf.item() == 0.0
    sums.accumulate_([torch.zeros(2**14)], [large.bfloat16()], torch.tensor(4.0), found_inf)
    assert found_inf.item() == 1.0


def test_who_gets_kernels() -> None:
    large, small = torch.nn.Parameter(torch.zeros(2**18)), torch.nn.Parameter(torch.zeros(8))

    def compiles(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
        return isinstance(kernels_for([optimizer], [parameter]), CompiledKernels)

    assert compiles(FusedSGD([large], lr=0.1), large)
    assert not compiles(FusedSGD([small], lr=0.1), small)
    assert compiles(FusedSGD([small], lr=0.1, backend="compiled"), small)
    assert not compiles(FusedSGD([large], lr=0.1, backend="eager"), large)
    assert not compiles(torch.optim.SGD([large], lr=0.1), large)


@pytest.mark.parametrize(
    ("level", "how"),
    [*((level, how) for level in ("O2", "O5") for how in ("", "load", "copy")), ("O5", "edit")],
)
def test_passes_that_wait_scaled_are_rounded_once(level: str, how: str) -> None:
    """As under ``no_sync``, where a later pass reduces the low gradients: they are a float32 sum, rounded once."""

    def build() -> halfpeak.Engine:
        model = make_net()
        return halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level)

    engine = build()
    total = torch.zeros(8, 6)
    for number in range(40):
        x, y = make_batch(number)
        weight = engine.model[0].weight
        assert isinstance(weight, Tensor)
        loss = (engine.model(x).float() - y).square().mean() / 40
        with engine.scaled(loss, delay=True) as scaled:
            total += torch.autograd.grad(scaled, weight, retain_graph=True)[0]
            scaled.backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, total.to(weight.dtype))
        if number == 20 and how == "load":
            other = build()
            other.load_state_dict(copy.deepcopy(engine.state_dict()))
            engine = other
        elif number == 20 and how == "copy":
            engine = copy.deepcopy(engine)
        elif number == 20 and how == "edit":
            total = weight.grad.mul_(3).float()
