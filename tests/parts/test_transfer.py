"""Numbers on their way to the host: what was sent arrives, and sending waits for nothing."""

from __future__ import annotations

import pytest
import torch

from halfpeak.parts.transfer import Transfer


def test_on_the_cpu_numbers_are_there_at_once() -> None:
    transfer = Transfer(torch.tensor([1.0, -2.5, float("inf")]))
    assert transfer.has_arrived()
    assert transfer.numbers() == [1.0, -2.5, float("inf")]


@pytest.mark.gpu
def test_on_an_accelerator_nothing_waits_but_reading() -> None:
    vector = torch.arange(4.0, device="cuda")
    # Memory that has been pinned once is there without asking the driver, who may wait.
    assert Transfer(vector).numbers() == [0.0, 1.0, 2.0, 3.0]
    torch.cuda.synchronize()
    # Long enough that the copy behind it cannot have arrived when it is asked for.
    torch.cuda._sleep(50_000_000)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        transfer = Transfer(vector)
        assert not transfer.has_arrived()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert transfer.numbers() == [0.0, 1.0, 2.0, 3.0]
    assert transfer.has_arrived()
