"""Native code called with prepared arguments gives the results of the compiled function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfpeak.fused.backends.inductor import BoundKernel, Kernel, Vector, compile_kernel
from halfpeak.fused.backends.kernels import squares

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Importing torch's compiler raises it."""

HOST = torch.device("cpu")


def added(total: Tensor, grad: Tensor, factor: Tensor) -> tuple[()]:
    total.add_(grad.float() * factor)
    return ()


@pytest.fixture(scope="module")
def adding() -> Kernel:
    vectors = (Vector(torch.float32, HOST, None), Vector(torch.bfloat16, HOST, None))
    return compile_kernel(added, (*vectors, Vector(torch.float32, HOST, ())))


def bound(kernel: Kernel, *vectors: Tensor) -> BoundKernel:
    found = kernel.bind(*vectors)
    assert found is not None
    return found


@pytest.mark.parametrize("length", [2, 17, 5000])
def test_a_bound_kernel_writes_where_it_was_bound(adding: Kernel, length: int) -> None:
    total = torch.arange(float(length))
    grads = [torch.randn(length).bfloat16() for _ in range(2)]
    run = bound(adding, total, grads[0], torch.tensor(1.0))
    assert torch.equal(total, torch.arange(float(length)))  # binding runs nothing
    for grad, factor in zip(grads, (0.5, 2.0), strict=True):
        wanted = total + grad.float() * factor
        run(grad, torch.tensor(factor))
        assert torch.equal(total, wanted)


def test_binding_checks_what_is_bound(adding: Kernel) -> None:
    with pytest.raises(AssertionError):
        adding.bind(torch.zeros(8), torch.zeros(16, dtype=torch.bfloat16)[::2], torch.tensor(1.0))


def test_two_that_are_bound_have_outputs_of_their_own() -> None:
    kernel = compile_kernel(squares, (Vector(torch.bfloat16, HOST, None), Vector(torch.float32, HOST, ())))
    first, second = (torch.full((64,), value).bfloat16() for value in (1.0, 2.0))
    one = torch.tensor(1.0)
    of_first, of_second = bound(kernel, first, one), bound(kernel, second, one)
    sums = [*of_first(first, one), *of_second(second, one)]
    assert [float(total) for total in sums] == [64.0, 256.0]


def test_what_computes_in_between_is_called_as_the_compiler_made_it() -> None:
    def turned(vector: Tensor, factor: Tensor) -> tuple[Tensor]:
        return (vector.flip(0).cumsum(0) * vector.sum() * factor,)

    kernel = compile_kernel(turned, (Vector(torch.float32, HOST, None), Vector(torch.float32, HOST, ())))
    vector, factor = torch.arange(40.0), torch.tensor(0.5)
    assert kernel.bind(vector, factor) is None
    torch.testing.assert_close(kernel(vector, factor)[0], turned(vector, factor)[0])


@pytest.mark.parametrize("threads", [12, 96])
def test_measuring_is_shared_among_all_threads_of_a_large_machine(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel = compile_kernel(squares, (Vector(torch.float32, HOST, None), Vector(torch.float32, HOST, ())))
    finally:
        torch.set_num_threads(before)
    assert f"#pragma omp parallel num_threads({threads})" in kernel._code.source_code


@pytest.mark.parametrize("length", [16, 18, 4099, 2**20])
def test_four_stretches_give_the_sum_of_squares(length: int) -> None:
    kernel = compile_kernel(squares, (Vector(torch.float32, HOST, None), Vector(torch.float32, HOST, ())))
    vector = torch.randn(length, generator=torch.Generator().manual_seed(0))
    wanted = (vector[: length // 4 * 4].double() * 0.25).square().sum()
    (total,) = kernel(vector, torch.tensor(0.25))
    torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=0.0)
