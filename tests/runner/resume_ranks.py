"""What test_ranks.py runs on several ranks: a run, and the same resumed in the middle."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import halfpeak.runner as hr
from runner import zoo

KINDS = ("EpochBasedRunner", "IterBasedRunner")
STOPS = (2, 3, 5)


class Model(zoo.Model):
    """Without batch norm, whose statistics are one per rank; with dropout, which each rank draws for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


def build(kind: str, folder: Path) -> Any:
    model = Model()
    length = {"max_epochs": 2} if kind == "EpochBasedRunner" else {"max_iters": 6}
    made = getattr(hr, kind)(model, optimizer=zoo.sgd(model), work_dir=folder, logger=zoo.quiet(), **length)
    made.register_training_hooks(
        {"policy": "poly", "by_epoch": False},
        {"type": "Fp16OptimizerHook", "mode": "master", "loss_scale": 64.0},
        {"interval": 1, "by_epoch": False},
        custom_hooks_config=[{"type": "EMAHook", "momentum": 0.1}, {"type": "DistSamplerSeedHook"}],
    )
    return made


def run(made: Any) -> Any:
    data = zoo.Noisy()
    made.run([DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=3))], [("train", 1)])
    return made.checkpoint()


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for kind in KINDS:
        whole = build(kind, folder / kind)
        torch.manual_seed(100 + rank)
        end = run(whole)
        found[kind] = {"random": end["random"]["cpu"], "weight": end["state_dict"]["first.weight"]}
        for stop in STOPS:
            again = build(kind, folder / f"{kind} {stop}")
            again.resume(folder / kind / f"iter_{stop}.pth")
            found[f"{kind} {stop}"] = zoo.differences(end, run(again))
        dist.barrier()
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def main() -> int:
    """Fork the ranks, so that torch is imported once. Returns how many of them failed."""
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    forking = multiprocessing.get_context("fork")
    processes = [forking.Process(target=rank_main, args=(rank, ranks, folder)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.exitcode != 0:
            for other in processes:
                other.kill()  # it would wait for ever
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
