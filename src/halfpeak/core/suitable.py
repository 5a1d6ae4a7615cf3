"""Which opt level suits a device, and why: the rule of ``prepare``, ``halfpeak train``, ``halfpeak env`` and ``doctor``.

A 16-bit level pays where the device computes its dtype itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from halfpeak.core.levels import Level, get_level

AUTO: Final = "auto"
"""The name that stands for the level that suits the device."""

SAFEST: Final = ("O0", "O4", "O5", "O1", "O2", "O3")
"""The levels, closest to float32 first."""

_logger = logging.getLogger("halfpeak")


class Advice(NamedTuple):
    """An opt level and the reason for it."""

    level: str
    reason: str


def suitable_level(device: torch.device | str) -> Advice:
    """O5 (bfloat16) where the device computes bfloat16 itself; elsewhere O0 on a CPU, and O2 (float16) on an accelerator.

    bfloat16 has the range of float32, so nothing overflows and no loss scale is needed. A CPU without instructions for it
    computes it more slowly than float32, and float16 too; an accelerator without it has float16 as its fast low dtype.

    >>> suitable_level("cpu").level in ("O0", "O5")
    True
    """
    device = torch.device(device)
    name = "CPU" if device.type == "cpu" else f"{device.type} device"
    if _has_native_bf16(device):
        return Advice("O5", f"this {name} computes bfloat16 natively, which needs no loss scale")
    if device.type == "cpu":
        return Advice(
            "O0", "this CPU has no instructions for bfloat16 and float16, and computes float32 faster"
        )
    return Advice("O2", f"this {name} has no native bfloat16; float16 is its fast low dtype")


def first_choice(device: torch.device | str, levels: Iterable[str]) -> str:
    """Of some levels, the one that suits the device, or else the one closest to float32.

    >>> first_choice("cpu", ["O3", "O1"])
    'O1'
    """
    levels, suitable = set(levels), suitable_level(device).level
    return suitable if suitable in levels else min(levels, key=SAFEST.index)


def level_for(level: str | Level, models: Sequence[nn.Module]) -> Level:
    """The level, by its name; ``"auto"`` is the level that suits the device of the first parameter, which is also logged.

    >>> level_for("auto", [nn.Linear(2, 2)]).name, level_for("O1", []).name
    ('O5', 'O1')

    Raises:
        ConfigError: there is no such level.
    """
    if level != AUTO:
        return get_level(level)
    device = next((p.device for model in models for p in nn.Module.parameters(model)), torch.device("cpu"))
    if device.type == "meta":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    advice = suitable_level(device)
    _logger.info(
        "level %s: %s; write level=%r to keep it everywhere", advice.level, advice.reason, advice.level
    )
    return get_level(advice.level)


def _has_native_bf16(device: torch.device) -> bool:
    if device.type == "cpu":
        # "bf16" is that of ARM. Without oneDNN, as in torch for macOS, no product uses these instructions.
        can = torch.cpu.get_capabilities()
        return torch.backends.mkldnn.is_available() and any(
            can.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16")
        )
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    module = torch.get_device_module(device)
    if hasattr(module, "is_bf16_supported"):
        return bool(module.is_bf16_supported())
    try:
        return torch.bfloat16 in torch.accelerator.get_device_capability(device)["supported_dtypes"]
    except (RuntimeError, NotImplementedError, KeyError):  # a backend that does not say: take the safe level
        return False


def has_matrix_units(device: torch.device) -> bool:
    """Whether the device has units for products of 16-bit matrices, which make these far more than twice as fast.

    Accelerators are taken to have them.
    """
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16", False))
