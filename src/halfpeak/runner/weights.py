"""Weights in files, for scripts without a runner: ``load_checkpoint``, ``save_checkpoint``. Answers to mmcv 1.7.2."""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import Logger
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.checkpoint import save
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.optim.wrapped import unwrap
from halfpeak.runner.checkpoint import Location, ReviseKeys, StrPath, load_weights, read


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
        filename: a file of halfpeak, or of mmcv if it holds plain data.
        map_location: as in ``torch.load``.
        strict: refuse what does not fit exactly; otherwise it is left out, and ``logger`` says so.
        revise_keys: pairs of a regular expression and its replacement, applied to each key.

    Raises:
        ConfigError: an address instead of a file.
        CheckpointError: the file is damaged, missing, or holds something other than plain data.
        StateError: ``strict``, and keys or shapes differ. Nothing was loaded.
    """
    if "://" in str(filename):
        raise ConfigError(f"{filename} is an address; download it, and write the path of the file")
    checkpoint = read(filename, map_location)
    load_weights(model, checkpoint, strict=strict, revise_keys=revise_keys, logger=logger)
    return checkpoint


def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = False, logger: Logger | None = None
) -> None:
    """Load weights; what does not fit is left out, and ``logger`` says so, unless ``strict``.

    Raises:
        StateError: ``strict``, and keys or shapes differ. Nothing was loaded.
    """
    load_weights(module, {"state_dict": state_dict}, strict=strict, revise_keys=(), logger=logger)


def save_checkpoint(
    model: nn.Module,
    filename: StrPath,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Save ``meta``, the weights and the state of the optimizer to a file: whole or not at all, with a digest.

    Raises:
        ConfigTypeError: ``meta`` is not a dict.
        CheckpointError: something in it is not plain data (the message says where), or it cannot be written.
    """
    if meta is not None and not isinstance(meta, Mapping):
        raise ConfigTypeError(f"meta must be a dict, not {type(meta).__name__}; write meta=dict(seed=0)")
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
    """The ``state_dict`` of the module that a wrapper is around, or of the module itself."""
    given = {} if destination is None else {"destination": destination}
    return unwrap(module).state_dict(prefix=prefix, keep_vars=keep_vars, **given)


def weights_to_cpu(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights on the host."""
    return {name: value.cpu() for name, value in state_dict.items()}
