"""EngineAdapter: wrapped models."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.errors import ParameterError
from halfpeak.core.levels import LEVELS
from halfpeak.integrations.engine_adapter import EngineAdapter


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_only_a_level_that_converts_refuses_an_own_process_group(one_rank: None, level: str) -> None:
    """DDP cannot be rebuilt with a process group of its own; at O1 and O4 it need not be."""
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model, process_group=torch.distributed.new_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reducer, before = wrapped.reducer, model.weight.detach().clone()
    adapter = EngineAdapter(level, {}, refused={}, advice="")
    if level in ("O2", "O5"):
        with pytest.raises(ParameterError, match="process_group"):
            adapter.connect([wrapped], [model], [optimizer])
        assert torch.equal(model.weight, before)
        assert adapter.engine is None
        return
    adapter.connect([wrapped], [model], [optimizer])
    with adapter.forward():
        loss = wrapped(torch.ones(4, 3)).float().square().mean()
    with adapter.scaled(loss) as scaled:
        scaled.backward()
    assert adapter.step(optimizer).stepped()
    assert wrapped.reducer is reducer
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_parameters_beside_the_model_in_its_wrapper_are_reduced_with_it(one_rank: None, level: str) -> None:
    """Such as those of a LightningModule itself. Under ``no_sync`` neither is reduced; a rank on its own would diverge."""
    module = nn.Sequential(nn.Linear(3, 2))
    module.scale = nn.Parameter(torch.ones(2))
    wrapped = DistributedDataParallel(module)
    adapter = EngineAdapter(LEVELS[level].replace(loss_scale=64.0), {}, refused={}, advice="")
    adapter.connect([wrapped], [module[0]], [torch.optim.SGD(module.parameters(), lr=0.5)])
    module.register_forward_hook(lambda _, args, output: output.float() * module.scale)
    (window,) = adapter.connected().parts.windows
    assert window.ids == set(map(id, module.parameters()))
    for synchronises in (False, True):
        with nullcontext() if synchronises else wrapped.no_sync(), adapter.forward():
            loss = wrapped(torch.ones(4, 3)).square().mean()
        with adapter.scaled(loss) as scaled:
            scaled.backward()
        assert (window.held is None) is synchronises
    assert adapter.step(adapter.connected().optimizers[0]).stepped()


def test_a_window_that_no_rank_has_reduced_is_left_out_of_the_state(one_rank: None) -> None:
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model)
    adapter = EngineAdapter("O2", {}, refused={}, advice="")
    adapter.connect([wrapped], [model], [torch.optim.SGD(model.parameters(), lr=0.5)])
    with wrapped.no_sync():
        loss = wrapped(torch.ones(4, 3)).square().mean()
    with adapter.scaled(loss) as scaled:
        scaled.backward()
    with pytest.warns(RuntimeWarning, match="begins the window anew; save after a step"):
        state = adapter.state_dict()
    assert state["window"] is None
    adapter.load_state_dict(state)
    assert adapter.connected().is_open


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_released_model_trains_in_its_own_dtypes(level: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    adapter = EngineAdapter(LEVELS[level].replace(loss_scale=64.0), {}, refused={}, advice="")
    adapter.connect([model], [model], [optimizer])
    with adapter.forward():
        loss = model(torch.randn(4, 3)).float().square().mean()
    with adapter.scaled(loss) as scaled:
        scaled.backward()
    adapter.release()
    for _ in range(2):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert tensor.dtype is (torch.int64 if name == "1.num_batches_tracked" else torch.float32)
        assert model[0].weight.grad.dtype is torch.float32
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
