"""The machine of a measurement, for reports: names of devices, versions."""

from __future__ import annotations

import platform
from importlib import metadata

import torch


def device_name(device: torch.device) -> str:
    """The name of a device, and for a CPU the number of torch's threads.

    >>> device_name(torch.device("cpu")).endswith(("thread", "threads"))
    True
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{processor()}, {threads} thread{'s' * (threads != 1)}"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device)


def processor() -> str:
    """The name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.processor() or "unknown")
    except OSError:
        return platform.processor() or "unknown"


def versions() -> str:
    """The versions of halfpeak, torch and Python.

    >>> versions().startswith("halfpeak ")
    True
    """
    return f"halfpeak {metadata.version('halfpeak')}, torch {torch.__version__}, Python {platform.python_version()}"
