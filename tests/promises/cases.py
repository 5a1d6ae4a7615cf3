"""What the tables of promises are made of: a case, its networks, optimizers and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.fused import FusedAdamW, FusedSGD
from promises.by_hand import ByHand, Loop, Prepared, Scenario, compare, parameters
from support.nets import LEVELS

Nets = Callable[[], list[nn.Module]]


def two_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))]


def generator() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))]


def critic() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))]


def sgd(nets: Iterable[nn.Module]) -> Optimizer:
    return torch.optim.SGD(parameters(nets), lr=0.125, momentum=0.5)


def adam(nets: Iterable[nn.Module]) -> Optimizer:
    return torch.optim.Adam(parameters(nets), lr=0.01, eps=1e-4)


def torchs_fused(nets: Iterable[nn.Module]) -> Optimizer:
    return torch.optim.AdamW(parameters(nets), lr=0.01, eps=1e-4, fused=True)


def fused_adamw(nets: Iterable[nn.Module]) -> Optimizer:
    return FusedAdamW(parameters(nets), lr=0.01, eps=1e-4, backend="eager")


class Around(Optimizer):
    """Steps by another optimizer over its own groups, as the SAM of many repositories does."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.3)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


def fused_sgd(nets: Iterable[nn.Module]) -> Optimizer:
    return FusedSGD(parameters(nets), lr=0.125, momentum=0.5, backend="eager")


def each(nets: Sequence[nn.Module]) -> list[Optimizer]:
    """An optimizer for each network."""
    return [sgd([net]) for net in nets]


def batch(seed: int, size: int = 6) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(100 + seed))


def loss_of(loop: Loop, seed: int = 0, *, net: int = 0, size: int = 6) -> Tensor:
    with loop.forward():
        return loop.output(batch(seed, size), net).square().mean()


def train(loop: Loop, seed: int = 0, **options: Any) -> bool:
    loop.backward(loss_of(loop, seed, **options))
    return loop.step()


@dataclass(frozen=True)
class Case:
    """One row of a table of promises.

    Attributes:
        scenario: is given a loop for each entry of ``nets``.
        nets: make the networks of each loop.
        makes: makes the optimizers of each loop.
        options: of each loop; see :class:`promises.by_hand.ByHand`.
        apart: options of one loop each.
        ours: options of the engine alone.
        levels: at which it is tried.
    """

    scenario: Scenario
    nets: tuple[Nets, ...] = (two_layers,)
    makes: Callable[[Any], Any] = adam
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    apart: Sequence[Mapping[str, Any]] = ()
    ours: Mapping[str, Any] = field(default_factory=dict[str, Any])
    levels: Sequence[str] = LEVELS


def rows(cases: Mapping[str, Case]) -> Any:
    """Parametrize a test by the rows of a table, each at its levels."""
    found = [(case, level) for case in cases.values() for level in case.levels]
    names = [f"{name}-{level}" for name, case in cases.items() for level in case.levels]
    return pytest.mark.parametrize(("case", "level"), found, ids=names)


def run(case: Case, level: str) -> list[Prepared]:
    """Run a case by hand and with engines, which are returned."""
    hand: list[ByHand] = []
    ours: list[Prepared] = []
    for number, nets in enumerate(case.nets):
        options = {**case.options, **(case.apart[number] if case.apart else {})}
        hand.append(ByHand(level, nets(), case.makes, beside=hand[-1] if hand else None, **options))
        options.update(case.ours)
        ours.append(Prepared(level, nets(), case.makes, beside=ours[-1] if ours else None, **options))
    compare(case.scenario, hand, ours)
    return ours
