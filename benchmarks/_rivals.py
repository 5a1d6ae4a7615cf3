"""Other packages' optimizers, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

Optimizers = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def optimizers(device: str) -> dict[str, Optimizers]:
    """AdamW of DeepSpeed, which compiles it for minutes at its first call ever, and of bitsandbytes."""
    found: dict[str, Optimizers] = {}
    if find_spec("deepspeed") is not None:
        from deepspeed.ops import adam

        # On an accelerator it is FusedAdam, which is AdamW unless told otherwise; so is that for the CPU.
        found["DeepSpeed"] = adam.DeepSpeedCPUAdam if device == "cpu" else adam.FusedAdam
    if find_spec("bitsandbytes") is not None:
        import bitsandbytes

        found["bitsandbytes AdamW"] = bitsandbytes.optim.AdamW
        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    return found
