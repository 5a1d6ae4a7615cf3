"""``prepare`` warns of an ``eps`` that is zero in the dtype it is used in, and of no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer, RMSprop

import halfpeak
from halfpeak.fused import FusedAdam


class OwnNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def warned(level: str, layer: nn.Module, make: Callable[[Any], Optimizer], **options: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        halfpeak.prepare(model, make(model.parameters()), level, **options)
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


OPTIMIZERS: list[tuple[str, str, Callable[[Any], Optimizer], bool]] = [
    ("Adam", "O3", Adam, True),
    ("AdamW", "O3", AdamW, True),
    ("RMSprop", "O3", RMSprop, True),
    ("Adadelta", "O3", lambda params: Adadelta(params, eps=1e-9), True),
    ("Adam, eps=1e-4", "O3", lambda params: Adam(params, eps=1e-4), False),
    ("Adam, fused", "O3", lambda params: Adam(params, fused=True), False),
    ("FusedAdam", "O3", FusedAdam, False),
    ("SGD", "O3", SGD, False),
    *((f"Adam {level}", level, Adam, False) for level in ("O0", "O1", "O2", "O4", "O5")),
]


@pytest.mark.parametrize(
    ("level", "make", "warns"), [row[1:] for row in OPTIMIZERS], ids=[r[0] for r in OPTIMIZERS]
)
def test_an_optimizer(level: str, make: Callable[[Any], Optimizer], warns: bool) -> None:
    found = warned(level, nn.ReLU(), make)
    assert len(found) == warns
    assert all("is 0 in torch.float16, in which it steps" in one and "eps=0.0001)" in one for one in found)


def test_what_it_says_to_write_trains() -> None:
    for eps, finite in ((1e-8, False), (1e-4, True)):
        model = nn.Linear(4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = halfpeak.prepare(model, Adam(model.parameters(), eps=eps), "O3")
        with engine.forward():
            loss = model(torch.full((1, 4), 1e-4)).square().mean()
        engine.backward(loss)
        engine.step()
        assert model.weight.isfinite().all().item() is finite


@pytest.mark.parametrize(
    ("layer", "level", "options", "said"),
    [
        (OwnNorm(1e-8), "O2", {}, "write epsilon=0.0001, or keep_fp32=['1']"),
        (OwnNorm(1e-5), "O2", {}, None),
        (OwnNorm(1e-8), "O2", {"keep_fp32": ["1"]}, None),
        (OwnNorm(1e-8), "O5", {}, None),
        (OwnNorm(1e-8), "O1", {}, None),
        (nn.CosineSimilarity(), "O2", {}, "write eps=0.0001"),
        (nn.LayerNorm(4, eps=1e-8), "O3", {}, None),
        (nn.BatchNorm1d(4, eps=1e-8), "O3", {}, None),
        (nn.RMSNorm(4, eps=1e-8), "O3", {}, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_module(layer: nn.Module, level: str, options: dict[str, Any], said: str | None) -> None:
    found = warned(level, layer, SGD, **options)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
