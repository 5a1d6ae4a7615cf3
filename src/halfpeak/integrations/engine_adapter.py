"""EngineAdapter: an engine inside another library's loop, which creates, wraps and drops models and optimizers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.levels import Level, LevelName, get_level
from halfpeak.core.policy import KeepFp32
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require
from halfpeak.core.step_result import StepResult
from halfpeak.core.suitable import AUTO, level_for
from halfpeak.distributed.optimizer_state import InitialMoments
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import prepare
from halfpeak.engine.state_checks import LOOP_KEYS
from halfpeak.optim.unwrap import check_can_convert, reconnect, synchronised_values

OPTIONS: Final = tuple(
    name for name in inspect.signature(prepare).parameters if name not in ("models", "optimizers", "level")
)
"""The options of :func:`halfpeak.prepare`."""


class EngineAdapter:
    """Prepares an engine once the loop has models and optimizers, and restores the models' dtypes at the end.

    Args:
        level: of :func:`halfpeak.prepare`.
        options: of :func:`halfpeak.prepare`, by name.
        refused: options that the loop handles itself, each with the end of its error message: what to write instead.
        advice: how a user of the loop gets an engine, the end of the error message where there is none yet.

    Raises:
        ConfigError: an unknown level or option, or a refused one.

    Attributes:
        level: the level as a value; None where ``"auto"`` has not met a model yet.
        keep_fp32: the option of that name.
        engine: the engine between :meth:`connect` and :meth:`release`; else None.
        results: the result of each optimizer's last step.
    """

    def __init__(
        self, level: LevelName | Level, options: Mapping[str, Any], *, refused: Mapping[str, str], advice: str
    ) -> None:
        _check_options(options, refused)
        self._given = level
        self.level = None if level == AUTO else get_level(level)
        self.engine: Engine | None = None
        self.results: dict[Optimizer, StepResult] = {}
        self._options, self._advice = dict(options), advice
        self.keep_fp32: Sequence[KeepFp32] = self._options.get("keep_fp32", ())
        self._original_dtypes: list[tuple[Tensor, torch.dtype]] = []
        self._moments: dict[Optimizer, InitialMoments] = {}
        self._saved_state: Mapping[str, Any] | None = None

    def level_for(self, models: Sequence[nn.Module]) -> Level:
        """The level, which at ``"auto"`` suits the device of ``models``."""
        return level_for(self._given, models)

    def connect(
        self,
        wrappers: Sequence[nn.Module],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        level: Level | None = None,
    ) -> None:
        """Prepare an engine for models inside wrappers (DDP, or the models themselves).

        The engine gets the state from an earlier :meth:`load_state_dict`, or from the previous engine.

        Args:
            wrappers: around the models.
            models: inside the wrappers.
            optimizers: over parameters of the models.
            level: what :meth:`level_for` has returned; None means that it is not called yet.
        """
        self.release()
        self.level = level = self.level_for(models) if level is None else level
        converted = wrappers if level.policy().param is not None else ()
        for wrapper in converted:
            check_can_convert(wrapper)
        tensors = [
            t for model in models for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()
        ]
        dtypes = [(tensor, tensor.dtype) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        values = [pair for wrapper in converted for pair in synchronised_values(wrapper)]
        self.engine = prepare(models, optimizers, level, **self._options)
        if self.engine.parts.has_shards:
            self._moments = {optimizer: InitialMoments(optimizer) for optimizer in optimizers}
        self._original_dtypes = dtypes
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(self.engine.pairs.set_value(parameter, value))
        for wrapper in converted:
            reconnect(wrapper)
        if self._saved_state is not None:
            state, self._saved_state = self._saved_state, None
            self.engine.load_loop_state_dict(state)

    def release(self) -> None:
        """Remove the engine, and restore the models' original dtypes with the values of the masters."""
        engine = self.engine
        if engine is None:
            return
        engine.parts.agree()
        self._saved_state = engine.loop_state_dict(window=False)
        values = [engine.pairs.float32_value(tensor) for tensor, _ in self._original_dtypes]
        engine.remove()
        for moments in self._moments.values():
            moments.remove()
        for (tensor, dtype), value in zip(self._original_dtypes, values, strict=True):
            if value is None and tensor.dtype is dtype and tensor.grad_dtype is dtype:
                continue
            grad, tensor.grad = tensor.grad, None
            tensor.data = (tensor if value is None else value).detach().to(tensor.device, dtype)
            if tensor.grad_dtype is not dtype:
                tensor.grad_dtype = dtype
            tensor.grad = None if grad is None else grad.to(dtype)
        self.engine = None
        self.results.clear()
        self._original_dtypes, self._moments = [], {}

    def connected(self) -> Engine:
        """The engine.

        Raises:
            OrderError: there is no engine yet.
        """
        if self.engine is None:
            raise OrderError(
                f"there is no engine yet, because no model and optimizer were prepared; {self._advice}"
            )
        return self.engine

    def forward(self) -> AbstractContextManager[Any]:
        """A context with the casts of the level; a null context without an engine."""
        return nullcontext() if self.engine is None else self.engine.forward()

    @contextmanager
    def scaled(self, loss: Tensor) -> Generator[Tensor]:
        """Context that yields the scaled loss for the loop's backward pass; afterwards all gradients are unscaled.

        Args:
            loss: already divided for accumulation.
        """
        engine = self.connected()
        with engine.scaled(loss) as scaled:
            yield scaled
        engine.parts.unscale_reduced()  # Hooks of the loop read gradients, and clip them.

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Step or skip one optimizer, and keep the result in :attr:`results`."""
        moments = self._moments.get(optimizer)
        with nullcontext() if moments is None else moments.left_out():
            self.results[optimizer] = result = self.connected().step(closure, optimizers=optimizer)
        return result

    def state_dict(self) -> dict[str, Any]:
        """:func:`engine_state`; without an engine, the state that the next engine will get."""
        return dict(self._saved_state or {}) if self.engine is None else engine_state(self.engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; without an engine, keep it for the next :meth:`connect`.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        if self.engine is not None:
            self.engine.load_loop_state_dict(state)
        else:
            self._saved_state = require(state, "state", dict.fromkeys(LOOP_KEYS, ...))


def engine_state(engine: Engine) -> dict[str, Any]:
    """Loss scales, counters and the open window. The loop saves models and optimizers itself, in float32.

    A window with gradients of one rank (shards, or not yet reduced) is left out with a warning: the loop writes one file for
    all.
    """
    engine.parts.unscale_reduced()
    if not (engine.parts.has_shards and engine.parts.has_gradients()):
        with suppress(OrderError):  # gradients that are not reduced yet
            return engine.loop_state_dict()
    warnings.warn(
        "saved inside an accumulation window: the gradients of each rank are left out, and a run that resumes from here "
        "begins the window anew; save after a step",
        RuntimeWarning,
        stacklevel=3,
    )
    return engine.loop_state_dict(window=False)


def _check_options(options: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    known = set(OPTIONS) - set(refused)
    for name in options:
        if name in refused:
            raise ConfigError(f"{name}={short_repr(options[name])} is refused: {refused[name]}")
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
