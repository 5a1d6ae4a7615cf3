"""A fused optimizer's step runs step hooks and has a profiler entry, as every torch optimizer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfpeak.fused import FusedSGD


def optimizer() -> FusedSGD:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return FusedSGD([weight], lr=0.5, backend="eager")


@pytest.mark.parametrize("profiled", [False, True])
def test_hooks_run_in_order_and_may_change_the_arguments(profiled: bool) -> None:
    sgd, seen = optimizer(), list[Any]()
    (weight,) = sgd.param_groups[0]["params"]

    def closure() -> Tensor:
        seen.append(weight[0].item())
        sgd.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss.detach()

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        seen.append("before")
        return args, {"closure": closure}

    def after(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((weight[0].item(), "closure" in kwargs))

    sgd.register_step_pre_hook(before)
    sgd.register_step_post_hook(after)
    if profiled:
        with torch.autograd.profiler.profile() as profile:
            assert float(sgd.step()) == 2.0
        assert [event.key for event in profile.key_averages()].count("Optimizer.step#FusedSGD.step") == 1
    else:
        assert float(sgd.step()) == 2.0
    assert seen == ["before", 1.0, (0.5, True)]


def test_a_hook_that_returns_nonsense_is_refused() -> None:
    sgd = optimizer()
    sgd.register_step_pre_hook(lambda *_: 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(
        RuntimeError, match=r"pre-hook .*<lambda> must return None or \(args, kwargs\), not 1"
    ):
        sgd.step()
