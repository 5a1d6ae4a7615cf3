"""Checkpoint files: reading, writing and naming them, and the functions for scripts without a runner.

Reads plain data written by mmcv, too. Compatible with mmcv 1.7.2.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.checkpoint import load, save
from halfpeak.checkpoint.temporary import temporary_path
from halfpeak.core.errors import CheckpointError, ConfigError, StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_mapping
from halfpeak.optim.arguments import require_dict
from halfpeak.optim.unwrap import unwrap

StrPath = str | os.PathLike[str]
Location = torch.device | str | None
ReviseKeys = Sequence[tuple[str, str]]


def read_checkpoint(path: StrPath, map_location: Location = "cpu") -> dict[str, Any]:
    """The content of a checkpoint file, of halfpeak or of another program, with its checksums checked.

    Args:
        map_location: as in ``torch.load``; ``"default"`` means the CPU.

    Raises:
        CheckpointError: the file is damaged, missing, or holds something other than a dict of plain data.
    """
    return load(path, map_location="cpu" if map_location == "default" else map_location)


def load_weights(
    model: nn.Module,
    checkpoint: Mapping[str, Any],
    *,
    strict: bool = False,
    revise_keys: ReviseKeys = ((r"^module\.", ""),),
    logger: Logger | None = None,
) -> None:
    """Load the weights of a checkpoint, which has or is a ``state_dict``; see :func:`load_checkpoint`.

    Raises:
        StateError: with ``strict``, keys or shapes differ. Nothing was loaded.
    """
    given = require_mapping(checkpoint.get("state_dict", checkpoint), "the weights of a checkpoint")
    unnamed = [key for key in given if not isinstance(key, str)]
    if unnamed:
        raise StateError(f"the keys of a checkpoint's weights must be strings, not {short_repr(unnamed[0])}")
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
    """Make ``latest.pth`` in the same directory a link to ``target``.

    Raises:
        CheckpointError: a directory has that name, or the operating system refuses.
    """
    link = target.parent / "latest.pth"
    # A unique name, because two writers in one directory must not collide.
    spare = temporary_path(link)
    try:
        try:
            spare.symlink_to(target.name)
        except (OSError, NotImplementedError):  # a file system without links
            shutil.copy(target, spare)
        os.replace(spare, link)
    except OSError as error:
        spare.unlink(missing_ok=True)
        raise CheckpointError(
            f"{target} is written, but {link} cannot be made a link to it: {error}"
        ) from None


def _problems(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    unexpected = [key for key in given if key not in own]
    missing = [key for key in own if key not in given]
    resized = [
        f"{key} is {_shape(given[key])} in the checkpoint and {_shape(own[key])} in the model"
        for key in own
        if key in given and _shape(own[key]) != _shape(given[key])
    ]
    found = [f"unexpected key in source state_dict: {listed(unexpected)}"] if unexpected else []
    found += [f"missing keys in source state_dict: {listed(missing)}"] if missing else []
    return found + resized


def listed(keys: Sequence[str]) -> str:
    """The keys as text for a log; unprintable keys are escaped, because the log may be a terminal."""
    return ", ".join(key if str(key).isprintable() else short_repr(key) for key in keys)


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def load_checkpoint(
    model: nn.Module,
    filename: StrPath,
    map_location: Location = None,
    strict: bool = False,
    logger: Logger | None = None,
    revise_keys: ReviseKeys = ((r"^module\.", ""),),
) -> dict[str, Any]:
    """Load the weights in a file into a model, and return everything in the file.

    Args:
        filename: a file of halfpeak, or a file of mmcv that holds plain data.
        map_location: as in ``torch.load``.
        strict: raise if keys or shapes differ; otherwise skip those entries and log a warning.
        revise_keys: pairs of a regular expression and its replacement, applied to each key.

    Raises:
        ConfigError: ``filename`` is a URL.
        CheckpointError: the file is damaged, missing, or holds something other than plain data.
        StateError: with ``strict``, keys or shapes differ. Nothing was loaded.
    """
    checkpoint = load_file(filename, map_location, logger)
    load_weights(model, checkpoint, strict=strict, revise_keys=revise_keys, logger=logger)
    return checkpoint


def load_file(
    filename: StrPath, map_location: Location = None, logger: Logger | None = None
) -> dict[str, Any]:
    """Everything in a file of plain data, as backbones read pretrained weights; mmcv's ``_load_checkpoint``.

    Raises:
        ConfigError, CheckpointError: as :func:`load_checkpoint`.
    """
    if "://" in str(filename):
        raise ConfigError(f"{filename} is a URL; download the file and pass its path")
    if logger is not None:
        logger.info("load checkpoint from local path: %s", filename)
    return read_checkpoint(filename, map_location)


class CheckpointLoader:
    """mmcv's class with :func:`load_file` as a method."""

    load_checkpoint = staticmethod(load_file)


def load_prefix(prefix: str, filename: StrPath, map_location: Location = None) -> dict[str, Any]:
    """The weights whose names begin with ``prefix`` and a dot, named without it; mmcv's ``_load_checkpoint_with_prefix``.

    Raises:
        StateError: there are none.
        ConfigError, CheckpointError: as :func:`load_checkpoint`.
    """
    checkpoint = load_file(filename, map_location)
    weights = require_mapping(checkpoint.get("state_dict", checkpoint), "the weights of a checkpoint")
    start = f"{prefix.removesuffix('.')}."
    found = {key.removeprefix(start): value for key, value in weights.items() if key.startswith(start)}
    if not found:
        raise StateError(f"{filename} has no weights below {prefix!r}, only {listed(list(weights)[:5])}, ...")
    return found


def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = False, logger: Logger | None = None
) -> None:
    """Load weights. Unless ``strict``, entries that do not fit are skipped with a warning to ``logger``.

    Raises:
        StateError: with ``strict``, keys or shapes differ. Nothing was loaded.
    """
    load_weights(module, {"state_dict": state_dict}, strict=strict, revise_keys=(), logger=logger)


def save_checkpoint(
    model: nn.Module,
    filename: StrPath,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Save ``meta``, the weights and the optimizer state to a file, atomically and with checksums.

    Raises:
        ConfigTypeError: ``meta`` is not a dict.
        CheckpointError: some value is not plain data (the message names it), or the file cannot be written.
    """
    require_dict("meta", {} if meta is None else meta, "meta=dict(seed=0)")
    state: dict[str, Any] = {
        "meta": {**(meta or {}), "time": time.asctime()},
        "state_dict": weights_to_cpu(unwrap(model).state_dict()),
    }
    if isinstance(optimizer, Mapping):
        state["optimizer"] = {name: one.state_dict() for name, one in optimizer.items()}
    elif optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
    save(filename, state, keep_previous=False)


def get_state_dict(
    module: nn.Module, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> dict[str, Any]:
    """The ``state_dict`` of the module, without the prefix of a wrapper."""
    given = {} if destination is None else {"destination": destination}
    return unwrap(module).state_dict(prefix=prefix, keep_vars=keep_vars, **given)


def weights_to_cpu(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the dict with all tensors on the CPU."""
    return {name: value.cpu() for name, value in state_dict.items()}


def checkpoint_path(out_dir: StrPath, filename_tmpl: str, number: int) -> Path:
    """The path that a template such as ``"epoch_{}.pth"`` gives; ConfigError unless it takes one number.

    Creates the directory.
    """
    try:
        name = filename_tmpl.format(number)
    except (AttributeError, IndexError, KeyError, ValueError):
        raise ConfigError(
            f"filename_tmpl={short_repr(filename_tmpl)} must have one place for the number; "
            "write filename_tmpl='epoch_{}.pth'"
        ) from None
    directory = Path(out_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def checkpoint_directory(out_dir: StrPath | None, work_dir: str | None, owner: str) -> str:
    """The directory in which a hook saves: ``work_dir``, or a directory of the same name inside ``out_dir``.

    ConfigError if both are None.

    >>> checkpoint_directory(None, "runs/a", "X"), checkpoint_directory("store", "runs/a", "X")
    ('runs/a', 'store/a')
    """
    if out_dir is None:
        if work_dir is None:
            raise ConfigError(
                f"{owner} has no place to save; give the runner work_dir=..., or the hook out_dir=..."
            )
        return work_dir
    if work_dir is None or Path(out_dir) == Path(work_dir):
        return str(out_dir)
    return str(Path(out_dir) / Path(work_dir).name)
