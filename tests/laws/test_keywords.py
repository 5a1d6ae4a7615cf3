"""Every keyword that a front end accepts changes something that a user can see, or raises."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak import amp

PREPARE: dict[str, dict[str, Any]] = {
    "level": {"level": "O5"},
    "scale": {"scale": halfpeak.ScaleConfig(backoff=0.25)},
    "num_losses": {"num_losses": 2},
    "accumulate": {"accumulate": 2},
    "clip": {"clip": 1e-3},
    "restore_buffers": {"restore_buffers": False},
    "op_lists": {"level": "O4", "op_lists": "apex"},
    "keep_fp32": {"keep_fp32": ["0"]},
    "cast_forward_inputs": {"level": "O4", "cast_forward_inputs": False},
    "float8": {"level": "O5", "float8": "tensorwise"},
    "group": {"group": "world"},
    "check_ranks": {"check_ranks": 3},
    "on_skip": {"on_skip": None},
}
"""One change per keyword. Whatever else a row sets, the run that it is compared with sets, too."""

LEVEL: dict[str, tuple[str, Any]] = {
    "cast_model_type": ("O2", torch.bfloat16),
    "patch_torch_functions": ("O1", False),
    "keep_batchnorm_fp32": ("O2", False),
    "master_weights": ("O2", False),
    "loss_scale": ("O2", 8.0),
    "cast_model_outputs": ("O2", torch.float16),
    "norms": ("O2", "batchnorm"),
}
"""One level and value per keyword of ``Level.replace``."""


def seen(**options: Any) -> list[Any]:
    """Train four steps, the third of them on an overflow, and list what a user can see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        engine = halfpeak.prepare(model, optimizer, **options)
    except halfpeak.ConfigError as refusal:
        return [str(refusal)]
    found: list[Any] = [len(engine.scalers)]
    logger, handler = logging.getLogger("halfpeak"), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    for x in torch.randn(4, 8, 4).mul(torch.tensor([1.0, 1.0, 1e30, 1.0])[:, None, None]):
        with engine.forward():
            output = model(x)
            loss = output.float().square().mean()
        engine.backward(loss)
        result = engine.step()
        found += [output.dtype, result.stepped(), float(result.scale)]
    logger.removeHandler(handler)
    found.append(engine.memory())
    return found + [(t.dtype, t.tolist()) for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("keyword", PREPARE)
def test_each_keyword_of_prepare_changes_something(keyword: str) -> None:
    changed = PREPARE[keyword]
    base = {"level": "O2", **{name: value for name, value in changed.items() if name != keyword}}
    if keyword == "level":
        base = {"level": "O2"}
    # repr, because a statistic that is NaN is not equal to itself.
    assert repr(seen(**base)) == repr(seen(**base))
    assert repr(seen(**{**base, **changed})) != repr(seen(**base))


def test_no_keyword_of_prepare_is_left_out() -> None:
    accepted = set(inspect.signature(halfpeak.prepare).parameters)
    assert accepted - {"models", "optimizers"} == PREPARE.keys(), "each has a row in PREPARE"


@pytest.mark.parametrize("keyword", LEVEL)
def test_each_keyword_of_a_level_changes_something(keyword: str) -> None:
    level, value = LEVEL[keyword]
    changed = halfpeak.LEVELS[level].replace(**{keyword: value})
    assert repr(seen(level=changed)) != repr(seen(level=level))
    assert repr(seen(level=halfpeak.LEVELS[level].replace())) == repr(seen(level=level))


def test_no_keyword_of_a_level_is_left_out() -> None:
    assert set(inspect.signature(halfpeak.Level.replace).parameters) - {"self"} == LEVEL.keys()


INITIALIZE: dict[str, dict[str, Any]] = {
    "enabled": {"enabled": False},
    "opt_level": {"opt_level": "O5"},
    "cast_model_type": {"cast_model_type": torch.bfloat16},
    "patch_torch_functions": {"opt_level": "O1", "patch_torch_functions": False},
    "patch_torch_functions_type": {"patch_torch_functions_type": torch.bfloat16},
    "keep_batchnorm_fp32": {"keep_batchnorm_fp32": False},
    "master_weights": {"master_weights": False},
    "loss_scale": {"loss_scale": 8.0},
    "cast_model_outputs": {"cast_model_outputs": torch.float16},
    "num_losses": {"num_losses": 2},
    "verbosity": {"verbosity": 0},
    "min_loss_scale": {"min_loss_scale": 2.0**16},
    "max_loss_scale": {"max_loss_scale": 2.0**8},
    "norms": {"norms": "all"},
    "patience": {"min_loss_scale": 2.0**16, "patience": 1},
}

SCALE_LOSS: dict[str, dict[str, Any]] = {
    "loss_id": {"loss_id": 1},
    "delay_unscale": {"delay_unscale": True},
    "delay_overflow_check": {"delay_overflow_check": True},
}

IGNORED = {"model": "apex documents it as ignored, and scripts pass it"}


def seen_by_amp(capsys: pytest.CaptureFixture[str], block: dict[str, Any], **options: Any) -> list[Any]:
    """The same run through ``halfpeak.amp``, with its printed output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    try:
        amp.initialize(model, optimizer, **options)
        for x in torch.randn(4, 8, 4).mul(torch.tensor([1.0, 1.0, 1e30, 1.0])[:, None, None]):
            optimizer.zero_grad()
            output = model(x)
            with amp.scale_loss(output.float().square().mean(), optimizer, **block) as scaled:
                scaled.backward()
            scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
            optimizer.step()
            found += [output.dtype, scaled.dtype, float(scaled.detach()), scales]
    except (halfpeak.HalfpeakError, RuntimeError) as refusal:
        found.append(str(refusal))
    found += [
        (t.dtype, t.tolist()) for t in (*model.parameters(), *model.buffers(), *amp.master_params(optimizer))
    ]
    return [*found, capsys.readouterr().out]


@pytest.mark.parametrize("keyword", INITIALIZE)
def test_each_keyword_of_initialize_changes_something(
    keyword: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = INITIALIZE[keyword]
    base = {"opt_level": "O2", **{name: value for name, value in changed.items() if name != keyword}}
    assert repr(seen_by_amp(capsys, {}, **{**base, **changed})) != repr(seen_by_amp(capsys, {}, **base))


@pytest.mark.parametrize("keyword", SCALE_LOSS)
def test_each_keyword_of_scale_loss_changes_something(
    keyword: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"opt_level": "O2", "num_losses": 2}
    assert repr(seen_by_amp(capsys, SCALE_LOSS[keyword], **options)) != repr(
        seen_by_amp(capsys, {}, **options)
    )


def test_no_keyword_of_the_apex_door_is_left_out() -> None:
    assert set(inspect.signature(amp.initialize).parameters) - {"models", "optimizers"} == INITIALIZE.keys()
    block = set(inspect.signature(amp.scale_loss).parameters) - {"loss", "optimizers"}
    assert block == SCALE_LOSS.keys() | IGNORED.keys()
