"""The kernel that adds unscaled gradients gives the bits of the operations of torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from halfpeak.ops import reference
from halfpeak.ops.triton import kernels
from support.triton import DEVICES, INTERPRETER_WARNS, NEEDS_TRITON

SIZES = (1, 7, 1023, 1024, 1025, 5000, 2048)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

pytestmark = [NEEDS_TRITON, *INTERPRETER_WARNS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("factor", [2.0**-16, 1 / 3, 2.0**20])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_kernel_adds_as_torch_does(device: str, adds: bool, factor: float, count: int) -> None:
    for number, (dtype, bad) in enumerate(product((*DTYPES, None), (None, torch.inf, torch.nan))):
        torch.manual_seed(number)
        kinds = [dtype or DTYPES[i % 3] for i in range(count)]
        grads = [torch.randn(size).to(kind) for size, kind in zip(SIZES, kinds, strict=False)]
        if bad is not None:
            grads[number % count][-1] = bad
        grads = [grad.to(device) for grad in grads]
        sums = [torch.randn(grad.shape).to(device) for grad in grads]
        wanted, inverse = [total.clone() for total in sums], torch.tensor(factor, device=device)
        found, told = torch.zeros((), device=device), torch.zeros((), device=device)
        if adds:
            reference.accumulate_(wanted, grads, inverse, told)
        else:
            wanted = reference.unscaled(grads, [torch.float32] * count, inverse, told)
        kernels().add_unscaled(sums, grads, inverse, found, adds=adds)
        assert found == told == float(bad is not None)
        for ours, theirs in zip(sums, wanted, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_begin_anywhere_are_read(device: str) -> None:
    """Addresses that are multiples of 4 and 2 bytes only."""
    grad = torch.randn(3001, device=device).half()[1:]
    total = torch.zeros(3001, device=device)[1:]
    kernels().add_unscaled(
        [total], [grad], torch.tensor(0.5, device=device), torch.zeros((), device=device), adds=True
    )
    assert torch.equal(total, grad.float() * 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_that_overflows_is_found(device: str) -> None:
    found, total = torch.zeros((), device=device), torch.zeros(5, device=device)
    grad = torch.full((5,), 3e38, device=device)
    kernels().add_unscaled([total], [grad], torch.tensor(4.0, device=device), found, adds=True)
    assert found == 1
