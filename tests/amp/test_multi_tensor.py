"""multi_tensor_apply and its operations, against plain arithmetic."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from core.scale_models import ApexHysteresis
from halfpeak.amp.multi_tensor import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
    update_scale_hysteresis,
)
from halfpeak.core.errors import ConfigError
from support.states import same

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZES = [1, 0, 7, 1025, 33]


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size).to(dtype) for size in SIZES] + [torch.randn(6, 4).to(dtype).t()]


def test_the_applier_passes_everything_on() -> None:
    def op(chunk_size: int, noop: Tensor, lists: list[list[Tensor]], *args: object) -> tuple[object, ...]:
        return chunk_size, noop, lists, args

    noop, lists = flag(), [[torch.ones(1)]]
    assert MultiTensorApply(333)(op, noop, lists, 1, "two") == (333, noop, lists, (1, "two"))
    assert multi_tensor_applier.chunk_size == 2048 * 32
    assert MultiTensorApply.available
    assert not MultiTensorApply.warned


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_scale(source: torch.dtype, target: torch.dtype) -> None:
    x, out, noop = tensors(source), [t.to(target) for t in tensors(source)], flag()
    before = [t.clone() for t in x]
    multi_tensor_applier(multi_tensor_scale, noop, [x, out], 0.3)
    for value, result in zip(x, out, strict=True):
        assert torch.equal(result, (value.float() * 0.3).to(target))
    assert same(x, before)
    assert noop.item() == 0
    multi_tensor_scale(0, noop, [x, x], 0.3)
    assert all(torch.equal(a, (b.float() * 0.3).to(source)) for a, b in zip(x, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [(0, 0), (3, 0), (3, 512), (3, 1024), (4, 32)])
def test_scale_finds_what_is_not_finite_and_writes_anyway(
    dtype: torch.dtype, bad: float, where: tuple[int, int]
) -> None:
    x, noop = tensors(dtype), flag()
    x[where[0]][where[1]] = bad
    out = [torch.zeros_like(t) for t in x]
    multi_tensor_scale(0, noop, [x, out], 2.0)
    assert noop.item() == 1
    assert not math.isfinite(out[where[0]][where[1]].item())
    assert torch.equal(out[2], (x[2].float() * 2).to(dtype))
    multi_tensor_scale(0, noop, [[torch.ones(1)], [torch.ones(1)]], 2.0)
    assert noop.item() == 1, "only the caller clears the flag"


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=str)
def test_axpby(dtypes: tuple[torch.dtype, ...]) -> None:
    x, y = tensors(dtypes[0]), tensors(dtypes[1])
    out, noop = [torch.empty_like(t, dtype=dtypes[2]) for t in x], flag()
    multi_tensor_applier(multi_tensor_axpby, noop, [x, y, out], 2.0, -0.25, -1)
    for a, b, result in zip(x, y, out, strict=True):
        assert torch.equal(result, (2.0 * a.float() + -0.25 * b.float()).to(dtypes[2]))
    assert noop.item() == 0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("checked", [-1, 0, 1])
def test_axpby_checks_what_it_is_told(which: int, checked: int) -> None:
    lists = [tensors(torch.float32) for _ in range(3)]
    lists[which][3][5] = math.nan
    noop = flag()
    multi_tensor_axpby(0, noop, lists, 1.0, 1.0, checked)
    assert noop.item() == int(checked in (-1, which))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [None, 0.5])
def test_l2norm(dtype: torch.dtype, inverse: float | None) -> None:
    x, noop = tensors(dtype), flag()
    before = [t.clone() for t in x]
    if inverse is None:
        total, each = multi_tensor_applier(multi_tensor_l2norm, noop, [x], True)
        alone, none = multi_tensor_l2norm(0, noop, [x])
    else:
        total, each = multi_tensor_applier(
            multi_tensor_unscale_l2norm, noop, [x], torch.tensor([inverse]), True
        )
        alone, none = multi_tensor_unscale_l2norm(0, noop, [x], torch.tensor([inverse]), False)
    wide = [t.double() * (inverse or 1.0) for t in x]
    assert (total.shape, each.shape, none.shape) == ((1,), (len(x),), (0,))
    assert total.dtype == each.dtype == torch.float32
    torch.testing.assert_close(each.double(), torch.stack([t.norm() for t in wide]), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        total.double()[0], torch.cat([t.reshape(-1) for t in wide]).norm(), rtol=1e-6, atol=0
    )
    assert torch.equal(total, alone)
    assert noop.item() == 0
    assert same(x, before)


def test_norms_raise_the_flag() -> None:
    for op, args in ((multi_tensor_l2norm, ()), (multi_tensor_unscale_l2norm, (torch.ones(1),))):
        noop = flag()
        for last in (math.nan, 1.0):  # finite norms do not lower it
            op(0, noop, [[torch.ones(3), torch.tensor([1.0, last])]], *args)
            assert noop.item() == 1


def test_a_large_norm_is_unscaled_before_it_is_taken() -> None:
    noop = flag()
    total, _ = multi_tensor_unscale_l2norm(0, noop, [[torch.tensor([3e38, 3e38])]], torch.tensor([1e-30]))
    torch.testing.assert_close(total, torch.tensor([3e8 * math.sqrt(2)]))
    assert noop.item() == 0


def test_empty_lists() -> None:
    noop = flag()
    multi_tensor_scale(0, noop, [[], []], 2.0)
    multi_tensor_axpby(0, noop, [[], [], []], 1.0, 1.0)
    assert multi_tensor_l2norm(0, noop, [[]], True)[0].item() == 0
    assert multi_tensor_unscale_l2norm(0, noop, [[]], torch.ones(1))[0].item() == 0
    assert noop.item() == 0


@pytest.mark.parametrize("noop", [torch.zeros(1), torch.zeros((), dtype=torch.int64)])
def test_flags_of_any_dtype_and_shape(noop: Tensor) -> None:
    bad = [torch.tensor([math.inf])]
    multi_tensor_scale(0, noop, [bad, [torch.ones(1)]], 1.0)
    assert noop.item() == 1
    noop.zero_()
    multi_tensor_l2norm(0, noop, [bad])
    assert noop.item() == 1


def test_refusals() -> None:
    one = [torch.ones(1)]
    for lists in ([one], [one, []], [one, one, one], []):
        with pytest.raises(ConfigError, match="expects 2 lists of equal length"):
            multi_tensor_scale(0, flag(), lists, 1.0)
    with pytest.raises(ConfigError, match="arg_to_check=2"):
        multi_tensor_axpby(0, flag(), [one, one, one], 1.0, 1.0, 2)
    scale, tracker = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ConfigError):
        update_scale_hysteresis(scale, tracker, tracker.clone(), torch.zeros(1), 2.0, 0.5, 0, 1)


@pytest.mark.parametrize("seed", range(6))
def test_update_scale_hysteresis(seed: int) -> None:
    rng = random.Random(seed)
    interval, hysteresis = rng.randint(1, 4), rng.randint(1, 3)
    factors = (2.0, 0.5) if seed % 2 else (4.0, 0.125)
    start = rng.choice([2.0**-120, 1.0, 2.0**16, 2.0**125])
    rule = ApexHysteresis(init=start, interval=interval, hysteresis=hysteresis, factors=factors)
    scale = torch.tensor([start])
    growth = torch.zeros(1, dtype=torch.int32)
    left = torch.tensor([hysteresis], dtype=torch.int32)
    chance = rng.choice([0.05, 0.6])
    for _ in range(150):
        overflow = rng.random() < chance
        rule.update(overflow)
        returned = update_scale_hysteresis(
            scale, growth, left, torch.tensor([float(overflow)]), *factors, interval, hysteresis
        )
        assert returned is scale
        assert (scale.item(), growth.item(), left.item()) == (rule.scale, rule.clean, rule.left)
        assert math.isfinite(scale.item())
        assert scale.item() > 0
