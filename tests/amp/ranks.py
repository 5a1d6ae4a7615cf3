"""The ranks of test_ranks.py."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak import OrderError, amp
from support.nets import TYPICAL

WINDOWS, PASSES = 4, 3


class Heads(nn.Module):
    """A trunk and two heads, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def train(rank: int, level: str, how: str, *, overflow: bool = False) -> dict[str, Any]:
    """Windows whose gradients are reduced once: by hand in the last block, by DDP, or in one process with whole batches.

    In the second window a loss of rank 0, not in the last pass, is inf, if there is an ``overflow``.
    """
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = "dynamic" if overflow else 64.0
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, max_loss_scale=64.0, verbosity=0)
    wrapped: Any = DistributedDataParallel(model, find_unused_parameters=True) if how == "ddp" else model
    ranks = [rank] if how != "one process" else range(dist.get_world_size())
    stepped: list[bool] = []
    refused = ""
    for step in range(WINDOWS * PASSES):
        last = step % PASSES == PASSES - 1
        x = torch.cat([batch(each, step) for each in ranks])
        with wrapped.no_sync() if how == "ddp" and not last else nullcontext():
            # The second head has no part in the last pass.
            output = wrapped(x, 0 if last or how == "ddp" else step % 2)
            loss = output.float().square().mean() / PASSES
            if overflow and step == PASSES and rank == 0:
                loss = loss * float("inf")
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
                if last and how == "by hand":
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            dist.all_reduce(parameter.grad.data)
                            parameter.grad.data.div_(dist.get_world_size())
        if step == 1 and how != "one process":
            try:
                optimizer.step()
            except OrderError as error:
                refused = str(error)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            stepped.append(amp.last_step(optimizer).stepped())
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()
    return {
        "parameters": [parameter.detach().float() for parameter in model.parameters()],
        "stepped": stepped,
        "scale": amp.state_dict()["loss_scaler0"],
        "refused": refused,
    }


def reduced_in_each_pass(rank: int, *, delay_unscale: bool) -> list[torch.Tensor]:
    """The parameters after two steps of two blocks each, whose gradients DDP reduces every time."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            loss = wrapped(batch(rank, 2 * step + part), part).float().square().mean()
            with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled:
                scaled.backward()
        optimizer.step()
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()
    return [parameter.detach().float() for parameter in model.parameters()]


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {
        **{
            f"{level} {how}": train(rank, level, how)
            for level in TYPICAL
            for how in ("by hand", "ddp", "one process")
        },
        **{
            f"{level} {how} overflow": train(rank, level, how, overflow=True)
            for level in TYPICAL
            for how in ("by hand", "ddp")
        },
        "reduced in each pass": {
            delay: reduced_in_each_pass(rank, delay_unscale=delay) for delay in (False, True)
        },
    }
