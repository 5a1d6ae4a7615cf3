"""Small helpers for scripts around a run: seeds, loggers, directories. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import getpass
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfpeak.optim.registry import Registry
from halfpeak.runner.checkpoint import StrPath
from halfpeak.runner.distributed import get_dist_info


def set_random_seed(seed: int, deterministic: bool = False, use_rank_shift: bool = False) -> None:
    """Seed Python, torch, its accelerators and, if it is imported, NumPy.

    Args:
        deterministic: make cuDNN use deterministic algorithms.
        use_rank_shift: add the rank to ``seed``, so that ranks draw different numbers.
    """
    seed += get_dist_info()[0] if use_rank_shift else 0
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def get_host_info() -> str:
    """``user@host``; empty if either is unknown."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container whose user has no name
        return ""


def get_time_str() -> str:
    """The local time as text for file names, such as ``20230131_235959``."""
    return time.strftime("%Y%m%d_%H%M%S", time.localtime())


def get_logger(
    name: str, log_file: StrPath | None = None, log_level: int | str = logging.INFO, file_mode: str = "w"
) -> logging.Logger:
    """The logger with that name. The first call sets it up: stderr and, on rank 0, a file. Other ranks log errors."""
    logger = logging.getLogger(name)
    parents = [logging.getLogger(name[:end]) for end, letter in enumerate(name) if letter == "."]
    if logger.handlers or any(parent.handlers for parent in parents):
        return logger
    rank, _ = get_dist_info()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if rank == 0 and log_file is not None:
        handlers.append(logging.FileHandler(log_file, file_mode))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
        handler.setLevel(log_level)
        logger.addHandler(handler)
    logger.setLevel(log_level if rank == 0 else logging.ERROR)
    return logger


def print_log(msg: object, logger: logging.Logger | str | None = None, level: int = logging.INFO) -> None:
    """Log a message with ``logger``, or with the logger of that name. None prints it, and ``"silent"`` drops it."""
    if logger is None:
        sys.stdout.write(f"{msg}\n")
    elif logger != "silent":
        (get_logger(logger) if isinstance(logger, str) else logger).log(level, msg)


def mkdir_or_exist(dir_name: StrPath, mode: int = 0o777) -> None:
    """Create a directory and its parents if missing; do nothing for an empty name."""
    if str(dir_name):
        Path(dir_name).expanduser().mkdir(mode=mode, parents=True, exist_ok=True)


def symlink(src: StrPath, dst: StrPath, overwrite: bool = True) -> None:
    """Make ``dst`` a symbolic link to ``src``."""
    if overwrite:
        Path(dst).unlink(missing_ok=True)
    Path(dst).symlink_to(src)


def build_from_cfg(
    cfg: Mapping[str, Any], registry: Registry, default_args: Mapping[str, Any] | None = None
) -> Any:
    """Build the object that ``cfg`` describes; see :meth:`~halfpeak.optim.Registry.build`."""
    return registry.build(cfg, default_args)
