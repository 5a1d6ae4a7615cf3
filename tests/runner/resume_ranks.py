"""The ranks of ``test_ranks.py``: resumed runs, reductions in windows, and shared evaluations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import halfpeak.runner as hr
from runner import zoo

KINDS = ("EpochBasedRunner", "IterBasedRunner")
EVERY = 4
WINDOWS: dict[str, dict[str, Any]] = {
    "float32": {"type": "GradientCumulativeOptimizerHook"},
    **{
        mode: {"type": "GradientCumulativeFp16OptimizerHook", "mode": mode, "loss_scale": 64.0}
        for mode in ("autocast", "master")
    },
}


class Model(zoo.Model):
    """Without batch norm, whose statistics differ over the ranks, and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.drop = nn.Identity()  # type: ignore[assignment]


class Plain(zoo.Noisy):
    """The data without noise, because random numbers of several ranks are not in a file."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index / zoo.SAMPLES)


def build(kind: str, folder: Path, config: dict[str, Any]) -> Any:
    model = Model()
    wrapped = (
        hr.MMDistributedDataParallel(model) if config["type"].endswith("CumulativeOptimizerHook") else model
    )
    by_epoch = kind == "EpochBasedRunner"
    length = {"max_epochs": 2} if by_epoch else {"max_iters": 6}
    made = getattr(hr, kind)(wrapped, optimizer=zoo.sgd(model), work_dir=folder, logger=zoo.quiet(), **length)
    made.register_training_hooks(
        {"policy": "poly", "by_epoch": False},
        config,
        {"filename_tmpl": "{}.pth", **({"interval": 1} if by_epoch else {"interval": 3, "by_epoch": False})},
        custom_hooks_config=[{"type": "EMAHook", "momentum": 0.1}, {"type": "DistSamplerSeedHook"}],
    )
    return made


def run(made: Any) -> Any:
    data, (rank, ranks) = Plain(), hr.get_dist_info()
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=3)
    made.run([DataLoader(data, batch_size=2, sampler=sampler)], [("train", 1)])
    return made.checkpoint()


def resumes(rank: int, folder: Path) -> dict[str, Any]:
    """Runs resumed between two passes, and runs to compare them with."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for name, config in {
            "ddp": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 3},
            "hook": {"type": "Fp16OptimizerHook", "mode": "master", "loss_scale": 64.0},
        }.items():
            where = folder / f"{kind} {name}"
            end = run(build(kind, where, config))
            again = build(kind, where / "again", config)
            dist.barrier()
            again.resume(where / ("1.pth" if kind == "EpochBasedRunner" else "3.pth"))
            rest = run(again)
            for state in (end, rest):
                del state["random"]
            found[f"{kind} {name}"] = {
                "differences": zoo.differences(end, rest),
                "weight": end["state_dict"]["first.weight"],
            }
    return found


class Identity(nn.Linear):
    """Whole numbers everywhere, so that sums are exact in any order and in half."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        return {"loss": (self(data[0]).float() * data[1]).sum()}


class Steps(nn.Module):
    """The same, with a ``train_step`` that calls a part of the model and not its ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Identity()

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        x = data[0].to(self.part.weight.dtype)
        return {"loss": (self.part(x).float() * data[1]).sum()}


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
    for name, config in WINDOWS.items():
        for way in ("once", "always", "once, without forward"):
            model = Steps() if "forward" in way else Identity()
            wrapped = hr.MMDistributedDataParallel(model)
            counted = count_reductions(wrapped)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            made = hr.IterBasedRunner(wrapped, optimizer=optimizer, logger=zoo.quiet(), max_iters=6)
            made.register_optimizer_hook({**config, "cumulative_iters": EVERY})
            if way == "always":  # as a runner of mmcv, which does not call around_train_step
                made.training_step = nullcontext  # type: ignore[method-assign]
            made.run([[whole_batch(number, rank) for number in range(6)]], [("train", 1)])
            found[f"{name} {way}"] = {
                "count": len(counted),
                "weights": [p.detach().float() for p in model.parameters()],
            }
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


def buffers(rank: int, folder: Path) -> dict[str, Any]:
    model = Tells(rank)
    made = hr.EpochBasedRunner(model, logger=zoo.quiet(), max_epochs=1)
    made.register_hook(hr.SyncBuffersHook())
    made.run([[0]], [("train", 1)])
    return {"buffers": model.norm.running_mean.item()}  # type: ignore[union-attr]


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    parts: tuple[Callable[[int, Path], dict[str, Any]], ...] = (resumes, reductions, evaluations, buffers)
    return {name: value for part in parts for name, value in part(rank, folder).items()}
