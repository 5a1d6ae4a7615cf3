"""EngineHolder: an engine inside a loop that hands over models and optimizers when it likes, and takes them away again."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.scope import contained
from halfpeak.core.errors import ConfigError, OrderError, StateError
from halfpeak.core.levels import get_level, resolve
from halfpeak.core.outcome import StepResult
from halfpeak.engine.engine import Engine
from halfpeak.engine.lane import Lane
from halfpeak.engine.prepare import prepare
from halfpeak.engine.slots import Phase
from halfpeak.engine.state import put_window, take_window
from halfpeak.engine.state_checks import check_window
from halfpeak.optim.wrapped import check_can_convert, reconnect

KEYS: Final = ("level", "scalers", "counters", "window")


class EngineHolder:
    """Makes an engine when models and optimizers are there, and gives the models their own dtypes back at the end.

    Args:
        level: ``"O0"`` to ``"O5"``; see :data:`halfpeak.LEVELS`.
        options: of :func:`halfpeak.prepare`.
        refused: options that are the loop's business, each with what to write instead.

    Raises:
        ConfigError: an unknown level or option, or one that is refused.

    Attributes:
        engine: between :meth:`connect` and :meth:`release`; else None.
        last: what the last step did; None before the first.
    """

    def __init__(self, level: str, options: Mapping[str, Any], refused: Mapping[str, str]) -> None:
        _check_options(level, options, refused)
        self.level = get_level(level).name
        self.engine: Engine | None = None
        self.last: StepResult | None = None
        self._options = dict(options)
        self._stored: list[tuple[Tensor, torch.dtype]] = []
        self._pending: Mapping[str, Any] | None = None

    def connect(
        self, wrappers: Sequence[nn.Module], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        """Make an engine of models that the wrappers (DDP, or the models themselves) hold, and go on with the scale."""
        self.release()
        for wrapper in wrappers:
            check_can_convert(wrapper)
        tensors = [
            t for model in models for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()
        ]
        stored = [(tensor, tensor.dtype) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        self.engine = prepare(models, optimizers, self.level, **self._options)
        self._stored = stored
        for wrapper in wrappers:
            reconnect(wrapper)
        if self._pending is not None:
            state, self._pending = self._pending, None
            self.load_state_dict(state)

    def release(self) -> None:
        """Take the engine off: the models store what they stored before, with the values of the masters."""
        engine = self.engine
        if engine is None:
            return
        self._pending = {**self.state_dict(), "window": None}
        values = [engine.masters.value_of(tensor) for tensor, _ in self._stored]
        engine.remove()
        for (tensor, dtype), value in zip(self._stored, values, strict=True):
            tensor.data = (tensor if value is None else value).detach().to(tensor.device, dtype)
        self.engine = None
        self._stored = []

    def connected(self, advice: str) -> Engine:
        """The engine.

        Raises:
            OrderError: there is none; the message ends in ``advice``.
        """
        if self.engine is None:
            raise OrderError(f"level {self.level} has no model and optimizer yet; {advice}")
        return self.engine

    def forward(self) -> AbstractContextManager[Any]:
        """The casts of the level; nothing before there is an engine."""
        return nullcontext() if self.engine is None else self.engine.forward()

    def step(self, engine: Engine, optimizer: Optimizer, closure: Any = None) -> StepResult:
        """Step or skip one optimizer, and remember what happened."""
        self.last = engine.step(closure, optimizers=optimizer)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """Loss scales, counters and the open window. Models and optimizers have states of their own, in float32."""
        if self.engine is None:
            return dict(self._pending or {})
        return take_scales(self.engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. Before there is an engine, it waits for one.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        if self.engine is not None:
            put_scales(self.engine, state)
        else:
            self._pending = _checked(state)


def take_scales(engine: Engine) -> dict[str, Any]:
    """The state of an engine but for its models and optimizers, which the loop saves."""
    engine.journal.settle()
    return {
        "level": engine.plan.properties.opt_level,
        "scalers": [scaler.state_dict() for scaler in engine.scalers],
        "counters": engine.journal.state_dict(),
        "window": take_window(engine),
    }


def put_scales(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restore what :func:`take_scales` gave. A static scale stays what it is, whatever was saved.

    Raises:
        StateError: it does not fit. Nothing was loaded.
    """
    known = _checked(state)
    if len(known["scalers"]) != len(engine.scalers):
        raise StateError(
            f"the state holds {len(known['scalers'])} loss scales, this run {len(engine.scalers)}"
        )
    scales = [scaler.parse(saved) for scaler, saved in zip(engine.scalers, known["scalers"], strict=True)]
    if known["window"] is not None:
        check_window(engine, known["window"])
    engine.journal.load_state_dict(known["counters"])
    for scaler, scale in zip(engine.scalers, scales, strict=True):
        scaler.state = scale if scaler.config.dynamic else scale._replace(scale=scaler.state.scale)
    engine.phases.look_for_trouble()
    if known["window"] is not None:
        put_window(engine, known["window"])


@contextmanager
def scaled(engine: Engine, loss: Tensor, lanes: list[Lane], *, delay: bool) -> Generator[Tensor]:
    """A backward pass: the loss times its scale; afterwards its gradients are true-sized.

    Args:
        engine: which.
        loss: divided for accumulation already.
        lanes: optimizers whose parameters may get gradients.
        delay: DDP does not reduce these gradients, so they stay scaled until it does.
    """
    # Recomputation in the backward pass (activation checkpointing) must be cast as the forward pass was.
    casting = engine.casting if isinstance(engine.casting, OpCasts) else nullcontext()
    with contained(), casting, engine.scaled(loss, lanes=lanes, delay=delay) as product:
        yield product
    for lane in lanes:
        lane.take_in()
        # The loop does not say whose loss it was: a verdict on no gradient is none.
        if lane.phase is Phase.UNSCALED and not lane.targets():
            lane.close()


def _checked(state: object) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or set(state) != set(KEYS):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"the state of a level in a loop has the keys {sorted(KEYS)}, not {found}")
    return state


def _check_options(level: str, options: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    known = set(inspect.signature(prepare).parameters) - {"models", "optimizers", "level"} - set(refused)
    for name in options:
        if name in refused:
            raise ConfigError(f"{name}={options[name]!r}: {refused[name]}")
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are level, {', '.join(sorted(known))}")
    names = set(inspect.signature(resolve).parameters) & set(options)
    resolve(level, **{name: options[name] for name in names})
