"""Which road a fused optimizer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import DeviceRoad, Road
from halfpeak.fused.roads.compiled import CompiledRoad
from halfpeak.fused.roads.device import EagerDeviceRoad
from halfpeak.fused.roads.eager import EagerRoad
from halfpeak.fused.roads.settings import has_kernel
from halfpeak.fused.roads.triton import TritonRoad
from halfpeak.ops.triton import is_installed, kernels

RoadName = Literal["auto", "eager", "compiled", "triton"]

WORTH_COMPILING = 2**18
"""Elements from which compiling pays: below, a step takes less than a millisecond on any road."""


def check_wish(wish: str) -> None:
    """Raise ConfigError for an unknown road."""
    if wish not in get_args(RoadName):
        raise ConfigError(f"road={wish!r} must be one of {', '.join(map(repr, get_args(RoadName)))}")


def choose(wish: RoadName, pieces: Sequence[Piece]) -> Road | DeviceRoad:
    """The road for some pieces. It depends on them and on the machine alone, so a resumed run takes the same.

    Raises:
        ConfigError: the road asked for does not lead over these pieces.
    """
    devices = {piece.block.weight.device for piece in pieces}
    on_host = {device.type for device in devices} == {"cpu"}
    if wish == "triton":
        _require_triton(pieces, devices)
        return TritonRoad(next(iter(devices)))
    if wish == "compiled":
        if not on_host:
            raise ConfigError("road='compiled' is for parameters on the CPU; write road='auto'")
        return CompiledRoad()
    if not on_host:
        reaches = wish == "auto" and _why_not_triton(pieces, devices) is None
        return TritonRoad(next(iter(devices))) if reaches else EagerDeviceRoad()
    size = sum(len(piece.block) for piece in pieces)
    return CompiledRoad() if wish == "auto" and size >= WORTH_COMPILING and has_compiler() else EagerRoad()


def leads_on(road: Road | DeviceRoad, pieces: Sequence[Piece]) -> bool:
    """Whether a road chosen earlier still leads over what there is now."""
    if isinstance(road, TritonRoad):
        return road.device == pieces[0].block.weight.device and all(map(has_kernel, pieces))
    on_host = all(piece.block.weight.device.type == "cpu" for piece in pieces)
    return on_host != isinstance(road, DeviceRoad)


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler."""
    # Not at the top: it takes longer to import than all of halfpeak.
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def _require_triton(pieces: Sequence[Piece], devices: set[torch.device]) -> None:
    why_not = _why_not_triton(pieces, devices)
    if why_not is not None:
        raise ConfigError(f"road='triton' cannot be taken: {why_not}; write road='auto'")


def _why_not_triton(pieces: Sequence[Piece], devices: set[torch.device]) -> str | None:
    """What keeps some pieces from the Triton road; None if nothing does."""
    if not is_installed():
        return "triton is not installed"
    if len(devices) > 1:
        return f"the parameters are on {len(devices)} devices"
    (device,) = devices
    if device.type != "cuda" and not (device.type == "cpu" and kernels().is_interpreted()):
        return f"its kernels run on CUDA devices, and the parameters are on {device}"
    strange = next((piece for piece in pieces if not has_kernel(piece)), None)
    if strange is not None:
        return f"it has no kernel for {type(strange.rule).__name__} on {strange.block.weight.dtype}"
    return None
