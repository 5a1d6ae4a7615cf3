"""``diagnose`` names the fault that a test injects, in every network, at every level, in every way to run.

A case is a fault, a place and a network, with a level and a way to run. ``make test`` runs the cases that cover the most
pairs of these; ``HALFPEAK_THOROUGH=1`` runs all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfpeak
from halfpeak import amp

# Networks. Each has a slot (Identity, for a faulty module), two places (low-precision outputs at all levels), a head.


class Mlp(nn.Module):
    places = ("first", "head")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slot, self.head = nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.slot(self.first(x).relu()))


class Cnn(nn.Module):
    places = ("stem.0", "head")
    shape = (3, 2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.slot, self.head = nn.Identity(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.slot(self.stem(x)).mean((2, 3)))


class GroupedUnet(nn.Module):
    places = ("down", "up")
    shape = (2, 4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.norm, self.slot, self.head = nn.GroupNorm(2, 8), nn.Identity(), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(
            torch.cat([self.up(self.slot(self.norm(self.down(x)))), x.to(self.head.weight.dtype)], 1)
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT / 3 + mask).softmax(-1).to(v.dtype) @ v)


class Masked(nn.Module):
    places = ("attention.qkv", "attention.out")
    shape = (2, 4, 8)
    masked = True

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.slot, self.head = Attention(), nn.Identity(), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.head(self.slot(self.attention(x, mask)))


class Transformer(nn.Module):
    places = ("layer.linear1", "layer.linear2")
    shape = (2, 4, 8)
    masked = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.slot, self.head = nn.Identity(), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.head(self.slot(self.layer(x, mask)))


class Lstm(nn.Module):
    places = ("first", "head")
    shape = (2, 4, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)
        self.slot, self.head = nn.Identity(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        output, (_, _) = self.lstm(self.first(x))
        return self.head(self.slot(output))


class LanguageModel(nn.Module):
    places = ("mlp.0", "mlp.2")
    tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.mlp, self.slot = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Identity()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Any:
        h = self.embedding(x)
        return self.head(self.slot(h + self.mlp(self.norm(h))))


class Experts(nn.Module):
    places = ("experts.0.0", "experts.1.0")

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.slot, self.head = nn.Linear(8, 2), nn.Identity(), nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        mixed = [expert(x) * weights[:, i : i + 1] for i, expert in enumerate(self.experts)]
        return self.head(self.slot(torch.stack(mixed).sum(0)))


NETWORKS: tuple[Any, ...] = (Mlp, Cnn, GroupedUnet, Masked, Transformer, Lstm, LanguageModel, Experts)


# Faults: each injects something, and has the ``where``, place and ``reason`` that the diagnosis must name.

ALL, FP16_MODEL, FP16 = tuple(halfpeak.LEVELS), ("O2", "O3"), ("O1", "O2", "O3")


class Slot(nn.Module):
    """A faulty computation in the middle of a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True)
class Run:
    """What a fault may change: the network, its inputs, and one place in the network."""

    net: Any
    inputs: list[Tensor]
    place: str

    @property
    def module(self) -> nn.Module:
        return self.net.get_submodule(self.place)


@dataclass(frozen=True)
class Fault:
    where: str
    reason: str
    inject: Callable[[Run], Any]
    levels: tuple[str, ...] = ALL
    at: str = "place"
    fits: Callable[[Any], bool] = lambda network: True
    loss: Callable[[Tensor], Tensor] = lambda loss: loss


def in_slot(
    reason: str, function: Callable[[Tensor], Tensor], levels: tuple[str, ...] = ALL, where: str = "forward"
) -> Fault:
    return Fault(where, reason, lambda run: setattr(run.net, "slot", Slot(function)), levels, "slot")


def activation(reason: str, factor: float, levels: tuple[str, ...] = ALL) -> Fault:
    return Fault(
        "forward",
        reason,
        lambda run: run.module.register_forward_hook(lambda m, i, output: output * factor),
        levels,
    )


def gradient(reason: str, factor: float) -> Fault:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: torch.full_like(grad, factor))

    return Fault("backward", reason, lambda run: run.module.register_forward_hook(hook))


def weight(reason: str, value: float, levels: tuple[str, ...] = ALL) -> Fault:
    def inject(run: Run) -> None:
        with torch.no_grad():
            run.module.weight.view(-1)[0] = value  # type: ignore[union-attr,operator]

    return Fault("weight", reason, inject, levels)


def given(reason: str, index: int, function: Callable[[Tensor], Any], levels: tuple[str, ...] = ALL) -> Fault:
    def fits(network: Any) -> bool:
        return hasattr(network, "masked") if index else not hasattr(network, "tokens")

    return Fault("input", reason, lambda run: function(run.inputs[index]), levels, "", fits)


def first(value: float) -> Callable[[Tensor], Any]:
    return lambda x: x.view(-1)[:1].fill_(value)


def scores(x: Tensor) -> Tensor:
    big = x + 300
    return (big @ big.mT).softmax(-1) @ x


def square(x: Tensor) -> Tensor:
    return x.new_full((x.shape[-1], x.shape[-1]), 250)


FAULTS: dict[str, Fault] = {
    "input nan": given("nan", 0, first(torch.nan)),
    "input inf": given("inf", 0, first(torch.inf)),
    "input overflow": given("overflow", 0, lambda x: x.mul_(1e7), FP16_MODEL),
    "mask nan": given("nan", 1, first(torch.nan)),
    "weight nan": weight("nan", torch.nan),
    "weight inf": weight("inf", -torch.inf),
    "weight overflow": weight("overflow", 1e5, ("O2",)),
    "activation nan": activation("nan", torch.nan),
    "activation inf": activation("inf", torch.inf),
    "activation overflow": activation("overflow", 1e8, FP16),
    "log": in_slot("inf", lambda x: torch.log(x * 0)),
    "sqrt": in_slot("nan", lambda x: torch.sqrt(-1 - x.abs())),
    "division": in_slot("inf", lambda x: (x.abs() + 1) / (x.abs() * 0)),
    "empty mean": in_slot("nan", lambda x: x + x[:0].mean()),
    "exp": in_slot("overflow", lambda x: torch.exp(x.abs().clamp(max=4) + 12), FP16_MODEL),
    "linear": in_slot("overflow", lambda x: F.linear((x.abs() + 1) * 250, square(x)), FP16_MODEL),
    "conv": in_slot(
        "overflow",
        lambda x: F.conv1d(
            (x.abs() + 1).flatten(0, -2)[:, None] * 250, x.new_full((1, 1, 3), 250), padding=1
        ).view_as(x),
        FP16_MODEL,
    ),
    "attention": in_slot("overflow", lambda x: scores(x.flatten(0, -2)).view_as(x), FP16_MODEL),
    "softmax": in_slot("overflow", lambda x: (x * 1e9).softmax(-1), FP16_MODEL),
    "norm": in_slot("overflow", lambda x: x * (x.abs() * 1000 + 3e4).norm(), FP16_MODEL),
    "sum": in_slot("overflow", lambda x: x + (x * 0 + 3e4).sum(), FP16_MODEL),
    "gradient nan": gradient("nan", torch.nan),
    "gradient inf": gradient("inf", torch.inf),
    "slope of sqrt": in_slot("nan", lambda x: x + torch.sqrt(x * 0) * 0, ALL, "backward"),
    "weight gradient": Fault(
        "backward",
        "nan",
        lambda run: run.module.weight.register_hook(lambda grad: grad * torch.nan),  # type: ignore[union-attr,operator]
    ),
    "loss nan": Fault(
        "loss", "nan", lambda run: None, ALL, "", loss=lambda loss: loss + torch.log(-1 - loss.abs())
    ),
    "loss inf": Fault(
        "loss", "inf", lambda run: None, ALL, "", loss=lambda loss: loss + 1 / (loss.abs() * 0)
    ),
    "loss overflow": Fault(
        "loss", "overflow", lambda run: None, ALL, "", loss=lambda loss: (loss + 1).half() * 1e5
    ),
    "gradient overflow": Fault(
        "backward", "overflow", lambda run: None, FP16_MODEL, "", loss=lambda loss: loss * 1e12
    ),
}


# Ways to run.


class Checkpointed(nn.Module):
    """A network that activation checkpointing computes again in the backward pass."""

    def __init__(self, net: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = net, use_reentrant

    def forward(self, *args: Tensor) -> Any:
        return checkpoint(self.net, *args, use_reentrant=self.use_reentrant)


MODES = ("model", "engine", "accumulated", "compiled", "checkpointed", "amp")


@dataclass(frozen=True)
class Case:
    fault: str
    place: str
    network: Any
    level: str
    mode: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.network.__name__}-{self.place}-{self.level}-{self.mode}".replace(" ", "_")

    def pairs(self) -> set[Any]:
        values = (self.fault, self.network.__name__, self.level, self.mode)
        return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(values), 2)}


def cases() -> list[Case]:
    """Every fault at each of its places in every network, twice, with the next level and the next mode each time."""
    modes = cycle(MODES)
    found: list[Case] = []
    for name, fault in FAULTS.items():
        levels = cycle(fault.levels)
        for network in NETWORKS:
            if fault.fits(network):
                places = network.places if fault.at == "place" else (fault.at,)
                found += [
                    Case(name, place, network, next(levels), next(modes))
                    for place in places
                    for _ in range(2)
                ]
            next(modes)
    return found


def covering(every: list[Case], count: int) -> Iterator[Case]:
    """The cases that together cover the most pairs of fault, network, level and mode."""
    uncovered = set[Any]().union(*(case.pairs() for case in every))
    for _ in range(count):
        best = max(every, key=lambda case: len(case.pairs() & uncovered))
        uncovered -= best.pairs()
        yield best


THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"


@pytest.mark.parametrize("case", cases() if THOROUGH else list(covering(cases(), 45)), ids=str)
def test_the_fault_is_named(case: Case) -> None:
    fault = FAULTS[case.fault]
    torch.manual_seed(0)
    net = case.network()
    inputs = [
        torch.randint(16, (2, 6)) if hasattr(net, "tokens") else torch.randn(getattr(net, "shape", (4, 8)))
    ]
    if hasattr(net, "masked"):
        inputs.append(nn.Transformer.generate_square_subsequent_mask(4))
    fault.inject(Run(net, inputs, case.place))
    model: Any = net
    if case.mode == "checkpointed":
        model = Checkpointed(net, use_reentrant=False)
    run: Any = model
    if case.mode in ("engine", "accumulated", "compiled"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = halfpeak.prepare(
            model, optimizer, case.level, accumulate=3 if case.mode == "accumulated" else 1
        )
    elif case.mode == "amp":
        amp.initialize(
            model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), opt_level=case.level, verbosity=0
        )
    called = torch.compile(model, backend="eager") if case.mode == "compiled" else model

    def closure() -> Tensor:
        return fault.loss(
            called(*inputs).float().square().mean() / 2**8
        )  # so small that by itself nothing overflows

    found = halfpeak.diagnose(run, closure, level=case.level)
    prefix = "net." if case.mode == "checkpointed" and case.place else ""
    assert (found.where, found.module, found.reason) == (fault.where, prefix + case.place, fault.reason), str(
        found
    )
    assert found.suggestion


def test_the_table_is_as_large_as_it_says() -> None:
    every = cases()
    assert len(set(every)) >= 300
    assert {case.network for case in every} == set(NETWORKS)
    assert {case.fault for case in every} == set(FAULTS)
