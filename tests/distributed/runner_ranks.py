"""Ranks of ``test_runner_hooks.py``: each runs every scenario and saves its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from halfpeak.fused import FusedSGD
from halfpeak.runner import EpochBasedRunner, MMDistributedDataParallel
from halfpeak.runner.distributed import allreduce_grads, allreduce_params, get_dist_info, master_only
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
from halfpeak.runner.hooks.optimizer import GradientCumulativeOptimizerHook
from runner.oracle.cases import Loop
from support.nets import make_normless as make

TOTAL = 8
POISONED = 4
SCALE = {"init_scale": 256.0, "interval": 3}

HOOKS: dict[str, Callable[..., Any]] = {
    "fp32": lambda **o: GradientCumulativeOptimizerHook(
        o.get("every", 1), grad_clip={"max_norm": 0.5}, skip_nonfinite=True
    ),
    **{
        mode: lambda mode=mode, every=1, **o: GradientCumulativeFp16OptimizerHook(
            every, grad_clip={"max_norm": 0.5}, loss_scale=SCALE, mode=mode, **o
        )
        for mode in ("autocast", "master")
    },
}


def train(
    hook: Any,
    net: nn.Module,
    model: nn.Module,
    poisoned: int | None,
    idle: bool = False,
    kind: Any = torch.optim.SGD,
) -> dict[str, Any]:
    """Train on data of this rank; rank 1 overflows in one iteration, and with ``idle`` it lacks a gradient in all."""
    rank = dist.get_rank()
    loop = Loop(model, max_iters=TOTAL)
    loop.optimizer = kind(net.parameters(), lr=0.1, momentum=0.9)
    hook.before_run(loop)
    scales, moved, trail = [], [], []
    for number in range(TOTAL):
        generator = torch.Generator().manual_seed(100 * number + rank)
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        loop.iter = number
        with hook.around_train_step(loop) or torch.enable_grad():
            loss = mse_loss(model(x).float(), y)
        if rank == 1 and number == poisoned:
            loss = loss * float("inf")
        if rank == 1 and idle:
            loss = mse_loss(net[:3](x.to(net[0].weight.dtype)).float()[:, :3], y)
        loop.outputs = {"loss": loss, "num_samples": 4}
        hook.after_train_iter(loop)
        moved.append(loop.step_result.stepped())
        trail += [p.detach().clone() for p in net.parameters()]
        scaler = loop.meta.get("fp16", {}).get("loss_scaler", {})
        scales.append(float(scaler.get("scale", scaler.get("cur_scale", 0.0))))
    return {
        "parameters": [p.detach().clone() for p in net.parameters()],
        "masters": [p.detach().clone() for g in loop.optimizer.param_groups for p in g["params"]],
        "momenta": [s["momentum_buffer"] for s in loop.optimizer.state.values()],
        "norms": [torch.tensor(entry["grad_norm"]) for entry, _ in loop.log_buffer.entries],
        "scales": scales,
        "moved": moved,
        "trail": trail,
    }


def through_ddp(kind: str, every: int, poisoned: int | None, **options: Any) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        net = make()
        return train(HOOKS[kind](every=every), net, DistributedDataParallel(net, **options), poisoned)

    return run


def through_hook(
    kind: str, poisoned: int | None, idle: bool = False, optimizer: Any = torch.optim.SGD, **options: Any
) -> Callable[[], dict[str, Any]]:
    """Train without DDP: the hook averages gradients. The ranks start with different weights."""

    def run() -> dict[str, Any]:
        net = make(dist.get_rank())
        return train(HOOKS[kind](**options), net, net, poisoned, idle, optimizer)

    return run


class Steps(nn.Module):
    """A model with ``train_step`` and ``val_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.net(data[0]), data[1]), "num_samples": 4}

    def val_step(self, data: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.net(data[0]), data[1])}


def through_steps() -> dict[str, Any]:
    """Train on the data of :func:`train` with a runner; rank 1 validates on fewer batches."""
    model = Steps()
    runner = EpochBasedRunner(
        MMDistributedDataParallel(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_epochs=1,
    )
    runner.register_optimizer_hook({"grad_clip": {"max_norm": 0.5}})
    data = []
    for number in range(TOTAL):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        data.append((torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)))
    runner.run([data, data[dist.get_rank() :]], [("train", 1), ("val", 1)])
    return {"parameters": [p.detach().clone() for p in model.parameters()]}


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    shapes = [(3,), (40, 30), (), (2, 3, 5, 5), (700,), (0,)]
    found = []
    for shape in shapes:
        leaf = nn.Parameter(torch.zeros(shape, dtype=dtype))
        leaf.grad = torch.randn(shape, generator=generator).to(dtype)
        found.append(leaf)
    found[3].grad = found[3].grad.contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
    return found


def averages(dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "coalesced": {},
        "buckets": {"bucket_size_mb": 0.002},
        "single": {"coalesce": False},
    }.items():
        params = leaves(dtype)
        allreduce_grads(params, **options)  # type: ignore[arg-type]
        found[name] = [param.grad for param in params]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, [param.grad for param in leaves(dtype)])
    found["expected"] = [one / 2 + other / 2 for one, other in zip(*gathered, strict=True)]
    return found


def collectives() -> dict[str, Any]:
    """The number of all-reduced tensors for six gradients of about 2k elements in total."""
    original, sent = dist.all_reduce, []
    found = {}
    dist.all_reduce = lambda tensor, *args, **kwargs: sent.append(tensor) or original(tensor, *args, **kwargs)  # type: ignore[assignment]
    try:
        for name, options in {
            "one bucket": {},
            "5 kB": {"bucket_size_mb": 5000 / 2**20},
            "each": {"coalesce": False},
        }.items():
            sent.clear()
            allreduce_grads(leaves(), **options)  # type: ignore[arg-type]
            found[name] = len(sent) - 1  # less the one that tells which ranks have which gradients
    finally:
        dist.all_reduce = original
    return found


def large_halves() -> dict[str, Any]:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    found = {}
    for coalesce in (True, False):
        weight.grad = torch.full((2,), 40000.0, dtype=torch.float16)
        allreduce_grads([weight], coalesce=coalesce)
        found[str(coalesce)] = weight.grad.clone()
    return found


def missing_gradients() -> dict[str, Any]:
    """Each rank has a gradient for another parameter; one parameter needs none, and one has none on any rank."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(dist.get_world_size() + 1)]
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    frozen.grad = torch.full((3,), float(dist.get_rank()))
    params[dist.get_rank()].grad = torch.ones(3)
    allreduce_grads([*params, frozen])
    return {"grads": [param.grad for param in params], "frozen": frozen.grad}


def buffers() -> dict[str, Any]:
    net = nn.BatchNorm1d(2)
    net.running_mean.fill_(float(dist.get_rank()))  # type: ignore[union-attr]
    net.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    net.register_buffer("flag", torch.tensor(True))
    allreduce_params(net.buffers())
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def who() -> dict[str, Any]:
    return {"info": list(get_dist_info()), "only": master_only(lambda: "ran")()}


def alone() -> dict[str, Any]:
    """Train with ``distributed=False``, which reduces nothing."""
    net = make(dist.get_rank())
    return train(Fp16OptimizerHook({"max_norm": 1.0}, loss_scale=SCALE, distributed=False), net, net, None)


def scenarios() -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "who": who,
        "missing": missing_gradients,
        "buffers": buffers,
        "average": partial(averages, torch.float32),
        "average half": partial(averages, torch.float16),
        "collectives": collectives,
        "large": large_halves,
        "steps": through_steps,
        "alone": alone,
        "idle": through_hook("master", None, idle=True),
    }
    for kind in HOOKS:
        for poisoned in (None, POISONED):
            found[f"ddp {kind} {poisoned}"] = through_ddp(kind, 1, poisoned)
            if kind != "fp32":
                found[f"hook {kind} {poisoned}"] = through_hook(kind, poisoned)
        found[f"ddp every 3 {kind}"] = through_ddp(kind, 3, POISONED)
        found[f"static graph every 3 {kind}"] = through_ddp(kind, 3, POISONED, static_graph=True)
    for kind in ("autocast", "master"):
        found[f"fused {kind}"] = through_hook(kind, POISONED, optimizer=FusedSGD)
        found[f"every 3 {kind}"] = through_hook(kind, POISONED, every=3)
        found[f"single {kind}"] = through_hook(kind, POISONED, coalesce=False)
        found[f"buckets {kind}"] = through_hook(kind, POISONED, bucket_size_mb=0.0001)
    return found


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: run() for name, run in scenarios().items()}
