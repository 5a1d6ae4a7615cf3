"""StatefulWrapper: states, resumes and copies of a wrapper with an engine inside."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch.optim import Optimizer

from halfpeak.engine.engine import Engine
from halfpeak.engine.state_checks import check_optimizer
from halfpeak.optim import exact
from halfpeak.optim.base import BaseOptimWrapper


class StatefulWrapper(BaseOptimWrapper):
    """The half of a wrapper that saves, loads and copies what its engine holds.

    A state may be loaded before there is an engine, or before the engine has seen its model. What it cannot be given yet
    is kept, and saved again as it is.
    """

    _KEYS: ClassVar[tuple[str, ...]] = (exact.KEY,)
    """What this class reads in a state, beside what every wrapper reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._engine: Engine | None = None
        self._pending: Mapping[str, Any] = {}

    @abstractmethod
    def _ready(self) -> Engine:
        """The engine of the optimizer as it is now."""

    @abstractmethod
    def _hold(self, engine: Engine | None) -> None:
        """Make an engine one's own."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state. Inside an accumulation window also what is open, under ``"halfpeak"``."""
        return {**super().state_dict(), **self._extra_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what :meth:`state_dict` gave, or the state of another wrapper or of a plain optimizer.

        Gradients of an open window are dropped; those of a saved one come back.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        self.check_state_dict(state_dict)
        if self._engine is not None:
            self._engine.abort()
        super().load_state_dict(state_dict)
        self._pending = {key: state_dict[key] for key in self._KEYS if key in state_dict}
        if self._engine is not None:
            self._apply_pending(self._engine)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` would take it.

        Raises:
            StateError: it would not.
        """
        check_optimizer(self.optimizer, state_dict)
        self._check_state(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None, "_pending": self._extra_state()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The engine first: it copies optimizer and masters joined to one another, and knows what is open.
        engine = copy.deepcopy(self._engine, memo)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = super().__getstate__()
        twin.__setstate__({name: copy.deepcopy(state[name], memo) for name in state if name != "_engine"})
        twin._hold(engine)
        return twin

    def _has_window(self) -> bool:
        is_open = self._engine is not None and self._engine.has_open_window
        return is_open or exact.has_window(self._pending)

    def _extra_state(self) -> dict[str, Any]:
        """What the state holds beside the optimizer's."""
        if self._engine is None or self._pending:
            return dict(self._pending)
        found = exact.take_exact(self._engine)
        return {} if found is None else {exact.KEY: found}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if exact.KEY in state:
            exact.check_exact(self._ready(), state[exact.KEY])

    def _apply_pending(self, engine: Engine) -> None:
        """Give the engine what a state dict held for it."""
        if self._pending:
            self._restore(engine, self._pending)
            if exact.KEY in self._pending:
                exact.put_exact(engine, self._pending[exact.KEY])
            self._put_buffers(engine)

    def _put_buffers(self, engine: Engine) -> None:
        """Statistics can be put only where the model is known; that may be later than the rest."""
        if engine.models:
            if exact.KEY in self._pending:
                engine.buffers.put_saved(self._pending[exact.KEY]["buffers"])
            self._pending = {}

    def _restore(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Read the formats of others."""
