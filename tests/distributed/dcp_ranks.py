"""Ranks of ``test_dcp.py``: each trains, saves, loads, continues and saves its results."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from distributed.launching import Refusals
from distributed.sharded_ranks import batch, full, net
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedAdamW

KINDS = ("shards", "copies", "alone")
"""FSDP2, DistributedDataParallel, and one rank alone with whole batches."""


class Run:
    """A model of one kind with its engine."""

    def __init__(
        self, kind: str, level: str, every: int = 1, order: int = 1, mesh: Any = None, **formats: Any
    ) -> None:
        make = FusedAdamW if kind.startswith("fused") else torch.optim.AdamW
        kind = kind.removeprefix("fused ")
        self.group = None if mesh is None else mesh.get_group()
        self.parts = 1 if kind == "alone" else dist.get_world_size(self.group)
        self.part = dist.get_rank() % self.parts
        self.model: nn.Module = fully_shard(net(), level, mesh=mesh) if kind == "shards" else net()
        optimizer = make([*self.model.parameters()][::order], lr=1e-2, **formats)
        scale = halfpeak.ScaleConfig(init=1024.0)
        self.engine = halfpeak.prepare(self.model, optimizer, level, clip=0.5, scale=scale, accumulate=every)
        self.wrapped = (
            DistributedDataParallel(self.model, process_group=self.group) if kind == "copies" else self.model
        )
        self.no_dist = kind == "alone"

    def train(self, steps: range) -> None:
        for step in steps:
            with self.engine.forward(None if self.no_dist else self.wrapped):
                loss = self.wrapped(batch(step).chunk(self.parts)[self.part]).float().square().mean()
            self.engine.backward(loss * float("inf") if step == 1 else loss)
            self.engine.step()

    def save(self, folder: Path) -> None:
        if not self.no_dist or dist.get_rank() == 0:
            dcp.save(
                {"engine": self.engine}, checkpoint_id=folder, no_dist=self.no_dist, process_group=self.group
            )
        dist.barrier(self.group)

    def load(self, folder: Path) -> None:
        dcp.load(
            {"engine": self.engine}, checkpoint_id=folder, no_dist=self.no_dist, process_group=self.group
        )

    def by_params(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.wrapped, self.engine.state_dict_optimizers())
        return {"model": model, "optimizer": optimizer, "loop": self.engine.loop_state_dict()}

    def set_by_params(self, state: dict[str, Any], **options: Any) -> None:
        set_state_dict(
            self.wrapped,
            self.engine.state_dict_optimizers(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(**options),
        )
        self.engine.load_loop_state_dict(state["loop"])

    def seen(self) -> dict[str, Any]:
        engine = self.engine
        state = engine.state_dict()
        rows = [entry for _, entry in sorted(state["optimizers"][0]["state"].items())]
        return {
            "values": [full(value).clone() for value in self.model.state_dict().values()],
            "moments": [full(entry["exp_avg_sq"]).clone() for entry in rows],
            "steps": [float(entry["step"]) for entry in rows],
            "counters": [int(engine.num_steps), int(engine.num_skipped), engine.micro_step],
            "scale": engine.read_scale(),
        }


BY_PARAMS = (
    *product(("O0", "O1", "O2", "O5"), ("shards",)),
    *product(("O1", "O2", "O4", "O5"), ("copies",)),
    *product(("O2",), ("alone", "fused shards", "fused copies")),
)
"""Level and kind of the runs that save and load by torch's own functions."""


def cases() -> Iterator[tuple[str, str, str]]:
    """Level, kind of the saving run, kind of the loading run."""
    yield from product(("O2", "O5"), KINDS, KINDS)
    yield from product(("O0", "O1"), ("shards",), ("shards",))
    yield from product(("O2",), ("fused shards",), ("fused shards", "fused alone"))
    yield ("O2", "fused copies", "fused shards")


@functools.cache
def stopped(level: str, source: str, folder: Path) -> dict[str, Any]:
    """Results of a run when it saves in the middle, and at its end."""
    run = Run(source, level)
    run.train(range(3))
    run.save(folder)
    saved = run.seen()
    run.train(range(3, 6))
    return {"saved": saved, "straight": run.seen()}


def resumed(level: str, source: str, target: str, folder: Path) -> dict[str, Any]:
    seen = stopped(level, source, folder / f"{level} {source}")
    other = Run(target, level)
    other.load(folder / f"{level} {source}")
    loaded = other.seen()
    other.train(range(3, 6))
    return {**seen, "loaded": loaded, "resumed": other.seen()}


def resumed_by_params(level: str, kind: str, folder: Path) -> dict[str, Any]:
    """:func:`resumed` through torch's get_state_dict and set_state_dict; and from whole tensors in memory."""
    run = Run(kind, level)
    run.train(range(3))
    if not run.no_dist or dist.get_rank() == 0:
        dcp.save(run.by_params(), checkpoint_id=folder, no_dist=run.no_dist)
    dist.barrier()
    whole = get_state_dict(
        run.wrapped, run.engine.state_dict_optimizers(), options=StateDictOptions(full_state_dict=True)
    )
    state = {"model": whole[0], "optimizer": whole[1], "loop": run.engine.loop_state_dict()}
    copied = copy.deepcopy(state)
    run.train(range(3, 6))
    seen = {"straight": run.seen()}
    for name in ("file", "memory"):
        other = Run(kind, level)
        if name == "file":
            state = other.by_params()
            dcp.load(state, checkpoint_id=folder, no_dist=run.no_dist)
            other.set_by_params(state)
        else:
            other.set_by_params(copied, full_state_dict=True)
        other.train(range(3, 6))
        seen[name] = other.seen()
    return seen


def unstepped(folder: Path) -> dict[str, Any]:
    """A run that loads a checkpoint from before the first step, and the run that saved it."""
    run = Run("shards", "O2")
    run.save(folder)
    other = Run("shards", "O2")
    other.load(folder)
    for one in (run, other):
        one.train(range(2))
    return {"straight": run.seen(), "resumed": other.seen()}


def reordered(folder: Path) -> dict[str, Any]:
    """Load into an optimizer with the parameters in another order, which takes moments by name."""
    run, other = Run("shards", "O2"), Run("copies", "O2", order=-1)
    run.train(range(3))
    run.save(folder)
    other.load(folder)
    return {"straight": run.seen(), "resumed": other.seen()}


COMPACT = (
    ("float32", torch.bfloat16),
    ("float32", "int8"),
    ("remainder", torch.float32),
    ("remainder8", "int8"),
)
"""``master`` and ``moments`` of fused optimizers."""


def compact(master: str, moments: Any, folder: Path) -> dict[str, Any]:
    """A run whose optimizer stores less than float32, and another one that loads its checkpoint and goes on."""
    run, other = (Run("fused copies", "O5", master=master, moments=moments) for _ in range(2))
    run.train(range(4))
    run.save(folder)
    with torch.no_grad(), other.engine.forward(other.wrapped):
        other.wrapped(batch(0))  # an evaluation: the weights have remainders, and no moments yet
    other.load(folder)
    loaded = copy.deepcopy([run.engine.optimizers[0].state_dict(), other.engine.optimizers[0].state_dict()])
    for one in (run, other):
        one.train(range(4, 6))
    return {"loaded": loaded, "end": [run.seen(), other.seen()]}


def refusals(folder: Path) -> dict[str, list[str]]:
    """Errors of calls that would silently lose gradients or moments."""
    found = Refusals()

    @found("OrderError: the last backward pass of the window ran under no_sync")
    def window_of_shards() -> None:
        run = Run("shards", "O2", every=2)
        run.train(range(1))
        run.engine.state_dict()

    @found("OrderError: the last backward pass of the window ran under no_sync")
    def window_of_copies() -> None:
        run = Run("copies", "O2", every=2)
        run.train(range(1))
        run.engine.state_dict()

    @found("OrderError: the last backward pass of the window ran under no_sync")
    def window_of_a_loop() -> None:
        run = Run("copies", "O2", every=2)
        run.train(range(1))
        run.engine.loop_state_dict()

    @found("StateError: the state was saved with ['exp_avg torch.float32',")
    def no_moments() -> None:
        run = Run("alone", "O2")
        run.train(range(1))
        state = run.engine.state_dict()
        state["optimizers"][0]["state"] = {}
        run.engine.load_state_dict(state)

    @found("StateError: the state of an optimizer was saved with ['exp_avg torch.bfloat16',")
    def other_moments() -> None:
        run, other = (Run("fused copies", "O5", moments=one) for one in (torch.bfloat16, torch.float32))
        run.train(range(1))
        run.save(folder / "moments")
        other.load(folder / "moments")

    @found("StateError: the state was saved inside a window with 18 gradients, but has 0")
    def lost_window() -> None:
        run, other = Run("alone", "O1", every=2), Run("alone", "O1", every=2)
        run.train(range(1))
        run.save(folder / "window")
        other.load(folder / "window")

    # torch's own errors: it looks the state up by the parameters of the model, and the optimizer steps masters of them.
    @found("KeyError: 0")
    def torch_by_names() -> None:
        run = Run("copies", "O2")
        run.train(range(1))
        get_state_dict(run.model, run.engine.optimizers)

    @found("KeyError: tensor(")
    def torch_by_names_afresh() -> None:
        run = Run("copies", "O2")
        state = Run("copies", "O2").by_params()
        set_state_dict(
            run.model, run.engine.optimizers, model_state_dict={}, optim_state_dict=state["optimizer"]
        )

    @found("StateError: the state is of other parameters: this optimizer has no ['trunk.weight']")
    def other_parameters() -> None:
        run, other = Run("copies", "O2"), Run("copies", "O2")
        state = run.engine.state_dict()
        state["optimizers"][0]["param_groups"][0]["params"][0] = "trunk.weight"
        other.engine.load_state_dict(state)

    return dict(found)


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {" ".join(case): resumed(*case, folder) for case in cases()}
    for number, case in enumerate(BY_PARAMS):
        seen[" ".join(("by params", *case))] = resumed_by_params(*case, folder / f"params{number}")
    seen["unstepped"] = unstepped(folder / "unstepped")
    seen["reordered"] = reordered(folder / "reordered")
    for number, formats in enumerate(COMPACT):
        seen[f"compact {number}"] = compact(*formats, folder / f"compact{number}")
    sharded = Run("shards", "O2")
    sharded.train(range(1))
    seen["by names"] = [
        sorted(part) for part in get_state_dict(sharded.model, sharded.engine.optimizers)[1]["state"].values()
    ]
    seen["refusals"] = refusals(folder)
    return seen
