"""Lightning 1 and 2: ``state_dict``, ``optimizer_states``, and a precision plugin's loss scale under its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.checkpoint.canonical import HALFPEAK_KEY, Contents
from halfpeak.checkpoint.formats.format import Files, Format, Target, add_entries, grad_scaler_entry


def read(tree: Any) -> Contents | None:
    """The contents of a run of Lightning."""
    if not isinstance(tree, Mapping) or not any(
        str(key).startswith("pytorch-lightning_version") for key in tree
    ):
        return None
    contents = Contents(form="lightning", version=str(tree.get("pytorch-lightning_version", "")))

    def add(key: str, value: Any) -> bool:
        return (
            key in ("pytorch-lightning_version", HALFPEAK_KEY)
            or contents.add_counter(key, value)
            or (key == "state_dict" and contents.add_model(key, value))
            or (key == "optimizer_states" and contents.add_optimizers(key, value))
            or contents.add_scaler(key, value)
        )

    add_entries(contents, tree.items(), add)
    contents.add_halfpeak_entry(tree.get(HALFPEAK_KEY))
    return contents


def write(contents: Contents) -> Files:
    """A checkpoint for Lightning 2 with ``precision="16-mixed"``."""
    return {
        "callbacks": {},
        "lr_schedulers": [],
        **contents.rest,
        "epoch": contents.epoch or 0,
        "global_step": contents.iteration or 0,
        # The first version whose checkpoints have this shape: later ones know how to bring it up to date.
        "pytorch-lightning_version": "2.0.0",
        "state_dict": contents.model,
        "optimizer_states": list(contents.optimizers.values()),
        **grad_scaler_entry("MixedPrecision", contents),
        **contents.halfpeak_entry,
    }


FORMAT = Format(
    "lightning",
    "a run of Lightning",
    read,
    Target(
        "a checkpoint of Lightning 2 with precision 16-mixed", write, optimizers=None, family=("lightning",)
    ),
)
