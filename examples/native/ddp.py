"""DistributedDataParallel, accumulating two backward passes; rank 0 saves, and the same command resumes a stopped run.

torchrun --nproc-per-node 2 examples/native/ddp.py --folder run --steps 100
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak import checkpoint


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
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = halfpeak.prepare(model, optimizer, options.level, accumulate=2, clip=1.0, check_ranks=50)
    ddp = DistributedDataParallel(model)

    file = options.folder / "checkpoint.pt"
    if file.exists():
        engine.load_state_dict(checkpoint.load(file))
    for number in range(engine.micro_step, 2 * options.steps):
        torch.manual_seed(1000 * number + rank)  # each rank draws its own batches
        x = torch.randn(32, 16, device=device)
        with engine.forward(ddp):
            loss = cross_entropy(ddp(x).float(), x[:, :8].argmax(1))
        engine.backward(loss)
        result = engine.step()
        if rank == 0 and result.boundary and engine.micro_step % 20 == 0:
            print(f"step {engine.micro_step // 2}: loss {loss.item():.3f}, scale {engine.read_scale():g}")
    if rank == 0:
        options.folder.mkdir(exist_ok=True)
        checkpoint.save(file, engine.state_dict())
    dist.barrier()  # no rank closes the process group while another still uses it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
