"""Random programs of calls over one or two engines, each compared bit for bit with loops by hand in plain torch.

``python -m fuzz.programs --seed 1 --minutes 5`` runs them for longer. Where :mod:`fuzz.compare` lets events happen to an
ordinary training loop, a program is any order of calls: passes, also through the network of the other engine, steps, edits,
``zero_grad`` on either side, writes to weights and masters, saves and restarts. On several ranks both sides are wrapped in
``DistributedDataParallel``.
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from fuzz.config import Config
from fuzz.reference import LOW, Note, Pair, Scale, same_bits
from halfpeak import HalfpeakError, LossScaleCollapse, fused
from halfpeak.core.levels import resolve
from reliability.support import state_hash

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "FusedAdamW": lambda p: fused.FusedAdamW(p, lr=0.01, eps=1e-4),
    "FusedSGD": lambda p: fused.FusedSGD(p, lr=0.05, momentum=0.9),
}


class Boom(RuntimeError):
    """Raised in a backward pass."""


@dataclass(frozen=True)
class Setup:
    """One engine: level, optimizers over its network, windows, clip, scale.

    With several ranks ``enters_no_sync`` lets ``engine.forward(wrapped)`` enter ``no_sync``, and ``wrapper`` has arguments of
    ``DistributedDataParallel``, on both sides.
    """

    level: str
    optimizers: tuple[str, ...]
    accumulate: int
    clip: float | None
    losses: int
    rule: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    enters_no_sync: bool = False
    wrapper: dict[str, Any] = field(default_factory=dict)

    @property
    def may_branch(self) -> bool:
        """Whether a rank may leave out a layer."""
        return bool(self.wrapper.get("find_unused_parameters"))

    @property
    def is_static(self) -> bool:
        return bool(self.wrapper.get("static_graph"))


@dataclass(frozen=True)
class Ranks:
    """A pass on several ranks.

    Attributes:
        factors: of the loss of each rank; empty for 1.
        wholes: whether each rank goes through the norm of a network; empty if all do.
        local: the engines whose network is in ``no_sync``.
    """

    factors: tuple[float, ...] = ()
    wholes: tuple[bool, ...] = ()
    local: frozenset[int] = frozenset()

    @property
    def factor(self) -> float:
        return self.factors[own_rank()] if self.factors else 1.0

    @property
    def whole(self) -> bool:
        return not self.wholes or self.wholes[own_rank()]


ALIKE: Final = Ranks()


def draw_setup(pick: random.Random, *, ranks: bool) -> Setup:
    level = pick.choice(("O0", "O1", "O2", "O2", "O3", "O4", "O5", "O5"))
    names = list(OPTIMIZERS)
    chosen = tuple(pick.choice(names) for _ in range(pick.choice((1, 1, 2))))
    options = {"loss_scale": pick.choice(("dynamic", 1.0, 256.0))} if pick.random() < 0.3 else {}
    return Setup(
        level,
        chosen,
        pick.choice((1, 1, 2, 3)),
        # By hand squares are added up in another order than by a fused step.
        None if any(name.startswith("Fused") for name in chosen) else pick.choice((None, 0.5)),
        pick.choice((1, 2)),
        {
            "init": 2.0 ** pick.choice((4, 8, 12)),
            "interval": pick.choice((2, 3, 2000)),
            "recovers": pick.random() < 0.5,
            "patience": 100,
        },
        options,
        ranks and pick.random() < 0.3,
        draw_wrapper(pick) if ranks else {},
    )


def draw_wrapper(pick: random.Random) -> dict[str, Any]:
    kind = pick.choice(("", "", "find_unused_parameters", "static_graph"))
    return {
        "gradient_as_bucket_view": pick.random() < 0.5,
        "bucket_cap_mb": pick.choice((25, 0.0001, 0.0006)),
        **({kind: True} if kind else {}),
    }


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Sequential):
    """Two layers and between them a norm, which a pass may leave out."""

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        first, norm, tanh, last = self
        return last(tanh(norm(first(x)) if whole else first(x)))  # type: ignore[no-any-return]


def network(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6))


@torch.no_grad()
def clip_by_norm(grads: list[Tensor], max_norm: float) -> None:
    if grads:
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads])
        )
        for grad in grads:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def batch(number: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * rank + number)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 6, generator=generator)


def dealt(parameters: list[Any], count: int) -> list[list[Any]]:
    """The parameters of each of some optimizers: those of the same layer stay together."""
    return [parameters] if count == 1 else [parameters[:2], parameters[2:]]


class Ours:
    """The engines of a program."""

    def __init__(self, setups: list[Setup], seed: int) -> None:
        self.setups = setups
        self.nets: list[Any] = []
        self.wrapped: list[Any] = []
        self.engines: list[halfpeak.Engine] = []
        for number, setup in enumerate(setups):
            self._add(setup, seed + number)

    def _add(self, setup: Setup, seed: int) -> None:
        net = network(seed)
        parts = dealt(list(net.parameters()), len(setup.optimizers))
        optimizers = [OPTIMIZERS[name](own) for name, own in zip(setup.optimizers, parts, strict=True)]
        engine = halfpeak.prepare(
            net,
            optimizers,
            halfpeak.LEVELS[setup.level].replace(**setup.options),
            accumulate=setup.accumulate,
            clip=setup.clip,
            num_losses=setup.losses,
            scale=halfpeak.ScaleConfig(**setup.rule),
            on_skip=None,
        )
        self.nets.append(net)
        self.engines.append(engine)
        self.wrapped.append(DistributedDataParallel(net, **setup.wrapper) if dist.is_initialized() else net)
        engine.unscale()  # it has written the weights, and where both sides are written the weight counts

    def loss(self, i: int, number: int, through: int | None, ranks: Ranks = ALIKE) -> Tensor:
        x, y = batch(number, own_rank())
        for one in (i, through):
            if one is not None:
                setup, wrapped = self.setups[one], self.wrapped[one]
                quiet = wrapped.no_sync() if one in ranks.local else nullcontext()
                known = [wrapped] if setup.enters_no_sync else []
                with quiet, self.engines[one].forward(*known):
                    x = wrapped(x, whole=ranks.whole or not setup.may_branch)
        return mse_loss(x.float(), y) * ranks.factor

    def backward(self, i: int, loss: Tensor, loss_id: int, only: int | None) -> None:
        engine = self.engines[i]
        engine.backward(loss, loss_id=loss_id, optimizers=None if only is None else engine.optimizers[only])

    def step(self, i: int, only: int | None) -> tuple[Any, ...]:
        engine = self.engines[i]
        result = engine.step(optimizers=None if only is None else engine.optimizers[only])
        return result.boundary, bool(result.found_inf), float(result.scale)

    def close(self, i: int, number: int) -> None:
        engine = self.engines[i]

        def closure() -> Tensor:
            loss = self.loss(i, number, None)
            engine.backward(loss)
            return loss

        engine.step(closure)

    def weights(self, i: int) -> list[Tensor]:
        return list(self.nets[i].parameters())

    def mains(self, i: int) -> list[Tensor]:
        return [self.engines[i].pairs.main_of(weight) for weight in self.nets[i].parameters()]

    def holders(self, i: int, *, masters: bool) -> list[Tensor]:
        """The tensors on one side that hold the gradients."""
        return self.mains(i) if masters else self.weights(i)

    def zero(self, i: int, *, masters: bool, to_none: bool) -> None:
        if not masters:
            self.nets[i].zero_grad(to_none)
        for optimizer in self.engines[i].optimizers if masters else ():
            optimizer.zero_grad(to_none)

    def unscale(self, i: int) -> None:
        self.engines[i].unscale()

    def abort(self, i: int) -> None:
        self.engines[i].abort()

    def evaluate(self, i: int, number: int) -> None:
        with torch.no_grad(), self.engines[i].forward():
            self.nets[i](batch(number)[0])

    def save(self, i: int) -> None:
        str(self.engines[i].state_dict())

    def restart(self, i: int, seed: int) -> None:
        state = copy.deepcopy(self.engines[i].state_dict())
        trainable = [weight.requires_grad for weight in self.weights(i)]
        self.engines[i].remove()
        kept = self.nets, self.engines, self.wrapped
        self.nets, self.engines, self.wrapped = [], [], []
        self._add(self.setups[i], seed)
        for every, fresh in zip(kept, (self.nets, self.engines, self.wrapped), strict=True):
            every[i] = fresh[0]
        self.nets, self.engines, self.wrapped = kept
        for weight, flag in zip(self.weights(i), trainable, strict=True):
            weight.requires_grad_(flag)
        self.engines[i].load_state_dict(state)

    def state(self, i: int) -> dict[str, Any]:
        engine = self.engines[i]
        values = {f"value {n}": v for n, v in self.nets[i].state_dict().items()}
        moments = {
            f"moment {o} {n} {key}": value
            for o, optimizer in enumerate(engine.optimizers)
            for n, row in optimizer.state_dict()["state"].items()
            for key, value in row.items()
            if isinstance(value, Tensor) and value.dim()
        }
        counts = [int(engine.num_steps), int(engine.num_skipped), engine.micro_step]
        return {
            **values,
            **moments,
            "counts": counts,
            "scales": [tuple(s.state_dict().values()) for s in engine.scalers],
        }


class ByHand:
    """The same runs in plain torch, on the same ranks: one list of networks, and what the passes have found."""

    def __init__(self, setups: list[Setup], seed: int, ranks: int = 1) -> None:
        self.setups, self.ranks = setups, ranks
        self.runs = [HandRun(setup, seed + number, ranks) for number, setup in enumerate(setups)]

    def loss(self, i: int, number: int, through: int | None, ranks: Ranks = ALIKE) -> Tensor:
        self.reached = [one for one in (i, through) if one is not None]
        self.local = {one for one in self.reached if one in ranks.local or self.runs[one].is_in_no_sync()}
        x, y = batch(number, own_rank())
        for one in self.reached:
            x = self.runs[one].forward(x, local=one in self.local, whole=ranks.whole)
        return mse_loss(x.float(), y) * ranks.factor

    def backward(self, i: int, loss: Tensor, loss_id: int, only: int | None) -> None:
        run = self.runs[i]
        scale = run.scales[loss_id]
        bad = scale.rule.recovers and scale.dynamic and not bool(loss.isfinite()) and self.ranks == 1
        for one in self.runs:
            if one is run:
                one.sync()
            for pair in one.pairs:
                pair.agree_on_flags()
            one.settle()
        loss = loss / run.setup.accumulate if run.setup.accumulate > 1 else loss
        reached = [j for j in self.reached if any(weight.requires_grad for weight in self.runs[j].weights)]
        reducing = [j for j in reached if j not in self.local and self.ranks > 1]
        held = [
            one.take(scale, reduced=j in reducing, only=only if one is run else None)
            for j, one in enumerate(self.runs)
        ]
        lost: list[HandRun] = []
        try:
            (loss.float() * scale.scale).backward()
            fresh = [[weight.grad for weight in one.weights] for one in self.runs]
        except Boom:
            adds = range(len(self.runs)) if scale.is_unit else self.local
            lost = [self.runs[j] for j in adds if self.runs[j].has_added_to(held[j])]
            raise
        finally:
            for one, grads in zip(self.runs, held, strict=True):
                one.put_back(grads)
            for one in lost:
                one.restart_window()
        for j in reached:
            one, local = self.runs[j], j in self.local
            one.was_reduced |= not local
            found = one.add(fresh[j], scale, local=local, only=only if one is run else None)
            one.note((i, loss_id), found, scale.scale, bad=bad and one is run, local=local)

    def step(self, i: int, only: int | None) -> tuple[Any, ...]:
        return self.runs[i].step(i, only, self.runs)

    def weights(self, i: int) -> list[Tensor]:
        return list(self.runs[i].weights)

    def mains(self, i: int) -> list[Tensor]:
        return self.runs[i].mains

    def holders(self, i: int, *, masters: bool) -> list[Tensor]:
        return self.runs[i].mains

    def zero(self, i: int, *, masters: bool, to_none: bool) -> None:
        for main in self.runs[i].mains:
            if main.grad is not None:
                main.grad = None if to_none else main.grad.zero_()
        self.runs[i].forget_sums(range(len(self.runs[i].optimizers)))

    def unscale(self, i: int) -> None:
        self.runs[i].sync()

    def abort(self, i: int) -> None:
        self.runs[i].abort()

    def evaluate(self, i: int, number: int) -> None:
        self.runs[i].publish_written()

    def save(self, i: int) -> None:
        self.runs[i].sync()

    def restart(self, i: int, seed: int) -> None:
        self.runs[i].sync()
        self.runs[i].publish_written()
        self.runs[i].is_wrapped = self.runs[i].was_reduced = False
        # From here on an overflow of a loss of the other engine only explains a skip.
        for number, one in enumerate(self.runs):
            for of_losses in (*one.notes, *one.waiting):
                known = dict(of_losses)
                of_losses.clear()
                for name, value in known.items():
                    of_losses[(None, name) if (name[0] == i) != (number == i) else name] = value

    def state(self, i: int) -> dict[str, Any]:
        return self.runs[i].state()


class ByHandCasts(nn.Module):
    """The forward pass of a network, with the casts written out."""

    def __init__(self, net: Net, low: torch.dtype | None, per_op: torch.dtype | None) -> None:
        super().__init__()
        self.net, self.low, self.per_op = net, low, per_op

    def forward(self, x: Tensor, *, whole: bool) -> Tensor:
        with torch.autocast("cpu", self.per_op) if self.per_op else nullcontext():
            if self.low is None:
                return self.net(x.float(), whole=whole)  # type: ignore[no-any-return]
            first, norm, tanh, last = self.net
            x = first(x.to(self.low))
            if whole:
                x = norm(x.float()).to(self.low) if norm.weight.dtype is torch.float32 else norm(x)
            return last(tanh(x)).float()  # type: ignore[no-any-return]


class HandRun:
    """One engine by hand.

    Attributes:
        sums: unscaled gradients of passes that the ranks have not reduced; None where they are in ``main.grad``.
        was_reduced: whether a pass was; with ``static_graph`` the first one is.
    """

    def __init__(self, setup: Setup, seed: int, ranks: int) -> None:
        self.setup = setup
        properties = resolve(setup.level, **setup.options)
        self.low = properties.cast_model_type if properties.cast_model_type in LOW else None
        self.net = network(seed)
        self.weights = list(self.net.parameters())
        exact = [weight.detach().clone() for weight in self.weights]
        if self.low is not None:
            self.net.to(self.low)
            if properties.keep_batchnorm_fp32:
                self.net[1].float()
        casts: Any = ByHandCasts(self.net, self.low, properties.patch_torch_functions_type)
        self.wrapped = (
            casts if ranks == 1 else DistributedDataParallel(casts, **setup.wrapper)
        )  # writes weights
        self.pairs: list[Pair] = []
        for weight, value in zip(self.weights, exact, strict=True):
            wants = properties.master_weights and weight.dtype in LOW
            start = value if ranks == 1 else weight.detach()
            self.pairs.append(Pair(weight, start.float().clone().requires_grad_() if wants else weight))
        self.mains = [pair.main for pair in self.pairs]
        parts = dealt(self.mains, len(setup.optimizers))
        self.optimizers = [OPTIMIZERS[name](own) for name, own in zip(setup.optimizers, parts, strict=True)]
        self.owner = [o for o, own in enumerate(parts) for _ in own]
        config = Config(
            seed, level=setup.level, scale=tuple(setup.rule.items()), options=tuple(setup.options.items())
        )
        self.scales = [Scale(config, properties) for _ in range(setup.losses)]
        # By (engine, loss): what its passes have found in the gradients of each optimizer.
        self.notes: list[dict[Any, Note]] = [{} for _ in self.optimizers]
        # The scale of the first pass of each loss that no pass has reduced yet.
        self.waiting: list[dict[Any, float]] = [{} for _ in self.optimizers]
        self.micro = self.num_steps = self.num_skipped = 0
        # Whether a pass has gone through the wrapper, before which all ranks get the masters of the first.
        self.is_wrapped = ranks == 1
        self.is_alone = ranks == 1
        self.sums: list[Tensor | None] = [None] * len(self.mains)
        self.was_reduced = False

    def forward(self, x: Tensor, *, local: bool, whole: bool) -> Tensor:
        if not self.is_wrapped:
            self.sync()
            self.is_wrapped = True
        self.publish_written()
        if self.is_alone:
            return self.wrapped(x, whole=True)  # type: ignore[no-any-return]
        held = [main.grad for main in self.mains]
        for main in self.mains:
            main.grad = None  # DDP would lay it into its buckets
        with self.wrapped.no_sync() if local else nullcontext():
            x = self.wrapped(x, whole=whole or not self.setup.may_branch)
        self.put_back(held)
        return x

    def publish_written(self) -> None:
        for pair in self.pairs:
            pair.publish_written()
            pair.agree_on_flags()

    def sync(self) -> None:
        for pair in self.pairs:
            pair.follow()
            pair.agree_on_flags()
        self.settle()

    def settle(self) -> None:
        """What passes have found is forgotten with their gradients, and where all are zero."""
        for o in range(len(self.optimizers)):
            grads = self.grads_of(o)
            if not grads:
                self.notes[o], self.waiting[o] = {}, {}
            elif not self.has_sums(o) and not any(bool(grad.any()) for grad in grads):
                self.notes[o] = {name: note._replace(found=0) for name, note in self.notes[o].items()}

    def is_in_no_sync(self) -> bool:
        """Whether ``engine.forward(wrapped)`` enters ``no_sync``."""
        is_first = self.setup.is_static and not self.was_reduced
        return self.setup.enters_no_sync and not self.is_boundary() and not is_first

    def is_boundary(self) -> bool:
        """Whether the coming step ends the window."""
        return (self.micro + 1) % self.setup.accumulate == 0

    def has_sums(self, o: int | None = None) -> bool:
        """Whether gradients of an optimizer, or of any, are not reduced yet."""
        return any(total is not None and o in (None, self.owner[k]) for k, total in enumerate(self.sums))

    def forget_sums(self, chosen: Iterable[int]) -> None:
        self.sums = [None if self.owner[k] in chosen else total for k, total in enumerate(self.sums)]

    def take(self, scale: Scale, *, reduced: bool, only: int | None) -> list[Tensor | None]:
        """Take the gradients away.

        Where a pass will reduce them put in unreduced sums, scaled, in the weight's dtype; at a scale of 1 also float32
        gradients that are there. Low ones DDP would round.
        """
        held = [main.grad for main in self.mains]
        for k, (pair, main) in enumerate(zip(self.pairs, self.mains, strict=True)):
            main.grad = pair.model.grad = None
            total, grad = self.sums[k], held[k]
            if reduced and only in (None, self.owner[k]):
                if total is not None:
                    pair.model.grad = (total * scale.scale).to(pair.model.dtype)
                elif scale.is_unit and grad is not None and pair.model.dtype is torch.float32:
                    pair.model.grad = grad
        self.begun = [pair.model.grad for pair in self.pairs]
        self.versions = [None if grad is None else grad._version for grad in self.begun]
        return held

    def put_back(self, grads: list[Tensor | None]) -> None:
        for pair, grad in zip(self.pairs, grads, strict=True):
            pair.model.grad = None
            pair.main.grad = grad

    def has_added_to(self, earlier: list[Tensor | None]) -> bool:
        """Whether a pass has reached parameters that had gradients."""
        return any(
            pair.model.grad is not None
            and not (old is None and total is None)
            and not (pair.model.grad is begun and begun._version == version)
            for old, total, pair, begun, version in zip(
                earlier, self.sums, self.pairs, self.begun, self.versions, strict=True
            )
        )

    def add(
        self, grads: list[Tensor | None], scale: Scale, *, local: bool, only: int | None
    ) -> dict[int, bool]:
        """Add the gradients of a pass; returns for each optimizer that got some whether one is seen not to be finite."""
        found: dict[int, bool] = {}
        for k, main in enumerate(self.mains):
            if local and main.grad is not None and only in (None, self.owner[k]):
                # What earlier passes have reduced is reduced again with the rest: a mean of equal addends.
                self.sums[k], main.grad = main.grad.clone(), None
        for k, (pair, grad) in enumerate(zip(self.pairs, grads, strict=True)):
            o, total = self.owner[k], pair.main.grad
            if grad is None or only not in (None, o):
                continue
            found.setdefault(o, False)
            unscaled = (grad.float() / scale.scale).to(pair.main.dtype)
            if local:
                before = self.sums[k]
                self.sums[k] = unscaled if before is None else before.add_(unscaled)
                continue
            # At a scale of 1 gradients are added in place, which nobody looks at before the step.
            in_place = scale.is_unit and total is not None and (self.is_alone or self.begun[k] is not None)
            if not in_place and (not scale.is_unit or total is not None or grad.dtype != unscaled.dtype):
                found[o] |= not bool(unscaled.isfinite().all())
            # DDP has reduced them together with what was there.
            is_sum = total is None or self.begun[k] is not None
            pair.main.grad = unscaled if is_sum else total.add_(unscaled)  # type: ignore[union-attr]
        if not local:
            self.forget_sums(found)
        return found

    def grads_of(self, o: int) -> list[Tensor]:
        if self.has_sums(o):
            return [g for k, g in enumerate(self.sums) if g is not None and self.owner[k] == o]
        return [m.grad for k, m in enumerate(self.mains) if m.grad is not None and self.owner[k] == o]

    def has_gradients(self, o: int) -> bool:
        return bool(self.grads_of(o))

    def note(self, name: Any, found: dict[int, bool], scale: float, *, bad: bool, local: bool) -> None:
        """Note what a pass has found; ``bad``: the loss itself is not finite."""
        for o, is_bad in found.items():
            # Sums that were not finite before they are reduced again say nothing of the passes since.
            is_told = bool(self.waiting[o]) and any(note.found for note in self.notes[o].values())
            self.waiting[o].setdefault(name, scale)
            if local:
                continue
            is_bad = is_bad and not is_told
            # Ranks do not know whose gradients under no_sync were not finite.
            for one, first in self.waiting[o].items():
                before = self.notes[o].get(one, Note(0, first))
                value = 0.5 if bad and one == name else float(is_bad)
                self.notes[o][one] = Note(max(before.found, value), before.first)
            self.waiting[o] = {}

    def step(self, number: int, only: int | None, runs: list[HandRun]) -> tuple[Any, ...]:
        if not self.is_boundary():
            self.micro += 1
            return False, False, self.scales[0].scale
        chosen = range(len(self.optimizers)) if only is None else [only]
        self.sync()
        self.publish_written()
        grads = [grad for o in chosen for grad in self.grads_of(o)]
        notes: dict[Any, Note] = {}
        for o in chosen:
            for name, note in self.notes[o].items():
                notes[name] = note if name not in notes else notes[name].joined(note)
        found = any(note.found for note in notes.values()) or not all(bool(g.isfinite().all()) for g in grads)
        if self.setup.clip is not None and not found:
            clip_by_norm(grads, self.setup.clip)
        for o in chosen:
            if not found:
                self.optimizers[o].step()
            for k, pair in enumerate(self.pairs):
                if self.owner[k] == o and not found:
                    pair.publish()
        self.micro += 1
        self.num_skipped += found and bool(grads)
        self.num_steps += not found and bool(grads)
        self._move_scales(number, notes, runs, found=found)
        self.drop(chosen)
        # A loss counts in the first of the steps that its passes have reached.
        self.notes = [
            {name: note._replace(counts=note.counts and name not in notes) for name, note in of_one.items()}
            for of_one in self.notes
        ]
        return True, found, self.scales[0].scale

    def _move_scales(self, number: int, notes: dict[Any, Note], runs: list[HandRun], *, found: bool) -> None:
        """After a skip lower the scales of the losses that have overflowed, also other engines', or of all own ones."""
        explained = any(note.found for note in notes.values())
        for name, note in notes.items():
            is_own = name[0] == number
            value = note.found if explained or not is_own else float(found)
            if name[0] is None or not (value or (is_own and note.counts)):
                continue
            scale = runs[name[0]].scales[name[1]]
            # A smaller scale than that of the first pass has answered the overflow already.
            if not value or scale.scale >= note.first:
                scale.update(value)

    def drop(self, chosen: Any) -> None:
        for o in chosen:
            self.notes[o], self.waiting[o] = {}, {}
            for k, main in enumerate(self.mains):
                if self.owner[k] == o:
                    main.grad = None
        self.forget_sums(chosen)

    def restart_window(self) -> None:
        self.micro -= self.micro % self.setup.accumulate
        self.drop(range(len(self.optimizers)))

    def abort(self) -> None:
        self.sync()
        self.publish_written()
        self.restart_window()

    def state(self) -> dict[str, Any]:
        names = [name for name, _ in self.net.named_parameters()]
        widened = self.low is not None
        values = {
            f"value {n}": pair.value().float() if widened else pair.value()
            for n, pair in zip(names, self.pairs, strict=True)
        }
        moments = {
            f"moment {o} {n} {key}": value
            for o, optimizer in enumerate(self.optimizers)
            for n, row in optimizer.state_dict()["state"].items()
            for key, value in row.items()
            if isinstance(value, Tensor) and value.dim()
        }
        counts = [self.num_steps, self.num_skipped, self.micro]
        return {**values, **moments, "counts": counts, "scales": [scale.values() for scale in self.scales]}


class Program:
    """Draws calls and makes each on both sides."""

    def __init__(self, seed: int, ranks: int = 1) -> None:
        self.pick = random.Random(seed)
        self.seed, self.ranks = seed, ranks
        setups = [draw_setup(self.pick, ranks=ranks > 1) for _ in range(self.pick.choice((1, 1, 2)))]
        self.ours, self.hand = Ours(setups, seed), ByHand(setups, seed, ranks)
        self.setups, self.number = setups, 0
        self.done: list[str] = []
        # Engines whose gradients were dropped on one side since they have last looked.
        self.unseen: set[int] = set()
        # Engines whose DDP waits for a pass that was to be reduced and has raised.
        self.armed: set[int] = set()

    def run(self, length: int) -> None:
        for _ in range(length):
            self.one()
        for i in range(len(self.setups)):
            self.compare(i)
        if self.ranks > 1:
            digests: list[Any] = [None] * self.ranks
            dist.all_gather_object(digests, state_hash(self.ours.engines))
            assert len(set(digests)) == 1, "the ranks differ"
        for engine in self.ours.engines:
            engine.remove()

    def one(self) -> None:
        pick = self.pick
        i = pick.randrange(len(self.setups))
        kinds = (
            ["train"] * 6
            + ["pass"] * 3
            + ["step", "drop", "edit", "edit", "evaluate", "weights", "masters", "save"]
        )
        kinds += ["restart", "unscale", "abort", "inf", "swap", "assign", "boom"]
        if self.ranks == 1:
            # DDP refuses to reduce into gradients that are not of its dtype, in a pass past the engine.
            kinds += ["freeze", "closure", "plain", "attack"]
        kind = pick.choice(kinds)
        self.number += 1
        getattr(self, f"do_{kind}")(i)

    def both(self, what: str, call: Callable[[Any], Any]) -> list[Any]:
        self.done.append(what)
        return [call(self.ours), call(self.hand)]

    def do_train(self, i: int) -> None:
        """A whole micro-step."""
        self.do_pass(i)
        self.do_step(i)

    def do_pass(self, i: int, factor: float | None = None) -> None:
        pick, setup = self.pick, self.setups[i]
        others = [j for j in range(len(self.setups)) if j != i]
        through = pick.choice(others) if others and pick.random() < 0.4 else None
        # A large update of a fused optimizer would make much of the last digits in which both sides may differ.
        is_fused = any(kind.startswith("Fused") for one in self.setups for kind in one.optimizers)
        large = 1.0 if is_fused else 1e7
        clean = [1.0] * (
            4 if self.ranks == 1 else 16
        )  # ranks have longer windows, of which each pass may overflow
        factor = pick.choice((*clean, large, float("inf"), float("nan"))) if factor is None else factor
        # DDP itself fails where a branch has been reached, and its gradients were left out.
        may_choose = len(setup.optimizers) == 2 and not setup.may_branch
        only = pick.randrange(2) if may_choose and pick.random() < 0.3 else None
        factors, wholes = (factor,) * self.ranks, tuple[bool, ...]()
        if self.ranks > 1 and factor != 1.0:
            odd = pick.randrange(self.ranks + 1)  # one rank alone, or all
            factors = tuple(factor if odd in (rank, self.ranks) else 1.0 for rank in range(self.ranks))
        if self.ranks > 1:
            wholes = tuple(pick.random() < 0.7 for _ in range(self.ranks))
        local = self.draw_local()
        loss_id, number = pick.randrange(setup.losses), self.number
        # As a critic in a pass of its generator. DDP itself would wait for the gradients of frozen weights.
        frozen = through if self.ranks > 1 and pick.random() < 0.4 else None
        if frozen is not None and self.setups[frozen].is_static:
            frozen = None
        ranks = Ranks(factors, wholes, local if frozen is None else local | {frozen})

        def run(side: Any) -> None:
            self.require(side, frozen, False)
            side.backward(i, side.loss(i, number, through, ranks), loss_id, only)
            self.require(side, frozen, True)

        self.both(f"pass {i} through {through} {ranks} loss {loss_id} only {only} frozen {frozen}", run)
        self.armed -= {i, through} - {frozen}

    @staticmethod
    def require(side: Any, i: int | None, wanted: bool) -> None:
        for weight in side.weights(i) if i is not None else ():
            weight.requires_grad_(wanted)

    def draw_local(self) -> frozenset[int]:
        """The engines whose network is in ``no_sync``, as far as torch itself allows it; often for several passes."""
        waits = any(run.has_sums() for run in self.hand.runs)
        if self.ranks == 1 or self.pick.random() < (0.25 if waits else 0.5):
            return frozenset()
        return frozenset(
            i
            for i, run in enumerate(self.hand.runs)
            if self.pick.random() < 0.8
            and i not in self.armed
            and (run.was_reduced or not run.setup.is_static)
        )

    def do_step(self, i: int) -> None:
        setup, run = self.setups[i], self.hand.runs[i]
        if run.is_boundary() and run.has_sums():
            self.do_pass(i)  # an unreduced window is not stepped
            if run.has_sums():
                return
        only = (
            self.pick.randrange(2)
            if len(setup.optimizers) == 2 and setup.accumulate == 1 and self.pick.random() < 0.4
            else None
        )
        ours, hand = self.both(f"step {i} only {only}", lambda side: side.step(i, only))
        assert ours == hand, f"step {ours} and by hand {hand}"
        self.compare(i)

    def do_drop(self, i: int) -> None:
        if self.setups[i].may_branch and self.hand.runs[i].has_sums():
            return  # torch itself fails where one rank alone does not reach the weights again
        masters, to_none = self.pick.random() < 0.5, self.pick.random() < 0.7
        if not to_none and not self.hand.runs[i].has_sums():
            self.make_true(i)
        self.both(
            f"zero {i} masters {masters} none {to_none}",
            lambda side: side.zero(i, masters=masters, to_none=to_none),
        )
        self.unseen.add(i)

    def do_edit(self, i: int) -> None:
        """Mask, halve, clip, add or drop gradients of a part of the parameters, on either side."""
        if self.hand.runs[i].has_sums():
            return
        self.make_true(i)
        masters, kind, part = self.pick.random() < 0.5, self.pick.randrange(5), self.pick.random()

        def edit(side: Any) -> None:
            grads = random.Random(str(part))
            for holder in side.holders(i, masters=masters):
                if holder.grad is None or grads.random() < 0.3:
                    continue
                if kind == 0:
                    holder.grad.mul_(0.5)
                elif kind == 1:
                    holder.grad = holder.grad * 0.5
                elif kind == 2:
                    holder.grad.clamp_(-0.01, 0.01)
                elif kind == 3:
                    holder.grad.mul_((holder.grad > 0).to(holder.grad.dtype))
                else:
                    holder.grad = None

        with torch.no_grad():
            self.both(f"edit {i} masters {masters} kind {kind}", edit)
        # A gradient assigned on one side is new, also if zero_grad() follows on the other before halfpeak has seen it.
        self.do_unscale(i)

    def do_inf(self, i: int) -> None:
        if self.hand.runs[i].has_sums():
            return
        self.make_true(i)

        def spoil(side: Any) -> None:
            holder = side.holders(i, masters=True)[0]
            if holder.grad is not None:
                holder.grad.view(-1)[0] = float("inf")

        with torch.no_grad():
            self.both(f"inf {i}", spoil)

    def do_assign(self, i: int) -> None:
        """A gradient of the user's own, in the place of the old one."""
        run = self.hand.runs[i]
        if run.has_sums():
            return
        self.make_true(i)
        if not run.notes[0] or not run.has_gradients(0):
            return

        def assign(side: Any) -> None:
            holder = side.holders(i, masters=self.seed % 2 == 0)[0]
            main = side.mains(i)[0]
            holder.grad = torch.full_like(main, 0.01)

        self.both(f"assign {i}", assign)
        self.do_unscale(i)

    def do_plain(self, i: int) -> None:
        """A backward pass past the engine, whose scale is 1: it adds to the gradients that are there."""
        hand, number = self.hand.runs[i], self.number
        if not hand.scales[0].is_unit or self.setups[i].accumulate > 1:
            return
        self.make_true(i)

        def run(side: Any) -> None:
            loss = side.loss(i, number, None)
            if side is self.ours:
                loss.backward()
                return
            hand.sync()
            held = hand.take(hand.scales[0], reduced=False, only=None)
            loss.backward()
            fresh = [weight.grad for weight in hand.weights]
            hand.put_back(held)
            hand.add(fresh, hand.scales[0], local=False, only=None)

        self.both(f"plain {i}", run)
        self.do_unscale(i)  # masters have the gradients only then

    def do_attack(self, i: int) -> None:
        """A backward pass for the gradient of an input, whose gradients of weights are dropped."""
        number, masters = self.number, self.pick.random() < 0.7

        def run(side: Any) -> None:
            if side is self.ours:
                side.loss(i, number, None).backward()
            else:
                side.evaluate(i, number)
            side.zero(i, masters=masters, to_none=True)

        self.both(f"attack {i} masters {masters}", run)

    def make_true(self, i: int) -> None:
        """Before an edit: ``unscale()``, where gradients may be left scaled for a fused step, or are not seen, or at random."""
        run = self.hand.runs[i]
        is_fused = [kind.startswith("Fused") for kind in self.setups[i].optimizers] == [True]
        is_true = not is_fused or (run.low is None and run.scales[0].is_unit)
        if not is_true or i in self.unseen or self.pick.random() < 0.5:
            self.do_unscale(i)
            self.unseen.discard(i)

    def do_unscale(self, i: int) -> None:
        if self.hand.runs[i].has_sums():
            return
        self.both(f"unscale {i}", lambda side: side.unscale(i))
        for weight, ours, hand in zip(
            self.ours.weights(i), self.ours.mains(i), self.hand.mains(i), strict=True
        ):
            assert weight.grad is ours.grad
            assert (ours.grad is None) is (hand.grad is None), f"gradient {ours.grad}, by hand {hand.grad}"
            if ours.grad is not None and hand.grad is not None:
                same = same_bits(ours.grad.nan_to_num(7.0), hand.grad.nan_to_num(7.0))
                assert same, f"gradient {ours.grad}, by hand {hand.grad}"

    def do_abort(self, i: int) -> None:
        if self.setups[i].may_branch and self.hand.runs[i].has_sums():
            return
        self.both(f"abort {i}", lambda side: side.abort(i))

    def do_evaluate(self, i: int) -> None:
        number = self.number
        self.both(f"evaluate {i}", lambda side: side.evaluate(i, number))

    def do_swap(self, i: int) -> None:
        """Other weights for an evaluation, and the old ones back."""
        number = self.number

        def swap(side: Any) -> None:
            side.evaluate(i, number)
            held = [weight.detach().clone() for weight in side.weights(i)]
            for weight in side.weights(i):
                weight.mul_(0.5)
            side.evaluate(i, number)
            for weight, value in zip(side.weights(i), held, strict=True):
                weight.copy_(value)

        with torch.no_grad():
            self.both(f"swap {i}", swap)

    def do_weights(self, i: int) -> None:
        at = self.pick.randrange(6)

        def write(side: Any) -> None:
            side.weights(i)[at].clamp_(-0.2, 0.2)

        with torch.no_grad():
            self.both(f"weights {i} {at}", write)

    def do_masters(self, i: int) -> None:
        def write(side: Any) -> None:
            for main in side.mains(i):
                main.mul_(0.9).add_(2**-10)

        with torch.no_grad():
            self.both(f"masters {i}", write)

    def do_freeze(self, i: int) -> None:
        at, masters, flag = self.pick.randrange(5), self.pick.random() < 0.5, self.pick.random() < 0.5

        def freeze(side: Any) -> None:
            (side.mains(i) if masters else side.weights(i))[at].requires_grad_(flag)

        # Both sides agree first: frozen here and unfrozen there in one go means nothing.
        self.both(f"evaluate {i}", lambda side: side.evaluate(i, 0))
        self.both(f"freeze {i} {at} masters {masters} {flag}", freeze)

    def do_save(self, i: int) -> None:
        if not self.hand.runs[i].has_sums():
            self.both(f"save {i}", lambda side: side.save(i))

    def do_restart(self, i: int) -> None:
        if self.hand.runs[i].has_sums():
            return
        self.both(f"restart {i}", lambda side: side.restart(i, self.seed + 77))

    def do_closure(self, i: int) -> None:
        setup = self.setups[i]
        if (
            setup.accumulate > 1
            or len(setup.optimizers) > 1
            or setup.losses > 1
            or self.hand.runs[i].has_gradients(0)
        ):
            return
        number, run = self.number, self.hand.runs[i]
        self.done.append(f"closure {i}")
        self.ours.close(i, number)
        run.sync()
        run.publish_written()
        run.drop([0])
        self.hand.backward(i, self.hand.loss(i, number, None), 0, None)
        if not all(bool(grad.isfinite().all()) for grad in run.grads_of(0)):
            raise HalfpeakError("the first evaluation has overflowed, and the scale falls in the step")
        run.step(i, None, self.hand.runs)
        self.compare(i)

    def do_boom(self, i: int) -> None:
        """A backward pass that raises has not happened, or has ended the window to which it had added in place."""
        setup = self.setups[i]
        if setup.may_branch or setup.is_static:
            return  # DDP itself fails
        # Before any gradient is written, or after some; DDP itself fails after some of a pass that it reduces.
        early = self.pick.random() < 0.5
        is_reduced = early and not setup.enters_no_sync and self.pick.random() < 0.5
        local = self.ranks > 1 and not is_reduced
        if local and i in self.armed:
            return
        number, ranks = self.number, Ranks(local=frozenset({i} if local else ()))
        self.done.append(f"boom {i} early {early} local {local}")

        def fire(grad: Tensor) -> None:
            raise Boom

        for side in (self.ours, self.hand):
            side.evaluate(i, number)  # both sides agree on requires_grad
            weight = side.weights(i)[2]
            if not weight.requires_grad:
                continue
            loss = side.loss(i, number, None, ranks)
            handle = (loss if early else weight).register_hook(fire)
            try:
                side.backward(i, loss, 0, None)
                raise AssertionError("nothing was raised")
            except Boom:
                pass
            finally:
                handle.remove()
        if self.ranks > 1 and not local:
            self.armed.add(i)

    def compare(self, i: int) -> None:
        ours, hand = self.ours.state(i), self.hand.state(i)
        for name, value in ours.items():
            other = hand.get(name)
            if isinstance(value, Tensor):
                if other is None:
                    assert not bool(value.any()), f"engine {i}: {name} on one side only"
                    continue
                other = other.detach()
                same = same_bits(value, other)
                if not same and any(kind.startswith("Fused") for kind in self.setups[i].optimizers):
                    # The memory of a fused optimizer over masters is cut differently, and the last elements of a block go
                    # through other instructions of the processor.
                    same = torch.allclose(value, other, rtol=0.02, atol=1e-3, equal_nan=True)
                assert same, f"engine {i}: {name} differs by {float((value - other).abs().max()):.3g}"
            else:
                assert value == other, f"engine {i}: {name} {value} and by hand {other}"


def run_one(seed: int, length: int = 25, ranks: int = 1) -> str | None:
    """Run a program; returns what differs, with the calls, or None."""
    program = Program(seed, ranks)
    try:
        with torch.random.fork_rng(devices=[]):
            program.run(length)
    except LossScaleCollapse:
        return None
    except Exception as error:
        if "overflowed, and the scale" in str(error) or "no backward pass of this step went through" in str(
            error
        ):
            return (
                None  # the last: all that it would step is from a loss of the other engine, whose scale is 1
            )
        return "\n".join([*program.done[-12:], f"{type(error).__name__}: {error}", *map(str, program.setups)])
    finally:
        for engine in program.ours.engines:
            engine.remove()
    return None


def run_many(first: int, given: argparse.Namespace, until: float) -> Iterator[tuple[int, str | None]]:
    """Run programs until the time is over; yields how many have run, and what differs in the last one."""
    number = 0
    while number < given.count and _all_ranks(time.monotonic() < until):
        found = run_one(first + number, given.length, given.ranks)
        number += 1
        yield number, found


def run_on_ranks(first: int, given: argparse.Namespace, until: float) -> Iterator[tuple[int, str | None]]:
    """:func:`run_many` on processes, which begin anew after a difference: one may wait for another then."""
    forking, number = multiprocessing.get_context("fork"), 0
    while number < given.count and time.monotonic() < until:
        seen: Queue[Any] = forking.Queue()
        with tempfile.NamedTemporaryFile() as meeting:
            arguments = (first + number, given, until, f"file://{meeting.name}", seen)
            ranks = [forking.Process(target=_be_rank, args=(rank, *arguments)) for rank in range(given.ranks)]
            for rank in ranks:
                rank.start()
            found = None
            while found is None and (more := seen.get()) is not None:
                count, found = more
                yield number + count, found
            for rank in ranks:
                rank.kill()
                rank.join()
        number += count


def _be_rank(
    rank: int, first: int, given: argparse.Namespace, until: float, meeting: str, seen: Queue[Any]
) -> None:
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=given.ranks, timeout=patience)
    for number, found in run_many(first, given, until):
        if rank == 0 or found is not None:
            seen.put((number, found))
        if found is not None:
            signal.pause()  # until it is killed
    if rank == 0:
        seen.put(None)


def _all_ranks(flag: bool) -> bool:
    """Whether the flag is set on all ranks."""
    value = torch.tensor(int(flag))
    if dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return bool(value)


def main() -> int:
    """Run programs until the time is over; return 1 if one differs."""
    arguments = argparse.ArgumentParser(prog="fuzz.programs", description=__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--minutes", type=float, default=1.0)
    arguments.add_argument("--count", type=int, default=10**9)
    arguments.add_argument("--length", type=int, default=25)
    arguments.add_argument("--ranks", type=int, default=1, help="processes under DistributedDataParallel")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    first, until = given.seed * 1_000_000, time.monotonic() + 60 * given.minutes
    number = failures = 0
    for number, found in (run_many if given.ranks == 1 else run_on_ranks)(first, given, until):
        if found is not None:
            failures += 1
            if failures <= 8:
                print(f"== program {first + number - 1}\n{found}\n", flush=True)
    print(f"{number} programs, {failures} differ")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
