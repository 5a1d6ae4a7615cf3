"""Optimizers and training loops of other packages, as far as these are installed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Optimizers: TypeAlias = Callable[..., Optimizer]
"""Makes an optimizer of parameters, and of hyper-parameters that all of them have."""
Loss: TypeAlias = Callable[[Tensor], Tensor]
Loop: TypeAlias = Callable[[Loss, nn.Module, Optimizer, Tensor, torch.dtype], Callable[[], Tensor]]
"""Makes one training step from a loss, a network, its optimizer, a batch and a low-precision dtype."""


def optimizers(device: str) -> dict[str, Optimizers]:
    """AdamW of DeepSpeed, which compiles for minutes at its first call on a machine, and of bitsandbytes."""
    found: dict[str, Optimizers] = {}
    if find_spec("deepspeed") is not None:
        adam = importlib.import_module("deepspeed.ops.adam")
        # Both are AdamW by default.
        found["DeepSpeed's"] = adam.DeepSpeedCPUAdam if device == "cpu" else adam.FusedAdam
    if find_spec("bitsandbytes") is not None:
        bitsandbytes = importlib.import_module("bitsandbytes.optim")
        found["bitsandbytes'"] = bitsandbytes.AdamW
        found["bitsandbytes', 8-bit state"] = bitsandbytes.AdamW8bit
    return found


def compact(device: str) -> dict[str, Optimizers]:
    """AdamW with small state over weights in bfloat16, as the packages advise for it; says which are left out, and why."""
    known: dict[str, tuple[str, str, dict[str, Any]]] = {
        "FlashOptim": ("flashoptim", "FlashAdamW", {}),
        "torchao, 8 bits, stochastic rounding": (
            "torchao.optim",
            "AdamW8bit",
            {"bf16_stochastic_round": True},
        ),
        "bitsandbytes, 8 bits": ("bitsandbytes.optim", "AdamW8bit", {}),
        "optimi, Kahan sum": ("optimi", "AdamW", {"eps": 1e-8}),
        "TransformerEngine, remainders, float16 moments": (
            "transformer_engine.pytorch.optimizers",
            "FusedAdam",
            {
                "master_weights": True,
                "store_param_remainders": True,
                "exp_avg_dtype": torch.float16,
                "exp_avg_sq_dtype": torch.float16,
            },
        ),
    }
    found: dict[str, Optimizers] = {}
    for name, (module, optimizer, options) in known.items():
        package = module.partition(".")[0]
        if find_spec(package) is None:
            print(f"left out, because it is not installed: {name} ({package})")
        elif device == "cpu" and package in ("flashoptim", "transformer_engine"):
            print(f"left out, because it needs a CUDA device: {name}")
        else:
            found[name] = functools.partial(getattr(importlib.import_module(module), optimizer), **options)
    return found


@functools.cache
def loops(device: str) -> dict[str, Loop]:
    """Mixed-precision loops of other packages, each written as in the package's documentation."""
    known: dict[str, tuple[str, Callable[..., Callable[[], Tensor]]]] = {
        "accelerate": ("accelerate", with_accelerate),
        "Lightning Fabric": ("lightning", with_fabric),
        "mmengine's AmpOptimWrapper": ("mmengine", with_mmengine),
    }
    found = {name: loop for name, (package, loop) in known.items() if find_spec(package) is not None}
    for name in known.keys() - found.keys():
        print(f"left out, because it is not installed: {name}")
    return {name: functools.partial(loop, device=device) for name, loop in found.items()}


def with_accelerate(
    loss_of: Loss, model: nn.Module, optimizer: Optimizer, x: Tensor, low: torch.dtype, *, device: str
) -> Callable[[], Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16" if low is torch.bfloat16 else "fp16", cpu=device == "cpu"
    )
    model, optimizer = accelerator.prepare(model, optimizer)

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return run


def with_fabric(
    loss_of: Loss, model: nn.Module, optimizer: Optimizer, x: Tensor, low: torch.dtype, *, device: str
) -> Callable[[], Tensor]:
    from lightning.fabric import Fabric

    precision = "bf16-mixed" if low is torch.bfloat16 else "16-mixed"
    fabric = Fabric(accelerator=torch.device(device).type, devices=1, precision=precision)
    wrapped, stepper = fabric.setup(model, optimizer)

    def run() -> Tensor:
        stepper.zero_grad()
        loss = loss_of(wrapped(x))
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, stepper, max_norm=1.0, error_if_nonfinite=False)
        stepper.step()
        return loss

    return run


def with_mmengine(
    loss_of: Loss, model: nn.Module, optimizer: Optimizer, x: Tensor, low: torch.dtype, *, device: str
) -> Callable[[], Tensor]:
    from mmengine.optim.optimizer import amp_optimizer_wrapper as module

    # AmpOptimWrapper refuses a machine without a GPU, although everything that it calls works there.
    scaler = functools.partial(torch.amp.GradScaler, device)
    with patch.multiple(module, is_cuda_available=lambda: True, GradScaler=scaler):
        wrapper = module.AmpOptimWrapper(
            optimizer=optimizer, dtype=str(low).removeprefix("torch."), clip_grad={"max_norm": 1.0}
        )

    def run() -> Tensor:
        with wrapper.optim_context(model):
            loss = loss_of(model(x))
        wrapper.update_params(loss)
        return loss

    return run
