"""Mixed precision written by hand in plain torch, and the same calls of an engine, to which the promises compare it.

Of halfpeak the loop by hand uses the table of levels and, at O1 and O4, the scope in which operations are cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from halfpeak.core.dtypes import is_low
from halfpeak.core.optimizer_state import params_of
from support.nets import LOW, MASTERED, STORED
from support.snapshot import raw

Side = Literal["model", "optimizer"]
SIDES: tuple[Side, ...] = ("model", "optimizer")
SCALE = 1024.0


class ByHand:
    """Scale, backward, unscale into float32 sums on masters; clip, step, copy back.

    Args:
        level: the opt level.
        nets: networks with float32 parameters, of which none is a norm.
        makes: makes one optimizer or several over the parameters of the networks.
        scale: the loss scale, a power of two.
        every: passes of a window.
        clip: the largest norm.
        beside: another loop, whose parameters a loss of this one may reach.
    """

    def __init__(
        self,
        level: str,
        nets: Sequence[nn.Module],
        makes: Callable[[Any], Any],
        *,
        scale: float = SCALE,
        every: int = 1,
        clip: float | None = None,
        beside: ByHand | None = None,
    ) -> None:
        self.level, self.nets, self.scale, self.every, self.clip = level, nets, scale, every, clip
        self.optimizers: list[Optimizer] = listed(makes(nets))
        self.passes = 0
        # What autograd writes to, and what is stepped for it; also those of the loop beside this one.
        self.pairs: list[tuple[Tensor, Tensor]] = [] if beside is None else beside.pairs
        stepped = {id(p) for optimizer in self.optimizers for p in params_of(optimizer)}
        for parameter in parameters(nets):
            if not any(parameter is weight for weight, _ in self.pairs):
                self._convert(parameter, has_master=id(parameter) in stepped and level in MASTERED)
        mains = {id(weight): main for weight, main in self.pairs}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [mains[id(p)] for p in group["params"]]  # LBFGS keeps the list

    def _convert(self, weight: Tensor, *, has_master: bool) -> None:
        if self.level == "O0" and weight.is_floating_point():
            weight.data = weight.data.float()
        exact, main = weight.data, weight
        if weight.dtype is torch.float32 and STORED[self.level] is not torch.float32:
            weight.data = exact.to(STORED[self.level])
            main = exact.clone().requires_grad_(weight.requires_grad) if has_master else weight
        self.pairs.append((weight, main))

    def forward(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", LOW[self.level]) if self.level in ("O1", "O4") else nullcontext()

    def output(self, x: Tensor, net: int = 0) -> Tensor:
        return self.nets[net](x.to(STORED[self.level]) if x.dtype is torch.float32 else x).float()

    def backward(
        self, loss: Tensor, *, scale: float = 0.0, optimizers: Optimizer | None = None, **kwargs: Any
    ) -> None:
        scale = scale or self.scale
        earlier = [main.grad for _, main in self.pairs]
        for weight, main in self.pairs:
            weight.grad = main.grad = None
        (loss / self.every * scale).backward(**kwargs)
        chosen = None if optimizers is None else set(map(id, params_of(optimizers)))
        for (weight, main), total in zip(self.pairs, earlier, strict=True):
            fresh, weight.grad = weight.grad, None
            if fresh is None or not (chosen is None or id(main) in chosen):
                main.grad = total
            else:
                wide = torch.promote_types(main.dtype, torch.float32)
                unscaled = (fresh.to(wide) / scale).to(main.dtype)
                main.grad = unscaled if total is None else total + unscaled

    def past(self, loss: Tensor) -> None:
        """A plain ``loss.backward()``."""
        self.backward(loss * self.every, scale=1.0)

    def step(self, *, optimizers: Optimizer | None = None) -> bool:
        self.passes += 1
        if self.passes % self.every:
            return False
        stepped = self.optimizers if optimizers is None else [optimizers]
        mains = list({id(p): p for optimizer in stepped for p in params_of(optimizer)}.values())
        grads = [main.grad for main in mains if main.grad is not None]
        moves = bool(grads) and all(bool(grad.to_dense().isfinite().all()) for grad in grads)
        if moves:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(mains, self.clip)
            for optimizer in stepped:
                optimizer.step()
        for main in mains:
            main.grad = None
        self.follow_mains(mains)
        return moves

    def step_with(self, closure: Callable[[], Tensor]) -> None:
        def evaluate() -> Tensor:
            self.follow_mains()
            self.zero_grad("optimizer")
            return closure()

        self.optimizers[0].step(evaluate)
        self.zero_grad("optimizer")
        self.follow_mains()

    def unscale(self) -> None:
        """Nothing: gradients are unscaled."""

    def zero_grad(self, side: Side, set_to_none: bool = True) -> None:
        stepped = [main for optimizer in self.optimizers for main in params_of(optimizer)]
        own = set(map(id, parameters(self.nets) if side == "model" else stepped))
        for weight, main in self.pairs:
            if main.grad is not None and id(weight if side == "model" else main) in own:
                main.grad = None if set_to_none else torch.zeros_like(main.grad)

    def holders(self, side: Side) -> list[Tensor]:
        """The tensors whose ``.grad`` user code on one side reads and writes: here it is the same on both."""
        return [main for _, main in self.pairs]

    def tensors(self, side: Side) -> list[Tensor]:
        """The tensors whose values user code on one side reads and writes."""
        return [pair[side == "optimizer"] for pair in self.pairs]

    @torch.no_grad()
    def follow(self, side: Side) -> None:
        """After the tensors of one side were written."""
        if side == "optimizer":
            self.follow_mains()
            return
        for weight, main in self.pairs:  # a master keeps the digits that still round to its weight
            main.copy_(torch.where(main.to(weight.dtype) == weight, main, weight.to(main.dtype)))

    @torch.no_grad()
    def follow_mains(self, mains: list[Tensor] | None = None) -> None:
        for weight, main in self.pairs:
            if weight is not main and (mains is None or any(main is one for one in mains)):
                weight.copy_(main)

    def freeze(self, side: Side, index: int, wanted: bool) -> None:
        for tensor in self.pairs[index]:
            tensor.requires_grad_(wanted)

    def leaf(self, leaf: Tensor) -> Tensor:
        """A leaf that no network has: an input, or a weight of a criterion."""
        self.pairs.append((leaf, leaf))
        return leaf

    def add_group(self, net: int) -> None:
        """Give the parameters of a network to the first optimizer."""
        own, mains = set(map(id, self.nets[net].parameters())), list[Tensor]()
        for number, (weight, main) in enumerate(self.pairs):
            if id(weight) in own:
                if self.level in MASTERED and weight.dtype is STORED[self.level]:
                    main = weight.detach().float().requires_grad_(weight.requires_grad)
                    main.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
                    self.pairs[number] = weight, main
                mains.append(main)
        self.optimizers[0].add_param_group({"params": mains})

    def values(self) -> list[Tensor]:
        """The float32 values of all parameters."""
        return [main.float() if is_low(main) else main for _, main in self.pairs]


class Prepared:
    """The same calls of an engine. ``options`` go to :func:`halfpeak.prepare`."""

    def __init__(
        self,
        level: str,
        nets: Sequence[nn.Module],
        makes: Callable[[Any], Any],
        *,
        scale: float = SCALE,
        every: int = 1,
        clip: float | None = None,
        beside: Prepared | None = None,
        compiles: bool = False,
        **options: Any,
    ) -> None:
        self.level, self.nets = level, nets
        self.engine = halfpeak.prepare(
            nets,
            makes(nets),
            halfpeak.LEVELS[level].replace(loss_scale=scale),
            accumulate=every,
            clip=clip,
            **options,
        )
        self.optimizers = self.engine.optimizers
        self._called: list[Any] = [
            torch.compile(net, backend="aot_eager", fullgraph=True) if compiles else net for net in nets
        ]
        self._leaves: list[Tensor] = []
        self._loops: list[Prepared] = [*(beside._loops if beside else ()), self]

    def forward(self) -> AbstractContextManager[Any]:
        return self.engine.forward()

    def output(self, x: Tensor, net: int = 0) -> Tensor:
        return self._called[net](x).float()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss, **kwargs)

    def past(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, optimizers: Optimizer | None = None) -> bool:
        return self.engine.step(optimizers=optimizers).stepped()

    def step_with(self, closure: Callable[[], Tensor]) -> None:
        self.engine.step(closure)

    def unscale(self) -> None:
        self.engine.unscale()

    def zero_grad(self, side: Side, set_to_none: bool = True) -> None:
        for one in self.nets if side == "model" else self.optimizers:
            one.zero_grad(set_to_none)

    def holders(self, side: Side) -> list[Tensor]:
        return self.tensors(side)

    def tensors(self, side: Side) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for loop in self._loops:
            for weight in (*parameters(loop.nets), *loop._leaves):
                main = loop.engine.pairs.main_of(weight)
                found.setdefault(id(weight), weight if side == "model" else main)
        return list(found.values())

    def follow(self, side: Side) -> None:
        """Nothing: the engine follows by itself."""

    def freeze(self, side: Side, index: int, wanted: bool) -> None:
        self.tensors(side)[index].requires_grad_(wanted)

    def leaf(self, leaf: Tensor) -> Tensor:
        self._leaves.append(leaf)
        return leaf

    def add_group(self, net: int) -> None:
        self.optimizers[0].add_param_group({"params": list(self.nets[net].parameters())})

    def values(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for loop in self._loops:
            for net in loop.nets:
                state = net.state_dict()
                found.update({id(p): state[name] for name, p in net.named_parameters() if id(p) not in found})
            found.update({id(leaf): leaf for leaf in loop._leaves if id(leaf) not in found})
        return list(found.values())


Loop = ByHand | Prepared
Scenario = Callable[..., Iterator[None]]
"""Trains one loop, or several, and yields where values and gradients are compared."""


def compare(scenario: Scenario, hand: Sequence[ByHand], ours: Sequence[Prepared]) -> None:
    """Run a scenario by hand and with engines in turns, and compare to the bit wherever it yields, and at its end."""
    compared = 0
    for _ in zip(scenario(*hand), scenario(*ours), strict=True):
        assert_same(hand[-1], ours[-1])
        compared += 1
    assert compared, "the scenario yields nowhere"
    assert_same(hand[-1], ours[-1])


def assert_same(hand: ByHand, ours: Prepared) -> None:
    """Values, and gradients on both sides, which are one tensor."""
    expected = hand.values()
    for number, (value, mine) in enumerate(zip(expected, ours.values(), strict=True)):
        assert bits(value) == bits(mine), f"value {number} is {mine}, not {value}"
    if any(loop.engine.parts.windows[0].held is not None for loop in ours._loops):
        return  # still scaled: the one exception, which the optimizer was chosen for
    for number, (value, main, weight) in enumerate(
        zip(hand.holders("optimizer"), ours.holders("optimizer"), ours.holders("model"), strict=True)
    ):
        assert bits(value.grad) == bits(weight.grad), f"gradient {number} is {weight.grad}, not {value.grad}"
        assert weight.grad is main.grad


def bits(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Dtype, shape and every bit of a tensor."""
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), raw(tensor))


def parameters(nets: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of several networks, each once."""
    return list({id(p): p for net in nets for p in net.parameters()}.values())


def listed(made: Any) -> list[Any]:
    """One thing, or a list of things, as a list."""
    return made if isinstance(made, list) else [made]
