"""Makes a build of torch for the CPU behave as a build for CUDA does on a machine without a GPU.

Such a build, which ``pip install torch`` brings on Linux, names CUDA as its accelerator although none is available, and
raises at the first call that needs a driver. Observed with torch 2.11 and 2.14.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

NEED_A_DRIVER = (
    "getStream setStream synchronizeDevice getDeviceIndex setDeviceIndex exchangeDevice getDeviceCapability"
)


def be_built_for_cuda(patch: pytest.MonkeyPatch) -> None:
    """Replace what such a build answers otherwise."""

    def raise_without_driver(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    patch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    for name in NEED_A_DRIVER.split():
        patch.setattr(torch._C, f"_accelerator_{name}", raise_without_driver)
