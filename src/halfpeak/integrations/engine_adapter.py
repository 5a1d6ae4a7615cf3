"""EngineAdapter: an engine inside another library's loop, which creates, wraps and drops models and optimizers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.casting.casts import OpCasts, casts_on
from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.levels import LevelName, Properties, get_level, resolve
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.core.step_result import StepResult
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import prepare
from halfpeak.engine.state_checks import LOOP_KEYS, check_buffers
from halfpeak.optim.unwrap import check_can_convert, reconnect, synchronised_values


class EngineAdapter:
    """Prepares an engine once the loop has models and optimizers, and restores the models' dtypes at the end.

    Args:
        level: ``"O0"`` to ``"O5"``; see :data:`halfpeak.LEVELS`.
        options: keyword arguments of :func:`halfpeak.prepare`.
        refused: options that the loop handles itself, each with the end of its error message: what to write instead.

    Raises:
        ConfigError: an unknown level or option, or a refused one.

    Attributes:
        has_masters: whether the optimizers step float32 copies of the parameters.
        engine: the engine between :meth:`connect` and :meth:`release`; else None.
        last: the result of the last step; None before the first.
        results: the result of each optimizer's last step.
    """

    def __init__(self, level: str, options: Mapping[str, Any], refused: Mapping[str, str]) -> None:
        properties = _resolved(level, options, refused)
        self.has_masters = bool(properties.master_weights)
        self._converts_models = properties.policy().param is not None
        self.level: LevelName = get_level(level).name
        self.engine: Engine | None = None
        self.last: StepResult | None = None
        self.results: dict[Optimizer, StepResult] = {}
        self._options = dict(options)
        self._original_dtypes: list[tuple[Tensor, torch.dtype]] = []
        self._saved_state: Mapping[str, Any] | None = None

    def connect(
        self, wrappers: Sequence[nn.Module], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        """Prepare an engine for models inside wrappers (DDP, or the models themselves).

        The engine gets the state from an earlier :meth:`load_state_dict`, or from the previous engine.
        """
        self.release()
        converted = wrappers if self._converts_models else ()
        for wrapper in converted:
            check_can_convert(wrapper)
        tensors = [
            t for model in models for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()
        ]
        dtypes = [(tensor, tensor.dtype) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        values = [pair for wrapper in wrappers for pair in synchronised_values(wrapper)]
        self.engine = prepare(models, optimizers, self.level, **self._options)
        self._original_dtypes = dtypes
        for parameter, value in values:
            self.engine.masters.set_value(parameter, value)
        for wrapper in converted:
            reconnect(wrapper)
        if self._saved_state is not None:
            state, self._saved_state = self._saved_state, None
            self.load_state_dict(state)

    def release(self) -> None:
        """Remove the engine, and restore the models' original dtypes with the values of the masters."""
        engine = self.engine
        if engine is None:
            return
        self._saved_state = {**self.state_dict(), "window": None}
        values = [engine.masters.fp32_value(tensor) for tensor, _ in self._original_dtypes]
        engine.remove()
        for (tensor, dtype), value in zip(self._original_dtypes, values, strict=True):
            tensor.data = (tensor if value is None else value).detach().to(tensor.device, dtype)
        self.engine = None
        self.results.clear()
        self._original_dtypes = []

    def connected(self, advice: str) -> Engine:
        """Return the engine.

        Raises:
            OrderError: there is no engine yet; the message ends in ``advice``.
        """
        if self.engine is None:
            raise OrderError(f"level {self.level} has no model and optimizer yet; {advice}")
        return self.engine

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context with the casts of the level; a null context without an engine."""
        return nullcontext() if self.engine is None else self.engine.forward()

    def step(
        self, engine: Engine, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> StepResult:
        """Step or skip one optimizer, and keep the result in :attr:`last`."""
        self.last = self.results[optimizer] = engine.step(closure, optimizers=optimizer)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """Return :func:`engine_state`; without an engine, the state that the next engine will get."""
        return dict(self._saved_state or {}) if self.engine is None else engine_state(self.engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; without an engine, keep it for the next :meth:`connect`.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        if self.engine is not None:
            load_engine_state(self.engine, state)
        else:
            self._saved_state = _checked(state)


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return loss scales, counters and the open window. The loop saves models and optimizers itself, in float32.

    A window with gradients not yet reduced over the ranks is left out with a warning: the loop writes one file for all.
    """
    state = engine.loop_state_dict()
    if "rank" not in state["window"]:
        return state
    warnings.warn(
        "saved inside an accumulation window: the gradients of each rank are left out, and a run that resumes from here "
        "begins the window anew; save after a step",
        RuntimeWarning,
        stacklevel=3,
    )
    return {**state, "window": None, "buffers": []}


def load_engine_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restore a state from :func:`engine_state`. A static scale keeps its configured value.

    Raises:
        StateError: the state does not fit. Nothing was loaded.
    """
    engine.load_loop_state_dict(_checked(state))


@contextmanager
def scale_loss(
    engine: Engine, loss: Tensor, optimizers: Iterable[Optimizer] | Optimizer | None = None, *, delay: bool
) -> Generator[Tensor]:
    """Yield the loss times its scale for the loop's backward pass, and unscale the gradients afterwards.

    Args:
        loss: already divided for accumulation.
        optimizers: the optimizers whose parameters may get gradients; None means all.
        delay: leave the gradients scaled until a later backward pass, because DDP does not reduce them in this one.
    """
    # Recomputation in the backward pass (activation checkpointing) must be cast as the forward pass was.
    casting = engine.casting if isinstance(engine.casting, OpCasts) else None
    with casts_on(casting), engine.scaled(loss, optimizers=optimizers, delay=delay) as product:
        yield product
    engine.unscale_pending()


def stepped_parameters(engine: Engine, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return what the optimizer steps for each parameter: its master, or the parameter itself."""
    masters = engine.masters
    return [parameter if (master := masters.of(parameter)) is None else master for parameter in parameters]


def _checked(state: object) -> Mapping[str, Any]:
    what = "the state of a level in a loop"
    # Older files hold no batch-norm statistics, so they have no "buffers".
    known = require_mapping({"buffers": [], **require_mapping(state, what)}, what, LOOP_KEYS)
    check_buffers(known["buffers"])
    return known


def _resolved(level: str, options: Mapping[str, Any], refused: Mapping[str, str]) -> Properties:
    """Check all options, and return the properties of the level with these options."""
    known = set(inspect.signature(prepare).parameters) - {"models", "optimizers", "level"} - set(refused)
    for name in options:
        if name in refused:
            raise ConfigError(f"{name}={short_repr(options[name])} is refused: {refused[name]}")
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are level, {', '.join(sorted(known))}")
    names = set(inspect.signature(resolve).parameters) & set(options)
    return resolve(level, **{name: options[name] for name in names})
