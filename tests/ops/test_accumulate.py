"""``add_unscaled``: every kind of gradient beside every kind of earlier sum, by a formula of one line."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from halfpeak.ops.accumulate import add_unscaled
from halfpeak.parts.grad_buffers import GradBufferPool

LOW = [torch.float16, torch.bfloat16]
DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "float16 to float32": (torch.float16, torch.float32),
    "bfloat16 to float32": (torch.bfloat16, torch.float32),
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float64": (torch.float64, torch.float64),
    "complex": (torch.complex64, torch.complex64),
}
SCALES = [1.0, 2.0**-16, 2.0**-24, 1 / 3, 3.0, 1e-30]
SHAPES = [(), (4,), (0,), (129, 131), (2**16 + 1,)]


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = dtype if dtype.is_complex else torch.float32
    return (torch.randn(shape, generator=generator, dtype=kind) * size).to(dtype)


def expected(
    total: Tensor | None, fresh: Tensor | None, dtype: torch.dtype, inv_scale: float
) -> Tensor | None:
    if fresh is None:
        return total
    wide = torch.promote_types(fresh.dtype, torch.float32)
    unscaled = (fresh.to(wide) * torch.tensor(inv_scale)).to(dtype)
    return unscaled if total is None else total + unscaled


def same_bits(mine: Tensor | None, other: Tensor | None) -> bool:
    if mine is None or other is None:
        return mine is other
    fits = (mine.dtype, mine.shape) == (other.dtype, other.shape)
    return fits and torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("inv_scale", SCALES)
@pytest.mark.parametrize("pooled", [False, True])
def test_the_formula(kind: str, inv_scale: float, pooled: bool) -> None:
    """Every shape with and without an earlier sum, and earlier sums alone, in one call."""
    had, wanted = DTYPES[kind]
    pool = GradBufferPool() if pooled else None
    earlier, fresh, formula = list[Tensor | None](), list[Tensor | None](), list[Tensor | None]()
    for number, (shape, has_sum, has_fresh) in enumerate(product(SHAPES, (False, True), (False, True))):
        total = values(wanted, shape, number) if has_sum else None
        grad = values(had, shape, 100 + number) if has_fresh else None
        formula.append(expected(total, grad, wanted, inv_scale))
        earlier.append(total)
        fresh.append(grad)
    found_inf = torch.zeros(())
    masters = [torch.empty(shape) for shape, _, _ in product(SHAPES, (0, 1), (0, 1))]
    found = add_unscaled(
        list(earlier),
        list(fresh),
        [wanted] * len(fresh),
        torch.tensor(inv_scale),
        found_inf,
        memory=None if pool is None else lambda places: pool.take([masters[i] for i in places]),
    )
    assert all(map(same_bits, found, formula))
    assert found_inf == 0
    # Sums are written in place, so that other code which holds them goes on seeing them.
    assert all(a is b for a, b in zip(found, earlier, strict=True) if b is not None)


@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_sparse_gradients_and_dense_sums(has_sum: bool, dtype: torch.dtype) -> None:
    rows = torch.tensor([[0, 2, 0]])
    entries = torch.tensor([[4.0], [8.0], [16.0]])

    def sparse(dtype: torch.dtype) -> Tensor:
        return torch.sparse_coo_tensor(rows, entries.to(dtype), (3, 1), check_invariants=True)

    dense = sparse(torch.float32).to_dense()
    for total, grad in (
        (sparse(torch.float32), sparse(dtype)),
        (dense.clone(), sparse(dtype)),
        (sparse(torch.float32), dense.clone().to(dtype)),
    ):
        (found,) = add_unscaled(
            [total if has_sum else None], [grad], [torch.float32], torch.tensor(0.25), torch.zeros(())
        )
        assert found is not None
        assert found.dtype is torch.float32
        assert torch.equal(found.to_dense(), dense * (1.25 if has_sum else 0.25))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("graph", ["of the gradient", "of the sum", "of both"])
def test_a_graph_is_kept_although_the_caller_computes_without(dtype: torch.dtype, graph: str) -> None:
    """A gradient penalty depends on the weights through both addends."""
    weight = torch.ones(2, requires_grad=True)
    total = weight * 2 if graph != "of the gradient" else torch.full((2,), 2.0)
    grad = (weight * 8).to(dtype) if graph != "of the sum" else torch.full((2,), 8.0, dtype=dtype)
    with torch.no_grad():
        (found,) = add_unscaled([total], [grad], [torch.float32], torch.tensor(0.25), torch.zeros(()))
    assert found is not None
    assert found.tolist() == [4.0, 4.0]
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [{"of the gradient": 2.0, "of the sum": 2.0, "of both": 4.0}[graph]] * 2


def test_low_gradients_take_memory_that_is_given_and_no_other() -> None:
    """Gradients of the wanted dtype are unscaled in place."""
    masters = [torch.empty(5), torch.empty(7)]
    pool, given = GradBufferPool(), list[list[int]]()

    def memory(places: list[int]) -> list[Tensor]:
        given.append(places)
        return pool.take([masters[i - 1] for i in places])

    grads: list[Tensor | None] = [torch.ones(3), torch.ones(5).half(), torch.ones(7).half()]
    found = add_unscaled(
        [None] * 3, grads, [torch.float32] * 3, torch.tensor(0.5), torch.zeros(()), memory=memory
    )
    assert given == [[1, 2]]
    assert found[0] is grads[0]
    places = [tensor.data_ptr() for tensor in found[1:] if tensor is not None]
    del found
    assert [tensor.data_ptr() for tensor in pool.take(masters)] == places
