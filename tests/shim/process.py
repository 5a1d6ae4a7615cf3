"""What a shim may change in a process, written down before and after."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it at the first optimizer, and then renews some of its names
from torch import nn

from laws.source import ROOT

OWNERS = {
    "torch": torch,
    "torch.cuda": torch.cuda,
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


def process_state() -> dict[str, Any]:
    """Modules by name and identity, finders, importers, and every name of torch that a shim could touch."""
    return {
        "modules": {
            name: id(module) for name, module in sys.modules.items() if name.split(".")[0] != "halfpeak"
        },
        "meta_path": [id(finder) for finder in sys.meta_path],
        "path_hooks": [id(hook) for hook in sys.path_hooks],
        "path": list(sys.path),
        "argv": list(sys.argv),
        "importers": {path for path in sys.path_importer_cache if "shim" in path},
        "function modes": torch._C._len_torch_function_stack(),
        **{name: {key: id(value) for key, value in vars(owner).items()} for name, owner in OWNERS.items()},
    }


def run_python(
    arguments: Sequence[str], folder: Path, *, extra_path: Sequence[Path] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python process in ``folder`` that finds this checkout."""
    path = os.pathsep.join(map(str, [ROOT / "src", *extra_path]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def halfpeak_run(
    *arguments: str, folder: Path, extra_path: Sequence[Path] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python -m halfpeak run`` in ``folder``."""
    return run_python(["-m", "halfpeak", "run", *arguments], folder, extra_path=extra_path, **environment)
