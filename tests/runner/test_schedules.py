"""Schedules: what they change, when they pause, and what they refuse. Their curves are in test_agreement.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak.runner as hr
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError
from halfpeak.optim import OptimWrapper, OptimWrapperDict
from runner.zoo import Results, result

DATA = [torch.ones(2, 3)] * 4


class Idle(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        return {}


class See(hr.Hook):
    def __init__(self, read: Any) -> None:
        self.read, self.seen = read, []

    def after_train_iter(self, runner: Any) -> None:
        self.seen.append(self.read(runner))


def run(
    optimizer: Any, config: Any, *, which: str = "lr", epochs: int = 2, results: Any = None, read: Any = None
) -> list[Any]:
    made = hr.EpochBasedRunner(Idle(), optimizer=optimizer, max_epochs=epochs)
    getattr(made, f"register_{which}_hook")(config)
    see = See(read or (lambda runner: runner.current_lr()))
    if results is not None:
        made.register_hook(Results(*results))
    made.register_hook(see, "LOWEST")
    made.run([DATA], [("train", 1)])
    return see.seen


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def sgd(lr: Any = 1.0, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], lr=lr, **options)


EXP = {"policy": "exp", "gamma": 0.5, "by_epoch": False}


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    results = [result(), result(overflow=True), result(), result()]
    assert run(sgd(), EXP, epochs=1, results=results) == [[1.0], [0.5], [0.5], [0.25]]


def test_a_skipped_window_is_repeated_as_a_whole() -> None:
    inside, good, bad = result(boundary=False), result(), result(overflow=True)
    results = [inside, good, inside, bad, inside, good, inside, good]
    rates = [rate for (rate,) in run(sgd(), EXP, results=results)]
    assert rates == [0.5**n for n in (0, 1, 2, 3, 2, 3, 4, 5)]


def test_a_result_is_that_of_its_own_iteration() -> None:
    """An iteration in which no hook sets ``step_result`` counts as a step."""

    class Once(hr.Hook):
        def after_train_iter(self, runner: Any) -> None:
            if runner.iter == 0:
                runner.step_result = result(overflow=True)

    made = hr.EpochBasedRunner(Idle(), optimizer=sgd(), max_epochs=1)
    made.register_hook(Once())
    made.run([DATA], [("train", 1)])
    assert (made.steps, made.scheduled_iter) == (3, 3)


def test_a_schedule_by_epoch_goes_on() -> None:
    results = [result(overflow=True)] * 8
    assert run(sgd(), {"policy": "exp", "gamma": 0.5}, results=results) == [[1.0]] * 4 + [[0.5]] * 4


def test_warm_up_waits_for_real_steps() -> None:
    config = {"policy": "fixed", "warmup": "linear", "warmup_iters": 4, "warmup_ratio": 0.5}
    results = [result(), result(overflow=True), *[result()] * 6]
    rates = [rate for (rate,) in run(sgd(), config, results=results)]
    assert rates == [0.5, 0.625, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("length", "rates"), [(2, [1.0, 1.0]), (8, [0.75, 0.8125])])
def test_a_resumed_run_follows_a_warm_up_that_was_made_longer(
    length: int, rates: list[float], tmp_path: Path
) -> None:
    config = {"policy": "fixed", "warmup": "linear", "warmup_ratio": 0.5, "by_epoch": False}
    see = See(lambda runner: runner.current_lr()[0])
    first, again = (hr.IterBasedRunner(Idle(), optimizer=sgd(), max_iters=count) for count in (4, 6))
    first.register_lr_hook({**config, "warmup_iters": 2})
    again.register_lr_hook({**config, "warmup_iters": length})
    again.register_hook(see, "LOWEST")
    first.run([DATA], [("train", 1)])
    first.save_checkpoint(tmp_path, create_symlink=False)
    again.resume(tmp_path / "iter_4.pth")
    again.run([DATA], [("train", 1)])
    assert see.seen == rates


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.Adam([parameter()], lr=rate)
    assert run(optimizer, EXP, epochs=1) == [[1.0], [0.5], [0.25], [0.125]]
    assert optimizer.param_groups[0]["lr"] is rate


def test_every_group_of_every_optimizer() -> None:
    two = torch.optim.SGD([{"params": [parameter()], "lr": 4.0}, {"params": [parameter()]}], lr=1.0)
    rates = run({"a": two, "b": sgd(8.0)}, EXP, epochs=1)
    assert rates[1] == {"a": [2.0, 0.5], "b": [4.0]}
    assert run(OptimWrapperDict(a=OptimWrapper(sgd())), EXP, epochs=1)[1] == {"a": [0.5]}


def test_a_wrappers_base_rate_moves_too() -> None:
    two = torch.optim.SGD([{"params": [parameter()], "lr": 4.0}, {"params": [parameter()]}], lr=1.0)
    rates = run(OptimWrapper(two), EXP, epochs=1, read=lambda runner: runner.optimizer.get_lr())
    assert rates[1] == {"base_lr": [0.5], "lr": [2.0, 0.5]}


def test_momentum_is_the_first_beta_too() -> None:
    config = {"policy": "step", "step": [1], "gamma": 0.5}
    optimizer = torch.optim.Adam([parameter()], betas=(0.8, 0.99))
    seen = run(optimizer, config, which="momentum", read=lambda runner: optimizer.param_groups[0]["betas"])
    assert (seen[0], seen[-1]) == ((0.8, 0.99), (0.4, 0.99))
    seen = run(sgd(momentum=0.8), config, which="momentum", read=lambda runner: runner.current_momentum())
    assert (seen[0], seen[-1]) == ([0.8], [0.4])


def test_one_cycle_has_a_number_per_group_and_optimizer() -> None:
    two = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=1.0, momentum=0.9)
    config = {"policy": "OneCycle", "max_lr": {"a": [1.0, 2.0], "b": 4.0}, "pct_start": 0.5, "div_factor": 4}
    rates = run({"a": two, "b": sgd()}, config)
    assert rates[0] == {"a": [0.25, 0.5], "b": [1.0]}
    assert rates[3] == {"a": [1.0, 2.0], "b": [4.0]}
    config = {
        "policy": "OneCycle",
        "base_momentum": [0.5, 0.6],
        "max_momentum": [0.9, 0.95],
        "pct_start": 0.5,
    }
    momenta = run(two, config, which="momentum", read=lambda runner: runner.current_momentum())
    assert (momenta[0], momenta[3], momenta[-1]) == ([0.9, 0.95], [0.5, 0.6], [0.9, 0.95])


def test_a_policy_of_ones_own() -> None:
    class Halves(hr.LrUpdaterHook):
        def get_lr(self, runner: Any, base_lr: float) -> float:
            return base_lr / 2**runner.epoch

    hook = Halves()
    assert run(sgd(), hook) == [[1.0]] * 4 + [[0.5]] * 4
    assert hook.base_lr == [1.0]
    later: Any = SimpleNamespace(epoch=3)
    assert hook.get_regular_lr(later) == [0.125]


class OwnWarmUp(hr.CosineAnnealingLrUpdaterHook):
    """As YOLOX of mmdetection 2.x: a quadratic warm-up, counted in epochs, which the curve leaves out."""

    def get_warmup_lr(self, cur_iters: int) -> list[float]:
        assert self.regular_lr == [1.0]
        return [rate * ((cur_iters + 1) / self.warmup_iters) ** 2 for rate in self.base_lr]  # type: ignore[union-attr]

    def get_lr(self, runner: Any, base_lr: float) -> float:
        assert self.min_lr_ratio is None
        return base_lr if runner.iter <= self.warmup_iters else self.min_lr


class OwnPlaces(hr.FixedLrUpdaterHook):
    """As users of mmcv wrote it: the stages themselves, over what the base class has for them."""

    def before_train_epoch(self, runner: Any) -> None:
        self.regular_lr = self.get_regular_lr(runner)

    def before_train_iter(self, runner: Any) -> None:
        is_warm = runner.iter >= self.warmup_iters
        self._set_lr(runner, self.regular_lr if is_warm else self.get_warmup_lr(runner.iter))


class OwnWrites(hr.FixedLrUpdaterHook):
    def _set_lr(self, runner: Any, lr_groups: Any) -> None:
        super()._set_lr(runner, [2 * rate for rate in lr_groups])


class OwnRates(hr.LrUpdaterHook):
    def get_regular_lr(self, runner: Any) -> list[float]:
        return [runner.epoch + 1.0]


class OwnState(hr.LrUpdaterHook):
    """As ReduceLrUpdaterHook of mmediting: each rate follows from the last one, so the calls count."""

    def get_regular_lr(self, runner: Any) -> list[float]:
        if not self.regular_lr:
            self.regular_lr = self.base_lr
        self.regular_lr = [rate / 2 for rate in self.regular_lr]
        return self.regular_lr


class OwnBase(hr.FixedLrUpdaterHook):
    def before_run(self, runner: Any) -> None:
        self.base_lr = [2 * group["lr"] for group in runner.optimizer.param_groups]


@pytest.mark.parametrize(
    ("hook", "rates"),
    [
        (
            OwnWarmUp(by_epoch=False, warmup="exp", warmup_iters=1, warmup_by_epoch=True, min_lr=0.5),
            [0.0625, 0.25, 0.5625, 1, 1] + 3 * [0.5],
        ),
        (OwnPlaces(warmup="linear", warmup_iters=2, warmup_ratio=0.5), [0.5, 0.75] + 6 * [1.0]),
        (OwnWrites(warmup="constant", warmup_iters=2, warmup_ratio=0.5), [1.0, 1.0] + 6 * [2.0]),
        (OwnRates(warmup="constant", warmup_iters=2, warmup_ratio=0.5), [0.5, 0.5, 1, 1] + 4 * [2.0]),
        (OwnState(warmup="constant", warmup_iters=2, warmup_ratio=0.5), [0.25, 0.25, 0.5, 0.5] + 4 * [0.25]),
        (OwnState(by_epoch=False), [0.5**number for number in range(1, 9)]),
        (OwnBase(warmup="constant", warmup_iters=2, warmup_ratio=0.5), [1.0, 1.0] + 6 * [2.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_overrides_of_a_schedule_are_called(hook: hr.LrUpdaterHook, rates: list[float]) -> None:
    assert run(sgd(), hook) == [[rate] for rate in rates]


def test_overrides_of_a_schedule_of_momenta_are_called() -> None:
    class Own(hr.MomentumUpdaterHook):
        def before_run(self, runner: Any) -> None:
            self.base_momentum = [group["momentum"] for group in runner.optimizer.param_groups]

        def get_regular_momentum(self, runner: Any) -> list[float]:
            assert self.base_momentum == [0.9]
            self.regular_momentum = [0.5]
            return self.regular_momentum

        def get_warmup_momentum(self, cur_iters: int) -> list[float]:
            return [self.regular_momentum[0] / 4]

        def _set_momentum(self, runner: Any, momentum_groups: Any) -> None:
            super()._set_momentum(runner, [value + 0.25 for value in momentum_groups])

    seen = run(
        sgd(momentum=0.9),
        Own(warmup="exp", warmup_iters=3),
        which="momentum",
        read=lambda runner: runner.current_momentum(),
    )
    assert seen == 3 * [[0.375]] + 5 * [[0.75]]


@pytest.mark.parametrize("which", ["lr", "momentum"])
def test_a_policy_that_says_no_value_is_refused(which: str) -> None:
    class Silent(hr.LrUpdaterHook if which == "lr" else hr.MomentumUpdaterHook):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match=f"Silent defines no value; .*get_{which}"):
        run(sgd(momentum=0.9), Silent(), which=which)


def test_the_first_rate_survives_a_resume(tmp_path: Path) -> None:
    """The optimizer's groups store it, so the rate at the moment of the resume does not matter."""
    optimizer = sgd()
    run(optimizer, EXP, epochs=1)
    again = sgd()
    again.load_state_dict(optimizer.state_dict())
    assert run(again, EXP, epochs=1)[0] == [1.0]


def test_by_iterations_a_schedule_by_epoch_follows_the_passes() -> None:
    """In mmcv such a schedule never changed the rate."""
    made = hr.IterBasedRunner(Idle(), optimizer=sgd(), max_iters=10)
    made.register_lr_hook({"policy": "exp", "gamma": 0.5})
    see = See(lambda runner: runner.current_lr()[0])
    made.register_hook(see, "LOWEST")
    made.run([DATA], [("train", 1)])
    assert see.seen == [1.0] * 4 + [0.5] * 4 + [0.25] * 2


LR_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "fixed", "by_epoch": 1}, ConfigTypeError, "by_epoch=1 must be True or False"),
    ({"policy": "fixed", "warmup": "cubic"}, ConfigError, "warmup='cubic' must be None or one of 'constant'"),
    ({"policy": "fixed", "warmup": "linear"}, ConfigError, "warmup_iters=0 must be an integer of 1 or more"),
    (
        {"policy": "fixed", "warmup": "exp", "warmup_iters": 2, "warmup_ratio": 0},
        ConfigError,
        "warmup_ratio=0 must be",
    ),
    ({"policy": "fixed", "gama": 1}, TypeError, "gama"),
    ({"policy": "step", "step": "8"}, ConfigTypeError, "step='8' must be an integer or a list"),
    ({"policy": "step", "step": []}, ConfigTypeError, "must be an integer or a list"),
    ({"policy": "step", "step": [0]}, ConfigError, "must be above 0"),
    ({"policy": "exp", "gamma": "x"}, ConfigTypeError, "gamma='x' must be a finite number"),
    ({"policy": "CosineAnnealing"}, ConfigError, "exactly one of min_lr=None and min_lr_ratio=None"),
    ({"policy": "LinearAnnealing", "min_lr": 0, "min_lr_ratio": 0}, ConfigError, "exactly one of"),
    (
        {"policy": "FlatCosineAnnealing", "min_lr": 0, "start_percent": 2},
        ConfigError,
        "start_percent=2 must be from 0",
    ),
    (
        {"policy": "CosineRestart", "periods": [1, 2], "min_lr": 0},
        ConfigError,
        "restart_weights=\\(1,\\) must be lists of the same length",
    ),
    ({"policy": "CosineRestart", "periods": [0], "min_lr": 0}, ConfigError, "periods="),
    ({"policy": "cyclic", "by_epoch": True}, ConfigError, "counts only iterations"),
    ({"policy": "cyclic", "target_ratio": (1, 2, 3)}, ConfigError, "must be one number or a pair"),
    ({"policy": "cyclic", "cyclic_times": 0}, ConfigError, "cyclic_times=0"),
    ({"policy": "cyclic", "step_ratio_up": 1.0}, ConfigError, "step_ratio_up=1.0"),
    ({"policy": "cyclic", "gamma": 2}, ConfigError, "gamma=2 must be above 0 and at most 1"),
    (
        {"policy": "cyclic", "anneal_strategy": "sin"},
        ConfigError,
        "anneal_strategy='sin' must be one of 'cos', 'linear'",
    ),
    ({"policy": "OneCycle", "max_lr": 1.0, "by_epoch": True}, ConfigError, "counts only iterations"),
    ({"policy": "OneCycle", "max_lr": 1.0, "pct_start": 1}, ConfigError, "pct_start=1 must be a float"),
    ({"policy": "OneCycle", "max_lr": 1.0, "total_steps": 0}, ConfigError, "total_steps=0"),
    ({"policy": "OneCycle", "max_lr": 1.0, "three_phase": 1}, ConfigTypeError, "three_phase=1"),
]


@pytest.mark.parametrize(("config", "error", "message"), LR_ERRORS)
def test_refused_schedules(config: dict[str, Any], error: type[Exception], message: str) -> None:
    made = hr.EpochBasedRunner(Idle(), optimizer=sgd(), max_epochs=1)
    with pytest.raises(error, match=message):
        made.register_lr_hook(config)
    assert not made.hooks


@pytest.mark.parametrize(
    ("optimizer", "which", "config", "error", "message"),
    [
        (None, "lr", EXP, OrderError, "this runner has no optimizer"),
        (
            sgd(),
            "lr",
            {"policy": "OneCycle", "max_lr": 1.0, "total_steps": 7},
            ConfigError,
            "less than the 8 iterations",
        ),
        (sgd(), "lr", {"policy": "OneCycle", "max_lr": []}, ConfigError, "no number for group 0"),
        (
            sgd(),
            "lr",
            {"policy": "CosineRestart", "periods": [1], "min_lr": 0},
            ConfigError,
            "epoch 1 is after the last",
        ),
        (
            sgd(),
            "lr",
            {"policy": "CosineRestart", "periods": [2], "min_lr": 0, "by_epoch": False},
            ConfigError,
            "iteration 2 is after the last",
        ),
        (
            torch.optim.Adagrad([parameter()]),
            "momentum",
            {"policy": "cyclic"},
            ConfigError,
            "neither 'momentum' nor 'betas'",
        ),
    ],
)
def test_schedules_that_do_not_fit_the_run(
    optimizer: Any, which: str, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(optimizer, config, which=which)


def test_a_schedule_by_epoch_needs_epochs() -> None:
    made = hr.IterBasedRunner(Idle(), optimizer=sgd(), max_iters=3)
    made.register_lr_hook({"policy": "poly"})
    with pytest.raises(ConfigError, match="the runner has no max_epochs; write by_epoch=False"):
        made.run([DATA], [("train", 1)])
