"""Two ranks of Fabric with DDP on a CPU, which do not reduce every backward pass. Run by test_lightning_ranks.py."""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from torch import nn

from halfpeak.integrations.lightning import HalfpeakFabricPrecision
from integrations.plain_loop import SCALE, adamw
from support.nets import make_batch, make_net


def train(level: str, *, ranks: int) -> list[float]:
    """Four steps of two backward passes; only the second pass reduces gradients, and rank 1 overflows once."""
    precision = HalfpeakFabricPrecision(level, {"scale": SCALE})
    fabric = Fabric(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", plugins=precision
    )
    fabric.launch()
    net = make_net()
    # Batch norm would see other batches on two ranks than on one.
    net[1] = nn.Identity()
    model, optimizer = fabric.setup(net, adamw(net.parameters()))
    precision.connect(model, optimizer)
    shards = range(2) if ranks == 1 else [fabric.global_rank]
    moved: list[bool] = []
    for step in range(4):
        for part in range(2):
            with fabric.no_backward_sync(model, enabled=part == 0):
                for shard in shards:
                    x, y = make_batch(4 * step + 2 * part + shard)
                    if (step, part, shard) == (2, 0, 1):
                        x = x * torch.inf
                    loss = nn.functional.mse_loss(model(x).float(), y) / (2 * len(shards))
                    fabric.backward(loss)
        moved.append(optimizer.step().stepped())
    assert moved == [True, True, False, True], moved
    values = torch.cat([value.float().reshape(-1) for value in net.state_dict().values()])
    if ranks > 1:
        gathered = fabric.all_gather(values)
        assert torch.equal(gathered[0], gathered[1]), "the ranks differ"
    fabric.print("WEIGHTS", *values.tolist())
    return values.tolist()


if __name__ == "__main__":
    train(sys.argv[1], ranks=int(sys.argv[2]))
