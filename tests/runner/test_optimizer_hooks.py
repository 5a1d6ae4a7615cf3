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

from halfpeak.core.errors import ConfigError, ConfigTypeError, LossScaleCollapse
from halfpeak.runner.hooks.optimizer import GradientCumulativeOptimizerHook, OptimizerHook
from runner.loops import by_hand, make_loop, run, step
from runner.oracle import cases
from support.nets import OPTIMIZERS, make_batch, make_net
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
def test_divisors_recorded_of_mmcv(row: dict[str, Any]) -> None:
    """By the methods that users' code and mmcv's own tests call."""
    every, total, start = row["window"]
    hook = GradientCumulativeOptimizerHook(cumulative_iters=every)
    loop = make_loop(nn.ParameterList([nn.Parameter(torch.zeros(()))]), total=total)
    loop.iter = start
    hook._init(loop)
    assert hook.initialized
    assert (hook.divisible_iters, hook.remainder_iters) == (total // every * every, total % every)
    for loop.iter, (divisor, boundary) in enumerate(row["factors"], start):
        assert hook._get_loss_factor(loop) == divisor
        assert (hook.every_n_iters(loop, every) or hook.is_last_iter(loop)) == boundary


@pytest.mark.parametrize("row", MMCV["divisors"], ids=lambda row: str(row["window"]))
def test_windows_recorded_of_mmcv(row: dict[str, Any]) -> None:
    every, total, start = row["window"]
    weight = nn.Parameter(torch.zeros(()))
    loop = make_loop(nn.ParameterList([weight]), total=total)
    loop.optimizer = torch.optim.SGD([weight], lr=1.0)
    hook = GradientCumulativeOptimizerHook(cumulative_iters=every)
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


def test_the_norm_is_weighted_by_the_batch() -> None:
    loop = make_loop(make_net())
    hook = OptimizerHook({"max_norm": 1.0})
    step(loop, hook, 0)
    loop.outputs = {"loss": loop.model(make_batch(1)[0]).square().mean()}
    hook.after_train_iter(loop)
    assert [count for _, count in loop.log_buffer.entries] == [16, 1]


def test_no_norm_where_there_is_no_gradient() -> None:
    net = make_net()
    loop = make_loop(net)
    loop.outputs = {"loss": torch.zeros((), requires_grad=True) * 1.0}
    OptimizerHook({"max_norm": 1.0}).after_train_iter(loop)
    assert loop.log_buffer.entries == []


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


def test_the_optimizer_may_be_replaced_in_a_run() -> None:
    loop = make_loop(make_net())
    hook = OptimizerHook()
    run(loop, hook, range(2))
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
    before = values(loop.model)[0][:2]
    step(loop, hook, 2)
    assert values(loop.model)[0][:2] == before


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


@pytest.mark.parametrize("every", [1, 2])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_named(every: int) -> None:
    """mmcv stepped, and one inf ruined the model."""
    loop = make_loop(make_net(), "adamw", total=400)
    hook = OptimizerHook() if every == 1 else GradientCumulativeOptimizerHook(every)
    run(loop, hook, range(4))
    before = values(loop.model, loop.optimizer)
    for number in range(4, 4 + every):
        step(loop, hook, number, overflow=number == 4)
    assert not loop.step_result.stepped()
    assert loop.step_result.nonfinite()[-1] == "0.weight"
    loop.optimizer.zero_grad()
    assert values(loop.model, loop.optimizer) == before
    step(loop, hook, 4 + every)
    step(loop, hook, 5 + every)
    assert loop.step_result.stepped()


def test_a_run_that_only_skips_is_ended() -> None:
    loop, hook = make_loop(make_net(), total=200), OptimizerHook()
    with pytest.raises(LossScaleCollapse, match=r"in 100 steps in a row. Not finite: 0\.weight") as caught:
        run(loop, hook, range(200), range(10, 200))
    assert caught.value.parameters[0] == "0.weight"
    assert loop.iter == 109


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: OptimizerHook({}), ConfigError, "grad_clip"),
        (lambda: OptimizerHook([1.0]), ConfigTypeError, r"write dict\(max_norm=1.0\)"),
        (lambda: OptimizerHook({"max_nrom": 1.0}), ConfigError, "did you mean 'max_norm'"),
        (lambda: OptimizerHook({"max_norm": -1.0}), ConfigError, "max_norm=-1.0"),
        (lambda: OptimizerHook(None, 1), ConfigTypeError, "detect_anomalous_params=1"),
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


@pytest.mark.parametrize(
    ("first", "total", "factors"),
    [(0, 6, [3] * 6), (0, 8, [3] * 6 + [2] * 2), (0, 10, [3] * 9 + [1]), (5, 10, [3] * 4 + [1])],
)
def test_an_override_of_the_divisor_is_called(first: int, total: int, factors: list[int]) -> None:
    class Own(GradientCumulativeOptimizerHook):
        def _get_loss_factor(self, runner: Any) -> int:
            seen.append(super()._get_loss_factor(runner))
            return seen[-1]

    seen: list[int] = []
    run(make_loop(make_net(), total=total), Own(cumulative_iters=3), range(first, total))
    assert seen == factors


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
