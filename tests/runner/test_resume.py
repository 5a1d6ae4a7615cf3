"""A resumed run ends as the uninterrupted one: weights, optimizer, hooks, log, data and random numbers, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from halfpeak import runner
from halfpeak.core.errors import CheckpointError, StateError
from halfpeak.runner.loop.batches import Batches, IterLoader
from runner import zoo
from runner.zoo import LENGTH, SETUPS, build, differences, run
from support.damage import flip

KINDS = ("EpochBasedRunner", "IterBasedRunner")
STOPS = (1, 4, 5, 7, 8, 12)
"""The first, the last of an epoch, the first of the next, after an overflow, inside windows of every setup, the last."""
BATCHES = [torch.full((1,), float(number)) for number in range(4)]
LENGTHS = {"EpochBasedRunner": {"max_epochs": 2}, "IterBasedRunner": {"max_iters": 8}}


class Interrupted(nn.Module):
    """Records the batches that it has trained on; the ``at``-th is interrupted."""

    at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        if len(self.seen) == self.at:
            raise KeyboardInterrupt
        self.seen.append(float(data))
        return {}


@pytest.mark.parametrize(
    ("setup", "kind", "validated"),
    [(setup, kind, (i + j) % 2 == 1) for i, setup in enumerate(SETUPS) for j, kind in enumerate(KINDS)],
)
def test_a_resume_is_bitwise(setup: str, kind: str, validated: bool, tmp_path: Path) -> None:
    end = run(build(kind, tmp_path / "whole", setup), validated=validated)
    stops = range(1, LENGTH + 1) if setup == "plain" and not validated else STOPS[validated::2]
    for stop in stops:
        again = build(kind, tmp_path / str(stop), setup)
        again.resume(tmp_path / "whole" / f"iter_{stop}.pth")
        assert again.iter == stop
        assert not differences(end, run(again, validated=validated)), stop


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_that_is_over_does_not_begin_again(kind: str, tmp_path: Path) -> None:
    """Two windows of five are skipped, so that the eleventh iteration counts as the first again."""
    made = [build(kind, tmp_path / name, "accumulated") for name in ("whole", "again")]
    for one in made:
        one.register_hook(zoo.Overflow(1), "HIGH")
    whole, again = made
    end = run(whole)
    again.resume(tmp_path / "whole" / "iter_10.pth")
    assert not differences(end, run(again))


def test_a_resume_at_the_end_of_an_epoch_is_bitwise(tmp_path: Path) -> None:
    """The file is written after the hooks that follow the saving hook, such as the swap of averages."""
    end = run(build("EpochBasedRunner", tmp_path, interval=1, by_epoch=True), validated=True)
    for epoch in (1, 2):
        again = build("EpochBasedRunner", tmp_path / str(epoch))
        again.resume(tmp_path / f"epoch_{epoch}.pth")
        assert (again.epoch, again.iter) == (epoch, 4 * epoch)
        assert not differences(end, run(again, validated=True))


def test_hooks_are_restored_where_a_subclass_has_a_run_of_its_own(tmp_path: Path) -> None:
    """As mmaction and mmgen wrote it. The place in the data is not restored, so the file is of the end of an epoch."""

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
def test_a_resume_is_bitwise_where_a_subclass_has_a_train_of_its_own(
    setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body of IterBasedRunner.train of mmcv 1.7, which subclasses copied with changes."""

    class Own(runner.IterBasedRunner):
        def train(self, data_loader: Any, **kwargs: Any) -> None:
            self.model.train()
            self.mode = "train"
            self.data_loader = data_loader
            self._epoch = data_loader.epoch
            data_batch = next(data_loader)
            self.data_batch = data_batch
            self.call_hook("before_train_iter")
            self.run_iter(data_batch, train_mode=True, **kwargs)
            self.call_hook("after_train_iter")
            del self.data_batch
            self._inner_iter += 1
            self._iter += 1

    usual = run(build("IterBasedRunner", tmp_path / "usual", setup))
    monkeypatch.setattr(runner, "IterBasedRunner", Own)
    assert not differences(usual, run(build("IterBasedRunner", tmp_path / "whole", setup)))
    for stop in STOPS:
        again = build("IterBasedRunner", tmp_path / str(stop), setup)
        again.resume(tmp_path / "whole" / f"iter_{stop}.pth")
        assert again.iter == stop
        assert not differences(usual, run(again)), stop


@pytest.mark.parametrize("setup", ["plain", "autocast, accumulated", "fp16"])
def test_a_second_run_goes_on(setup: str, tmp_path: Path) -> None:
    made = build("EpochBasedRunner", tmp_path, setup)
    first = run(made)
    made._max_epochs += 1
    assert differences(first, run(made))
    assert made.iter == LENGTH + 4


def without_noise(data: zoo.Noisy, index: int) -> Tensor:
    return torch.full((3,), index / zoo.SAMPLES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", runner.Hook.stages)
def test_a_file_taken_at_the_end_of_any_stage_resumes_bitwise(
    kind: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last hook of the stage calls ``save_checkpoint`` itself."""
    places: list[str] = []

    class Save(runner.Hook):
        def save(self, runner: Any) -> None:
            places.append(f"{len(places)}.{{}}.pth")
            runner.save_checkpoint(tmp_path, places[-1], create_symlink=False)

    if stage in ("before_train_iter", "before_val_iter"):
        # The resumed run loads the batch again, and loading it in this process draws new noise.
        monkeypatch.setattr(zoo.Noisy, "__getitem__", without_noise)
    setattr(Save, stage, Save.save)
    whole = build(kind, tmp_path / "whole", interval=100)
    whole.register_hook(Save(), "LOWEST")
    end = run(whole, validated=True)
    for number in range(0, len(places), 2):
        again = build(kind, tmp_path / str(number), interval=100)
        again.resume(next(tmp_path.glob(f"{number}.*.pth")))
        assert not differences(end, run(again, validated=True)), number


def test_an_interrupted_iteration_gets_its_batch_again(tmp_path: Path) -> None:
    """A script may catch the interrupt and save."""
    for kind in KINDS:
        made, again = (getattr(runner, kind)(Interrupted(), **LENGTHS[kind]) for _ in range(2))
        made.model.at = 6
        with pytest.raises(KeyboardInterrupt):
            made.run([BATCHES], [("train", 1)])
        made.save_checkpoint(tmp_path, "interrupted.pth", create_symlink=False)
        again.resume(tmp_path / "interrupted.pth")
        again.run([BATCHES], [("train", 1)])
        assert (again.iter, made.model.seen + again.model.seen) == (8, [0, 1, 2, 3, 0, 1, 2, 3])


class Averages(runner.Hook):
    """As ExpMomentumEMAHook of mmdetection: averages in buffers that it registers, and swaps around an epoch."""

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
            held = value.data.clone()
            value.data.copy_(average.data)
            average.data.copy_(held)

    before_train_epoch = after_train_epoch

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (value, self.averages[f"ema_{name.replace('.', '_')}"]) for name, value in self.weights.items()
        ]


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize("setup", ["plain", "autocast, accumulated"])
@pytest.mark.parametrize("kind", [*KINDS, "by epochs"])
def test_weights_that_a_hook_registers_are_resumed(
    kind: str, setup: str, by_hook: bool, tmp_path: Path
) -> None:
    """A hook may also resume by itself, as mmdetection's does where its ``resume_from`` is set."""

    def train(folder: str, file: Path | None = None) -> Any:
        model = zoo.Model()
        optimizer, config = SETUPS[setup][0](model), SETUPS[setup][1]
        length = {"max_iters": 8} if kind == "IterBasedRunner" else {"max_epochs": 2}
        cls = runner.EpochBasedRunner if kind == "by epochs" else getattr(runner, kind)
        made = cls(model, optimizer=optimizer, work_dir=tmp_path / folder, logger=zoo.quiet(), **length)
        made.register_training_hooks(
            {"policy": "poly", "by_epoch": False},
            config,
            {"interval": 1, "by_epoch": kind == "by epochs", "filename_tmpl": "{}.pth"},
        )
        made.register_hook(Averages(file if by_hook else None), 49)
        made.register_hook(zoo.Overflow(1, 5), "ABOVE_NORMAL")
        if file is not None:
            made.resume(file)
        return run(made)

    whole = train("whole")
    for stop in (1, 2) if kind == "by epochs" else (2, 4, 5):
        assert not differences(whole, train(str(stop), tmp_path / "whole" / f"{stop}.pth")), stop


def test_weights_that_the_model_lacks_are_refused_when_the_run_begins(tmp_path: Path) -> None:
    made = runner.EpochBasedRunner(Interrupted(), max_epochs=1, work_dir=tmp_path)
    made.model.register_buffer("more", torch.zeros(1))
    made.save_checkpoint(tmp_path)
    again = runner.EpochBasedRunner(Interrupted(), max_epochs=2)
    again.resume(tmp_path / "epoch_1.pth")
    with pytest.raises(StateError, match="unexpected key in source state_dict: more"):
        again.run([BATCHES], [("train", 1)])
    assert again.iter == 0


class OwnTrain(runner.EpochBasedRunner):
    """The body of EpochBasedRunner.train of mmcv 1.7, which subclasses copied with changes."""

    def train(self, data_loader: Any, **kwargs: Any) -> None:
        self.model.train()
        self.mode = "train"
        self.data_loader = data_loader
        self._max_iters = self._max_epochs * len(data_loader)  # type: ignore[operator]
        self.call_hook("before_train_epoch")
        for i, data_batch in enumerate(data_loader):
            self.data_batch = data_batch
            self._inner_iter = i
            self.call_hook("before_train_iter")
            self.run_iter(data_batch, train_mode=True, **kwargs)
            self.call_hook("after_train_iter")
            del self.data_batch
            self._iter += 1
        self.call_hook("after_train_epoch")
        self._epoch += 1


@pytest.mark.parametrize("cls", [runner.EpochBasedRunner, runner.IterBasedRunner, OwnTrain])
def test_a_second_run_after_a_resumed_one_restores_nothing(cls: Any, tmp_path: Path) -> None:
    lengths = LENGTHS["IterBasedRunner" if cls is runner.IterBasedRunner else "EpochBasedRunner"]
    made, again = (cls(Interrupted(), **lengths) for _ in range(2))
    made.run([BATCHES], [("train", 1)])
    made.save_checkpoint(tmp_path, "end.pth", create_symlink=False)
    again.resume(tmp_path / "end.pth")
    for more in (1, 2):
        again._max_epochs, again._max_iters = 2 + more, 8 + 4 * more
        again.run([BATCHES], [("train", 1)])
    assert (again.iter, again.steps) == (16, 16)


def test_a_runner_that_goes_back_by_an_iteration_counts_its_steps_again(tmp_path: Path) -> None:
    whole, made = (build("IterBasedRunner", tmp_path / name) for name in "ab")
    run(whole)
    run(made)
    made.resume(tmp_path / "b" / f"iter_{LENGTH - 1}.pth")
    run(made)
    assert (made.iter, made.steps) == (LENGTH, whole.steps)


def test_a_file_without_the_mark_of_an_open_epoch_resumes(tmp_path: Path) -> None:
    """As older files are: the hooks have the state of the file, not that of a new epoch."""
    end = run(build("IterBasedRunner", tmp_path / "a"))
    again = build("IterBasedRunner", tmp_path / "b")
    again.resume(tmp_path / "a" / "iter_5.pth")
    del again._resumed["loop"]["is_open"]
    assert not differences(end, run(again))


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    """A resume from the wrong place must not pass for a right one."""
    end = run(build("EpochBasedRunner", tmp_path / "a"))
    again = build("EpochBasedRunner", tmp_path / "b")
    again.resume(tmp_path / "a" / "iter_5.pth")
    again._resumed["loop"]["open"]["taken"] += 1
    assert any(path.startswith("/state_dict") for path in differences(end, run(again)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_resumes_at_its_batch(workers: int) -> None:
    generator = torch.Generator().manual_seed(5)
    inside = RandomSampler(zoo.Noisy(), generator=torch.Generator().manual_seed(6))
    loaders: list[Any] = [
        DataLoader(zoo.Noisy(), batch_size=2, shuffle=True, num_workers=workers),
        DataLoader(zoo.Noisy(), batch_size=2, sampler=RandomSampler(zoo.Noisy(), generator=generator)),
        DataLoader(zoo.Noisy(), batch_size=2, sampler=WeightedRandomSampler([1.0, 5.0, 2.0], 8)),
        DataLoader(zoo.Noisy(), batch_sampler=BatchSampler(inside, 2, drop_last=False)),
    ]
    for loader in loaders[:1] if workers else loaders:
        whole = Batches(loader)
        begun = [next(whole) for _ in range(2)]
        state, numbers = whole.state_dict(), torch.get_rng_state()
        rest = list(whole)
        resumed = Batches(loader, state)
        # The noise comes from torch's own generator, which a runner restores; workers seed theirs from it.
        torch.set_rng_state(numbers)
        again = list(resumed)
        assert len(begun) + len(rest) == resumed.num_batches
        assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))


def test_an_endless_loader_resumes_at_its_batch() -> None:
    def make() -> IterLoader:
        return IterLoader(DataLoader(torch.arange(5.0), shuffle=True))

    loader = make()
    for _ in range(7):
        next(loader)
    state, following = loader.state_dict(), [next(loader) for _ in range(3)]
    again = make()
    again.load_state_dict(state)
    assert again.epoch == 1
    assert all(torch.equal(a, next(again)) for a in following)


def test_an_endless_loader_sets_the_epoch_of_its_sampler() -> None:
    def make() -> IterLoader:
        data = torch.arange(8.0)
        return IterLoader(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))  # type: ignore[arg-type]

    loader = make()
    for _ in range(6):
        next(loader)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert [next(again).item() for _ in range(6)] == [next(loader).item() for _ in range(6)]


def test_a_resume_refuses_other_data(tmp_path: Path) -> None:
    run(build("EpochBasedRunner", tmp_path))
    again = build("EpochBasedRunner", tmp_path)
    again.resume(tmp_path / "iter_7.pth")
    with pytest.raises(
        StateError, match="after 3 batches of a pass over the data, but the data loader has only 2"
    ):
        again.run([DataLoader(zoo.Noisy(), batch_size=6, shuffle=True)], [("train", 1)])


def test_another_workflow_starts_from_its_first_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(build("EpochBasedRunner", tmp_path), validated=True)
    again = build("EpochBasedRunner", tmp_path)
    again.logger = zoo.logging.getLogger("loud")
    again.resume(tmp_path / "iter_6.pth")
    run(again)
    assert "it starts from its first entry" in caplog.text
    assert again.epoch == 3


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_counts_in_proportion(kind: str, tmp_path: Path) -> None:
    run(build(kind, tmp_path))
    again = build(kind, tmp_path)
    again._world_size = 2
    again.resume(tmp_path / "iter_6.pth")
    assert again.iter == 3


def test_a_file_of_the_other_runner_is_refused(tmp_path: Path) -> None:
    run(build("IterBasedRunner", tmp_path))
    again = build("EpochBasedRunner", tmp_path)
    before = again.checkpoint()
    with pytest.raises(StateError, match="counts 'iter', but EpochBasedRunner counts 'epoch'"):
        again.resume(tmp_path / "iter_6.pth")
    assert not differences(before, again.checkpoint())


def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run(build("EpochBasedRunner", tmp_path))
    path = tmp_path / "iter_6.pth"
    flip(path)
    again = build("EpochBasedRunner", tmp_path)
    before = again.checkpoint()
    with pytest.raises(CheckpointError, match="damaged"):
        again.resume(path)
    assert not differences(before, again.checkpoint())


def test_an_optimizer_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run(build("EpochBasedRunner", tmp_path))
    again = build("EpochBasedRunner", tmp_path)
    again.optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    before = again.checkpoint()
    with pytest.raises(StateError, match="groups differ"):
        again.resume(tmp_path / "iter_6.pth")
    assert not differences(before, again.checkpoint())


def test_the_optimizer_may_be_left_out(tmp_path: Path) -> None:
    run(build("EpochBasedRunner", tmp_path))
    again = build("EpochBasedRunner", tmp_path)
    again.resume(tmp_path / "iter_6.pth", resume_optimizer=False)
    assert again.iter == 6
    assert not again.optimizer.state


def test_meta_comes_back_for_both_runners(tmp_path: Path) -> None:
    """mmcv's IterBasedRunner lost it, and the loss scale with it."""
    for kind in KINDS:
        run(build(kind, tmp_path, "fp16"))
        again = build(kind, tmp_path, "fp16")
        again.meta = {"own": 1}
        again.resume(tmp_path / "iter_8.pth")
        assert again.meta["fp16"]["loss_scaler"]["cur_scale"] == 2.0**24  # from 2**32, halved eight times
        assert (again.meta["seed"], again.meta["own"]) == (3, 1)


def test_state_of_a_missing_hook_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(build("EpochBasedRunner", tmp_path))
    again = runner.EpochBasedRunner(zoo.Model(), max_epochs=3)
    again.resume(tmp_path / "iter_4.pth")
    run(again)
    assert "no hook for the state of EMAHook in the checkpoint" in caplog.text
    assert "no optimizer was resumed: the runner has none" in caplog.text
