"""Ranks of ``test_averages.py``: each runs every scenario and saves its results."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

import halfpeak
from distributed.launching import Refusals
from halfpeak import AveragedModel
from halfpeak.distributed import fully_shard
from support.averages import Exact
from support.nets import LEVELS, OPTIMIZERS, make_batch
from support.nets import make_normless as make

EMA = swa_utils.get_ema_multi_avg_fn(0.9)


def train(engine: halfpeak.Engine, wrapped: nn.Module, number: int) -> None:
    x, y = make_batch(10 * number + dist.get_rank())
    with engine.forward(wrapped):
        loss = mse_loss(wrapped(x).float(), y)
    engine.backward(loss)
    engine.step()


def prepared(net: nn.Module, level: str) -> halfpeak.Engine:
    return halfpeak.prepare(
        net, OPTIMIZERS["adamw"](net.parameters()), halfpeak.LEVELS[level].replace(loss_scale=64.0)
    )  # type: ignore[arg-type]


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in state.items()}


def parallel(level: str) -> dict[str, Any]:
    """Averages made before ``prepare``, and after the first step, from the model and from its wrapper."""
    net = make(seed=dist.get_rank())
    averages = [AveragedModel(net, multi_avg_fn=EMA)]
    engine = prepared(net, level)
    wrapped = DistributedDataParallel(net)
    train(engine, wrapped, 0)
    averages += [AveragedModel(one, multi_avg_fn=EMA) for one in (net, wrapped)]
    exact = Exact(0.9)
    for number in range(1, 5):
        train(engine, wrapped, number)
        exact.update(whole(net.state_dict()))
        for averaged, model in zip(averages, (wrapped, net, wrapped), strict=True):
            averaged.update_parameters(model)
    states = [list(averaged.parameters()) for averaged in averages]
    x = make_batch(0)[0]
    return {
        "averages": [average.detach() for average in states[0]],
        "same": all(all(map(torch.equal, states[0], other)) for other in states[1:]),
        "distance": exact.distance(averages[0].module.state_dict()),
        "output": averages[0](x).detach(),
    }


def sharded(level: str) -> dict[str, Any]:
    net = make()
    averaged = AveragedModel(net, multi_avg_fn=EMA)
    fully_shard(net, level)  # type: ignore[arg-type]
    fully_shard(averaged.module, level)  # type: ignore[arg-type]
    engine = prepared(net, level)
    exact = Exact(0.9)
    for number in range(5):
        train(engine, net, number)
        exact.update(whole(net.state_dict()))
        averaged.update_parameters(net)
    weights = copy.deepcopy(net.state_dict())
    net.load_state_dict(averaged.module.state_dict())
    swapped = whole(net.state_dict())
    net.load_state_dict(weights)
    averages = whole(averaged.module.state_dict())
    served = make()
    served.load_state_dict(averages)
    x = make_batch(0)[0]
    return {
        "averages": list(averages.values()),
        "same": all(torch.equal(swapped[name], value) for name, value in averages.items()),
        "distance": exact.distance(whole(averaged.module.state_dict())),
        "close": torch.allclose(averaged(x).float(), served(x), atol=0.02),
    }


def refused() -> dict[str, list[str]]:
    net = make()
    averaged = AveragedModel(net)
    fully_shard(net, "O5")
    refusals = Refusals()

    @refusals("ParameterError: FSDPSequential is sharded")
    def a_copy_of_shards() -> None:
        AveragedModel(net)

    @refusals("ParameterError: the 6 parameters and buffers of FSDPSequential are not like the 6 averages")
    def shards_into_a_whole_copy() -> None:
        averaged.update_parameters(net)

    return refusals


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": dict(refused())}
    for level in LEVELS:
        found[f"parallel {level}"] = parallel(level)
        found[f"sharded {level}"] = sharded(level)
    return found
