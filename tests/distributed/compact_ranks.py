"""Ranks of ``test_compact.py``: compact optimizer state over shards, trained, saved and loaded on several numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

import halfpeak
from distributed.sharded_ranks import full
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedAdamW
from halfpeak.fused.state_dtypes.codecs import REMAINDER

FORMS: dict[str, dict[str, Any]] = {
    "float32 shards, 8-bit moments": {"moments": "int8"},
    "low shards, 8 bits": {"master": "remainder8", "moments": "int8"},
    "low shards, 16 bits and 8": {"master": "remainder", "moments": "int8"},
}
"""The optimizer's options. With a remainder the shards are low."""
LEVELS = dict(zip(FORMS, ("O5", "O2", "O5"), strict=True))
SIZES = ("alone", "1", "2", "4", "2 x 2")
"""Numbers of ranks: no wrapper, FSDP2, and replicas of shards."""
MOVES = (("4", "2"), ("4", "alone"), ("2", "4"), ("alone", "2 x 2"))
"""The run that saves, and the run that loads."""


class Block(nn.Module):
    """Rows of 48 and of 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 64), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """``head`` has seven rows (uneven shards) of 128 elements, ``gain`` one (none on other ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 48))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.up, self.head = nn.Linear(48, 128), nn.Linear(128, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 48, generator=draw), torch.randn(8, 7, generator=draw)


class Run:
    """Training on whole batches on every rank, so that a mean over two or four ranks is the gradient of one process."""

    def __init__(self, level: str, form: str, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        self.mesh, model = mesh, Net()
        with torch.no_grad():
            for parameter in model.parameters():
                # Values that float16 and bfloat16 have, from which masters start where DDP could broadcast the weights.
                parameter.copy_(parameter.bfloat16().half())
        low = "master" in FORMS[form]
        self.model: nn.Module = (
            model if mesh is None else fully_shard(model, level, mesh=mesh, low_shards=low)
        )
        self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-2, backend="eager", **FORMS[form])
        scale = halfpeak.ScaleConfig(init=2.0**8)
        self.engine = halfpeak.prepare(self.model, self.optimizer, level, scale=scale)

    def train(self, steps: range) -> None:
        for step in steps:
            inputs, targets = batch(step)
            with self.engine.forward(self.model):
                loss = nn.functional.mse_loss(self.model(inputs).float(), targets)
            self.engine.backward(loss * float("inf") if step == 1 and dist.get_rank() == 0 else loss)
            self.engine.step()

    def seen(self) -> dict[str, Tensor]:
        """Float32 weights, and the state as it is stored; all of them whole."""
        found = {name: full(value) for name, value in self.model.state_dict().items()}
        rows: Mapping[Tensor, Mapping[str, Any]] = self.optimizer.state
        stepped = (p for group in self.optimizer.param_groups for p in group["params"])
        for (name, _), parameter in zip(self.model.named_parameters(), stepped, strict=True):
            row = {key: value for key, value in rows[parameter].items() if key != REMAINDER}  # in the weights
            found |= {f"{name} {key}": full(value) for key, value in row.items()}
        return found

    def save(self, folder: Path) -> None:
        if self.mesh is not None or dist.get_rank() == 0:
            dcp.save({"engine": self.engine}, checkpoint_id=folder, **self._ranks())

    def load(self, folder: Path) -> None:
        dcp.load({"engine": self.engine}, checkpoint_id=folder, **self._ranks())

    def _ranks(self) -> dict[str, Any]:
        if self.mesh is None:
            return {"no_dist": True}
        return {} if self.mesh.size() == dist.get_world_size() else {"process_group": self.mesh.get_group()}


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    # All ranks must make the group of each size; only its members train.
    meshes = {size: DeviceMesh("cpu", list(range(int(size)))) for size in ("1", "2", "4")}
    meshes["2 x 2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copy", "part"))
    members = {"alone": 1, "1": 1, "2": 2, "4": 4, "2 x 2": 4}
    seen: dict[str, Any] = {}
    for form, level in LEVELS.items():
        for source, size in (*((None, size) for size in SIZES), *MOVES):
            name = f"{form} {size}" if source is None else f"{form} {source} to {size}"
            seen[name] = None
            if rank < members[size]:
                run = Run(level, form, meshes.get(size))
                if source is None:
                    run.train(range(3))
                else:
                    run.load(folder / f"{form} {source}")
                saved = run.seen()
                if source is None and any(size == first for first, _ in MOVES):
                    run.save(folder / name)
                run.train(range(3, 5))
                seen[name] = {"saved": saved, "straight": run.seen()}
            dist.barrier()
    return seen
