"""Wrappers equal loops of plain torch, and ``ApexOptimWrapper`` with several losses the engine, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import halfpeak
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, ScalarHistory
from support.nets import OPTIMIZERS, make_batch, make_net, make_normless
from support.snapshot import values

Clipping = Callable[[list[Tensor]], object]

CLIPS: dict[str, tuple[Mapping[str, Any] | None, Clipping]] = {
    "off": (None, lambda parameters: None),
    "norm": ({"max_norm": 0.05}, lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.05)),
    "norm-inf": (
        {"type": "norm", "max_norm": 0.05, "norm_type": "inf"},
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=float("inf")),
    ),
    "norm-loose": ({"max_norm": 1e6}, lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e6)),
    "value": (
        {"type": "value", "clip_value": 0.01},
        lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
    ),
}

WINDOWS = [(1, 4), (3, 6), (3, 7), (3, 8), (4, 2)]
"""Accumulation and the number of backward passes: no remainder, a remainder of one or two, fewer than a window."""


def divisor(i: int, every: int, total: int) -> int:
    return every if i < total - total % every else total % every


def is_boundary(i: int, every: int, total: int) -> bool:
    return (i + 1) % every == 0 or i + 1 == total


def wrapped(wrapper: OptimWrapper, model: nn.Module, total: int, batch: Callable[[int], Any]) -> None:
    """Train through a wrapper."""
    wrapper.initialize_count_status(model, 0, total)
    for i in range(total):
        x, y = batch(i)
        with wrapper.optim_context(model):
            loss = mse_loss(model(x), y)
        wrapper.update_params(loss)


@pytest.mark.parametrize(
    ("optimizer", "clip", "every", "total"),
    [
        (list(OPTIMIZERS)[(i + j) % len(OPTIMIZERS)], clip, *window)
        for i, clip in enumerate(CLIPS)
        for j, window in enumerate(WINDOWS)
    ],
)
def test_float32_is_the_loop_that_anyone_would_write(
    optimizer: str, clip: str, every: int, total: int
) -> None:
    options, clip_by_hand = CLIPS[clip]
    model, reference = make_net(), make_net()
    stepping, stepping_by_hand = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, reference))
    history = ScalarHistory()
    wrapper = OptimWrapper(stepping, accumulative_counts=every, clip_grad=options, sink=history)
    wrapped(wrapper, model, total, make_batch)
    norms_by_hand: list[float] = []
    for i in range(total):
        x, y = make_batch(i)
        (mse_loss(reference(x), y) / divisor(i, every, total)).backward()
        if is_boundary(i, every, total):
            norm = clip_by_hand(list(reference.parameters()))
            norms_by_hand += [float(norm)] if isinstance(norm, Tensor) else []
            stepping_by_hand.step()
            stepping_by_hand.zero_grad()
    assert values(model, stepping) == values(reference, stepping_by_hand)
    assert history.read("train/grad_norm") == norms_by_hand
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("every", "total"), [(1, 6), (3, 10)])
@pytest.mark.parametrize("clip", ["off", "norm", "value"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("dtype", "loss_scale"),
    [
        ("float16", {"init_scale": 2.0**12, "growth_interval": 2}),
        ("float16", 256.0),
        ("bfloat16", {"init_scale": 2.0**12}),
        ("bfloat16", {"enabled": False}),
    ],
    ids=["fp16", "fp16-static", "bf16-scaled", "bf16"],
)
def test_amp_is_autocast_and_grad_scaler(
    dtype: str, loss_scale: Any, optimizer: str, clip: str, every: int, total: int
) -> None:
    """With an overflow in the middle, except with a disabled scaler, with which torch would not skip."""
    skips = loss_scale != {"enabled": False}

    def batch(i: int) -> tuple[Tensor, Tensor]:
        x, y = make_batch(i)
        return (x * 1e30, y) if i == 4 and skips else (x, y)

    options, clip_by_hand = CLIPS[clip]
    model, reference = make_normless(1), make_normless(1)
    stepping, stepping_by_hand = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, reference))
    wrapper = AmpOptimWrapper(
        loss_scale, dtype, optimizer=stepping, accumulative_counts=every, clip_grad=options
    )
    wrapped(wrapper, model, total, batch)

    is_static = isinstance(loss_scale, float)
    scaler = torch.amp.GradScaler("cpu", **({"init_scale": loss_scale} if is_static else loss_scale))
    skipped = 0
    for i in range(total):
        x, y = batch(i)
        with torch.autocast("cpu", getattr(torch, dtype)):
            loss = mse_loss(reference(x), y)
        scaler.scale(loss / divisor(i, every, total)).backward()
        if is_boundary(i, every, total):
            scaler.unscale_(stepping_by_hand)
            clip_by_hand(list(reference.parameters()))
            skipped += any(not p.grad.isfinite().all() for p in reference.parameters() if p.grad is not None)
            scaler.step(stepping_by_hand)
            scaler.update(loss_scale if is_static else None)
            stepping_by_hand.zero_grad()
    assert skipped == skips
    assert values(model, stepping) == values(reference, stepping_by_hand)
    theirs = scaler.state_dict()
    if is_static:
        theirs["_growth_tracker"] = wrapper.state_dict()["loss_scaler"][
            "_growth_tracker"
        ]  # counted, and never used
    assert wrapper.state_dict()["loss_scaler"] == theirs


def poisoned(i: int) -> tuple[Tensor, Tensor]:
    """Every third batch overflows in any 16-bit dtype and in float32."""
    x, y = make_batch(i)
    return (x * 1e38, y) if i % 3 == 1 else (x, y)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_several_losses_have_a_scale_each(level: str) -> None:
    model, reference = make_net(), make_net()
    stepping, stepping_by_engine = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, reference))
    wrapper = ApexOptimWrapper(level, optimizer=stepping, num_losses=2, norms="all")
    engine = halfpeak.prepare(
        reference,
        stepping_by_engine,
        halfpeak.LEVELS[level].replace(loss_scale="dynamic"),
        scale=halfpeak.ScaleConfig(),
        num_losses=2,
        op_lists="apex",
    )
    for i in range(6):
        for loss_id in (0, 1):
            x, y = poisoned(i + loss_id)
            with wrapper.optim_context(model):
                loss = mse_loss(model(x).float(), y)
            wrapper.backward(loss, loss_id=loss_id)
            with engine.forward():
                loss = mse_loss(reference(x).float(), y)
            engine.backward(loss, loss_id=loss_id)
        wrapper.step()
        wrapper.zero_grad()
        engine.step()
    scales = [entry["loss_scale"] for entry in wrapper.state_dict()["apex_amp"].values()]
    assert scales == [engine.read_scale(0), engine.read_scale(1)]
    assert min(scales) < 2.0**16
    assert values(model, stepping) == values(reference, stepping_by_engine)
