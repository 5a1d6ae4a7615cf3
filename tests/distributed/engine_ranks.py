"""Ranks of ``test_engine_ranks.py``: each runs every scenario and saves its results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak import amp
from halfpeak.integrations.timm import LossScaler
from support.nets import TYPICAL

WINDOWS = 3
HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce_hook": lambda: (None, allreduce_hook),
    "fp16_compress_hook": lambda: (None, fp16_compress_hook),
    "PowerSGD": lambda: (PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1), powerSGD_hook),
}
OPTIONS = [
    *product(list(HOOKS)[:2], TYPICAL),
    *product(("PowerSGD",), ("O0", "O4")),
    ("own no_sync, compiled", "O2"),
]
"""Options of ``DistributedDataParallel``, and the level. ``fuzz.programs`` draws the others."""
LOADERS = ("told", "not told", "amp")
"""Whether ``engine.forward`` is given the wrapper, and the front end that never is."""
ZERO_REDUNDANCY = ("O0", "O1", "O4")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def seen_of(engine: halfpeak.Engine, outcomes: list[bool]) -> dict[str, Any]:
    return {
        "parameters": [p.detach().clone() for p in engine.models[0].parameters()],
        "masters": [master.detach().clone() for _, master in engine.pairs],
        "momentum": [state["momentum_buffer"].clone() for state in engine.optimizers[0].state.values()],
        "scale": engine.read_scale(),
        "counters": [int(engine.num_steps), int(engine.num_skipped), engine.micro_step],
        "outcomes": outcomes,
    }


def parallel(rank: int, level: str, poisoned: bool, option: str = "") -> dict[str, Any]:
    """DDP with windows of three passes; if ``poisoned``, the loss of rank 1 is inf in a pass of window 1."""
    own = option.startswith("own no_sync")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scale = halfpeak.ScaleConfig(init=1024.0)
    engine = halfpeak.prepare(model, optimizer, level, accumulate=1 if own else 3, clip=1.0, scale=scale)
    inner: Any = torch.compile(model, backend="eager") if own else model
    wrapped = DistributedDataParallel(inner)
    if option in HOOKS:
        wrapped.register_comm_hook(*HOOKS[option]())
    outcomes: list[bool] = []
    for step in range(3 * WINDOWS):
        is_inside = own and step % 3 != 2
        with wrapped.no_sync() if is_inside else nullcontext(), engine.forward(wrapped):
            loss = wrapped(batch(rank, step)).float().square().mean() / (3 if own else 1)
        # The loss is inf and the activations are finite, so found_inf must come from the gradients.
        engine.backward(loss * float("inf") if poisoned and rank == 1 and step == 4 else loss)
        if not is_inside:
            result = engine.step()
            outcomes += [result.stepped()] if result.boundary else []
    return seen_of(engine, outcomes)


def bad_losses(rank: int, reduced: Literal["world", "part"] | None) -> dict[str, Any]:
    """DDP; one rank's loss is nan in step 1, and infinite with finite gradients in step 3.

    With ``"part"``, ``group=`` is a part of the ranks, as where every replica of a pipeline has a group of its stages.
    """
    parts = [dist.new_group([one]) for one in range(dist.get_world_size())]
    group = parts[rank] if reduced == "part" else reduced
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scale = halfpeak.ScaleConfig(init=1024.0, recovers=True)
    engine = halfpeak.prepare(model, optimizer, "O2", scale=scale, group=group, on_skip=None)
    wrapped = DistributedDataParallel(model)
    outcomes: list[bool] = []
    scales: list[float] = []
    for step in range(5):
        with engine.forward(wrapped):
            loss = wrapped(batch(rank, step)).float().square().mean()
        if rank == 1 and step in (1, 3):
            loss = loss * float("nan") if step == 1 else loss + float("inf")
        engine.backward(loss)
        outcomes.append(engine.step().stepped())
        scales.append(engine.read_scale())
    return {**seen_of(engine, outcomes), "scales": scales}


def own_losses(rank: int, how: str) -> dict[str, Any]:
    """With ``group=``: rank 1 takes the losses in another order, only one of them, or has no batch in step 2."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale = halfpeak.ScaleConfig(init=1024.0, interval=3)
    engine = halfpeak.prepare(model, optimizer, "O2", scale=scale, num_losses=2, group="world")
    outcomes: list[bool] = []
    for step in range(WINDOWS + 1):
        losses = {"order": [1, 0], "one": [0], "none": [0, 1] if step != 2 else []}[how] if rank else [0, 1]
        for number in losses:
            with engine.forward():
                loss = model(batch(rank, step)).float().square().mean()
            is_poisoned = rank == 0 and (number, step) == (0, 0)
            engine.backward(loss * float("inf") if is_poisoned else loss, loss_id=number)
        outcomes.append(engine.step().stepped())
    scales = [engine.read_scale(number) for number in range(2)]
    return {
        "outcomes": outcomes,
        "scales": scales,
        "counters": [int(engine.num_steps), int(engine.num_skipped)],
    }


def joined(rank: int, level: str) -> dict[str, Any]:
    """Rank 1 has fewer batches; ``join()`` answers the collectives of rank 0 until rank 0 ends."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = halfpeak.prepare(model, optimizer, level, scale=halfpeak.ScaleConfig(init=1024.0))
    wrapped, outcomes, said = DistributedDataParallel(model), [], ""
    with wrapped.join():
        for step in range(WINDOWS + 2 * (rank == 0)):
            with engine.forward(wrapped):
                loss = wrapped(batch(rank, step)).float().square().mean()
            engine.backward(loss)
            outcomes.append(engine.step().stepped())
    try:
        engine.check_ranks()
    except halfpeak.RankMismatchError as error:
        said = str(error)
    return {**seen_of(engine, outcomes), "said": said}


def loaded_by_first(rank: int, level: str, how: str) -> dict[str, Any]:
    """Rank 0 alone loads a state finer than its low weights; DDP broadcasts the weights. Then the same on all ranks."""
    state = {name: value + 1e-5 for name, value in net().state_dict().items()}
    runs: list[list[Tensor]] = []
    for loads in (rank == 0, True):
        model: Any = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine: Any = None
        if how == "amp":
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0
            )
        else:
            engine = halfpeak.prepare(model, optimizer, level, scale=halfpeak.ScaleConfig(init=1024.0))
        if loads:
            model.load_state_dict(state)
        wrapped = DistributedDataParallel(model)
        for step in range(WINDOWS):
            if how == "amp":
                with amp.scale_loss(wrapped(batch(rank, step)).float().square().mean(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with engine.forward(wrapped if how == "told" else None):
                    loss = wrapped(batch(rank, step)).float().square().mean()
                engine.backward(loss)
                engine.step()
        runs.append([parameter.detach().clone() for parameter in amp.master_params(optimizer)])
    return {"by first": runs[0], "by all": runs[1]}


def zero_redundancy(rank: int, level: str, how: str | None) -> list[Tensor]:
    """``ZeroRedundancyOptimizer``; every rank loads the state that rank 0 has gathered and saved after two steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def made() -> tuple[nn.Module, Any, halfpeak.Engine]:
        model = net()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        return model, optimizer, halfpeak.prepare(model, optimizer, level)

    model, optimizer, engine = made()
    wrapped = DistributedDataParallel(model)
    for step in range(4):
        if step == 2 and how is not None:
            optimizer.consolidate_state_dict(0)
            file: list[Any] = [None]
            if rank == 0:
                whole = how == "engine"
                file = [
                    engine.state_dict()
                    if whole
                    else [model.state_dict(), optimizer.state_dict(), engine.loop_state_dict()]
                ]
            dist.broadcast_object_list(file)
            model, optimizer, engine = made()
            if how == "engine":
                engine.load_state_dict(file[0])
            else:
                for one, state in zip((model, optimizer), file[0], strict=False):
                    one.load_state_dict(state)
                engine.load_loop_state_dict(file[0][2])
            wrapped = DistributedDataParallel(model)
        with engine.forward(wrapped):
            loss = wrapped(batch(rank, step)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def adversarial(rank: int, level: str, how: str) -> dict[str, Any]:
    """Two networks in windows of two passes under the script's ``no_sync``; no backward pass names its optimizers.

    In a ``loop`` of another library the critic steps before the last loss of the generator. With ``one process`` there
    are whole batches and no wrappers.
    """
    networks: list[Any] = [nn.Sequential(net(), nn.Linear(2, 4)) for _ in range(2)]
    optimizers: Any = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in networks]
    if how == "amp":
        networks, optimizers = amp.initialize(
            networks, optimizers, opt_level=level, loss_scale=64.0, verbosity=0, num_losses=2
        )
    else:
        engine = halfpeak.prepare(networks, optimizers, halfpeak.LEVELS[level].replace(loss_scale=64.0))
    wrapped: list[Any] = (
        networks if how == "one process" else [DistributedDataParallel(one) for one in networks]
    )
    parts = range(dist.get_world_size()) if how == "one process" else [rank]

    def backward(number: int, step: int, last: bool) -> None:
        x = torch.cat([batch(part, step) for part in parts])
        networks[1].requires_grad_(number == 1)
        with ExitStack() as stack:
            for one in wrapped if not last and how != "one process" else ():
                stack.enter_context(one.no_sync())
            made = wrapped[0](x)
            loss = wrapped[1](made.detach() if number else made).float().sub(number).square().mean() / 2
            if how == "amp":
                with amp.scale_loss(loss, optimizers[number], number, delay_unscale=not last) as scaled:
                    scaled.backward()
            else:
                with engine.scaled(loss) as scaled:
                    scaled.backward()
        networks[1].requires_grad_(True)

    said = ""
    try:
        for step in range(WINDOWS):
            for last in (False, True):
                for number in (1, 0):
                    backward(number, 2 * step + last, last)
                    if last and how == "amp":
                        optimizers[number].step()
                        optimizers[number].zero_grad()
                    elif last:
                        engine.step(optimizers=optimizers[number])
    except halfpeak.OrderError as error:
        said = str(error)
    return {"said": said, "parameters": [p.detach().clone() for one in networks for p in one.parameters()]}


def saved_by_timm(rank: int) -> dict[str, Any]:
    """timm's loop saves inside a window of unreduced gradients; every rank loads the file of rank 0."""
    model, again = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_scaler = LossScaler(halfpeak.prepare(model, optimizer, "O2"))
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync(), loss_scaler.engine.forward():
        loss = wrapped(batch(rank, 0)).float().square().mean()
    loss_scaler(loss, optimizer, need_update=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file = [loss_scaler.state_dict()]
    dist.broadcast_object_list(file)
    fresh = LossScaler(halfpeak.prepare(again, torch.optim.SGD(again.parameters(), lr=0.05), "O2"))
    fresh.load_state_dict(file[0])
    return {"said": [str(one.message) for one in caught], "open": fresh.engine.is_open}


def scenarios() -> dict[str, Callable[[int], dict[str, Any]]]:
    """Every scenario by name; each rank runs them in this order."""
    table: dict[str, Callable[[int], dict[str, Any]]] = {}
    for level in TYPICAL:
        for poisoned in (False, True):
            table[f"parallel {level} {poisoned}"] = partial(parallel, level=level, poisoned=poisoned)
    for option, level in OPTIONS:
        poisoned = option != "PowerSGD"  # whose error memory would keep an inf
        table[f"option {option} {level}"] = partial(parallel, level=level, poisoned=poisoned, option=option)
    for level in TYPICAL:
        table[f"joined {level}"] = partial(joined, level=level)
    for reduced in (None, "part", "world"):
        table[f"bad losses {reduced}"] = partial(bad_losses, reduced=reduced)
    for how in ("order", "one", "none"):
        table[f"own losses {how}"] = partial(own_losses, how=how)
    for level in ZERO_REDUNDANCY:
        for interrupted in (None, "engine", "loop"):
            table[f"zero redundancy {level} {interrupted}"] = partial(
                zero_redundancy, level=level, how=interrupted
            )
    for level in TYPICAL:
        for how in ("loop", "amp", "one process"):
            table[f"adversarial {level} {how}"] = partial(adversarial, level=level, how=how)
    for level in ("O2", "O5"):
        for how in LOADERS:
            table[f"loaded by first {level} {how}"] = partial(loaded_by_first, level=level, how=how)
    return {**table, "saved by timm": saved_by_timm}


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: run(rank) for name, run in scenarios().items()}
