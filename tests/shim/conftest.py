"""A fixture that installs the apex shim for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfpeak import shim


@pytest.fixture
def apex_installed() -> Iterator[None]:
    """``import apex`` works in the test."""
    shim.install()
    yield
    shim.uninstall()
