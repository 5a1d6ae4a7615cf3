"""Ranks of ``test_wrappers.py``: each runs every scenario and saves its results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from distributed.launching import Refusals
from halfpeak.integrations.engine_adapter import EngineAdapter
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from support.nets import make_normless as make

TOTAL = 7
"""Backward passes of a run: with windows of three, two whole windows and one of a single pass."""

SCALE = 2.0**10
"""Low enough that only poisoned passes overflow."""

KINDS: dict[str, Callable[..., OptimWrapper]] = {
    "plain": lambda optimizer, **o: OptimWrapper(optimizer, skip_nonfinite=True, **o),
    "amp": lambda optimizer, **o: AmpOptimWrapper({"init_scale": SCALE}, "float16", optimizer=optimizer, **o),
    **{
        level: lambda optimizer, level=level, **o: ApexOptimWrapper(
            level, optimizer=optimizer, max_loss_scale=SCALE, **o
        )
        for level in ("O1", "O2", "O4", "O5")
    },
}

Scenario = Callable[[], dict[str, Any]]


def batch(i: int, poisoned: int | None) -> tuple[Tensor, Tensor]:
    """A batch of this rank; that of rank 1 overflows in pass ``poisoned``."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * i + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator) / 64
    return (x * 1e38, y) if rank == 1 and i == poisoned else (x, y)


def train(wrapper: OptimWrapper, model: nn.Module, numbers: range, poisoned: int | None) -> list[float]:
    """Train, and return which steps were skipped."""
    skipped: list[float] = []
    for i in numbers:
        x, y = batch(i, poisoned)
        with wrapper.optim_context(model):
            loss = mse_loss(model(x).float(), y)
        wrapper.update_params(loss)
        if wrapper.last_result is not None:
            skipped.append(float(wrapper.last_result.found_inf))
    return skipped


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def parallel(kind: str, every: int, poisoned: int | None, **options: Any) -> dict[str, Any]:
    """Train a model that DDP wraps before the ``OptimWrapper`` meets it."""
    model = make(seed=dist.get_rank())
    wrapper = KINDS[kind](adamw(model), accumulative_counts=every, clip_grad={"max_norm": 0.05})
    wrapped = DistributedDataParallel(model, **options)
    reductions: list[int] = []

    def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and knows no text
        reductions.append(bucket.index())
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, count)
    wrapper.initialize_count_status(wrapped, 0, TOTAL)
    skipped = train(wrapper, wrapped, range(TOTAL), poisoned)
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "masters": [p.detach().clone() for g in wrapper.optimizer.param_groups for p in g["params"]],
        "skipped": skipped,
        "reductions": reductions.count(0),
        "extra": repr({k: v for k, v in wrapper.state_dict().items() if k not in ("state", "param_groups")}),
    }


def by_hand() -> dict[str, Any]:
    """The training of the plain wrapper in windows of three, written by hand."""
    model = make(seed=dist.get_rank())
    optimizer = adamw(model)
    wrapped = DistributedDataParallel(model)
    for i in range(TOTAL):
        x, y = batch(i, None)
        divisor = 3 if i < 6 else 1
        is_boundary = i in (2, 5, 6)
        wrapped.require_backward_grad_sync = is_boundary
        (mse_loss(wrapped(x), y) / divisor).backward()
        if is_boundary:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return {"parameters": [p.detach().clone() for p in model.parameters()]}


def resumed(kind: str) -> dict[str, Any]:
    """A whole run, and one resumed inside a window, after a pass whose gradients were not reduced."""
    found: list[list[Tensor]] = []
    for stop in (TOTAL, 5):
        model = make()
        wrapper = KINDS[kind](adamw(model), accumulative_counts=3)
        wrapped = DistributedDataParallel(model)
        wrapper.initialize_count_status(wrapped, 0, TOTAL)
        train(wrapper, wrapped, range(stop), 4)
        if stop < TOTAL:
            saved = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
            model = make(seed=5)
            model.load_state_dict(saved[0])
            wrapper = KINDS[kind](adamw(model), accumulative_counts=3)
            wrapper.load_state_dict(saved[1])
            wrapped = DistributedDataParallel(model)
            wrapper.initialize_count_status(wrapped, stop, TOTAL)
            train(wrapper, wrapped, range(stop, TOTAL), 4)
        found.append([t.clone() for t in model.state_dict().values()])
    return {"straight": found[0], "resumed": found[1]}


def sharded(kind: str, poisoned: int | None) -> dict[str, Any]:
    """Train with FSDP2; the gradient of one shard is infinite, so one rank alone would see it."""
    model = make()
    fully_shard(model)
    wrapper = KINDS[kind](
        torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=3, clip_grad={"max_norm": 0.05}
    )
    wrapper.initialize_count_status(model, 0, TOTAL)
    norms: list[float] = []
    skipped: list[float] = []
    for i in range(TOTAL):
        x, y = batch(i, None)
        with wrapper.optim_context(model):
            loss = mse_loss(model(x).float(), y)
            if i == poisoned:
                # The weights are gathered until the backward pass; this element is in rank 0's shard.
                loss = loss + next(model.parameters()).flatten()[0] * torch.inf
        wrapper.backward(wrapper.scale_loss(loss))
        if wrapper.should_update():
            wrapper.step()
            wrapper.zero_grad()
            skipped.append(float(wrapper.last_result.found_inf))  # type: ignore[union-attr]
            norms.append(float(wrapper.last_result.grad_norm))  # type: ignore[union-attr,arg-type]
    whole = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    return {"parameters": whole, "skipped": skipped, "norms": norms}


def nested() -> dict[str, Any]:
    """Train one model of two networks, each in a DistributedDataParallel of its own."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = DistributedDataParallel(make(seed=dist.get_rank()))
            self.two = DistributedDataParallel(make(seed=dist.get_rank() + 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    model = Both()
    wrapper = ApexOptimWrapper("O2", optimizer=adamw(model))
    for i in range(3):
        x, y = batch(i, None)
        with wrapper.optim_context(model):
            loss = mse_loss(model(x), y)
        wrapper.update_params(loss)
    return {"parameters": [p.detach().clone() for p in model.parameters()]}


def in_a_loop() -> dict[str, Any]:
    """A loop that wraps the model before it connects the engine; its state saved after a pass that was not reduced."""
    model = make(seed=dist.get_rank())
    wrapped, optimizer = DistributedDataParallel(model), adamw(model)
    read = [p.detach().clone() for p in model.parameters()]
    adapter = EngineAdapter(
        "O2", {"scale": halfpeak.ScaleConfig(init=SCALE)}, refused={}, advice="connect first"
    )
    adapter.connect([wrapped], [model], [optimizer])
    kept = list(model.state_dict().values())
    x, y = batch(0, None)
    with wrapped.no_sync():
        loss = mse_loss(wrapped(x).float(), y)
    with adapter.connected().scaled(loss) as scaled:
        scaled.backward()
    with warnings.catch_warnings(record=True) as warned:
        state = adapter.state_dict()
    adapter.connect([wrapped], [model], [optimizer])
    adapter.load_state_dict(state)
    return {"read": read, "kept": kept, "warned": [str(one.message) for one in warned], "state": repr(state)}


def refusals() -> dict[str, Any]:
    """Errors of uses that cannot work on several ranks."""
    found = Refusals()

    @found("ParameterError: DistributedDataParallel(process_group=...) must wrap the model after")
    def own_group() -> None:
        wrapped = DistributedDataParallel(make(), process_group=dist.new_group())
        train(KINDS["O2"](adamw(wrapped)), wrapped, range(1), None)

    @found("ParameterError: parameter 0.weight is sharded and gathered in torch.float32")
    def shards() -> None:
        model = make()
        fully_shard(model)
        train(KINDS["O2"](adamw(model)), model, range(1), None)

    @found(
        "ParameterError: parameter 1.weight is sharded and gathered in torch.float32, and this level computes with it in "
        "torch.float16; shard the float32 model by halfpeak.distributed.fully_shard, with the level and keep_fp32= of this "
        "call: halfpeak.LEVELS[level].replace(norms='batchnorm')"
    )
    def norms_of_the_level() -> None:
        for level in (
            halfpeak.LEVELS["O2"].replace(norms="batchnorm"),
            "O2",
        ):  # the first is what it asks for
            model = halfpeak.distributed.fully_shard(make(), level)
            train(KINDS["O2"](adamw(model)), model, range(1), None)

    @found("OrderError: the gradients were not reduced over the ranks")
    def two_passes() -> None:
        wrapped = DistributedDataParallel(make())
        wrapper = OptimWrapper(adamw(wrapped), accumulative_counts=2)
        x, y = batch(0, None)
        with wrapper.optim_context(wrapped):
            loss = mse_loss(wrapped(x), y)
        wrapper.backward(loss, retain_graph=True)
        wrapper.update_params(loss)

    @found("ConfigError: delay_all_reduce_named_params: DistributedDataParallel reduces")
    def delayed() -> None:
        model = make()
        wrapper = KINDS["O1"](adamw(model))
        last = list(model[3].named_parameters())
        wrapped = DistributedDataParallel(
            model, delay_all_reduce_named_params=last, param_to_hook_all_reduce=model[0].weight
        )
        train(wrapper, wrapped, range(1), None)

    return dict(found)


def scenarios() -> dict[str, Scenario]:
    found: dict[str, Scenario] = {
        f"parallel {kind} {every} {poisoned}": partial(parallel, kind, every, poisoned)
        for kind in KINDS
        for every, poisoned in ((1, 4), (3, 4), (3, None))
    }
    found |= {f"static graph {kind}": partial(parallel, kind, 3, 4, static_graph=True) for kind in KINDS}
    found["by hand"] = by_hand
    found |= {f"resumed {kind}": partial(resumed, kind) for kind in ("plain", "amp", "O1", "O2", "O5")}
    found |= {
        f"sharded {kind} {poisoned}": partial(sharded, kind, poisoned)
        for kind in ("plain", "amp", "O4")
        for poisoned in (None, 5)
    }
    return {**found, "nested": nested, "in a loop": in_a_loop, "refusals": refusals}


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: run() for name, run in scenarios().items()}
