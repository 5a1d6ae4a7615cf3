"""How far a model's output is from float32's at a level, in units of torch.autocast's error in the same dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import halfpeak
from support.nets import LOW

LIMIT = 3.0
"""A model passes if its error is at most this many times autocast's."""


@dataclass(frozen=True)
class Member:
    """A model of the zoo.

    Attributes:
        name: the library, what the model is for, and its name.
        build: makes it, the same at each call.
        run: its output for a fixed batch.
        is_slow: whether float16 takes minutes on a CPU.
        keep_fp32: what an error at the levels with low weights says to write.
    """

    name: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]
    is_slow: bool = False
    keep_fp32: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One model at one level.

    Attributes:
        member: its name.
        level: ``"O1"`` to ``"O5"``.
        error: of the output, relative to that of float32 by norm; None if the level does not run.
        autocast: that of ``torch.autocast``, at least a quarter of the dtype's ``eps``.
        message: what was raised, or else what went wrong in a step.
    """

    member: str
    level: str
    error: float | None
    autocast: float
    message: str = ""

    @property
    def passes(self) -> bool:
        return not self.message and self.error is not None and self.error <= LIMIT * self.autocast

    def __str__(self) -> str:
        found = "" if self.error is None else f"{self.error / self.autocast:5.2f} times {self.autocast:.1e}"
        return f"{'ok  ' if self.passes else 'FAIL'} {self.member:40} {self.level}  {found}{self.message}"


def rows(member: Member, levels: Sequence[str]) -> Iterator[Row]:
    """Compare a model at some levels: those whose dtype it can be trained in under autocast.

    Raises:
        ValueError: its output is zero.
        Exception: it does not run in float32.
    """
    model = member.build().eval()
    want = member.run(model).detach()
    if not bool(want.any()):
        raise ValueError("its output is zero")
    errors: dict[torch.dtype, float | None] = {}
    for level in levels:
        dtype = LOW[level]
        if dtype not in errors:
            errors[dtype] = under_autocast(member, copy.deepcopy(model), dtype, want)
        autocast = errors[dtype]
        if autocast is not None:
            yield row(member, copy.deepcopy(model), level, want, autocast)


def under_autocast(member: Member, model: nn.Module, dtype: torch.dtype, want: Tensor) -> float | None:
    """The error under autocast, at least a quarter of the dtype's ``eps``; None if it does not train there."""
    try:
        with torch.autocast("cpu", dtype):
            output = member.run(model)
    except RuntimeError:  # no kernel: that depends on the processor
        return None
    output.float().square().mean().backward()
    if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
        return None
    return max(relative(output.detach(), want), torch.finfo(dtype).eps / 4)


def row(member: Member, model: nn.Module, level: str, want: Tensor, autocast: float) -> Row:
    """Train one step at a level; ``model`` is prepared for it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = halfpeak.ScaleConfig(init=16.0)
    keep = member.keep_fp32 if halfpeak.LEVELS[level].policy().param is not None else ()
    try:
        engine = halfpeak.prepare(
            model, torch.optim.SGD(trained, lr=1e-4), level, keep_fp32=keep, scale=scale
        )
        with engine.forward():
            output = member.run(model)
            loss = output.float().square().mean()
        engine.backward(loss)
        stepped = engine.step().stepped()
    except Exception as error:
        return Row(member.name, level, None, autocast, f"{type(error).__name__}: {error}")
    is_finite = all(bool(parameter.isfinite().all()) for parameter in trained)
    message = (
        "" if stepped and is_finite else ", and the step was skipped" if not stepped else ", and then NaN"
    )
    return Row(member.name, level, relative(output.detach(), want), autocast, message)


def relative(output: Tensor, want: Tensor) -> float:
    return float((output.float() - want.float()).norm() / want.float().norm())
