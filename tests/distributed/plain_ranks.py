"""Ranks of ``test_plain.py``: random programs of passes, beside loops in plain torch over the same wrappers.

A loop by hand has networks of the same dtypes in the same wrappers. At a loss scale of 1 with float32 weights it does what
anybody does in plain torch; elsewhere it holds float32 sums itself, which it multiplies, rounds and divides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak.distributed import fully_shard

NUM_PROGRAMS = {"one network": 60, "two networks": 25, "shards": 25}

LEVELS: dict[str, tuple[halfpeak.Level, torch.dtype, bool]] = {
    "O0": (halfpeak.LEVELS["O0"], torch.float32, False),
    "O0 scaled": (halfpeak.LEVELS["O0"].replace(loss_scale="dynamic"), torch.float32, True),
    "O2": (halfpeak.LEVELS["O2"], torch.float16, True),
    "O5": (halfpeak.LEVELS["O5"], torch.bfloat16, False),
}
"""The level, the dtype of its weights, and whether it scales losses."""

INTERVAL = 2
"""Clean steps after which a scale doubles."""


class Raised(RuntimeError):
    """What a pass raises."""


class Raise(torch.autograd.Function):
    """Raises in the backward pass, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Raised


class Net(nn.Module):
    """Two layers, and between them a branch that a rank may leave out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.branch, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 6)
        self.whole, self.raises = True, ""
        with torch.no_grad():
            for parameter in self.parameters():  # the same values at every level
                parameter.copy_(parameter.bfloat16().half().float())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x.to(self.stem.weight.dtype)))
        x = x + torch.tanh(self.branch(x)) if self.whole else x
        if self.raises == "inside":  # when the gradients of the head are written
            x = Raise.apply(x)
        x = self.head(x)
        return Raise.apply(x) if self.raises == "outside" else x


class Scale:
    """A loss scale by hand."""

    def __init__(self, value: float, *, moves: bool) -> None:
        self.value, self.clean, self.moves = value, 0, moves

    def update(self, *, overflow: bool) -> None:
        if not self.moves:
            return
        self.clean = 0 if overflow else self.clean + 1
        if overflow:
            self.value /= 2
        elif self.clean == INTERVAL:
            self.value, self.clean = self.value * 2, 0


class Hand:
    """A network that is trained by hand.

    Attributes:
        true: unscaled gradients, which the ranks have reduced.
        sums: those of passes that they have not reduced, times ``scale``; None without such passes.
        found: by loss, whether a pass of it has found an overflow.
        waiting: the losses of passes that were not reduced.
    """

    def __init__(self, net: Net, dtype: torch.dtype, *, is_scaled: bool, **options: Any) -> None:
        self.net = net.to(dtype)
        self.wrapped = DistributedDataParallel(self.net, **options)
        self.weights = list(self.net.parameters())
        self.masters = [w if dtype is torch.float32 else w.detach().float() for w in self.weights]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.05, momentum=0.9)
        self.is_plain = dtype is torch.float32 and not is_scaled
        self.scale = 1.0
        self.drop()

    def drop(self) -> None:
        self.true: list[Tensor | None] = [None] * len(self.weights)
        self.sums: list[Tensor | None] | None = None
        self.found: dict[int, bool] = {}
        self.waiting: set[int] = set()
        for weight in self.weights:
            weight.grad = None

    def begin(self, scale: float, *, local: bool) -> None:
        """Before a pass that will write gradients here."""
        self.before = self.true, self.sums, self.scale
        if self.is_plain:
            sums = self.true if self.sums is None else self.sums
            for weight, grad in zip(self.weights, sums, strict=True):
                weight.grad = grad
            self.versions = [-1 if grad is None else grad._version for grad in sums]
            return
        if local and self.sums is None:
            self.sums, self.true, self.scale = self.true, [None] * len(self.true), 1.0
        if self.sums is not None:
            self.sums = [None if one is None else one * (scale / self.scale) for one in self.sums]
            self.scale = scale
        for i, weight in enumerate(self.weights):
            summed = None if local or self.sums is None else self.sums[i]
            weight.grad = None if summed is None else summed.to(weight.dtype)
        self.versions = [-1 if weight.grad is None else weight.grad._version for weight in self.weights]

    def end(self, loss_id: int, scale: float, *, local: bool) -> None:
        """After it."""
        grads = [weight.grad for weight in self.weights]
        self.waiting.add(loss_id)
        if self.is_plain:
            self.true, self.sums = (self.true, grads) if local else (grads, None)
        else:
            fresh = [None if grad is None else grad.float() for grad in grads]
            for weight in self.weights:
                weight.grad = None
            if local:
                assert self.sums is not None
                self.sums = list(map(added, self.sums, fresh))
            else:
                unscaled = [None if grad is None else grad / scale for grad in fresh]
                # What was not finite before these passes says nothing of their losses.
                known = self.sums is not None and any(self.found.values())
                overflow = not all(grad is None or bool(grad.isfinite().all()) for grad in unscaled)
                for loss in self.waiting:
                    self.found[loss] = self.found.get(loss, False) or (overflow and not known)
                self.true, self.sums = list(map(added, self.true, unscaled)), None
        if not local:
            self.waiting = set()

    def undo(self) -> None:
        """After a pass that raised: it has not happened, except where it has added to sums that were there."""
        added_to = [
            weight.grad is not None and weight.grad._version != version
            for weight, version in zip(self.weights, self.versions, strict=True)
        ]
        sums = self.sums if self.sums is not None else self.true if self.is_plain else []
        self.true, self.sums, self.scale = self.before
        if any(was and summed is not None for was, summed in zip(added_to, sums, strict=False)):
            self.drop()
        for weight in self.weights:
            weight.grad = None

    def edit(self, function: Callable[[Tensor], Tensor]) -> None:
        self.true = [None if grad is None else function(grad) for grad in self.true]

    def step(self, scales: Sequence[Scale]) -> bool:
        """Step or skip; returns which."""
        grads = [grad for grad in self.true if grad is not None]
        overflow = any(self.found.values()) or not all(bool(grad.isfinite().all()) for grad in grads)
        if not overflow:
            for master, grad in zip(self.masters, self.true, strict=True):
                master.grad = grad
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for weight, master in zip(self.weights, self.masters, strict=True):
                    if weight is not master:
                        weight.copy_(master)
        explained = any(self.found.values())
        for loss, found in self.found.items():
            scales[loss].update(overflow=overflow and (found or not explained))
        self.drop()
        return not overflow


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


class Ours:
    """The same network under an engine."""

    def __init__(self, net: Net, level: halfpeak.Level, scales: Sequence[Scale], **options: Any) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        config = halfpeak.ScaleConfig(
            init=scales[0].value, dynamic=scales[0].moves, interval=INTERVAL, floor=2.0**-30, patience=None
        )
        self.engine = halfpeak.prepare(net, self.optimizer, level, scale=config, num_losses=len(scales))
        for number, scale in enumerate(scales):
            self.engine.scaler(number).set_scale(scale.value)
        self.wrapped = DistributedDataParallel(net, **options)
        self.engine.parts.agree()  # it has written the weights

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    @property
    def mains(self) -> list[Tensor]:
        return [self.engine.pairs.main_of(weight) for weight in self.net.parameters()]


class Program:
    """One random program of passes, edits and steps of one or two networks, on both ranks.

    Attributes:
        trail: what has been done.
    """

    def __init__(self, seed: int, *, networks: int) -> None:
        self.pick = pick = random.Random(seed)
        name = pick.choice(list(LEVELS))
        level, dtype, is_scaled = LEVELS[name]
        # A frozen critic is left out of a pass, which a static graph does not know.
        self.kind = pick.choice(("plain", "unused", "static") if networks == 1 else ("plain", "unused"))
        moves = is_scaled and networks == 1
        values = [2.0 ** pick.choice((4, 8, 10)) if is_scaled else 1.0 for _ in range(pick.choice((1, 2)))]
        self.scales = [Scale(value, moves=moves) for value in values]
        if is_scaled and not moves:
            level = level.replace(loss_scale=values[0])
        options: dict[str, Any] = {
            "gradient_as_bucket_view": pick.random() < 0.5,
            "find_unused_parameters": self.kind == "unused",
            "static_graph": self.kind == "static",
            "bucket_cap_mb": pick.choice((25, 0.0001, 0.0006)),
        }
        self.is_unit = not is_scaled
        self.hands = [Hand(Net(seed + i), dtype, is_scaled=is_scaled, **options) for i in range(networks)]
        self.ours = [Ours(Net(seed + i), level, self.scales, **options) for i in range(networks)]
        self.trail = [f"{name} {len(values)} losses {options}"]
        self.was_reduced, self.is_armed, self.passes = False, False, seed

    def run(self) -> str:
        """What differs first, after what was done; empty if nothing does."""
        for _ in range(self.pick.randint(12, 20)):
            roll = self.pick.random()
            chosen = self.pick.randrange(len(self.ours))
            if roll < 0.55:
                self.do_pass(chosen)
            elif roll < 0.7:
                self.do_step(chosen)
            elif roll < 0.8:
                self.do_edit(chosen)
            elif roll < 0.9:
                self.do_drop(chosen)
            else:
                self.do_write(chosen)
            why = self.difference()
            # The ranks go on together, or not at all.
            differs = torch.tensor(float(bool(why)))
            dist.all_reduce(differs)
            if differs:
                return "\n".join([*self.trail, why or "differs on the other rank"])
        return ""

    def do_pass(self, chosen: int) -> None:
        """A pass of one network; or of the first through the second, which may be frozen for it."""
        pick, rank = self.pick, dist.get_rank()
        self.passes += 1
        local = pick.random() < 0.5 and (self.was_reduced or self.kind != "static") and not self.is_armed
        loss_id = pick.randrange(len(self.scales))
        factors = [1.0, 1.0]
        if not self.is_unit and pick.random() < 0.3:
            factors[pick.randrange(2)] = pick.choice((1e9, float("inf")))
        wholes = [self.kind != "unused" or pick.random() < 0.6 for _ in range(2)]
        used = [0, 1] if chosen == 0 and len(self.ours) == 2 else [chosen]
        frozen = used == [0, 1] and pick.random() < 0.5
        generator = torch.Generator().manual_seed(10 * self.passes + rank)
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
        raises = self.draw_exception(local)
        self.trail.append(f"pass {used} {local=} {loss_id=} {factors=} {wholes=} {frozen=} {raises=}")

        def loss_of(sides: Sequence[Any], stack: ExitStack) -> Tensor:
            out = x
            for number in used:
                sides[number].net.whole, sides[number].net.raises = wholes[rank], raises
                sides[number].net.requires_grad_(not (frozen and number == 1))
                # A forward pass that is to be reduced and whose backward pass writes nothing leaves torch's hooks armed.
                if local or (frozen and number == 1):
                    stack.enter_context(sides[number].wrapped.no_sync())
                out = sides[number].wrapped(out)
            return mse_loss(out.float(), y) * factors[rank]

        with ExitStack() as stack, self.ours[chosen].engine.forward():
            loss = loss_of(self.ours, stack)
            with suppress(Raised):
                self.ours[chosen].engine.backward(loss, loss_id=loss_id)
        scale = self.scales[loss_id].value
        reached = [self.hands[number] for number in used if not (frozen and number == 1)]
        with ExitStack() as stack:
            loss = loss_of(self.hands, stack)
            for hand in reached:
                hand.begin(scale, local=local)
            with suppress(Raised):
                (loss * scale).backward()
            for hand in reached:
                hand.undo() if raises else hand.end(loss_id, scale, local=local)
        for one in (*self.ours, *self.hands):
            one.net.requires_grad_(True)
        if raises:
            self.is_armed |= not local  # torch's hooks, for a pass that is reduced
        else:
            self.was_reduced, self.is_armed = self.was_reduced or not local, False

    def draw_exception(self, local: bool) -> str:
        """Where the pass raises, as far as torch itself goes on after it."""
        if len(self.ours) == 2 or self.pick.random() > 0.15:
            return ""
        if self.kind == "unused" and (local or self.hands[0].sums is not None):
            return ""
        if self.kind == "static":
            return "outside" if self.was_reduced else ""
        return self.pick.choice(("inside", "outside")) if local else "outside"

    def do_step(self, chosen: int) -> None:
        ours, hand = self.ours[chosen], self.hands[chosen]
        if hand.sums is not None or all(grad is None for grad in hand.true):
            return
        self.trail.append(f"step {chosen}")
        stepped = ours.engine.step().stepped()
        if stepped != hand.step(self.scales):
            self.trail.append(f"{stepped=}, and by hand not")

    def do_edit(self, chosen: int) -> None:
        hand = self.hands[chosen]
        if hand.sums is not None:
            return
        masters, replaces = self.pick.random() < 0.5, self.pick.random() < 0.5
        self.trail.append(f"edit {chosen} {masters=} {replaces=}")
        side: Iterable[Tensor] = self.ours[chosen].mains if masters else self.ours[chosen].weights
        for one in side:
            if one.grad is not None and replaces:
                one.grad = one.grad / 3
            elif one.grad is not None:
                one.grad.div_(3)
        hand.edit(lambda grad: grad / 3)

    def do_drop(self, chosen: int) -> None:
        """``zero_grad()`` on either side."""
        ours, hand = self.ours[chosen], self.hands[chosen]
        if hand.sums is not None and self.kind == "unused":
            return  # torch itself fails where one rank alone does not reach the weights again
        to_none = self.pick.random() < 0.5
        side: Any = self.pick.choice((ours.net, ours.optimizer))
        self.trail.append(f"zero {chosen} {type(side).__name__} {to_none=}")
        side.zero_grad(set_to_none=to_none)
        if to_none or hand.sums is not None:
            hand.drop()
        else:
            hand.edit(torch.zeros_like)
            hand.found = dict.fromkeys(hand.found, False)

    def do_write(self, chosen: int) -> None:
        """Halve the weights, or move the masters."""
        ours, hand = self.ours[chosen], self.hands[chosen]
        masters = self.pick.random() < 0.5
        self.trail.append(f"write {chosen} {masters=}")
        with torch.no_grad():
            for one in ours.mains if masters else ours.weights:
                one.add_(2.0**-9) if masters else one.mul_(0.5)
            for weight, master in zip(hand.weights, hand.masters, strict=True):
                if masters:
                    master.add_(2.0**-9)
                    weight.copy_(master)
                else:
                    weight.mul_(0.5)
                    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))

    def difference(self) -> str:
        """Where gradients, weights, masters or scales are not those by hand."""
        for number, (ours, hand) in enumerate(zip(self.ours, self.hands, strict=True)):
            ours.engine.parts.agree()
            for i, (weight, main) in enumerate(zip(ours.weights, ours.mains, strict=True)):
                expected = (hand.true if hand.sums is None else hand.sums)[i]
                held = ours.engine.parts.windows[0].held
                if expected is not None and held is not None:
                    expected = expected * (float(held.scale) / hand.scale)
                if weight.grad is not main.grad:
                    return f"network {number}: the gradients {i} are two"
                if (weight.grad is None) != (expected is None):
                    return f"network {number}: gradient {i} is {weight.grad}, by hand {expected}"
                if weight.grad is not None and expected is not None:
                    wide = expected.to(weight.grad.dtype).float()
                    if not torch.equal(weight.grad.float().nan_to_num(), wide.nan_to_num()):
                        return f"network {number}: gradient {i} is {weight.grad}, by hand {wide}"
                if not (torch.equal(weight, hand.weights[i]) and torch.equal(main, hand.masters[i])):
                    return f"network {number}: weight {i} differs"
            scales = [ours.engine.read_scale(k) for k in range(len(self.scales))]
            if scales != [scale.value for scale in self.scales]:
                return f"scales {scales}, by hand {[scale.value for scale in self.scales]}"
        return ""


def shards(seed: int) -> str:
    """Random windows over FSDP2; by hand gradients stay scaled until the step."""
    pick, rank = random.Random(seed), dist.get_rank()
    level = pick.choice(("O0", "O2", "O5"))
    scale = Scale(2.0 ** pick.choice((4, 8, 10)) if level == "O2" else 1.0, moves=level == "O2")
    nets = [fully_shard(Net(seed), level) for _ in range(2)]
    net, plain = nets
    optimizer, by_hand = (torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in nets)
    config = halfpeak.ScaleConfig(init=scale.value, interval=INTERVAL, floor=2.0**-30, patience=None)
    engine, trail = halfpeak.prepare(net, optimizer, level, scale=config), [level]
    for window in range(pick.randint(3, 5)):
        num = pick.randint(1, 4)
        overflow = False
        for number in range(num):
            local = number < num - 1 and pick.random() < 0.5
            factors = [1.0, 1.0]
            if level == "O2" and pick.random() < 0.1:
                factors[pick.randrange(2)] = float("inf")
            generator = torch.Generator().manual_seed(100 * window + 10 * number + rank)
            x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
            trail.append(f"pass {local=} {factors=}")
            for one in nets:
                one.set_requires_gradient_sync(not local)  # type: ignore[operator]
                loss = mse_loss(one(x).float(), y) * factors[rank]
                if one is net:
                    engine.backward(loss)
                else:
                    (loss * scale.value).backward()
            for one, other in zip(net.parameters(), plain.parameters(), strict=True):
                if not local and one.grad is not None:
                    unscaled = other.grad.to_local() / scale.value  # type: ignore[union-attr]
                    if not torch.equal(one.grad.to_local().nan_to_num(), unscaled.nan_to_num()):  # type: ignore[attr-defined]
                        trail.append("a gradient differs")
        grads = [one.grad.to_local() for one in plain.parameters() if one.grad is not None]  # type: ignore[attr-defined]
        bad = torch.tensor(float(not all(bool(grad.isfinite().all()) for grad in grads)))
        dist.all_reduce(bad)
        overflow = bool(bad)
        trail.append(f"step {overflow=}")
        if not overflow:
            for one in plain.parameters():
                if one.grad is not None:
                    one.grad.div_(scale.value)
            by_hand.step()
        by_hand.zero_grad()
        if engine.step().stepped() == overflow:
            trail.append("stepped otherwise")
        scale.update(overflow=overflow)
        if engine.read_scale() != scale.value:
            trail.append(f"scale {engine.read_scale()}, by hand {scale.value}")
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            if not torch.equal(one.to_local(), other.to_local()):  # type: ignore[attr-defined]
                trail.append("a weight differs")
        differs = torch.tensor(float(not trail[-1].startswith("step")))
        dist.all_reduce(differs)
        if differs:
            return "\n".join(trail)
    return ""


RUNS: dict[str, Callable[[int], str]] = {
    "one network": lambda seed: Program(seed, networks=1).run(),
    "two networks": lambda seed: Program(seed, networks=2).run(),
    "shards": shards,
}


def see(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What differs in each program; empty texts where nothing does."""
    return {
        f"{kind} {number}": RUNS[kind](1_000 * number)
        for kind, count in NUM_PROGRAMS.items()
        for number in range(count)
    }
