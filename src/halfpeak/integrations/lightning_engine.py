"""An engine inside a precision plugin of Lightning 2.x, whichever of its packages the plugin is of."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.scope import contained
from halfpeak.core.errors import ConfigError, OrderError, StateError
from halfpeak.core.levels import get_level, resolve
from halfpeak.core.outcome import StepResult
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import prepare
from halfpeak.engine.slots import Phase
from halfpeak.engine.state import put_window, take_window
from halfpeak.engine.state_checks import check_window
from halfpeak.optim.wrapped import check_can_convert, reconnect, unwrap

NOT_HERE: Final = {
    "accumulate": "Lightning counts the backward passes of a step: write Trainer(accumulate_grad_batches=...)",
    "clip": "Lightning clips: write Trainer(gradient_clip_val=...), or fabric.clip_gradients(...)",
    "num_losses": "Lightning does not say which loss a backward pass is of; leave it out",
}
"""Options of :func:`halfpeak.prepare` that are Lightning's business."""

PRECISIONS: Final = {
    "O0": "32-true",
    "O1": "16-mixed",
    "O2": "16-true",
    "O3": "16-true",
    "O4": "bf16-mixed",
    "O5": "bf16-true",
}
"""What Lightning calls what comes nearest to a level. It shows the name and estimates sizes with it."""

KEYS: Final = ("level", "scalers", "counters", "window")


class EnginePlugin:
    """What both plugins do: hold an engine, enter its casts, run its backward passes and its steps, save its state.

    Args:
        level: ``"O0"`` to ``"O5"``; see :data:`halfpeak.LEVELS`.
        options: of :func:`halfpeak.prepare`, but for what Lightning does itself (``clip``, ``accumulate``).

    Raises:
        ConfigError: an unknown level or option, or one that is Lightning's business.

    Attributes:
        engine: between ``connect`` and ``teardown``; else None.
        last: what the last step did; None before the first.
    """

    def __init__(self, level: str = "O2", **options: Any) -> None:
        _check_options(level, options)
        self.level = get_level(level).name
        self.precision: Any = PRECISIONS[self.level]
        self.engine: Engine | None = None
        self.last: StepResult | None = None
        self._options = options
        self._wrapper: nn.Module | None = None
        self._pending: Mapping[str, Any] | None = None

    def _connect(
        self, wrapper: nn.Module, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Engine:
        """Make an engine of models that ``wrapper`` (DDP, or the model itself) holds; take up a state that waits."""
        check_can_convert(wrapper)
        self.engine = prepare(models, optimizers, self.level, **self._options)
        reconnect(wrapper)
        self._wrapper = wrapper
        self.last = None
        if self._pending is not None:
            state, self._pending = self._pending, None
            self.load_state_dict(dict(state))
        return self.engine

    def _connected(self) -> Engine:
        if self.engine is None:
            raise OrderError(
                f"{type(self).__name__} has no model yet; write precision.connect(model, optimizer) after fabric.setup"
            )
        return self.engine

    def forward_context(self) -> AbstractContextManager[Any]:
        """The casts of the level."""
        return nullcontext() if self.engine is None else self.engine.forward()

    @contextmanager
    def _scaled(self, loss: Tensor) -> Generator[Tensor]:
        """A backward pass: the loss times its scale. Gradients that DDP does not reduce now stay scaled until it does."""
        engine = self._connected()
        casting = engine.casting if isinstance(engine.casting, OpCasts) else nullcontext()
        delay = not getattr(self._wrapper, "require_backward_grad_sync", True)
        # Recomputation in the backward pass (activation checkpointing) must be cast as the forward pass was.
        with contained(), casting, engine.scaled(loss, lanes=engine.lanes, delay=delay) as scaled:
            yield scaled
        for lane in engine.lanes:
            # Lightning does not say whose loss it was: a verdict on no gradient is none.
            if lane.phase is Phase.UNSCALED and not lane.targets():
                lane.close()

    def state_dict(self) -> dict[str, Any]:
        """Loss scales, counters and the open window. The model and its optimizers have theirs, in float32."""
        if self.engine is None:
            return dict(self._pending or {})
        engine = self.engine
        engine.journal.settle()
        return {
            "level": self.level,
            "scalers": [scaler.state_dict() for scaler in engine.scalers],
            "counters": engine.journal.state_dict(),
            "window": take_window(engine),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. Before there is an engine, it waits for one.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(KEYS):
            raise StateError(
                f"the state of {type(self).__name__} has the keys {sorted(KEYS)}, not {_keys(state_dict)}"
            )
        if self.engine is None:
            self._pending = state_dict
            return
        engine = self.engine
        if len(state_dict["scalers"]) != len(engine.scalers):
            raise StateError(
                f"the state holds {len(state_dict['scalers'])} loss scales, this run {len(engine.scalers)}"
            )
        scales = [
            scaler.parse(saved) for scaler, saved in zip(engine.scalers, state_dict["scalers"], strict=True)
        ]
        if state_dict["window"] is not None:
            check_window(engine, state_dict["window"])
        engine.journal.load_state_dict(state_dict["counters"])
        for scaler, scale in zip(engine.scalers, scales, strict=True):
            if scaler.config.dynamic:
                scaler.state = scale
        engine.phases.look_for_trouble()
        if state_dict["window"] is not None:
            put_window(engine, state_dict["window"])


def innermost(model: nn.Module) -> nn.Module:
    """The module inside Fabric's wrapper and those of torch."""
    return unwrap(getattr(model, "_forward_module", model))


def _check_options(level: str, options: Mapping[str, Any]) -> None:
    known = set(inspect.signature(prepare).parameters) - {"models", "optimizers", "level"} - set(NOT_HERE)
    for name in options:
        if name in NOT_HERE:
            raise ConfigError(f"{name}={options[name]!r}: {NOT_HERE[name]}")
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are level, {', '.join(sorted(known))}")
    names = set(inspect.signature(resolve).parameters) & set(options)
    resolve(level, **{name: options[name] for name in names})


def _keys(state: object) -> object:
    return sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
