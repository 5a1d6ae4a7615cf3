"""``halfpeak env``: prints the facts about the machine that a bug report needs, on one screen."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

import torch

from halfpeak import __version__
from halfpeak.cli.arguments import Arguments
from halfpeak.cli.text import printable, size
from halfpeak.core.suitable import suitable_level
from halfpeak.insight.machine import processor
from halfpeak.ops.triton import is_installed
from halfpeak.recipes.device import find_device

_OTHERS = (
    "numpy",
    "triton",
    "apex",
    "mmcv",
    "mmengine",
    "lightning",
    "accelerate",
    "transformers",
    "timm",
    "rich",
    "matplotlib",
)
"""Packages whose versions may matter for a bug."""

_VARIABLES = (
    "OMP_",
    "MKL_",
    "CUDA_",
    "CUBLAS_",
    "NCCL_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "WORLD_SIZE",
    "CXX",
)
"""Prefixes of environment variables that change the behaviour of torch."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Arguments("env", "Say what a report of a fault needs: versions, devices, backends, compiler.")
    parser.parse_args(arguments)
    sys.stdout.write("".join(f"{label:<12}{printable(text)}\n" for label, text in rows()))
    return 0


def rows() -> Iterator[tuple[str, str]]:
    """The lines of the output, as pairs of label and text."""
    yield "halfpeak", __version__
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    cuda, rocm = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "no CUDA"
    yield "torch", f"{torch.__version__} ({built}{f', cuDNN {cudnn}' if cudnn else ''})"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.platform()}, {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}"
    device = find_device("auto")
    yield from _accelerators(device)
    level, reason = suitable_level(device)
    yield "level", f"{level} suits this device: {reason}"
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    yield (
        "backends",
        f"eager; compiled: {f'with {compiler}' if compiler else 'no C++ compiler'}; "
        f"triton: {'installed' if is_installed() else 'not installed'}",
    )
    yield "packages", ", ".join(_packages()) or "none of those that matter"
    known = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    yield "variables", ", ".join(f"{name}={os.environ[name]}" for name in known) or "none"


def _accelerators(device: torch.device) -> Iterator[tuple[str, str]]:
    if device.type == "cpu":
        yield "accelerator", "none"
        return
    for index in range(torch.accelerator.device_count()):
        told = ""
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(index)
            told = f" {found.name}, {size(found.total_memory)}, capability {found.major}.{found.minor}"
        yield f"{device.type}:{index}", told.strip() or "present"


def _packages() -> Iterator[str]:
    for name in _OTHERS:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
