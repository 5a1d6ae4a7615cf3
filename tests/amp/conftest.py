"""Every test of amp starts and ends with an unused session and with no casts on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfpeak import amp


@pytest.fixture(autouse=True)
def fresh_session(process_left_as_found: None) -> Iterator[None]:
    state = amp._amp_state
    state.__init__()
    yield
    if state.handle is not None:
        state.handle._deactivate()
    state.__init__()
