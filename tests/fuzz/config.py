"""The configuration of one run of the fuzzer: plain values, drawn from a seed, that a script can state."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

import halfpeak
from fuzz.models import PARTS
from halfpeak import fused
from halfpeak.core.dtypes import LOW

LEVELS = tuple(halfpeak.LEVELS)

# eps is large enough for float16, in which O3 steps. torch's fused SGD with momentum fails if a parameter gets its
# first gradient later than others; on the CPU, with low-precision weights, it reads uninitialised memory.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "FusedSGD": lambda p: fused.FusedSGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "FusedAdam": lambda p: fused.FusedAdam(p, lr=0.01, eps=1e-4),
    "FusedAdamW": lambda p: fused.FusedAdamW(p, lr=0.01, eps=1e-4),
    "FusedAdagrad": lambda p: fused.FusedAdagrad(p, lr=0.05, eps=1e-4),
    "FusedLAMB": lambda p: fused.FusedLAMB(p, lr=0.01, eps=1e-4),
    "FusedNovoGrad": lambda p: fused.FusedNovoGrad(p, lr=0.01, eps=1e-4),
}


@dataclass(frozen=True)
class Planned:
    """An event, when it happens, and the seed of its own draws."""

    at: int
    moment: str
    name: str
    seed: int = 0


@dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        seed: of weights and data.
        parts: of the network, in order.
        optimizers: one or two; two take the parameters in turn.
        level: O0 to O5.
        groups: parameter groups of each optimizer.
        heads: outputs of the network, each with a loss.
        losses: the number of loss scalers: one for all heads, or one for each.
        iterations: forward passes of the loop.
        accumulate: backward passes per step.
        clip: ``("norm", x)``, ``("value", x)`` or None.
        scale: arguments of :class:`halfpeak.ScaleConfig`.
        options: further arguments of :func:`halfpeak.prepare`.
        held_out: every third parameter is left out of the optimizers at first.
        in_turns: each optimizer has a backward pass and a step of its own in every iteration, as in a GAN.
        events: what happens between the usual calls.
    """

    seed: int
    parts: tuple[str, ...] = ("linear",)
    optimizers: tuple[str, ...] = ("SGD momentum",)
    level: str = "O2"
    groups: int = 1
    heads: int = 1
    losses: int = 1
    iterations: int = 4
    accumulate: int = 1
    clip: tuple[str, float] | None = None
    scale: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    held_out: bool = False
    in_turns: bool = False
    events: tuple[Planned, ...] = ()

    @property
    def scale_config(self) -> halfpeak.ScaleConfig:
        """The rule of the loss scale, before the level's own."""
        return halfpeak.ScaleConfig(**dict(self.scale))

    @property
    def keywords(self) -> dict[str, Any]:
        """Of :attr:`options`, those that ``prepare`` takes; the others override the level."""
        taken = inspect.signature(halfpeak.prepare).parameters
        return {name: value for name, value in self.options if name in taken}

    @property
    def chosen_level(self) -> halfpeak.Level:
        """The level with its overrides."""
        own = {name: value for name, value in self.options if name not in self.keywords}
        return halfpeak.LEVELS[self.level].replace(**own)

    @property
    def clipping(self) -> halfpeak.ClipNorm | halfpeak.ClipValue | None:
        """:attr:`clip` as ``prepare`` takes it."""
        if self.clip is None:
            return None
        kind, limit = self.clip
        return halfpeak.ClipNorm(max_norm=limit) if kind == "norm" else halfpeak.ClipValue(value=limit)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizers step float32 copies."""
        return bool(halfpeak.LEVELS[self.level].properties.master_weights)

    @property
    def is_fused(self) -> bool:
        """Whether the step of a halfpeak.fused optimizer may read gradients where backward left them."""
        return len(self.optimizers) == 1 and self.optimizers[0].startswith("Fused")


def draw(seed: int, catalogue: Mapping[str, tuple[str, ...]], with_event: str | None = None) -> Config:
    """The configuration of a seed.

    In half of the configurations all events come in two successive iterations, so that they affect each other.

    Args:
        seed: any integer.
        catalogue: events by name, each with the moments at which it may happen.
        with_event: an event that must be among its events.
    """
    pick = random.Random(seed)
    level = pick.choice(LEVELS)
    heads = pick.choice((1, 1, 2))
    optimizers = tuple(pick.choice(list(OPTIMIZERS)) for _ in range(pick.choice((1, 1, 1, 2))))
    accumulate = pick.choice((1, 1, 2, 3))
    iterations = accumulate * pick.randint(2, 5)
    scale = {
        "init": 2.0 ** pick.choice((0, 4, 8, 12, 16)),
        "interval": pick.choice((1, 2, 3, 2000)),
        "hysteresis": pick.choice((1, 1, 2)),
        "refill": pick.choice(("clean", "growth")),
        "recovers": pick.random() < 0.5,
        "floor": pick.choice((2.0**-14, 2.0**-14, 16.0)),
        "patience": pick.choice((1, 3, 100, 100)),
    }
    options: dict[str, Any] = {}
    if pick.random() < 0.3:
        options["loss_scale"] = pick.choice(("dynamic", 1.0, 16.0, 1024.0))
    properties = halfpeak.LEVELS[level].properties
    if properties.patch_torch_functions and pick.random() < 0.5:
        options["op_lists"] = "apex"
    if properties.cast_model_type in LOW and pick.random() < 0.3:
        options["keep_batchnorm_fp32"] = pick.choice((True, False))
    if pick.random() < 0.2:
        options["norms"] = "batchnorm"
    if pick.random() < 0.15:
        options["restore_buffers"] = False
    names = pick.sample(sorted(catalogue), pick.randint(0, 5)) + [with_event] * (with_event is not None)
    first, last = 0, iterations
    if pick.random() < 0.5:
        first = pick.randrange(iterations)
        last = min(first + 2, iterations)
    events = [
        Planned(
            pick.randrange(first, last),
            pick.choice(catalogue[chosen]),
            chosen,
            pick.randrange(1000),
        )
        for chosen in names
    ]
    # torch.autocast to float16 does not support an LSTM on every CPU.
    is_autocast = properties.patch_torch_functions and "op_lists" not in options
    known = [part for part in PARTS if part != "lstm" or not is_autocast]
    return Config(
        seed=seed,
        parts=tuple(pick.choice(known) for _ in range(pick.randint(1, 3))),
        optimizers=optimizers,
        level=level,
        groups=pick.choice((1, 1, 2, 3)),
        heads=heads,
        losses=pick.choice((1, heads)),
        iterations=iterations,
        accumulate=accumulate,
        clip=pick.choice((None, None, ("norm", 0.3), ("norm", 100.0), ("value", 0.02))),
        scale=tuple(scale.items()),
        options=tuple(options.items()),
        held_out=pick.random() < 0.2,
        in_turns=len(optimizers) == 2 and accumulate == 1 and pick.random() < 0.5,
        events=tuple(sorted(events, key=lambda event: event.at)),
    )
