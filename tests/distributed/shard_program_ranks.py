"""Ranks of ``test_programs.py``: random windows over FSDP2, beside a loop in plain torch whose gradients stay scaled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import halfpeak
from fuzz.config import Config
from fuzz.reference import Scale
from halfpeak.distributed import fully_shard

COUNT = 25


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6))


def alike(one: Any, other: Any) -> bool:
    """Whether shards are equal; NaN equals NaN."""
    return torch.equal(one.to_local().nan_to_num(7.0), other.to_local().nan_to_num(7.0))


def run(seed: int) -> str:
    """What differs, after what was done; empty if nothing does."""
    pick, rank = random.Random(seed), dist.get_rank()
    level = pick.choice(("O0", "O2", "O5"))
    rule = {"init": 2.0 ** pick.choice((4, 8, 10)), "interval": 2, "floor": 2.0**-30, "patience": None}
    scale = Scale(Config(seed, scale=tuple(rule.items())), halfpeak.LEVELS[level].properties)
    net, plain = (fully_shard(network(seed), level) for _ in range(2))
    optimizer, by_hand = (torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (net, plain))
    engine = halfpeak.prepare(net, optimizer, level, scale=halfpeak.ScaleConfig(**rule))
    done, wrong = [level], list[str]()
    for window in range(pick.randint(3, 5)):
        num = pick.randint(1, 4)
        for number in range(num):
            local = number < num - 1 and pick.random() < 0.5
            factors = [1.0, 1.0]
            if level == "O2" and pick.random() < 0.1:
                factors[pick.randrange(2)] = float("inf")
            generator = torch.Generator().manual_seed(100 * window + 10 * number + rank)
            x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
            done.append(f"pass {local=} {factors=}")
            for one in (net, plain):
                one.set_requires_gradient_sync(not local)  # type: ignore[operator]
                loss = mse_loss(one(x).float(), y) * factors[rank]
                if one is net:
                    engine.backward(loss)
                else:
                    (loss * scale.scale).backward()
            for one, other in zip(net.parameters(), plain.parameters(), strict=True):
                if not local and other.grad is not None and not alike(one.grad, other.grad / scale.scale):
                    wrong.append("a gradient differs")
        grads = [one.grad for one in plain.parameters() if one.grad is not None]
        bad = torch.tensor(float(not all(bool(grad.to_local().isfinite().all()) for grad in grads)))  # type: ignore[attr-defined]
        dist.all_reduce(bad)
        overflow = bool(bad)
        done.append(f"step {overflow=}")
        if not overflow:
            for grad in grads:
                grad.div_(scale.scale)
            by_hand.step()
        by_hand.zero_grad()
        if engine.step().stepped() == overflow:
            wrong.append("stepped otherwise")
        scale.update(float(overflow))
        if engine.read_scale() != scale.scale:
            wrong.append(f"scale {engine.read_scale()}, by hand {scale.scale}")
        if not all(map(alike, net.parameters(), plain.parameters())):
            wrong.append("a weight differs")
        differs = torch.tensor(float(bool(wrong)))
        dist.all_reduce(differs)
        if differs:
            return "\n".join([*done, *wrong])
    return ""


def see(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What differs in each program; empty texts where nothing does."""
    return {str(number): run(1_000 * number) for number in range(COUNT)}
