"""``master="remainder"``: a remainder is used only with the weight whose rounding left it."""

from __future__ import annotations

import pytest
import torch

from halfpeak.fused import FusedAdamW


@pytest.mark.parametrize("is_stepped", [False, True], ids=["before the first step", "after a step"])
def test_memory_that_returns_to_its_address_has_no_remainder(is_stepped: bool) -> None:
    memory = bytearray(2 * 64)

    def at_one_address(value: float) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.bfloat16).fill_(value)

    weight = torch.nn.Parameter(at_one_address(0.0))
    optimizer = FusedAdamW([weight], lr=0.0, weight_decay=0.0, master="remainder")
    if is_stepped:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    weight.data = at_one_address(1.0)
    remainders = optimizer.remainders
    assert remainders is not None
    remainders.set_value(weight, torch.full((64,), 1.001))
    assert torch.equal(remainders.fp32_value(weight), torch.full((64,), 1.001))
    weight.data = torch.zeros_like(weight)
    weight.data = at_one_address(0.5)
    assert torch.equal(remainders.fp32_value(weight), torch.full((64,), 0.5))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(remainders.fp32_value(weight), torch.full((64,), 0.5))
