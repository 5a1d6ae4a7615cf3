"""Ranks of ``test_asymmetric.py``, of which one differs in each scenario."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from distributed.engine_ranks import batch
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedSGD

LAYOUTS = ("ddp", "fsdp", "none")
STEPS = 5
ODD = 1
"""The rank that differs."""


class Net(nn.Module):
    """Two branches; an iteration may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 8)
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(x + self.branch(x) if whole else x)


class Run:
    """One engine of this rank."""

    def __init__(self, layout: str, **options: Any) -> None:
        model = Net()
        if layout == "fsdp":
            fully_shard(model, "O2")
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = {"scale": halfpeak.ScaleConfig(init=1024.0), **options}
        if layout != "none":
            options.setdefault("clip", 1.0)
        # Without a wrapper, gradients are local to each rank, and only found_inf is reduced.
        options.setdefault("group", "world" if layout == "none" else None)
        self.engine = halfpeak.prepare(model, self.optimizer, "O2", **options)
        self.model = model
        self.wrapped: Any = model if layout == "fsdp" else None
        if layout == "ddp":
            self.wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def step(self, at: int, *, factor: float = 1.0, whole: bool = True) -> Any:
        with self.engine.forward(self.wrapped):
            outputs = (self.wrapped or self.model)(batch(dist.get_rank(), at), whole=whole)
            loss = outputs.float().square().mean()
        self.engine.backward(loss * factor)
        return self.engine.step()


def train(layout: str, odd: Callable[[Run, int], Any]) -> dict[str, Any]:
    """Train five iterations, of which the odd rank runs some differently."""
    run, outcomes = Run(layout), []
    before = collectives()
    for at in range(STEPS):
        result = odd(run, at) if dist.get_rank() == ODD else run.step(at)
        outcomes.append(result.stepped())
    return {
        "outcomes": outcomes,
        "scale": run.engine.read_scale(),
        "counters": [int(run.engine.num_steps), int(run.engine.num_skipped), run.engine.micro_step],
        "collectives": collectives() - before,
        "values": [] if layout != "ddp" else [p.detach().clone() for p in run.model.parameters()],
    }


def collectives() -> int:
    """The number of collectives that this rank has begun on the world group."""
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]


def bad_loss(run: Run, at: int) -> Any:
    return run.step(at, factor=float("nan") if at == 2 else 1.0)


def without_gradient(run: Run, at: int) -> Any:
    return run.step(at, whole=at != 2)


def looking(run: Run, at: int) -> Any:
    """Evaluate, and read memory, properties and gradients, which the other ranks do not."""
    run.engine.memory()
    if run.wrapped is not run.model:
        run.model.eval()
        with torch.no_grad():
            run.model(batch(9, at))
        run.model.train()
    result = run.step(at)
    run.engine.read_scale()
    return result


def local_nan(run: Run, at: int) -> Any:
    """Make one gradient of this rank NaN, by a hook on the parameter, which runs before DDP reduces the gradient."""
    handle = run.model.head.bias.register_hook(lambda grad: grad * float("nan") if at == 2 else grad)
    result = run.step(at)
    handle.remove()
    return result


def raising(run: Run, at: int) -> Any:
    """Abort before a collective begins, as after an exception, and run the iteration again."""
    if at == 2:
        run.engine.abort()
    return run.step(at)


def differing(layout: str) -> dict[str, Any]:
    """Start with different loss scales."""
    return refused(Run(layout, scale=halfpeak.ScaleConfig(init=1024.0 * (1 + (dist.get_rank() == ODD)))))


def loaded(layout: str, older: bool) -> dict[str, Any]:
    """The odd rank alone loads a checkpoint, or loads an older one than the others."""
    first = Run(layout)
    states = []
    for at in range(2):
        first.step(at, factor=float("inf"))
        states.append(first.engine.state_dict())
    run = Run(layout)
    if older or dist.get_rank() == ODD:
        run.engine.load_state_dict(states[0 if dist.get_rank() == ODD else 1])
    return refused(run)


def failing(layout: str, where: str, **options: Any) -> dict[str, Any]:
    """The odd rank raises in its second iteration, before the reduction or in the optimizer's step, and continues."""
    run, calls = Run(layout, **options), iter(range(STEPS))

    def fail(*_: Any) -> None:
        if next(calls) == 1 and dist.get_rank() == ODD:
            raise ArithmeticError("on one rank")

    if where == "optimizer":
        run.optimizer.register_step_pre_hook(fail)
    else:
        run.model.head.register_full_backward_pre_hook(fail)
    for at in range(STEPS):
        try:
            run.step(at)
        except halfpeak.RankMismatchError as error:
            return {"error": str(error), "at": at}
        except ArithmeticError:
            pass
    return {"error": "", "at": STEPS}


def own_norms() -> str:
    """Clip local gradients by their norm; return the error."""
    run = Run("none", clip=1.0)
    try:
        run.step(0)
    except halfpeak.RankMismatchError as error:
        return str(error)
    return ""


EXPERTS = [(level, name) for level in ("O0", "O2", "O5") for name in ("SGD", "FusedSGD", "SGD, largest")]
"""Level and optimizer of each training with experts; one clips by the largest element."""


class Experts(nn.Module):
    """A stem and a head on all ranks, and between them an expert for each part of the batch."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [nn.Linear(4, 8), nn.Linear(8, 2), *(nn.Linear(8, 8) for _ in range(4))]
        self.stem, self.head = made[:2]
        self.experts = nn.ModuleDict({str(i): made[2 + i] for i in experts})

    def forward(self, *parts: Tensor) -> Tensor:
        out = [
            self.head(expert(torch.relu(self.stem(x))))
            for x, expert in zip(parts, self.experts.values(), strict=True)
        ]
        return torch.stack(out).float().square().mean()


def experts(level: str, name: str) -> dict[str, Any]:
    """Train with one expert per rank, and in one process with all experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def train(mine: list[int]) -> tuple[Experts, list[float], list[bool]]:
        model, alone = Experts(mine), len(mine) == ranks
        if "largest" in name:
            for parameter in model.experts.parameters():
                # The largest element is then one of an expert, which only one rank has.
                parameter.register_hook(lambda grad: grad * 16)
        make = FusedSGD if name == "FusedSGD" else torch.optim.SGD
        clip = halfpeak.ClipNorm(0.05, norm_type=float("inf") if "largest" in name else 2.0)
        options: dict[str, Any] = {"clip": clip, "scale": halfpeak.ScaleConfig(init=1024.0)}
        if not alone:
            for parameter in model.experts.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]
                # DistributedDataParallel averages other gradients, but does not reduce these.
                parameter.register_hook(lambda grad: grad / ranks)
            options["group"] = "world"
        engine = halfpeak.prepare(
            model,
            make(model.parameters(), lr=0.1, momentum=0.9),
            halfpeak.LEVELS[level].replace(loss_scale="dynamic"),
            **options,
        )
        wrapped: Any = model
        if not alone:
            ignored = [f"experts.{key}" for key, _ in model.experts.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            wrapped = DistributedDataParallel(model)
        norms, outcomes = [], []
        for at in range(STEPS):
            with engine.forward(None if alone else wrapped):
                loss = wrapped(*(batch(i, at) for i in mine))
            handle = model.experts[str(mine[-1])].bias.register_hook(
                lambda grad, at=at: grad * float("inf") if at == 2 and ranks - 1 in mine else grad
            )
            engine.backward(loss)
            result = engine.step()
            handle.remove()
            outcomes.append(result.stepped())
            norms.append(float(result.grad_norm))
        return model, norms, outcomes

    model, norms, outcomes = train([rank])
    whole, expected, _ = train(list(range(ranks)))
    values = whole.state_dict()
    return {
        "shared": [p.detach().clone() for part in (model.stem, model.head) for p in part.parameters()],
        "norms": norms,
        "expected": expected,
        "outcomes": outcomes,
        "distance": max(float((v - values[key]).abs().max()) for key, v in model.state_dict().items()),
    }


def wrapped_before() -> str:
    """Make parameters low after ``DistributedDataParallel`` has wrapped them; return the error."""
    model = Net()
    wrapped = DistributedDataParallel(model)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2")
    try:
        with engine.forward():
            wrapped(batch(0, 0))
    except halfpeak.OrderError as error:
        return str(error)
    return ""


def refused(run: Run) -> dict[str, Any]:
    """The error of ``check_ranks``, and the collectives that it began."""
    before = collectives()
    try:
        run.engine.check_ranks()
    except halfpeak.RankMismatchError as error:
        return {"error": str(error), "collectives": collectives() - before}
    return {"error": "", "collectives": collectives() - before}


def scenarios() -> dict[str, Callable[[], dict[str, Any]]]:
    """Every scenario by name; each rank runs them in this order."""
    table: dict[str, Callable[[], dict[str, Any]]] = {}
    for layout in LAYOUTS:
        table[f"{layout} nan"] = partial(train, layout, bad_loss)
        if layout != "fsdp":  # FSDP2 needs the same gradients on every rank, and calls no hook of a parameter
            table[f"{layout} no gradient"] = partial(train, layout, without_gradient)
            table[f"{layout} nan in one gradient"] = partial(train, layout, local_nan)
        table[f"{layout} looks"] = partial(train, layout, looking)
        if layout != "none":  # with found_inf reduced in every step, ranks notice
            table[f"{layout} abort"] = partial(train, layout, raising)
        options = {} if layout == "none" else {"check_ranks": 2}
        table[f"{layout} failed"] = partial(failing, layout, "optimizer", **options)
        if layout == "ddp":
            table["ddp backward failed"] = partial(failing, layout, "backward", check_ranks=1)
            table["ddp backward, group failed"] = partial(failing, layout, "backward", group="world")
    for layout in ("ddp", "none"):
        table[f"{layout} other scale"] = partial(differing, layout)
        table[f"{layout} other checkpoint"] = partial(loaded, layout, False)
        table[f"{layout} older checkpoint"] = partial(loaded, layout, True)
    return table


def leave(rank: int) -> str:
    """The odd rank leaves the process group; return the error of the others. Must run last."""
    run = Run("ddp")
    run.step(0)
    if rank == ODD:
        dist.destroy_process_group()
        return "gone"
    try:
        run.step(1)
    except Exception as error:
        run.engine.abort()
        return f"{type(error).__name__}, open: {run.engine.is_open}"
    return "went on"


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {name: run() for name, run in scenarios().items()}
    dist.barrier()
    for level, name in EXPERTS:
        seen[f"experts {level} {name}"] = experts(level, name)
    seen["own norms"], seen["wrapped before"] = own_norms(), wrapped_before()
    dist.barrier()
    seen["leave"] = leave(rank)
    return seen
