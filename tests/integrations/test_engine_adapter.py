"""EngineAdapter: which wrapped models a level accepts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.errors import ParameterError
from halfpeak.integrations.engine_adapter import EngineAdapter, scale_loss


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_only_a_level_that_converts_refuses_an_own_process_group(one_rank: None, level: str) -> None:
    """DDP cannot be rebuilt with a process group of its own; at O1 and O4 it need not be."""
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model, process_group=torch.distributed.new_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reducer, before = wrapped.reducer, model.weight.detach().clone()
    adapter = EngineAdapter(level, {}, {})
    if level in ("O2", "O5"):
        with pytest.raises(ParameterError, match="process_group"):
            adapter.connect([wrapped], [model], [optimizer])
        assert torch.equal(model.weight, before)
        assert adapter.engine is None
        return
    adapter.connect([wrapped], [model], [optimizer])
    engine = adapter.connected("")
    with adapter.forward():
        loss = wrapped(torch.ones(4, 3)).float().square().mean()
    with scale_loss(engine, loss, delay=False) as scaled:
        scaled.backward()
    assert adapter.step(engine, optimizer).stepped()
    assert wrapped.reducer is reducer
    assert not torch.equal(model.weight, before)
