"""Snapshots of the process state that a shim may change, and their comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's first optimizer would import it later and rebind names of torch
from torch import nn

from halfpeak.shim.installing import SHIMS
from laws.source import ROOT

OWNERS = {
    "torch": torch,
    "torch.cuda": torch.cuda,
    "torch.accelerator": torch.accelerator,
    "torch.cuda.nvtx": torch.cuda.nvtx,
    "torch.cuda.profiler": torch.cuda.profiler,
    "torch.distributed": torch.distributed,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
    "torch.autocast": torch.autocast,
    "torch.nn.Module": nn.Module,
    "torch.nn.DataParallel": nn.DataParallel,
    "torch.nn.parallel.DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": nn.functional,
}


PACKAGES = {package for shim in SHIMS.values() for package in shim.packages}
"""Import names that come from a shim."""


def process_state() -> dict[str, Any]:
    """Modules by name and id, finders, and every name of torch that a shim could change."""
    return {
        "modules": {name: id(module) for name, module in sys.modules.items()},
        "meta_path": [id(finder) for finder in sys.meta_path],
        "path_hooks": [id(hook) for hook in sys.path_hooks],
        "path": list(sys.path),
        "argv": list(sys.argv),
        "function modes": torch._C._len_torch_function_stack(),
        **{name: names_of(owner) for name, owner in OWNERS.items()},
    }


def names_of(owner: Any) -> dict[str, int]:
    """The ids of an owner's names, except those that Python creates at the first access."""
    lazy = ("__slotnames__", "__annotations__", "__annotate__", "__annotations_cache__")
    return {name: id(value) for name, value in vars(owner).items() if name not in lazy}


def changes(before: dict[str, Any]) -> dict[str, Any]:
    """The differences from ``before``. A new module counts only if it is a shim's."""
    now = process_state()
    old, new = before["modules"], now["modules"]
    modules = {name for name, module in old.items() if new.get(name) != module}
    modules |= {name for name in new.keys() - old.keys() if name.split(".")[0] in PACKAGES}
    others = {
        key: (value, now[key]) for key, value in before.items() if key != "modules" and now[key] != value
    }
    return {**others, **({"modules": modules} if modules else {})}


def run_python(
    arguments: Sequence[str], folder: Path, *, extra_path: Sequence[Path] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, with this checkout on its path."""
    path = os.pathsep.join(map(str, [ROOT / "src", *extra_path]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
