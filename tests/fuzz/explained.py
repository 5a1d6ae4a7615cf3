"""Where the two sides may differ in the last digits, and why."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

from fuzz.config import Config, Planned
from fuzz.reference import Reference
from fuzz.subject import Subject


class Tolerance(NamedTuple):
    """How far apart values may be, and the reason; without a reason not at all."""

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
    1e-2,
    "a fused step divides gradients of low weights by the loss scale in float32, where others round the quotient, maybe to "
    "zero; Adam's and Adagrad's updates are as large for the smallest gradients",
)
LARGEST_UPDATE = 0.05
"""The largest update in one step of a fused optimizer: its learning rate."""


def tolerance_of(config: Config) -> Tolerance:
    """The tolerance of a configuration."""
    fused = any(name.startswith("Fused") for name in config.optimizers)
    if fused and config.has_masters:
        return ANOTHER_LAYOUT
    if fused and config.level == "O3":
        return WITHOUT_ROUNDING
    if (fused or config.level == "O3") and config.clip is not None and config.clip[0] == "norm":
        return ANOTHER_ORDER
    return EXACT


def tolerance_of_tensor(config: Config, name: str, tolerance: Tolerance) -> Tolerance:
    """The tolerance of one tensor. A norm cancels the effect of a bias or a gain before it.

    The gradients of such biases and gains are rounding error only (``test_what_a_norm_takes_away_has_no_gradient``). So if
    last digits may differ, these gradients differ altogether, and most optimizers make updates of full size from them.
    """
    if tolerance is EXACT or any(event.name == "evaluation mode from here on" for event in config.events):
        return tolerance
    biases = [f"parts.{i}." for i, part in enumerate(config.parts) if part == "conv and batch norm"]
    if biases and name == "norm" and tolerance.reason:
        # The bias is rounded together with the outputs, so a different bias changes all gradients.
        return tolerance._replace(relative=max(tolerance.relative, 0.05))
    taken_away = [place + of for place in biases for of in ("conv.bias", "norm.running_mean")]
    taken_away += [
        f"parts.{i}.gain" for i, pair in enumerate(pairwise(config.parts)) if pair in GAIN_AND_NORM
    ]
    if name.endswith(tuple(taken_away)):
        return tolerance._replace(absolute=LARGEST_UPDATE * config.iterations)
    return tolerance


GAIN_AND_NORM: Final = {("scalar", "conv and batch norm"), ("scalar", "group norm")}


def known(config: Config, planned: Planned, subject: Subject, reference: Reference) -> str | None:
    """Why an event is left out of a run, where its effect is unspecified; None if it is not left out.

    Args:
        config: of the run.
        planned: the event.
        subject: as it is when the event is due.
        reference: the same.
    """
    mains = [p for o in subject.optimizers for group in o.param_groups for p in group["params"]]
    if planned.name == "freeze through the groups" and any(
        subject.model_of(main).requires_grad and not main.requires_grad for main in mains
    ):
        return "since the last pass a master or its parameter was frozen or unfrozen, which the other side does not show yet"
    if planned.name == "go back to what was saved" and any(
        getattr(group, "fire", None) for optimizer in subject.optimizers for group in optimizer.param_groups
    ):
        return "an exception waits where the learning rate is read, and the check of a state reads it"
    return None
