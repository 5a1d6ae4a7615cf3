"""A model sharded by FSDP2 and a fused optimizer; every rank saves its shards, and any number of ranks can resume.

torchrun --nproc-per-node 2 examples/native/fsdp2.py --folder run --steps 100
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfpeak
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedAdamW


class Block(nn.Module):
    """An MLP block; ``fully_shard`` shards repeated blocks one by one, so FSDP2 gathers one at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_process_group()
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local)
        device = torch.accelerator.current_accelerator() or device

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *(Block(32) for _ in range(2)), nn.Linear(32, 8)).to(device)
    fully_shard(model, options.level)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    engine = halfpeak.prepare(model, optimizer, options.level, clip=1.0)

    saved = [path.parent for path in options.folder.glob("*/.metadata")]  # DCP writes it last
    if saved:
        dcp.load({"engine": engine}, checkpoint_id=max(saved, key=lambda path: int(path.name)))
    for number in range(engine.micro_step, options.steps):
        torch.manual_seed(1000 * number + rank)  # each rank draws its own batches
        x = torch.randn(32, 16, device=device)
        with engine.forward(model):
            loss = cross_entropy(model(x).float(), x[:, :8].argmax(1))
        engine.backward(loss)
        engine.step()
        if rank == 0 and engine.micro_step % 10 == 0:
            print(f"step {engine.micro_step}: loss {loss.item():.3f}, scale {engine.read_scale():g}")
    dcp.save({"engine": engine}, checkpoint_id=options.folder / str(engine.micro_step))
    dist.barrier()  # no rank closes the process group while another still uses it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
