"""Gradients in the buckets of DistributedDataParallel, beside another engine. Several ranks are in tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak.fused import FusedAdamW
from promises.by_hand import parameters
from promises.cases import batch, critic, generator, sgd
from support.nets import TYPICAL


def fused(nets: Any) -> FusedAdamW:
    return FusedAdamW(parameters(nets), lr=0.01, backend="eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("makes", [sgd, fused])
@pytest.mark.parametrize("in_views", [False, True])
def test_gradients_stay_while_another_engine_has_its_pass(
    one_rank: None, level: Any, makes: Any, in_views: bool
) -> None:
    """Which writes the buckets again, where they are views of these."""

    def train(*, wrap: bool) -> list[Tensor]:
        nets = generator() + critic()
        engines = [
            halfpeak.prepare(net, makes([net]), halfpeak.LEVELS[level].replace(loss_scale=1024.0))
            for net in nets
        ]
        g, d = (
            DistributedDataParallel(net, gradient_as_bucket_view=in_views) if wrap else net for net in nets
        )
        for seed in range(3):
            with engines[0].forward():
                loss = d(g(batch(seed))).float().square().mean()
            engines[0].backward(loss)
            with engines[1].forward():
                loss = d(batch(seed + 50)).float().mean()
            engines[1].backward(loss)
            assert all(engine.step().stepped() for engine in engines)
        return [p.detach() for net in nets for p in net.parameters()]

    for ours, plain in zip(train(wrap=True), train(wrap=False), strict=True):
        torch.testing.assert_close(ours, plain)
