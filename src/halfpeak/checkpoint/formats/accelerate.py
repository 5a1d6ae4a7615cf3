"""Folders of accelerate's save_state and of transformers: a file per model and optimizer, and ``scaler.pt``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from halfpeak.checkpoint.canonical import Contents, is_weights
from halfpeak.checkpoint.file import save
from halfpeak.checkpoint.formats.format import Files, Format, Target, grad_scaler_entry
from halfpeak.checkpoint.open import Folder
from halfpeak.checkpoint.temporary import temporary_folder

_MODEL: Final = re.compile(r"(pytorch_)?model(_\d+)?\.(bin|safetensors)")
_SHARD: Final = re.compile(r"((pytorch_)?model)-\d+-of-\d+\.(bin|safetensors)")
_OPTIMIZER: Final = re.compile(r"optimizer(_\d+)?\.(bin|pt)")
_HALFPEAK: Final = "halfpeak.bin"
"""The file of the state that only halfpeak understands; accelerate does not look at it."""


def read(files: Folder) -> Contents:
    """The contents of a folder. A folder with only weights gets the format ``weights``."""
    contents = Contents()

    def add(name: str, value: Any) -> bool:
        shard = _SHARD.fullmatch(name)
        if shard is not None and is_weights(value):
            # One model saved in several files.
            return contents.add_model(shard[1], {**contents.models.get(shard[1], {}), **value})
        return (
            (_MODEL.fullmatch(name) is not None and contents.add_model(name, value))
            or (_OPTIMIZER.fullmatch(name) is not None and contents.add_optimizer(name, value))
            or (name == "scaler.pt" and contents.add_scaler(name, value))
        )

    contents.rest = {name: value for name, value in files.items() if not add(name, value)}
    if _HALFPEAK in contents.rest:
        contents.add_halfpeak_entry(contents.rest.pop(_HALFPEAK))
    random = any(name.startswith(("random_states", "rng_state")) for name in contents.rest)
    if contents.optimizers or contents.scalers or random:
        contents.form = "accelerate"
    elif contents.models:
        contents.form = "weights"
    return contents


def write(contents: Contents) -> Files:
    """The files of a folder for accelerate's ``load_state``, by name."""

    def name(stem: str, number: int) -> str:
        return f"{stem}.bin" if number == 0 else f"{stem}_{number}.bin"

    return {
        **{name("pytorch_model", i): model for i, model in enumerate(contents.models.values())},
        **{name("optimizer", i): optimizer for i, optimizer in enumerate(contents.optimizers.values())},
        **grad_scaler_entry("scaler.pt", contents),
        **contents.halfpeak_entry(_HALFPEAK),
    }


def store(place: Path, files: Files) -> None:
    """Write the whole folder or nothing."""
    with temporary_folder(place) as folder:
        for name, state in files.items():
            save(folder / name, state)


FORMAT = Format(
    "accelerate",
    "a folder of accelerate's save_state, or a checkpoint folder of transformers",
    target=Target(
        "a folder for accelerate's load_state",
        write,
        models=None,
        optimizers=None,
        keeps_counters=False,
        store=store,
    ),
)
