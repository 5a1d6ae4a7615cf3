"""Resets the process-wide state of other libraries after every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state in classes."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
            kept._reset_state()
