"""A model split into one stage per rank, run by torch.distributed.pipelining; each stage saves under its number.

torchrun --nproc-per-node 2 examples/native/pipeline.py --folder run --steps 100
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import halfpeak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_process_group()
    rank, ranks, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local)
        device = torch.accelerator.current_accelerator() or device

    torch.manual_seed(rank)
    ends = 16 if rank == 0 else 32, 8 if rank == ranks - 1 else 32
    model = nn.Sequential(nn.Linear(ends[0], 64), nn.ReLU(), nn.Linear(64, ends[1])).to(device)
    for parameter in model.parameters():
        parameter.allreduce = False  # no other rank holds it, so it counts once in the norm of all stages
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = halfpeak.prepare(model, optimizer, options.level, clip=1.0, group="world")

    def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.float(), target) * engine.scale

    stage = PipelineStage(model, rank, ranks, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=scaled_loss)

    saved = [path.parent for path in options.folder.glob("*/.metadata")]  # DCP writes it last
    if saved:
        dcp.load({f"stage {rank}": engine}, checkpoint_id=max(saved, key=lambda path: int(path.name)))
    for number in range(engine.micro_step, options.steps):
        torch.manual_seed(1000 * number)  # all ranks draw x: the first uses it, the last its targets
        x = torch.randn(64, 16, device=device)
        inputs = [x] if rank == 0 else []
        losses: list[Tensor] = []
        ends_here = {"target": x[:, :8].argmax(1), "losses": losses} if rank == ranks - 1 else {}
        scale = engine.read_scale()
        with engine.forward(), engine.scaled(torch.ones((), device=device)):
            schedule.step(*inputs, **ends_here)
        engine.step()
        if losses and engine.micro_step % 10 == 0:
            loss = torch.stack(losses).mean().item() / scale
            print(f"step {engine.micro_step}: loss {loss:.3f}, scale {engine.read_scale():g}")
    dcp.save({f"stage {rank}": engine}, checkpoint_id=options.folder / str(engine.micro_step))
    dist.barrier()  # no rank closes the process group while another still uses it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
