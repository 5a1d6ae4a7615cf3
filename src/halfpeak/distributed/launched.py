"""The ranks that torchrun started for one command: join them, agree on values, gather and cut shards."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from halfpeak.core.errors import ConfigError, HalfpeakError, RankLostError
from halfpeak.ops.shards import is_shard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; by default only this one. Every rank calls each method, in the same order.

    Attributes:
        rank: the rank of this process.
        count: the number of ranks.
        local: the rank on this machine, which is also the index of the accelerator.
        has_group: whether there is a process group. A single process under torchrun has one, too.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    has_group: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result on every rank.

        Raises:
            HalfpeakError: raised by ``make`` on rank 0, on every rank.
        """
        if self.count == 1:
            return make()
        made: list[Any] = [None]
        if self.is_first:
            try:
                made = [make()]
            except HalfpeakError as error:
                made = [error]
        dist.broadcast_object_list(made)
        if isinstance(made[0], HalfpeakError):
            raise made[0]
        return made[0]  # type: ignore[no-any-return]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank. Communicates between hosts and waits for no device."""
        if self.count == 1:
            return flag
        number = torch.tensor(float(flag))
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return bool(number)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks of values that each rank computed from its part of the data.  # f32[n]"""
        if self.count == 1:
            return values
        dist.all_reduce(values)
        return values / self.count

    def copy_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0, as ``DistributedDataParallel`` does before its next forward pass."""
        for buffer in model.buffers() if self.count > 1 else ():
            dist.broadcast(buffer, src=0)


ALONE: Final = Ranks()
"""Only this process."""


@contextmanager
def joined() -> Generator[Ranks]:
    """Join the ranks that torchrun started in a process group for the body; without torchrun, only this process.

    Raises:
        ConfigError: the environment names several ranks, but not how to reach them.
        RankLostError: the body lost contact with a rank.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 and not (dist.is_available() and dist.is_torchelastic_launched()):
        yield ALONE
        return
    try:
        store, rank, count = next(rendezvous("env://"))
    except ValueError as error:
        raise ConfigError(f"{count} processes cannot join: {error}; start them with torchrun") from None
    dist.init_process_group(store=_of_this_start(store, rank, count), rank=rank, world_size=count)
    try:
        yield Ranks(rank, count, int(os.environ.get("LOCAL_RANK", "0")), has_group=True)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(text in str(error) for text in _OF_GLOO):
            raise RankLostError(
                f"rank {rank} could not reach another rank, which has died or hangs: the report of torchrun names it. Start "
                "all of them again, from the last checkpoint"
            ) from error
        raise
    finally:
        dist.destroy_process_group()


def _of_this_start(store: dist.Store, rank: int, count: int) -> dist.Store:
    """A part of the store for this start of all ranks: after a restart, the store still has addresses of dead ranks."""
    keys = [f"start/{i}" for i in range(count)]
    store.set(keys[rank], secrets.token_hex(8))
    seen = ""
    while True:
        starts = hashlib.sha256(b" ".join(store.multi_get(keys))).hexdigest()
        # Each rank adds 1 for the values that it read. A rank that read the value of a dead rank reads again.
        if store.add(starts, int(starts != seen)) >= count:
            return dist.PrefixStore(starts, store)
        seen = starts
        time.sleep(_PAUSE)


_OF_GLOO: Final = ("gloo/", "caused pair closure")
"""Parts of messages that identify gloo's errors, which have no class: a path of its source, or words of a timeout."""

_PAUSE: Final = 0.02
"""Seconds between two reads of the store."""


def whole(state: Any) -> Any:
    """A state with each shard gathered on the host, which needs memory for all of them. Every rank must call it."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole(value) for value in state)
    if not isinstance(state, Tensor) or not is_shard(state):
        return state
    shard: Any = state.detach()
    return shard.full_tensor().cpu()


def parts(state: Any, like: Any) -> Any:
    """The result of :func:`whole`, cut into shards as in ``like``, a current state. What does not fit stays whole."""
    if isinstance(like, Mapping) and isinstance(state, Mapping):
        return {key: parts(value, like.get(key)) for key, value in state.items()}
    if isinstance(like, list | tuple) and isinstance(state, list | tuple) and len(like) == len(state):
        return [parts(value, other) for value, other in zip(state, like, strict=True)]
    if not isinstance(like, Tensor) or not is_shard(like) or not isinstance(state, Tensor):
        return state
    # Imported here because the import is slow; if a shard exists, it has been imported already.
    from torch.distributed.tensor import distribute_tensor

    shard: Any = like
    return distribute_tensor(state.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)
