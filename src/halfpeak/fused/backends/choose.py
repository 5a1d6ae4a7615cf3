"""Chooses the backend of an optimizer by device, by sizes and by what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.backends.base import Backend, HostBackend
from halfpeak.fused.backends.eager import EagerBackend
from halfpeak.fused.backends.eager_device import EagerDeviceBackend
from halfpeak.fused.backends.inductor import InductorBackend
from halfpeak.fused.backends.triton import TritonBackend
from halfpeak.fused.backends.triton_tables import has_kernel
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.ops.triton import is_installed, kernels

BackendName = Literal["auto", "eager", "compiled", "triton"]

MIN_COMPILED = 2**18
"""Compile from this many elements on: with fewer, a step takes less than a millisecond on any backend."""


def check_backend(backend: BackendName) -> BackendName:
    """``backend``, if it is one.

    Raises:
        ConfigError: it is not.
    """
    if backend not in get_args(BackendName):
        raise ConfigError(
            f"backend={short_repr(backend)} must be one of {', '.join(map(repr, get_args(BackendName)))}"
        )
    return backend


def choose(requested: BackendName, slices: Sequence[BufferSlice]) -> Backend:
    """The backend for some slices. A resumed run gets the same one: only request, slices and machine decide.

    Raises:
        ConfigError: the requested backend does not support these slices.
    """
    devices = {slice_.buffer.weight.device for slice_ in slices}
    on_host = {device.type for device in devices} == {"cpu"}
    if requested == "triton":
        why_not = _why_not_triton(slices, devices)
        if why_not is not None:
            raise ConfigError(f"backend='triton' is not available: {why_not}; write backend='auto'")
        return TritonBackend(next(iter(devices)))
    if requested == "compiled":
        if not on_host:
            where = ", ".join(sorted(map(str, devices)))
            raise ConfigError(
                f"backend='compiled' updates parameters on the CPU, and these are on {where}; write backend='auto'"
            )
        return InductorBackend()
    if not on_host:
        reaches = requested == "auto" and _why_not_triton(slices, devices) is None
        return TritonBackend(next(iter(devices))) if reaches else EagerDeviceBackend()
    size = sum(len(slice_.buffer) for slice_ in slices)
    return (
        InductorBackend()
        if requested == "auto" and size >= MIN_COMPILED and has_compiler()
        else EagerBackend()
    )


def still_fits(backend: Backend, slices: Sequence[BufferSlice]) -> bool:
    """Whether a backend that was chosen for earlier slices supports these."""
    if isinstance(backend, TritonBackend):
        return backend.device == slices[0].buffer.weight.device and all(map(has_kernel, slices))
    on_host = all(slice_.buffer.weight.device.type == "cpu" for slice_ in slices)
    return on_host == isinstance(backend, HostBackend)


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler."""
    # Not at the top, because this import takes longer than importing all of halfpeak.
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def _why_not_triton(slices: Sequence[BufferSlice], devices: set[torch.device]) -> str | None:
    """The reason why the Triton backend cannot update the slices; None if it can."""
    if not is_installed():
        return "triton is not installed"
    if len(devices) > 1:
        return f"the parameters are on {len(devices)} devices"
    (device,) = devices
    if device.type != "cuda" and not (device.type == "cpu" and kernels().is_interpreted()):
        return f"its kernels run on CUDA devices, and the parameters are on {device}"
    strange = next((slice_ for slice_ in slices if not has_kernel(slice_)), None)
    if strange is not None:
        return f"it has no kernel for {type(strange.rule).__name__} on {strange.buffer.weight.dtype}"
    return None
