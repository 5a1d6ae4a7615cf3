"""Books: what a step writes down beside the weights, so that one kernel can do it where the gradients are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from halfpeak.core.schedule import ScaleConfig, ScaleState


class Books(NamedTuple):
    """What a step needs to know before its gradients are read.

    Attributes:
        config: how the loss scale moves.
        state: where it stands.
        taken: steps so far.          # i32[]
        skipped: steps skipped so far.  # i32[]
        found_inf: anything but zero skips, whatever the gradients are.  # f32[]
        limit: the largest norm of all gradients; None does not clip.
    """

    config: ScaleConfig
    state: ScaleState
    taken: Tensor
    skipped: Tensor
    found_inf: Tensor
    limit: float | None


class Account(NamedTuple):
    """What has come of it. Nothing has moved yet.

    Attributes:
        found_inf: 1 if the step is to be skipped.       # f32[]
        norm: of the true-sized gradients.               # f32[]
        factor: makes gradients true-sized and clips.    # f32[]
        state: where the loss scale stands after the step.
        stuck: its last field as a float.                # f32[]
        taken: steps after it.                           # i32[]
        skipped: steps skipped after it.                 # i32[]
    """

    found_inf: Tensor
    norm: Tensor
    factor: Tensor
    state: ScaleState
    stuck: Tensor
    taken: Tensor
    skipped: Tensor
