"""A step waits for the device once, to learn whether to skip; not at all with an optimizer that takes found_inf, and where
nothing is skipped."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfpeak.core.decide
import laws.drivers
from halfpeak.optim import OptimWrapper
from halfpeak.runner import GradientCumulativeOptimizerHook
from laws.source import PACKAGE


class Waits(TorchDispatchMode):
    """Records the lines of halfpeak, or of this file, that read a value of a tensor into Python."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            stack = traceback.extract_stack()[:-1]
            # If a test itself reads the value, its own line is recorded.
            frames = [
                frame for frame in stack if frame.filename.startswith((str(PACKAGE), __file__))
            ] or stack
            self.places.append(f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
        return func(*args, **(kwargs or {}))


DRIVERS = [name for name in laws.drivers.DRIVERS if name not in ("FP16_Optimizer", "accelerate")]
"""All drivers except those whose interface tells at once whether a step was skipped."""


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@pytest.mark.parametrize(
    ("driver", "level"), [(name, one) for name in DRIVERS for one in laws.drivers.DRIVERS[name].levels]
)
def test_how_often_a_step_waits(
    driver: str, level: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a window nothing waits. ``amp`` reads ``found_inf`` before ``optimizer.step()``, even if that takes it; so
    does ``ApexOptimWrapper``, which calls it.

    The hooks of mmcv read scale, counters and outcome for ``runner.meta`` in one ``tolist()``, which the mode does not see.
    """
    # On the host a step reads numbers without waiting for anything; it decides here as on a device.
    monkeypatch.setattr(halfpeak.core.decide, "host_values", lambda *_: None)
    run = laws.drivers.Case(driver=driver, level=level, optimizer=optimizer, every=3, clip=0.05).run()
    at_the_end = int(optimizer == "sgd" or driver in ("amp", "ApexOptimWrapper", "OptimizerHook"))
    if driver.startswith("Fp16OptimizerHook"):
        at_the_end = 0
    for number in range(9):
        with Waits() as waits:
            run.train(number)
        assert len(waits.places) == (at_the_end if number % 3 == 2 else 0), "\n".join(
            ["the step reads values of tensors at", *waits.places]
        )


class SteppingWrapperRun(laws.drivers.WrapperRun):
    def wrap(self, **options: Any) -> OptimWrapper:
        return OptimWrapper(self.optimizer, **options)


class SteppingHookRun(laws.drivers.HookRun):
    def make_hook(self, **options: Any) -> Any:
        return GradientCumulativeOptimizerHook(self.every, **options)


@pytest.mark.parametrize("make", [SteppingWrapperRun, SteppingHookRun])
def test_without_skip_nonfinite_nothing_waits(make: type[laws.drivers.Run]) -> None:
    run = make(laws.drivers.Case(driver="", level="O0", optimizer="sgd", every=3, clip=0.05), 0)
    for number in range(9):
        with Waits() as waits:
            run.train(number)
        assert waits.places == []
        assert run.moved() == (number % 3 == 2)


def test_the_counter_counts() -> None:
    with Waits() as waits:
        bool(torch.ones(()) > 0)
        torch.ones(3).sum().item()
    assert len(waits.places) == 2
