"""Checkpoints of Lightning 1 and 2: ``state_dict``, ``optimizer_states``, and a loss scale under the plugin's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.formats.format import Files, Format, Target, grad_scaler_entry


def is_form(tree: Mapping[Any, Any], contents: Contents) -> bool:
    """Whether a dict is a checkpoint of Lightning."""
    return any(str(key).startswith("pytorch-lightning_version") for key in tree)


def write(contents: Contents) -> Files:
    """A checkpoint for Lightning 2 with ``precision="16-mixed"``."""
    return {
        "callbacks": {},
        "lr_schedulers": [],
        **contents.rest,
        "epoch": contents.epoch or 0,
        "global_step": contents.iteration or 0,
        # The first version with this layout: later versions of Lightning migrate it.
        "pytorch-lightning_version": "2.0.0",
        "state_dict": contents.model,
        "optimizer_states": list(contents.optimizers.values()),
        **grad_scaler_entry("MixedPrecision", contents),
        **contents.halfpeak_entry(),
    }


FORMAT = Format(
    "lightning",
    "a run of Lightning",
    is_form,
    Target(
        "a checkpoint of Lightning 2 with precision 16-mixed", write, optimizers=None, family=("lightning",)
    ),
)
