"""Checkpoint files of a run: written as halfpeak's own, read also where mmcv wrote plain data."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfpeak.checkpoint import load, load_plain
from halfpeak.checkpoint.trailer import looks_complete
from halfpeak.core.errors import StateError
from halfpeak.optim.wrapped import unwrap

StrPath = str | os.PathLike[str]
Location = torch.device | str | None
ReviseKeys = Sequence[tuple[str, str]]


def read(path: StrPath, map_location: Location = "cpu") -> dict[str, Any]:
    """What a checkpoint file holds: halfpeak's, with its digest checked, or plain data of another program.

    Args:
        map_location: as in ``torch.load``; ``"default"`` means the host.

    Raises:
        CheckpointError: the file is damaged, missing, or holds something other than plain data.
        StateError: it holds no dict.
    """
    where = "cpu" if map_location == "default" else map_location
    if looks_complete(Path(path)):
        return load(path, map_location=where)
    found = load_plain(path, map_location=where)
    if not isinstance(found, dict):
        raise StateError(f"{path} holds a {type(found).__name__}; a checkpoint is a dict")
    return found


def load_weights(
    model: nn.Module,
    checkpoint: Mapping[str, Any],
    *,
    strict: bool = False,
    revise_keys: ReviseKeys = ((r"^module\.", ""),),
    logger: Logger | None = None,
) -> None:
    """Load the ``state_dict`` of a checkpoint, or a checkpoint that is one, into a model.

    Args:
        strict: refuse what does not fit exactly; otherwise it is left out, and the log says so.
        revise_keys: pairs of a regular expression and its replacement, applied to each key in turn.

    Raises:
        StateError: ``strict``, and the keys or shapes differ. Nothing was loaded.
    """
    given: Mapping[str, Any] = checkpoint.get("state_dict", checkpoint)
    for pattern, replacement in revise_keys:
        given = {re.sub(pattern, replacement, key): value for key, value in given.items()}
    model = unwrap(model)
    own = model.state_dict()
    problems = _problems(own, given)
    if problems and strict:
        raise StateError(f"the model and the checkpoint do not match: {'; '.join(problems)}")
    if problems and logger is not None:
        logger.warning("The model and the loaded state dict do not match exactly\n%s", "\n".join(problems))
    fitting = {key: value for key, value in given.items() if key in own and _shape(own[key]) == _shape(value)}
    model.load_state_dict(fitting, strict=False)


def link_latest(target: Path) -> None:
    """Let ``latest.pth`` beside a file lead to it."""
    link = target.parent / "latest.pth"
    temporary = target.parent / ".latest.pth.tmp"
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target.name)
    except (OSError, NotImplementedError):  # a file system without links
        shutil.copy(target, temporary)
    os.replace(temporary, link)


def _problems(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    unexpected = [key for key in given if key not in own]
    missing = [key for key in own if key not in given]
    resized = [
        f"{key} is {_shape(given[key])} in the checkpoint and {_shape(own[key])} in the model"
        for key in own
        if key in given and _shape(own[key]) != _shape(given[key])
    ]
    found = [f"unexpected key in source state_dict: {', '.join(unexpected)}"] if unexpected else []
    found += [f"missing keys in source state_dict: {', '.join(missing)}"] if missing else []
    return found + resized


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
