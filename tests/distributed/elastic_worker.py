"""A worker of ``test_elastic.py``: trains with DDP under torchrun, saves after every step, and goes on where it was.

Arguments: a folder, and how many workers are to be killed: one at a time, each in the middle of another step.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from distributed.engine_ranks import batch, net
from halfpeak import checkpoint

STEPS = 24
EVERY = 2


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # A file of its own for each attempt: torchrun's store may still have the addresses of the dead.
    rendezvous = f"file://{folder / f'rendezvous-{os.getppid()}-{restarts}'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scale = halfpeak.ScaleConfig(init=1024.0, interval=5)
    engine = halfpeak.prepare(model, optimizer, "O2", accumulate=EVERY, clip=1.0, scale=scale)
    newest = folder / "newest.pt"
    if newest.exists():
        engine.load_state_dict(checkpoint.load(newest))
    wrapped = DistributedDataParallel(model)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    doomed = doomed_step(restarts) if restarts < kills else None
    for step in range(engine.micro_step, STEPS):
        with engine.forward(wrapped):
            loss = wrapped(batch(rank, step)).float().square().mean()
        if doomed is not None and step >= doomed and rank == restarts % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.backward(loss * float("inf") if step == 7 and rank == 1 else loss)
        engine.step()
        if rank == 0 and engine.micro_step % EVERY == 0:
            # Inside a window each rank has gradients of its own.
            checkpoint.save(newest, engine.state_dict())
            (folder / "progress").write_text(str(step))
        dist.barrier()
        if agreed(bool(asked)):
            break
    if rank == 0:
        digest = hashlib.sha256()
        for _, master in engine.masters:
            digest.update(master.detach().numpy().tobytes())
        (folder / "result").write_text(f"{engine.micro_step} {engine.read_scale()} {digest.hexdigest()}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Threads of gloo have been seen to wait for each other at exit.


def doomed_step(restart: int) -> int:
    """In which step a worker dies after so many restarts, wherever that one begins."""
    return random.Random(restart).randrange(1 + 4 * restart, 5 + 4 * restart)


def agreed(asked: bool) -> bool:
    """Whether any worker was asked to end."""
    anyone_asked = torch.tensor(float(asked))
    dist.all_reduce(anyone_asked, op=dist.ReduceOp.MAX)
    return bool(anyone_asked)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
