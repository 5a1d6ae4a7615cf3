"""Which road a fused optimizer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from halfpeak.core.errors import ConfigError
from halfpeak.fused.blocks import Block
from halfpeak.fused.roads.base import Road
from halfpeak.fused.roads.compiled import CompiledRoad
from halfpeak.fused.roads.eager import EagerRoad

RoadName = Literal["auto", "eager", "compiled", "triton"]

WORTH_COMPILING = 2**18
"""Elements from which compiling pays: below, a step takes less than a millisecond on any road."""


def check_wish(wish: str) -> None:
    """Raise ConfigError for an unknown road."""
    if wish not in get_args(RoadName):
        raise ConfigError(f"road={wish!r} must be one of {', '.join(map(repr, get_args(RoadName)))}")


def choose(wish: RoadName, blocks: Sequence[Block]) -> Road:
    """The road for some blocks. It depends on them and on the machine alone, so a resumed run takes the same."""
    if wish == "compiled":
        return CompiledRoad()
    on_cpu = all(block.weight.device.type == "cpu" for block in blocks)
    if wish == "auto" and on_cpu and sum(map(len, blocks)) >= WORTH_COMPILING and has_compiler():
        return CompiledRoad()
    return EagerRoad()


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler."""
    # Not at the top: it takes longer to import than all of halfpeak.
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True
