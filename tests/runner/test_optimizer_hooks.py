"""OptimizerHook and its accumulating form: the same bits as plain torch, the same numbers as mmcv 1.7.2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.runner.hooks.optimizer import GradientCumulativeOptimizerHook, OptimizerHook
from runner.loops import by_hand, make_loop, run, step
from runner.oracle import cases
from support.nets import OPTIMIZERS, make_batch, make_net, overflowing
from support.snapshot import values

MMCV: dict[str, Any] = json.loads((Path(__file__).parent / "oracle" / "mmcv.json").read_text())
KINDS: dict[str, Callable[..., Any]] = {
    "OptimizerHook": OptimizerHook,
    "GradientCumulativeOptimizerHook": GradientCumulativeOptimizerHook,
}


@pytest.mark.parametrize("name", cases.RUNS)
def test_runs_recorded_of_mmcv(name: str) -> None:
    kind, options, overflows = cases.RUNS[name]
    found = cases.train(KINDS[kind](**options), cases.make_model(), overflows=overflows)
    recorded = MMCV["runs"][name]
    for ours, theirs in zip(found["parameters"], recorded["parameters"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)  # another processor may round differently
    assert [(list(entry), count) for entry, count in found["logged"]] == [
        (list(entry), count) for entry, count in recorded["logged"]
    ]
    for (ours, _), (theirs, _) in zip(found["logged"], recorded["logged"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("row", MMCV["divisors"], ids=lambda row: str(row["window"]))
def test_windows_recorded_of_mmcv(row: dict[str, Any]) -> None:
    """With the divisor from ``_get_loss_factor``, which user code overrides."""

    class Own(GradientCumulativeOptimizerHook):
        def _get_loss_factor(self, runner: Any) -> int:
            divisors.append(super()._get_loss_factor(runner))
            return divisors[-1]

    divisors: list[int] = []
    every, total, start = row["window"]
    weight = nn.Parameter(torch.zeros(()))
    loop = make_loop(nn.ParameterList([weight]), total=total)
    loop.optimizer = torch.optim.SGD([weight], lr=1.0)
    hook = Own(cumulative_iters=every)
    expected, window = torch.zeros(()), torch.zeros(())
    for number, (divisor, boundary) in enumerate(row["factors"], start):
        loop.iter, loop.outputs = number, {"loss": weight * 1.0}
        hook.after_train_iter(loop)
        window = window + torch.tensor(1.0) / divisor
        if boundary:
            expected, window = expected - window, torch.zeros(())
        assert torch.equal(weight.detach(), expected)
        assert loop.step_result.boundary == boundary
        assert weight.grad is None if boundary else torch.equal(weight.grad, window)  # type: ignore[arg-type]
    assert divisors == [divisor for divisor, _ in row["factors"]]
    assert (hook.divisible_iters, hook.remainder_iters) == (total // every * every, total % every)


def test_the_norm_is_weighted_by_the_batch() -> None:
    loop = make_loop(make_net())
    hook = OptimizerHook({"max_norm": 1.0})
    step(loop, hook, 0)
    loop.outputs = {"loss": loop.model(make_batch(1)[0]).square().mean()}
    hook.after_train_iter(loop)
    loop.outputs = {"loss": torch.zeros((), requires_grad=True) * 1.0}  # no gradient, no norm
    hook.after_train_iter(loop)
    assert [count for _, count in loop.log_buffer.entries] == [16, 1]


@pytest.mark.parametrize(("every", "expected"), [(None, 1.0), (1, 3.0)])
def test_gradients_that_were_there_before(every: int | None, expected: float) -> None:
    """OptimizerHook zeroes gradients before each step; the accumulating hook zeroes them only after its steps."""
    weight = nn.Parameter(torch.zeros(()))
    loop = make_loop(nn.ParameterList([weight]))
    loop.optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor(2.0)
    hook = OptimizerHook() if every is None else GradientCumulativeOptimizerHook(every)
    loop.outputs = {"loss": weight * 1.0}
    hook.after_train_iter(loop)
    assert weight.item() == -expected
    assert (weight.grad is None) == (every is not None)


def test_unreachable_parameters_are_logged() -> None:
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 3)})
    for hook in (
        OptimizerHook(detect_anomalous_params=True),
        GradientCumulativeOptimizerHook(2, detect_anomalous_params=True),
    ):
        loop = make_loop(net)
        loss = net["used"](torch.ones(1, 2)).sum()
        for _ in range(3000):  # deeper than Python's stack
            loss = loss + 1.0
        loop.outputs = {"loss": loss}
        hook.after_train_iter(loop)
        hook.after_run(loop)
        assert loop.handler.lines[-2:] == [
            "idle.weight with shape (3, 2) is not in the computational graph",
            "idle.bias with shape (3,) is not in the computational graph",
        ]


def test_warnings_are_logged_once() -> None:
    loop = make_loop(make_net(), total=8)
    loop.model.train()
    hook = GradientCumulativeOptimizerHook(3)
    hook.before_run(loop)
    for number in range(1, 8):
        step(loop, hook, number)
    assert [line.split(":")[0] for line in loop.handler.lines] == [
        "Resume iter number is not divisible by cumulative_iters in GradientCumulativeOptimizerHook, which means the "
        "gradient of some iters is lost and the result may be influenced slightly",
        "GradientCumulativeOptimizerHook may slightly decrease performance if the model has BatchNorm layers",
        "Loss will be divided by 2 in the last 2 iterations because they are not enough for 3 cumulative_iters",
    ]


def test_a_subclass_with_its_own_step_calls_clip_grads() -> None:
    class Own(OptimizerHook):
        def __init__(self, grad_clip: Any) -> None:  # as people wrote it: without super().__init__()
            self.grad_clip = grad_clip

        def after_train_iter(self, runner: Any) -> None:
            runner.optimizer.zero_grad()
            runner.outputs["loss"].backward()
            self.norm = self.clip_grads(runner.model.parameters())
            runner.optimizer.step()

    net, plain = make_net(), make_net()
    loop, hook = make_loop(net), Own({"max_norm": 0.25})
    run(loop, hook, range(4))
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    norms = by_hand(plain, optimizer, 4, clip=0.25)
    assert values(net, loop.optimizer) == values(plain, optimizer)
    assert hook.norm is not None
    assert torch.equal(hook.norm, norms[-1])
    assert OptimizerHook({"max_norm": 1.0}).clip_grads([]) is None


def test_an_optimizer_that_is_none_of_torchs_takes_the_steps_of_mmcv() -> None:
    """A mock, or a wrapper of another library with ``zero_grad`` and ``step``."""

    class Foreign:
        def __init__(self, inner: Any) -> None:
            self.step, self.zero_grad = inner.step, inner.zero_grad

    net, plain = make_net(), make_net()
    loop = make_loop(net)
    loop.optimizer = Foreign(OPTIMIZERS["sgd"](net.parameters()))
    run(loop, OptimizerHook({"max_norm": 0.25}), range(4))
    norms = by_hand(plain, OPTIMIZERS["sgd"](plain.parameters()), 4, clip=0.25)
    assert values(net) == values(plain)
    assert torch.equal(loop.log_buffer.entries[-1][0]["grad_norm"], norms[-1])


@pytest.mark.parametrize("clip", [None, 0.25])
def test_a_gradient_that_is_not_finite_is_stepped_as_in_mmcv(clip: float | None) -> None:
    net, plain = make_net(), make_net()
    loop, hook = make_loop(net), OptimizerHook(clip and {"max_norm": clip})
    run(loop, hook, range(2))
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    by_hand(plain, optimizer, 2, clip=clip)
    with overflowing(net[4].weight):
        step(loop, hook, 2)
    with overflowing(plain[4].weight):
        by_hand(plain, optimizer, 1, first=2, clip=clip)
    assert loop.step_result.stepped()
    assert not net[4].weight.isfinite().all()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_skip_is_in_the_result_and_names_the_gradients() -> None:
    loop, hook = make_loop(make_net()), OptimizerHook(skip_nonfinite=True)
    run(loop, hook, range(2), [1])
    assert not loop.step_result.stepped()
    assert loop.step_result.nonfinite()[-1] == "0.weight"
    step(loop, hook, 2)
    assert loop.step_result.stepped()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: OptimizerHook({}), ConfigError, "grad_clip"),
        (lambda: OptimizerHook([1.0]), ConfigTypeError, r"write dict\(max_norm=1.0\)"),
        (lambda: OptimizerHook({"max_nrom": 1.0}), ConfigError, "did you mean 'max_norm'"),
        (lambda: OptimizerHook({"max_norm": -1.0}), ConfigError, "max_norm=-1.0"),
        (lambda: OptimizerHook(None, 1), ConfigTypeError, "detect_anomalous_params=1"),
        (lambda: OptimizerHook(skip_nonfinite=1), ConfigTypeError, "skip_nonfinite=1"),  # type: ignore[arg-type]
        (lambda: GradientCumulativeOptimizerHook("4"), ConfigError, "write cumulative_iters=4"),
        (lambda: GradientCumulativeOptimizerHook(-1), ConfigError, "cumulative_iters=-1"),
        (lambda: GradientCumulativeOptimizerHook(True), ConfigError, "cumulative_iters=True"),
        (lambda: GradientCumulativeOptimizerHook(2.0), ConfigError, r"cumulative_iters=2\.0"),
        (
            lambda: GradientCumulativeOptimizerHook(2, loss_scale=1.0),
            ConfigTypeError,
            "takes no 'loss_scale'",
        ),
        (
            lambda: GradientCumulativeOptimizerHook(2, grad_clp=None),
            ConfigTypeError,
            "did you mean 'grad_clip'",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_runner_that_is_a_mock() -> None:
    """As in users' tests of their own hooks."""
    lines: list[str] = []
    runner, net = Mock(), make_net()
    runner.model, runner.outputs = net, {"num_samples": 0}
    runner.logger.log = lambda msg=None, **kwargs: lines.append(msg)
    hook = OptimizerHook({"max_norm": 2.0}, detect_anomalous_params=True)
    x, _ = make_batch(0)
    runner.outputs["loss"] = net[0](x).sum()
    hook.after_train_iter(runner)
    runner.optimizer.step.assert_called_once_with()
    (logged, count), _ = runner.log_buffer.update.call_args
    assert isinstance(logged["grad_norm"], float)
    assert count == 0
    assert len(lines) == len(list(net.parameters())) - 2
