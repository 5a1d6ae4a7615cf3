"""Batch-norm statistics keep the forward passes of a clean step, and return to their former values on a skip."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfpeak.parts.batch_norm import BatchNormStats
from support.states import differences

NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "BatchNorm3d": lambda: nn.BatchNorm3d(3),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "not affine": lambda: nn.BatchNorm1d(3, affine=False),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
}

FOUND_INFS: dict[str, Callable[[bool], Tensor | bool]] = {
    "device": lambda skipped: torch.tensor(float(skipped)),
    "host": bool,
}


def spoil(module: nn.Module, value: float) -> None:
    """Write to the statistics as a forward pass does."""
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.fill_(7 if buffer.dtype is torch.int64 else value)


def stats(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


@pytest.mark.parametrize("found_inf", FOUND_INFS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_skipped_step_puts_every_statistic_back(norm: str, found_inf: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), NORMS[norm](), nn.Sequential(NORMS[norm]()))
    buffers = BatchNormStats([model])
    for value in (1.0, torch.inf, torch.nan):
        before = stats(model)
        assert before
        buffers.begin_forward()
        spoil(model, value)
        assert differences(stats(model), before)
        buffers.end_step(FOUND_INFS[found_inf](True))
        assert not differences(stats(model), before)
    buffers.begin_forward()
    spoil(model, 2.0)
    after = stats(model)
    buffers.end_step(FOUND_INFS[found_inf](False))
    assert not differences(stats(model), after)
    buffers.begin_forward()
    spoil(model, torch.nan)
    buffers.end_step(FOUND_INFS[found_inf](True))
    assert not differences(stats(model), after), "a clean step is what a later skip goes back to"


def test_buffers_stay_the_same_objects() -> None:
    model = nn.BatchNorm1d(3)
    held = [(buffer, buffer.data_ptr()) for buffer in model.buffers()]
    buffers = BatchNormStats([model])
    buffers.begin_forward()
    spoil(model, 3.0)
    buffers.end_step(torch.ones(()))
    assert all(
        now is then and now.data_ptr() == address
        for now, (then, address) in zip(model.buffers(), held, strict=True)
    )


def test_what_is_not_a_running_statistic_is_left_alone() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(3))
    model.register_module("norm", nn.LayerNorm(3))
    model.register_module("stateless", nn.BatchNorm1d(3, track_running_stats=False))
    buffers = BatchNormStats([model])
    buffers.begin_forward()
    spoil(model, 5.0)
    buffers.end_step(True)
    assert model.get_buffer("table").tolist() == [5.0] * 3
    assert buffers.saved() == []


def test_several_models_that_share_a_layer() -> None:
    shared = nn.BatchNorm1d(3)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.BatchNorm1d(2))
    buffers = BatchNormStats([first, second])
    before = stats(second)
    assert sum(flat.numel() for flat in buffers.saved()) == sum(buffer.numel() for buffer in before)
    buffers.begin_forward()
    spoil(second, torch.nan)
    buffers.end_step(torch.ones(()))
    assert not differences(stats(second), before)


def test_a_model_to_watch_later() -> None:
    model, late = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    buffers = BatchNormStats([model])
    spoil(late, 2.0)
    before = stats(late)
    buffers.add_model(late)
    buffers.begin_forward()
    spoil(late, torch.nan)
    buffers.end_step(True)
    assert not differences(stats(late), before)


def test_statistics_replaced_by_others_of_another_dtype_are_kept() -> None:
    model = nn.BatchNorm1d(3)
    buffers = BatchNormStats([model])
    buffers.begin_forward()
    model.double()
    spoil(model, 5.0)
    buffers.end_step(True)
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [5.0] * 3


def mixed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2, dtype=torch.float64), nn.BatchNorm1d(4))


@pytest.mark.parametrize("saved", [[], [torch.ones(2)]], ids=["nothing", "another shape"])
def test_what_does_not_fit_is_replaced_by_the_present(saved: list[Tensor]) -> None:
    model = mixed()
    buffers = BatchNormStats([model])
    spoil(model, 3.0)
    before = stats(model)
    buffers.restore_saved(saved)
    buffers.begin_forward()
    spoil(model, torch.nan)
    buffers.end_step(True)
    assert not differences(stats(model), before)


def test_a_lazy_layer_is_looked_after_once_it_has_a_shape() -> None:
    model = nn.LazyBatchNorm1d()
    buffers = BatchNormStats([model])
    model(torch.randn(4, 3))
    buffers.end_step(False)
    before = stats(model)
    buffers.begin_forward()
    spoil(model, torch.nan)
    buffers.end_step(torch.ones(()))
    assert not differences(stats(model), before)
