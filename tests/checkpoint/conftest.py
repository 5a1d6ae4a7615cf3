"""Every test of checkpoints starts and ends with an unused session of amp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfpeak import amp


@pytest.fixture(autouse=True)
def fresh_session(process_left_as_found: None) -> Iterator[None]:
    """amp keeps its runs in the process."""
    amp._amp_state.__init__()
    yield
    amp._amp_state.__init__()
