"""Asynchronous copies to the host: the value at the time of the call arrives, and starting a copy does not wait."""

from __future__ import annotations

import pytest
import torch

from halfpeak.ops.async_scalar import AsyncCopy, AsyncScalar


def test_on_the_cpu_values_are_there_at_once() -> None:
    copy = AsyncCopy(torch.tensor([1.0, -2.5, float("inf")]))
    assert copy.is_ready()
    assert copy.read().tolist() == [1.0, -2.5, float("inf")]


def test_a_copy_has_the_value_at_the_time_it_was_started() -> None:
    source, scalar = torch.tensor(1.0), AsyncScalar(torch.device("cpu"))
    copy = AsyncCopy(source)
    scalar.push(source)
    source.zero_()
    assert (copy.read(), scalar.value) == (1.0, 1.0)


def test_a_scalar_on_the_cpu_is_the_current_one() -> None:
    scalar = AsyncScalar(torch.device("cpu"))
    assert scalar.value == 0.0
    for value in (3.0, -1.5, float("inf"), 0.0):
        scalar.push(torch.tensor(value))
        assert scalar.value == value
    scalar.push(torch.tensor(7, dtype=torch.int32))
    assert scalar.value == 7.0


@pytest.mark.gpu
def test_on_an_accelerator_only_reading_waits() -> None:
    vector = torch.arange(4.0, device="cuda")
    # Warm-up: later copies reuse this pinned memory; a first allocation calls the driver, which may wait.
    assert AsyncCopy(vector).read().tolist() == [0.0, 1.0, 2.0, 3.0]
    torch.cuda.synchronize()
    # Long enough that the copy queued behind it cannot have arrived at ``is_ready()``.
    torch.cuda._sleep(50_000_000)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = AsyncCopy(vector)
        assert not copy.is_ready()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert copy.read().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copy.is_ready()


@pytest.mark.gpu
def test_a_scalar_of_an_accelerator_arrives() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    scalar = AsyncScalar(device)
    scalar.push(torch.tensor(5.0, device=device))
    torch.accelerator.synchronize()
    assert scalar.value == 5.0
