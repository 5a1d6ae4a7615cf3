"""Runs that go on from a file: what comes back, where the data begins, and which files are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from halfpeak import runner
from halfpeak.core.errors import CheckpointError, StateError
from runner import zoo
from runner.zoo import LENGTH, PASS, SETUPS, build, differences, run
from support.damage import flip

KINDS = ("EpochBasedRunner", "IterBasedRunner")
BATCHES = [torch.full((1,), float(number)) for number in range(4)]
LENGTHS = {"EpochBasedRunner": {"max_epochs": 2}, "IterBasedRunner": {"max_iters": 8}}


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_resume_between_two_passes_is_bitwise(setup: str, kind: str, tmp_path: Path) -> None:
    """Weights, masters, optimizer, loss scale, schedules, averages, counters and random numbers of one process.

    The file is written after the hooks that follow the saving hook, such as the swap of averages.
    """
    by_epoch = kind == "EpochBasedRunner"
    options = {"interval": 1 if by_epoch else PASS, "by_epoch": by_epoch, "filename_tmpl": "{}.pth"}
    end = run(build(kind, tmp_path / "whole", setup, **options))
    for finished in (1, 2):
        again = build(kind, tmp_path / str(finished), setup, **options)
        again.resume(tmp_path / "whole" / f"{finished if by_epoch else finished * PASS}.pth")
        assert again.iter == finished * PASS
        assert not differences(end, run(again)), finished


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    """A resume from the wrong place must not pass for a right one."""
    end = run(build("EpochBasedRunner", tmp_path / "a"))
    again = build("EpochBasedRunner", tmp_path / "b")
    again.resume(tmp_path / "a" / "iter_5.pth")
    assert any(path.startswith("/state_dict") for path in differences(end, run(again)))


def test_hooks_are_restored_where_a_subclass_has_a_run_of_its_own(tmp_path: Path) -> None:
    """As mmaction and mmgen wrote it."""

    class Own(runner.EpochBasedRunner):
        def run(self, data_loaders: Any, workflow: Any, max_epochs: int | None = None, **kwargs: Any) -> None:
            self.call_hook("before_run")
            while self.epoch < self.max_epochs:
                self.train(data_loaders[0])
            self.call_hook("after_run")

    def train(*, resumed: bool = False) -> Any:
        torch.manual_seed(0)
        model = zoo.Model()
        made = Own(
            model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), work_dir=tmp_path, max_epochs=4
        )
        made.register_training_hooks(
            None, {}, {"interval": 1}, custom_hooks_config=[runner.EMAHook(momentum=0.1, warm_up=1)]
        )
        if resumed:
            made.resume(tmp_path / "epoch_2.pth")
        made.run([[torch.ones(2, 3)] * 3], [("train", 1)])
        assert made.max_iters == 12
        return model.state_dict()

    whole = {name: value.clone() for name, value in train().items()}
    again = train(resumed=True)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("setup", ["plain", "autocast, accumulated", "fp16"])
def test_a_resume_where_a_subclass_has_a_train_of_its_own(
    setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As subclasses for mmcv 1.7 wrote it: they count and call the hooks themselves."""

    class Own(runner.IterBasedRunner):
        def train(self, data_loader: Any, **kwargs: Any) -> None:
            self.mode, self.data_loader = "train", data_loader
            self.model.train()
            self._epoch, self.data_batch = data_loader.epoch, next(data_loader)
            self.call_hook("before_train_iter")
            self.run_iter(self.data_batch, train_mode=True, **kwargs)
            self.call_hook("after_train_iter")
            self._iter, self._inner_iter = self._iter + 1, self._inner_iter + 1

    usual = run(build("IterBasedRunner", tmp_path / "usual", setup))
    monkeypatch.setattr(runner, "IterBasedRunner", Own)
    assert not differences(usual, run(build("IterBasedRunner", tmp_path / "whole", setup)))
    again = build("IterBasedRunner", tmp_path / "again", setup)
    again.resume(tmp_path / "usual" / f"iter_{PASS}.pth")
    assert not differences(usual, run(again))


class Averages(runner.Hook):
    """As ExpMomentumEMAHook of mmdetection: averages in buffers that it registers; it resumes by itself."""

    def __init__(self, resume_from: Path | None) -> None:
        self.resume_from = resume_from

    def before_run(self, runner: Any) -> None:
        self.weights = runner.model.state_dict()
        for name, value in self.weights.items():
            runner.model.register_buffer(f"ema_{name.replace('.', '_')}", value.data.clone())
        self.averages = dict(runner.model.named_buffers())
        if self.resume_from is not None:
            runner.resume(self.resume_from)

    def after_train_iter(self, runner: Any) -> None:
        for value, average in self.pairs():
            if value.is_floating_point():
                average.mul_(0.5).add_(value.data, alpha=0.5)

    def after_train_epoch(self, runner: Any) -> None:
        for value, average in self.pairs():
            before = value.data.clone()
            value.data.copy_(average.data)
            average.data.copy_(before)

    before_train_epoch = after_train_epoch

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (value, self.averages[f"ema_{name.replace('.', '_')}"]) for name, value in self.weights.items()
        ]


@pytest.mark.parametrize("setup", ["plain", "accumulated"])
def test_a_hook_may_register_weights_and_resume_by_itself(setup: str, tmp_path: Path) -> None:
    def train(folder: str, file: Path | None = None) -> Any:
        model = zoo.Model()
        optimizer, config = SETUPS[setup][0](model), SETUPS[setup][1]
        made = runner.EpochBasedRunner(
            model, optimizer=optimizer, work_dir=tmp_path / folder, logger=zoo.quiet(), max_epochs=3
        )
        made.register_training_hooks({"policy": "poly", "by_epoch": False}, config, {"interval": 1})
        made.register_hook(Averages(file), 49)
        return run(made)

    whole = train("whole")
    for epoch in (1, 2):
        again = train(str(epoch), tmp_path / "whole" / f"epoch_{epoch}.pth")
        assert not differences(whole, again), epoch


def test_weights_that_the_model_lacks_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in mmcv, because a hook may register them later."""
    made = runner.EpochBasedRunner(zoo.Model(), max_epochs=1)
    made.model.register_buffer("more", torch.zeros(1))
    made.save_checkpoint(tmp_path)
    runner.EpochBasedRunner(zoo.Model(), max_epochs=2).resume(tmp_path / "epoch_1.pth")
    assert "unexpected key in source state_dict: more" in caplog.text


def test_meta_comes_back_for_both_runners(tmp_path: Path) -> None:
    """mmcv's IterBasedRunner lost it, and the loss scale with it."""
    for kind in KINDS:
        run(build(kind, tmp_path, "fp16"))
        again = build(kind, tmp_path, "fp16")
        again.meta = {"own": 1}
        again.resume(tmp_path / "iter_8.pth")
        assert again.meta["fp16"]["loss_scaler"]["cur_scale"] == 2.0**24  # from 2**32, halved eight times
        assert (again.meta["seed"], again.meta["own"]) == (3, 1)


def test_the_optimizer_may_be_left_out(tmp_path: Path) -> None:
    run(build("EpochBasedRunner", tmp_path))
    again = build("EpochBasedRunner", tmp_path)
    again.resume(tmp_path / "iter_6.pth", resume_optimizer=False)
    assert again.iter == 6
    assert not again.optimizer.state


def test_state_of_a_missing_hook_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(build("EpochBasedRunner", tmp_path))
    again = runner.EpochBasedRunner(zoo.Model(), max_epochs=3)
    again.resume(tmp_path / "iter_4.pth")
    run(again)
    assert "no hook for the state of EMAHook in the checkpoint" in caplog.text
    assert "no optimizer was resumed: the runner has none" in caplog.text


# --- where the data begins --------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Records the batches that it has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        self.seen.append(float(data))
        return {}


@pytest.mark.parametrize(
    ("kind", "again", "batches"), [("EpochBasedRunner", 4, [0, 1, 2, 3]), ("IterBasedRunner", 6, [0, 1])]
)
def test_inside_an_epoch_the_data_begins_anew(
    kind: str, again: int, batches: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By epochs the whole epoch is repeated, so the iterations go back to its beginning, which schedules count."""
    made, other = (getattr(runner, kind)(Seen(), work_dir=tmp_path, **LENGTHS[kind]) for _ in range(2))
    made.register_checkpoint_hook({"interval": 6, "by_epoch": False})
    made.run([BATCHES], [("train", 1)])
    iters: list[int] = []
    other.register_hook(runner.ClosureHook("before_train_iter", lambda runner: iters.append(runner.iter)))
    other.resume(tmp_path / "iter_6.pth")
    assert other.iter == 6
    other.run([BATCHES], [("train", 1)])
    assert (iters, other.model.seen, other.iter) == (list(range(again, 8)), batches, 8)
    assert ("saved inside epoch 2, which begins again" in caplog.text) == (kind == "EpochBasedRunner")


def test_inside_a_window_the_gradients_so_far_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(build("IterBasedRunner", tmp_path, "accumulated"))
    again = build("IterBasedRunner", tmp_path / "again", "accumulated")
    again.logger = logging.getLogger("loud")
    again.resume(tmp_path / "iter_10.pth")
    before = again.model.first.weight.detach().clone()
    moved: list[bool] = []
    again.register_hook(
        runner.ClosureHook(
            "after_train_iter",
            lambda runner: moved.append(not torch.equal(before, runner.model.first.weight)),
        ),
        "LOWEST",
    )
    run(again)
    assert "Resume iter number is not divisible by cumulative_iters" in caplog.text
    assert moved[:2] == [False, True]


def test_a_resumed_run_gives_the_sampler_the_number_of_its_pass(tmp_path: Path) -> None:
    """mmcv began with the order of the first pass again."""

    class Orders(DistributedSampler[float]):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            told.append(epoch)

    told: list[int] = []
    made, again = (runner.IterBasedRunner(Seen(), work_dir=tmp_path, max_iters=8) for _ in range(2))
    made.register_checkpoint_hook({"interval": 4, "by_epoch": False})
    loader = DataLoader(torch.arange(4.0), sampler=Orders(range(4), num_replicas=1, rank=0))  # type: ignore[arg-type]
    made.run([loader], [("train", 1)])
    again.resume(tmp_path / "iter_4.pth")
    again.run([loader], [("train", 1)])
    assert told == [1, 1]
    assert (again.epoch, again.model.seen) == (1, made.model.seen[4:])


@pytest.mark.parametrize("setup", ["plain", "autocast, accumulated", "fp16"])
def test_a_second_run_goes_on(setup: str, tmp_path: Path) -> None:
    made = build("EpochBasedRunner", tmp_path, setup)
    first = run(made)
    made._max_epochs += 1
    assert differences(first, run(made))
    assert made.iter == LENGTH + PASS


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_counts_in_proportion(kind: str, tmp_path: Path) -> None:
    run(build(kind, tmp_path))
    again = build(kind, tmp_path)
    again._world_size = 2
    again.resume(tmp_path / "iter_6.pth")
    assert again.iter == 3


# --- which files are refused ------------------------------------------------------------------------------------------


def widen(made: Any) -> None:
    made.model.last = nn.Linear(8, 3)


def replace_optimizer(made: Any) -> None:
    made.optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "change", "is_damaged", "says"),
    [
        ("IterBasedRunner", None, False, "counts 'epoch', but IterBasedRunner counts 'iter'"),
        ("EpochBasedRunner", None, True, "damaged"),
        ("EpochBasedRunner", widen, False, r"last\.weight is \(2, 8\) in the checkpoint and \(3, 8\) in the"),
        (
            "EpochBasedRunner",
            replace_optimizer,
            False,
            r"\['params'\] is \[0, 1, 2, 3, 4, 5\] and should be a list of 1",
        ),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    kind: str, change: Any, is_damaged: bool, says: str, tmp_path: Path
) -> None:
    run(build("EpochBasedRunner", tmp_path))
    path = tmp_path / "iter_6.pth"
    if is_damaged:
        flip(path)
    again = build(kind, tmp_path)
    if change is not None:
        change(again)
    before = again.checkpoint()
    with pytest.raises((StateError, CheckpointError), match=says):
        again.resume(path, resume_optimizer=change is not widen)
    assert not differences(before, again.checkpoint())
