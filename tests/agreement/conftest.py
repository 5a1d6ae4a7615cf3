"""The door's session is fresh for every test, and no casts outlive one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfpeak import amp


@pytest.fixture(autouse=True)
def fresh_session(process_left_as_found: None) -> Iterator[None]:
    amp._amp_state.__init__()
    yield
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()
    amp._amp_state.__init__()
