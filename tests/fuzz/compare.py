"""Runs a configuration on both sides in step, and says where they first differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuzz.config import Config, Planned
from fuzz.events import AFTER, BEFORE, BETWEEN, EVENTS, FORWARDED, Injected, NextIteration, act
from fuzz.explained import Tolerance, known, tolerance_of, tolerance_of_tensor
from fuzz.reference import LOW, Collapse, Reference, same_bits
from fuzz.subject import Subject
from halfpeak import HalfpeakError, LossScaleCollapse


class Mismatch(AssertionError):
    """The sides differ."""


@dataclass
class Counts:
    """How much has been tried."""

    configurations: int = 0
    steps: int = 0
    skips: int = 0
    collapses: int = 0
    events: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    tolerated: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def compare(config: Config, counts: Counts | None = None) -> None:
    """Run ``config`` on both sides.

    Raises:
        Mismatch: they differ, or halfpeak raised what it should not have.
    """
    Comparison(config, counts or Counts()).run()


class Comparison:
    """Both sides of one configuration, side by side."""

    def __init__(self, config: Config, counts: Counts) -> None:
        self.config, self.counts = config, counts
        self.tolerance = tolerance_of(config)
        self.where = "prepare"
        self._names: dict[int, str] = {}

    def run(self) -> None:
        try:
            with torch.random.fork_rng(devices=[]):
                self._run()
        except Mismatch as error:
            raise Mismatch(f"{self.where}: {error}") from error.__cause__
        except Exception as error:
            raise Mismatch(f"{self.where}: {type(error).__name__}: {error}") from error
        self.counts.configurations += 1
        if self.tolerance.reason:
            self.counts.tolerated[self.tolerance.reason] += 1

    def _run(self) -> None:
        self.subject, self.reference = Subject(self.config), Reference(self.config)
        for at in range(self.config.iterations):
            try:
                self._iteration(at)
            except NextIteration:
                continue
            except Injected as error:
                if error.zeroes:
                    self._event(Planned(at, "after an exception", "zero_grad of the optimizer"))
            except Collapse:
                self._check()
        self._check_values()

    def _iteration(self, at: int) -> None:
        turns = [[o] for o in range(len(self.config.optimizers))] if self.config.in_turns else [None]
        for turn in turns:
            self._turn(at, turn)
            if turn is turns[-1]:
                self._check()
            self._events(at, AFTER)

    def _turn(self, at: int, turn: list[int] | None) -> None:
        """Forward, backward and step, of the optimizers whose turn it is."""
        self._events(at, BEFORE)
        losses = self._both("forward", lambda run: run.forward(at), at)
        self._events(at, FORWARDED)
        for loss_id, pair in enumerate(zip(*losses, strict=True)):
            self._both("backward", partial(_backward, list(pair), loss_id, turn, len(losses[0])), at)
        self._events(at, BETWEEN)
        results = self._both("step", lambda run: run.step(turn), at)
        self._same_results(*results)
        self.counts.steps += results[0].boundary
        self.counts.skips += results[0].found_inf

    def _both(self, what: str, call: Callable[[Any], Any], at: int) -> tuple[Any, Any]:
        """Make the call on both sides; if one raises the exception that an event has planted, both must."""
        self.where = f"iteration {at}, {what}"
        raised: list[BaseException | None] = [None, None]
        results: list[Any] = [None, None]
        for i, run in enumerate((self.subject, self.reference)):
            try:
                results[i] = call(run)
            except (Injected, Collapse) as error:
                raised[i] = error
            except LossScaleCollapse:
                raised[i] = Collapse()
        self._raise_alike(raised)
        return results[0], results[1]

    def _raise_alike(self, raised: Sequence[BaseException | None]) -> None:
        """Raise what both sides have raised."""
        ours, theirs = raised
        if type(ours) is not type(theirs):
            raise Mismatch(f"raised {ours!r} and by hand {theirs!r}")
        self.counts.collapses += isinstance(ours, Collapse)
        if ours is not None:
            raise ours

    def _events(self, at: int, moment: str) -> None:
        for planned in self.config.events:
            if (planned.at, planned.moment) == (at, moment):
                self._event(planned)

    def _event(self, planned: Planned) -> None:
        self.where = f"iteration {planned.at}, {planned.name!r} {planned.moment}"
        event = EVENTS[planned.name]
        if not event.fits(self.config):
            return
        reason = known(self.config, planned, self.subject, self.reference)
        if reason is not None:
            self.counts.left_out[planned.name] += 1
            self.counts.known[reason] += 1
            return
        raised: list[BaseException | None] = []
        for side in ("subject", "reference"):
            run = getattr(self, side)
            try:
                setattr(self, side, act(run, planned) or run)
                raised.append(None)
            except (Injected, NextIteration, Collapse) as error:
                raised.append(error)
            except LossScaleCollapse:
                raised.append(Collapse())
            except HalfpeakError as error:
                self._note_refusal(planned.name, error)
                return
        self.counts.events[planned.name] += 1
        self._raise_alike(raised)

    def _note_refusal(self, name: str, error: HalfpeakError) -> None:
        """An event that was refused has not happened, and the run goes on as if it had not been tried."""
        for text in EVENTS[name].refusals:
            if text in str(error):
                self.counts.refused[f"{name}: {text}"] += 1
                return
        raise error

    def _same_results(self, ours: Any, theirs: Any) -> None:
        for name in ("boundary", "found_inf", "scale"):
            if getattr(ours, name) != getattr(theirs, name):
                raise Mismatch(f"{name} is {getattr(ours, name)} and by hand {getattr(theirs, name)}")
        if (ours.norm is None) != (theirs.norm is None):
            raise Mismatch(f"norm {ours.norm} and by hand {theirs.norm}")
        if ours.norm is not None and torch.tensor(ours.norm).isfinite():
            self._close("norm", torch.tensor(ours.norm), torch.tensor(theirs.norm), max(NORM, self.tolerance))

    def _check(self) -> None:
        ours, theirs = self.subject, self.reference
        for name in ("num_steps", "num_skipped", "micro"):
            if getattr(ours, name) != getattr(theirs, name):
                raise Mismatch(f"{name} {getattr(ours, name)} and by hand {getattr(theirs, name)}")
        for i, (scaler, scale) in enumerate(zip(ours.engine.scalers, theirs.scales, strict=True)):
            if tuple(scaler.state_dict().values()) != scale.values():
                raise Mismatch(f"scale {i} {scaler.state_dict()} and by hand {scale.values()}")
        for name, one, other in self._tensors():
            self._close(name, one, other, self.tolerance)

    def _check_values(self) -> None:
        """Compare ``model.state_dict()``, also after the last event."""
        self.where = "end"
        one, other = self.subject.values(), self.reference.values()
        if list(one) != list(other):
            raise Mismatch(f"state_dict has {list(one)} and by hand {list(other)}")
        for name in one:
            self._close(f"state_dict {name}", one[name], other[name], self.tolerance)

    def _tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The tensors that training changes: name, the subject's, the reference's."""
        ours, theirs = self.subject, self.reference
        named = zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True)
        for (name, one), (_, other) in named:
            yield name, one, other
        for (name, one), (_, other) in zip(
            ours.model.named_buffers(), theirs.model.named_buffers(), strict=True
        ):
            yield name, one, other
        # Parameters that load_state_dict(assign=True) has taken out of the model keep their names.
        self._names |= {id(parameter): name for name, parameter in ours.model.named_parameters()}
        names = self._names
        for o, (mine, by_hand) in enumerate(zip(ours.optimizers, theirs.optimizers, strict=True)):
            left, right = mine.state_dict(), by_hand.state_dict()
            if _groups(left) != _groups(right):
                raise Mismatch(f"groups of optimizer {o}: {_groups(left)} and by hand {_groups(right)}")
            mains = [p for group in mine.param_groups for p in group["params"]]
            others = [p for group in by_hand.param_groups for p in group["params"]]
            for i, (one, other) in enumerate(zip(mains, others, strict=True)):
                value = ours.engine.pairs.float32_value(ours.model_of(one))
                pair = theirs.pairs.get(id(theirs.model_of(other)))
                other = other if pair is None else pair.value()
                value = one if value is None else value
                value = value.to(other.dtype) if one.dtype in LOW else value
                yield f"optimizer {o}, value of {names.get(id(ours.model_of(one)), i)}", value, other
                yield from _rows(
                    f"optimizer {o}, state {i}", left["state"].get(i, {}), right["state"].get(i, {})
                )

    def _close(self, name: str, one: Tensor, other: Tensor, tolerance: Tolerance) -> None:
        one, other = one.detach(), other.detach()
        if one.dtype != other.dtype or one.shape != other.shape:
            raise Mismatch(
                f"{name} is {one.dtype} {tuple(one.shape)}, by hand {other.dtype} {tuple(other.shape)}"
            )
        if same_bits(one, other):
            return
        one, other = one.double(), other.double()
        if not torch.equal(one.isfinite(), other.isfinite()):
            raise Mismatch(f"{name} is not finite where by hand it is, or the other way round")
        tolerance = tolerance_of_tensor(self.config, name, tolerance)
        difference = (one - other).nan_to_num(0, 0, 0).abs().max() if one.numel() else 0.0
        if difference == 0:
            return
        size = other.nan_to_num(0, 0, 0).abs().max()
        if difference > tolerance.relative * size + tolerance.absolute:
            raise Mismatch(f"{name} differs by {float(difference):.3g} where its size is {float(size):.3g}")


NORM = Tolerance(1e-5, 1e-30, "")
"""The squares are summed in another order."""


def _backward(losses: list[Tensor], loss_id: int, turn: list[int] | None, count: int, run: Any) -> None:
    """Call backward on one side; the sides take their losses in turn."""
    run.backward(losses.pop(0), loss_id, turn, retain=loss_id + 1 < count)


def _groups(state: dict[str, Any]) -> list[Any]:
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()}
        for group in state["param_groups"]
    ]


def _rows(name: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The state of one parameter. Zeros on one side only are left out, because a skipped fused kernel creates them."""
    for key in {**one, **other}:
        ours, theirs = one.get(key), other.get(key)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            there = ours if theirs is None else theirs
            assert there is not None
            if isinstance(there, Tensor) and not bool(there.any()):
                continue
            raise Mismatch(f"{name} has {key!r} on one side only: {ours} and by hand {theirs}")
        yield f"{name} {key}", torch.as_tensor(ours), torch.as_tensor(theirs)
