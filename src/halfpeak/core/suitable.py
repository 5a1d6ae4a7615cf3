"""Which opt level suits a device, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

AUTO: Final = "auto"
"""The name that stands for the level that suits the device."""

_logger = logging.getLogger("halfpeak")


class Advice(NamedTuple):
    """An opt level and the reason for it."""

    level: str
    reason: str


def suitable_level(device: torch.device | str) -> Advice:
    """O5 (bfloat16) on a CPU and wherever the device computes bfloat16 itself, O2 (float16) elsewhere.

    bfloat16 has the range of float32, so nothing overflows and no loss scale is needed; where it is only emulated,
    float16 with a dynamic loss scale is the fast low dtype.

    >>> suitable_level("cpu").level
    'O5'
    """
    device = torch.device(device)
    if device.type == "cpu":
        return Advice("O5", "a CPU computes bfloat16 at about the speed of float32, and float16 far slower")
    if _has_native_bf16(device):
        return Advice("O5", f"{device.type} computes bfloat16 natively, which needs no loss scale")
    return Advice("O2", f"this {device.type} device has no native bfloat16; float16 is its fast low dtype")


def level_for(level: str, models: Sequence[nn.Module]) -> str:
    """``level`` itself, or for ``"auto"`` the level that suits the device of the first parameter, which is also logged.

    >>> level_for("auto", [nn.Linear(2, 2)]), level_for("O1", [])
    ('O5', 'O1')
    """
    if level != AUTO:
        return level
    device = next((p.device for model in models for p in nn.Module.parameters(model)), torch.device("cpu"))
    if device.type == "meta":
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    advice = suitable_level(device)
    _logger.info(
        "level %s: %s; write level=%r to keep it everywhere", advice.level, advice.reason, advice.level
    )
    return advice.level


def _has_native_bf16(device: torch.device) -> bool:
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
