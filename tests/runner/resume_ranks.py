"""The ranks of ``test_ranks.py``: runs resumed in the middle of an epoch or of a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import halfpeak.runner as hr
from halfpeak.core.errors import StateError
from halfpeak.optim import AmpOptimWrapper
from runner import zoo

KINDS = ("EpochBasedRunner", "IterBasedRunner")
STOPS = (2, 3, 5)
EVERY, OPEN = 4, (3, 5)
WINDOWS: dict[str, tuple[bool, dict[str, Any]]] = {
    "ddp float32": (True, {"type": "GradientCumulativeOptimizerHook"}),
    **{
        f"{way} {mode}": (
            way == "ddp",
            {"type": "GradientCumulativeFp16OptimizerHook", "mode": mode, "loss_scale": 64.0},
        )
        for way in ("ddp", "hook")
        for mode in ("autocast", "master")
    },
    "ddp wrapper": (True, {"type": "OptimWrapperHook"}),
}
"""Whether DDP wraps the model, and the configuration of the hook."""


class Model(zoo.Model):
    """Without batch norm, whose statistics differ over the ranks; with dropout, which each rank draws for itself."""

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


def build_window(name: str, folder: Path) -> Any:
    """Seven iterations in windows of four, with a file after each."""
    ddp, config = WINDOWS[name]
    model: nn.Module = Model()
    optimizer: Any = zoo.sgd(model)
    if "wrapper" in name:
        optimizer = AmpOptimWrapper("dynamic", "float16", optimizer=optimizer, accumulative_counts=EVERY)
    else:
        config = {**config, "cumulative_iters": EVERY}
    wrapped = hr.MMDistributedDataParallel(model) if ddp and dist.is_initialized() else model
    made = hr.IterBasedRunner(wrapped, optimizer=optimizer, work_dir=folder, logger=zoo.quiet(), max_iters=7)
    made.register_training_hooks(None, config, {"interval": 1})
    return made


def run(made: Any) -> Any:
    data, (rank, ranks) = zoo.Noisy(), hr.get_dist_info()
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=3)
    made.run([DataLoader(data, batch_size=2, sampler=sampler)], [("train", 1)])
    return made.checkpoint()


def resumes(rank: int, folder: Path) -> dict[str, Any]:
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
    return found


def windows(rank: int, folder: Path) -> dict[str, Any]:
    """For each way to accumulate: a weight of the whole run, and its differences from runs resumed inside a window."""
    found: dict[str, Any] = {}
    for name in WINDOWS:
        torch.manual_seed(100 + rank)
        whole = build_window(name, folder / name)
        end = run(whole)
        found[f"{name} weight"] = end["state_dict"]["first.weight"]
        for stop in OPEN:
            again = build_window(name, folder / f"{name} {stop}")
            again.resume(folder / name / f"iter_{stop}.pth")
            found[f"{name} {stop}"] = zoo.differences(end, run(again))
    return found


def of_rank_0(rank: int, folder: Path) -> dict[str, Any]:
    """Resume from a file that only rank 0 wrote inside a window: the error on this rank, and what the resume changed."""

    class Saves(hr.Hook):
        def after_train_iter(self, runner: Any) -> None:
            if runner.iter == 1 and rank == 0:
                runner.save_checkpoint(folder, "alone.pth", create_symlink=False)

    whole = build_window("hook autocast", folder / "first")
    whole.register_hook(Saves())
    run(whole)
    dist.barrier()
    again = build_window("hook autocast", folder / "second")
    before = again.checkpoint()
    try:
        again.resume(folder / "alone.pth")
    except StateError as error:
        return {"says": str(error), "changed": zoo.differences(before, again.checkpoint())}
    return {"says": "nothing"}


class Identity(nn.Linear):
    """Whole numbers everywhere, so that sums are exact in any order and in half."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        return {"loss": (self(data[0]).float() * data[1]).sum()}


def whole_batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return tuple(torch.randint(-4, 5, (4, n), generator=generator).float() for n in (3, 2))  # type: ignore[return-value]


def count_reductions(wrapped: DistributedDataParallel) -> list[int]:
    """Return a list that grows by one with each bucket that DDP reduces."""
    counted: list[int] = []
    # A lambda, because torch checks a hook's annotations and does not resolve annotations that are strings.
    wrapped.register_comm_hook(None, lambda state, bucket: counted.append(1) or allreduce_hook(state, bucket))  # type: ignore[arg-type]
    return counted


def reductions(rank: int, folder: Path) -> dict[str, Any]:
    """Count DDP's reductions in windows of four and of two iterations, also with a reduction in every iteration."""
    found: dict[str, Any] = {}
    for name in ("ddp float32", "ddp autocast", "ddp master"):
        for always in (False, True):
            model = Identity()
            wrapped = hr.MMDistributedDataParallel(model)
            counted = count_reductions(wrapped)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            made = hr.IterBasedRunner(wrapped, optimizer=optimizer, logger=zoo.quiet(), max_iters=6)
            made.register_optimizer_hook({**WINDOWS[name][1], "cumulative_iters": EVERY})
            hook = made.hooks[0]
            if always:
                hook._can_delay = lambda runner: False  # type: ignore[attr-defined]
            made.run([[whole_batch(number, rank) for number in range(6)]], [("train", 1)])
            key = f"{name} {'always' if always else 'once'}"
            found[key] = {"count": len(counted), "weights": [p.detach().float() for p in model.parameters()]}
    return found


class Told(torch.utils.data.Dataset[torch.Tensor]):
    """A data set of five numbers that records the results it is asked to evaluate."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(index)}

    def evaluate(self, results: Any, logger: Any = None) -> dict[str, float]:
        self.seen.append(results)
        return {"acc": 1.0 / len(self.seen)}


class Tells(nn.Module):
    """Returns its rank, its input and its batch-norm mean, which differs over the ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.norm.running_mean.fill_(rank + 7.0)  # type: ignore[union-attr]
        self.rank = rank

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        return {"loss": torch.ones(())}

    def forward(self, return_loss: bool, x: torch.Tensor) -> list[Any]:
        return [[self.rank, value, self.norm.running_mean.item()] for value in x.tolist()]  # type: ignore[union-attr]


def evaluations(rank: int, folder: Path) -> dict[str, Any]:
    """Two evaluations on two ranks, the first with the best score, and evaluations by a ``test_fn`` that collects itself."""
    data, asked = Told(), []
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    made = hr.EpochBasedRunner(Tells(rank), work_dir=folder / "best", logger=zoo.quiet(), max_epochs=2)
    made.register_hook(hr.DistEvalHook(loader, save_best="acc"), "LOW")

    def collect(model: Any, loader: Any, tmpdir: str | None = None) -> Any:
        asked.append(tmpdir)
        return {"loss": 0.5} if rank == 0 else None

    made.register_hook(hr.DistEvalHook(loader, test_fn=collect, tmpdir="somewhere", gpu_collect=True))
    made.run([[0]], [("train", 1)])
    dist.barrier()
    files = sorted(path.name for path in (folder / "best").iterdir())
    return {
        "evaluation": {
            "seen": data.seen,
            "asked": asked,
            "files": files,
            "output": dict(made.log_buffer.output),
        }
    }


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    parts: tuple[Callable[[int, Path], dict[str, Any]], ...] = (resumes, windows, reductions, evaluations)
    found = {name: value for part in parts for name, value in part(rank, folder).items()}
    found["alone"] = of_rank_0(rank, folder)
    return found
