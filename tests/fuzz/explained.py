"""Where the two sides may differ in the last digits, and why."""

from __future__ import annotations

from typing import NamedTuple

from fuzz.config import Config, Planned


class Tolerance(NamedTuple):
    """How far apart values may be, and the reason; nothing at all where there is none."""

    relative: float = 0.0
    absolute: float = 0.0
    reason: str = ""


EXACT = Tolerance()
ANOTHER_ORDER = Tolerance(
    0.02,
    1e-3,
    "squares are added up in another order, by a fused step in that of its memory and at O3 dtype by dtype, so the norm by "
    "which gradients are clipped differs in the last digit; from there on a weight may round to the next low number",
)
ANOTHER_LAYOUT = Tolerance(
    0.02,
    1e-3,
    "the memory of a fused optimizer over masters is cut differently from that of one over the same tensors alone, and the "
    "last elements of a block go through other instructions of the processor; from there on a weight may round to the next "
    "low number",
)


WITHOUT_ROUNDING = Tolerance(
    0.02,
    1e-3,
    "a fused step divides gradients of low weights by the loss scale in float32, where others round the quotient",
)


def tolerance_of(config: Config) -> Tolerance:
    """What a configuration is compared by."""
    fused = any(name.startswith("Fused") for name in config.optimizers)
    if fused and config.has_masters:
        return ANOTHER_LAYOUT
    if fused and config.level == "O3":
        return WITHOUT_ROUNDING
    if (fused or config.level == "O3") and config.clip is not None and config.clip[0] == "norm":
        return ANOTHER_ORDER
    return EXACT


def known(config: Config, planned: Planned, micro: int) -> str | None:
    """Why an event is left out of a configuration: what halfpeak is known to do wrongly there, until it is mended.

    Args:
        config: of the run.
        planned: the event.
        micro: completed calls of ``step``.
    """
    name, masters = planned.name, config.has_masters
    place = micro % config.accumulate
    inside = place > 0 or (config.accumulate > 1 and planned.moment in ("before backward", "before step"))
    between_passes = place > 0 if planned.moment != "before step" else place < config.accumulate - 1
    if name.startswith("gradients ") and between_passes and not masters:
        return "edits between the passes of a window over float32 weights drop its earlier passes"
    if masters and name == "weights through .data":
        return "leaves no trace"
    if masters and name.startswith("zero_grad of the model"):
        return "does not reach masters"
    if name.startswith("zero_grad") and (config.is_fused or (between_passes and not masters)):
        return "an overflow that nobody has read lowers the scale or not, as somebody has looked at the gradients"
    if name == "add a group" and config.accumulate > 1:
        return "what lay in its gradients is added in another order"
    if name == "add a group" and (inside or planned.moment in ("before backward", "before step")):
        return "the earlier gradients of its window are lost"
    return None
