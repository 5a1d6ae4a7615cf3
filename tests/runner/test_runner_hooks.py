"""Hooks other than optimizer hooks and schedules: averages, evaluation, logs, checkpoints, samplers, buffers, closures."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import halfpeak.runner as hr
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.optim import AmpOptimWrapper
from halfpeak.runner.loop.data import IterLoader
from runner import zoo
from runner.zoo import Results, result

DATA = [torch.ones(2, 3)] * 4
TRAIN = [("train", 1)]


class Line(nn.Module):
    """One weight that counts the training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def train_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        with torch.no_grad():
            self.weight.add_(1)
        return {"log_vars": {"loss": 1.0}, "num_samples": 2}

    def val_step(self, data: Tensor, optimizer: Any) -> dict[str, Any]:
        return {"log_vars": {"acc": 0.5}, "num_samples": 2}

    def forward(self, x: Tensor, return_loss: bool = True) -> Any:
        assert [return_loss, self.training, torch.is_grad_enabled()] == [False] * 3
        return [float(self.weight)] * len(x)


def epochs(folder: Path | None = None, count: int = 2, **options: Any) -> hr.EpochBasedRunner:
    return hr.EpochBasedRunner(Line(), work_dir=folder, max_epochs=count, logger=zoo.quiet(), **options)


# --- averages of the weights ------------------------------------------------------------------------------------------


def test_an_average_moves_on_real_steps_only() -> None:
    made = epochs(count=1)
    made.register_hook(Results(result(), result(overflow=True), result(boundary=False), None))
    hook = hr.EMAHook(momentum=0.5, warm_up=1)
    made.register_hook(hook)
    made.run([DATA], TRAIN)
    # Steps 1 and 4: 0.5 * 1 = 0.5, then 0.5 * 0.5 + 0.5 * 4. After the epoch the model holds it, the hook the weight.
    assert made.model.weight.item() == 2.25
    assert hook.averages["weight"].item() == 4.0


def test_an_interval_averages_with_the_momentum_of_as_many_steps() -> None:
    """mmcv raised the momentum to the power of the interval, which nearly stopped the average."""
    made = epochs(count=1)
    made.register_hook(hr.EMAHook(momentum=0.5, interval=2, warm_up=1))
    made.run([DATA], TRAIN)
    assert made.model.weight.item() == pytest.approx(0.25 * (0.25 * 0 + 0.75 * 1) + 0.75 * 3)


def test_validation_sees_the_average_and_training_the_weights() -> None:
    seen: list[tuple[str, float]] = []
    made = epochs()
    made.register_hook(hr.EMAHook(momentum=0.5, warm_up=1))
    for stage in ("before_train_iter", "before_val_iter"):
        made.register_hook(
            hr.ClosureHook(stage, lambda runner: seen.append((runner.mode, runner.model.weight.item())))
        )
    made.run([DATA[:1], DATA[:1]], [("train", 1), ("val", 1)])
    assert seen == [("train", 0.0), ("val", 0.5), ("train", 1.0), ("val", 1.25)]


def test_masters_come_back_exactly_from_under_the_average(tmp_path: Path) -> None:
    """The weights are float16 and their masters float32; a run with averages trains as one without."""
    found: list[Tensor] = []
    for averaged in (True, False):
        made = zoo.build("EpochBasedRunner", tmp_path, "fp16, accumulated")
        if averaged:
            hooks = [hook for hook in made.hooks if isinstance(hook, hr.EMAHook)]
            made.register_hook(
                hr.ClosureHook("after_train_epoch", lambda runner: found.append(master(runner)))
            )
        else:
            made.hooks[:] = [hook for hook in made.hooks if not isinstance(hook, hr.EMAHook)]
        zoo.run(made)
        found.append(
            hooks[0].averages["first.weight"] if averaged else made.model.state_dict()["first.weight"]
        )
    assert found[-1].dtype is torch.float32
    assert torch.equal(found[-2], found[-1])


def master(runner: Any) -> Tensor:
    return runner.model.state_dict()["first.weight"]


@pytest.mark.parametrize("kind", ["plain", "fp16, accumulated", "apex"])
def test_it_averages_the_values_that_the_optimizer_steps(kind: str, tmp_path: Path) -> None:
    exact: dict[str, Tensor] = {}

    class Checked(hr.EMAHook):
        def before_run(self, runner: Any) -> None:
            super().before_run(runner)
            exact.update({name: value.double() for name, value in self.averages.items()})

        def after_train_iter(self, runner: Any) -> None:
            super().after_train_iter(runner)
            if runner.step_result.stepped():
                momentum = min(0.1, self._steps / (99 + self._steps))
                for name, value in runner.model.state_dict().items():
                    if name in exact:
                        exact[name].lerp_(value.double(), momentum)
            assert all((self.averages[name] - value).abs().max() < 1e-6 for name, value in exact.items())

    made = zoo.build("EpochBasedRunner", tmp_path, kind)
    made.hooks[:] = [hook for hook in made.hooks if not isinstance(hook, hr.EMAHook)]
    made.register_hook(Checked(momentum=0.1))
    zoo.run(made)
    assert made.steps > 1


# --- wrappers ---------------------------------------------------------------------------------------------------------


def test_the_result_of_a_wrapper_is_in_the_runner() -> None:
    model = zoo.Model()
    wrapper = AmpOptimWrapper(
        {"init_scale": 2.0},
        "float16",
        optimizer=zoo.sgd(model),
        accumulative_counts=2,
        clip_grad={"max_norm": 1.0},
    )
    made = hr.EpochBasedRunner(model, optimizer=wrapper, max_epochs=1)
    seen: list[Any] = []
    made.register_hook(zoo.Overflow(3), "HIGHEST")
    made.register_optimizer_hook({})
    made.register_hook(
        hr.ClosureHook(
            "after_train_iter",
            lambda runner: seen.append((runner.step_result.boundary, runner.step_result.stepped())),
        ),
        "LOWEST",
    )
    made.run([[torch.ones(4, 3)] * 5], TRAIN)
    assert seen == [(False, False), (True, True), (False, False), (True, False), (True, True)]
    assert len(made.log_buffer.val_history["grad_norm"]) == 3


# --- evaluation -------------------------------------------------------------------------------------------------------


class Scored:
    """Three samples; each evaluation returns the next score of a list."""

    def __init__(self, *scores: float, name: str = "acc") -> None:
        self.scores, self.name, self.seen = list(scores), name, []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1)}

    def evaluate(self, results: list[float], logger: Any = None, **options: Any) -> dict[str, Any]:
        self.seen.append((results, options))
        return {self.name: self.scores.pop(0), "other": 0.0}


def evaluated(
    folder: Path, data: Scored, count: int = 3, kind: Any = hr.EvalHook, **options: Any
) -> hr.EpochBasedRunner:
    made = epochs(folder, count)
    made.register_hook(kind(DataLoader(data), **options), "LOW")  # type: ignore[arg-type]
    made.register_logger_hooks({"interval": 10, "hooks": [{"type": "TextLoggerHook"}]})
    made.run([DATA], TRAIN)
    return made


@pytest.mark.parametrize("kind", [hr.EvalHook, hr.DistEvalHook])
def test_evaluation_keeps_the_best(kind: Any, tmp_path: Path) -> None:
    data = Scored(0.1, 0.3, 0.2)
    made = evaluated(tmp_path, data, kind=kind, save_best="auto", flag=1)
    assert data.seen == [([n] * 3, {"flag": 1}) for n in (4.0, 8.0, 12.0)]
    assert made.meta["hook_msgs"] == {"best_score": 0.3, "best_ckpt": str(tmp_path / "best_acc_epoch_2.pth")}
    assert [path.name for path in tmp_path.glob("*.pth")] == ["best_acc_epoch_2.pth"]
    best = epochs()
    best.resume(tmp_path / "best_acc_epoch_2.pth")
    assert (best.epoch, best.iter, best.model.weight.item()) == (2, 8, 8.0)
    rows = [json.loads(line) for line in next(tmp_path.glob("*.json")).read_text().splitlines()]
    assert [row["acc"] for row in rows if row.get("mode") == "val"] == [0.1, 0.3, 0.2]
    assert made.model.training


class OwnEvaluation(hr.EvalHook):
    """As users of mmcv wrote it: the whole evaluation in ``_do_evaluate``."""

    def _should_evaluate(self, runner: Any) -> bool:
        return runner.epoch != 1 and super()._should_evaluate(runner)

    def _do_evaluate(self, runner: Any) -> None:
        runner.log_buffer.output["eval_iter_num"] = len(self.dataloader)
        key_score = self.evaluate(runner, ["own", runner.epoch])
        if self.save_best and key_score:
            self._save_ckpt(runner, key_score)


class OwnDistributedEvaluation(OwnEvaluation, hr.DistEvalHook):
    pass


class OwnScore(hr.EvalHook):
    def evaluate(self, runner: Any, results: Any) -> float:
        runner.log_buffer.output["acc"] = results[0] / 100
        runner.log_buffer.ready = True
        return results[0] / 100


class OwnFile(hr.EvalHook):
    def _save_ckpt(self, runner: Any, key_score: float) -> None:
        super()._save_ckpt(runner, key_score + 1)


@pytest.mark.parametrize(
    ("kind", "results", "best"),
    [
        (OwnEvaluation, [["own", 0], ["own", 2]], 0.2),
        (OwnDistributedEvaluation, [["own", 0], ["own", 2]], 0.2),
        (OwnScore, [], 0.12),
        (OwnFile, [[4.0] * 3, [8.0] * 3, [12.0] * 3], 1.3),
    ],
)
def test_overrides_of_an_evaluation_are_called(
    kind: Any, results: list[Any], best: float, tmp_path: Path
) -> None:
    data = Scored(0.1, 0.2, 0.3)
    made = evaluated(tmp_path, data, kind=kind, save_best="acc")
    assert [found for found, _ in data.seen] == results
    [file] = tmp_path.glob("*.pth")
    assert file.name == "best_acc_epoch_3.pth"
    assert made.meta["hook_msgs"] == {"best_score": best, "best_ckpt": str(file)}


class OwnText(hr.TextLoggerHook):
    """As users of mmcv write it: a line and a file of their own, from the dict that the hook has collected."""

    def __init__(self, **options: Any) -> None:
        super().__init__(True, 2, True, False, 1000, None, (".log",), True, None)
        self.lines: list[str] = []
        self.rows: list[Any] = []

    def _log_info(self, log_dict: dict[str, Any], runner: Any) -> None:
        self.lines.append(
            f"{log_dict['mode']} {log_dict.pop('epoch')}/{runner.max_epochs} {log_dict['loss']}"
        )

    def _dump_log(self, log_dict: dict[str, Any], runner: Any) -> None:
        self.rows.append(sorted(log_dict.keys() - {"time", "data_time", "memory"}))


class OwnTimes(hr.CheckpointHook):
    """Saves after every epoch, and each time the last file again under another name."""

    def after_train_epoch(self, runner: Any) -> None:
        self._save_checkpoint(runner)
        runner.save_checkpoint(
            self.out_dir, save_optimizer=self.save_optimizer, **{**self.args, "filename_tmpl": "newest.pth"}
        )


def test_overrides_of_a_text_logger_are_called(tmp_path: Path) -> None:
    made = epochs(tmp_path)
    logger = OwnText()
    made.register_hook(hr.IterTimerHook())
    made.register_hook(logger, "VERY_LOW")
    made.run([DATA], TRAIN)
    assert logger.lines == [f"train {epoch}/2 1.0" for epoch in (1, 1, 2, 2)]
    assert logger.rows == [["iter", "loss", "lr", "mode"]] * 4


def test_an_override_of_a_checkpoint_hook_calls_its_parts(tmp_path: Path) -> None:
    made = epochs(tmp_path)
    made.register_hook(OwnTimes(create_symlink=False, file_client_args=None))
    made.run([DATA], TRAIN)
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == [
        "epoch_1.pth",
        "epoch_2.pth",
        "newest.pth",
    ]
    files = [torch.load(tmp_path / f"{name}.pth") for name in ("epoch_2", "newest")]
    assert [(file["meta"]["epoch"], file["meta"]["iter"]) for file in files] == [(2, 8)] * 2


@pytest.mark.parametrize(
    ("name", "options", "best"),
    [
        ("loss", {}, 0.1),
        ("bbox_mAP", {}, 0.3),
        ("mIoU", {}, 0.3),
        ("distance", {"rule": "less"}, 0.1),
        ("distance", {"less_keys": ["dist"]}, 0.1),
        ("distance", {"greater_keys": ["dist"]}, 0.3),
    ],
)
def test_which_score_is_better(name: str, options: dict[str, Any], best: float, tmp_path: Path) -> None:
    made = evaluated(
        tmp_path, Scored(math.nan, 0.2, math.nan, 0.1, 0.3, name=name), 5, save_best=name, **options
    )
    assert made.meta["hook_msgs"]["best_score"] == best


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"interval": 2}, [2, 4]),
        ({"start": 3}, [3, 4, 5]),
        ({"start": 2, "interval": 3}, [2, 5]),
    ],
)
def test_when_it_evaluates(options: dict[str, Any], at: list[int]) -> None:
    data = Scored(*[0.0] * 5)
    made = epochs(count=5)
    made.register_hook(hr.EvalHook(DataLoader(data), **options))  # type: ignore[arg-type]
    made.run([DATA[:1]], TRAIN)
    assert [results[0] for results, _ in data.seen] == at


@pytest.mark.parametrize("first", [True, False])
def test_evaluation_by_iteration_does_not_mix_with_the_log_of_training(first: bool, tmp_path: Path) -> None:
    made = hr.IterBasedRunner(Line(), work_dir=tmp_path, max_iters=6, logger=zoo.quiet())
    hook = hr.EvalHook(DataLoader(Scored(0.1, 0.2)), interval=3, by_epoch=False)  # type: ignore[arg-type]
    if first:  # before the timer, which has the same priority
        made.register_hook(hook, "LOW")
    made.register_training_hooks(None, log_config={"interval": 3, "hooks": [{"type": "TextLoggerHook"}]})
    if not first:
        made.register_hook(hook, "LOW")
    made.run([DATA], TRAIN)
    rows = [json.loads(line) for line in next(tmp_path.glob("*.json")).read_text().splitlines()]
    assert [(row["mode"], row["iter"], "acc" in row, "loss" in row) for row in rows] == [
        ("train", 3, False, True),
        ("val", 3, True, False),
        ("train", 6, False, True),
        ("val", 3, True, False),
    ]


def test_a_test_function_may_give_the_scores() -> None:
    made = epochs(count=1)
    made.register_hook(hr.EvalHook(DATA, test_fn=lambda model, loader: {"acc": len(loader) / 8}))
    made.run([DATA], TRAIN)
    assert made.log_buffer.output["acc"] == 0.5


@pytest.mark.parametrize(
    ("test_fn", "options", "message"),
    [
        (None, {"dataloader": [{"x": torch.ones(1)}]}, "NoneType has no evaluate"),
        (lambda model, loader: {"acc": 1.0}, {"save_best": "mAP"}, "save_best='mAP' is not among the scores"),
        (lambda model, loader: {"speed": 1.0}, {"save_best": "auto"}, "write rule='greater'"),
    ],
)
def test_scores_that_cannot_be_used(
    test_fn: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made = epochs(tmp_path)
    made.register_hook(hr.EvalHook(**{"dataloader": DATA, "test_fn": test_fn, **options}))
    with pytest.raises(ConfigError, match=message):
        made.run([DATA], TRAIN)


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "stops"), [({}, 4), ({"by_epoch": False, "profile_iters": 2}, 2)])
def test_a_profile_of_the_beginning(options: dict[str, Any], stops: int, tmp_path: Path) -> None:
    steps: list[int] = []
    trace = tmp_path / "trace.json"
    made = epochs(count=2)
    made.register_profiler_hook(
        {
            "on_trace_ready": lambda found: steps.append(found.step_num),
            "json_trace_path": str(trace),
            **options,
        }
    )
    made.run([DATA], TRAIN)
    assert steps == [stops]
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_profile_of_the_log_and_a_schedule(caplog: pytest.LogCaptureFixture) -> None:
    made = epochs(count=1)
    made.logger = logging.getLogger("profile")
    hook = hr.ProfilerHook(
        profile_iters=9,
        activities=["cpu"],
        schedule={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready={"type": "log_trace", "row_limit": 3},
        profile_memory=True,
    )
    made.register_hook(hook)
    with caplog.at_level(logging.INFO, "profile"):
        made.run([DATA], TRAIN)
    assert "Self CPU %" in caplog.text


# --- logs -------------------------------------------------------------------------------------------------------------


def test_the_log_buffer_averages_the_last_values_of_each_name() -> None:
    buffer = hr.LogBuffer()
    for value, count in ((1.0, 1), (2.0, 3), (4.0, 1)):
        buffer.update({"a": torch.tensor(value)}, count)
    buffer.update({"b": 7})
    buffer.average(2)
    assert (buffer.output, buffer.ready) == ({"a": 2.5, "b": 7.0}, True)
    buffer.average()
    assert buffer.output["a"] == 2.2
    buffer.update({"c": 1.0}, 0)
    buffer.average()
    assert math.isnan(buffer.output["c"])
    buffer.clear_output()
    assert (buffer.output, buffer.ready, len(buffer.val_history)) == ({}, False, 3)
    buffer.clear()
    assert not buffer.val_history


def test_a_tensor_in_the_log_may_change_later() -> None:
    buffer, value = hr.LogBuffer(), torch.tensor(1.0)
    buffer.update({"a": value})
    value.fill_(9)
    buffer.average()
    assert buffer.output == {"a": 1.0}


@pytest.mark.parametrize("values", [[1], {"a": "x"}, {"a": torch.ones(2)}, {"a": None}])
def test_refused_numbers_add_nothing(values: Any) -> None:
    buffer = hr.LogBuffer()
    with pytest.raises(ConfigTypeError, match="number"):
        buffer.update({"b": 1.0, **values} if isinstance(values, dict) else values)
    with pytest.raises(ConfigError, match="n=-1"):
        buffer.average(-1)
    assert not buffer.val_history


def test_the_last_logger_empties_the_output(tmp_path: Path) -> None:
    """An earlier logger leaves the output for the later ones."""
    seen: list[Any] = []

    class Copy(hr.LoggerHook):
        def log(self, runner: Any) -> None:
            seen.append({**self.get_loggable_tags(runner, tags_to_skip=("time", "data_time"))})

    made = epochs(tmp_path, 1, optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.25))
    made.register_training_hooks(
        None, log_config={"interval": 2, "hooks": [Copy(interval=2), Copy(interval=2)]}
    )
    made.run([DATA], TRAIN)
    assert seen == [{"train/loss": 1.0, "learning_rate": 0.5, "momentum": 0.25}] * 4
    assert not made.log_buffer.ready


def test_lines_of_several_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    two = {name: torch.optim.SGD([torch.zeros(1)], lr=lr) for name, lr in (("g", 0.5), ("d", 0.25))}
    made = hr.EpochBasedRunner(Line(), optimizer=two, max_epochs=1)
    made.register_training_hooks(None, log_config={"interval": 4, "hooks": [{"type": "TextLoggerHook"}]})
    made.run([DATA], TRAIN)
    line = next(message for message in caplog.messages if message.startswith("Epoch"))
    assert line.startswith("Epoch [1][4/4]\tlr_g: 5.000e-01 lr_d: 2.500e-01, eta: 0:00:00, time: 0.")
    assert line.endswith(", loss: 1.0000")


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = epochs(tmp_path, 1, optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.5))
    made.register_logger_hooks({"interval": 2, "hooks": [{"type": "TensorboardLoggerHook"}]})
    made.register_hook(hr.IterTimerHook())
    made.run([DATA, DATA], [("train", 1), ("val", 1)])
    events = EventAccumulator(str(tmp_path / "tf_logs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "val/acc", "learning_rate", "momentum"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(2, 1.0), (4, 1.0)]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_old_files_go_also_where_the_last_one_comes_in_between(tmp_path: Path) -> None:
    made = epochs(tmp_path, 5)
    made.register_checkpoint_hook({"interval": 2, "max_keep_ckpts": 2})
    made.run([DATA], TRAIN)
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == ["epoch_4.pth", "epoch_5.pth"]
    assert (tmp_path / "latest.pth").resolve().name == "epoch_5.pth"


def test_another_directory_and_name(tmp_path: Path) -> None:
    made = epochs(tmp_path / "run", 1)
    made.register_checkpoint_hook(
        {
            "out_dir": tmp_path / "store",
            "filename_tmpl": "e{}.pth",
            "meta": {"note": 1},
            "create_symlink": False,
            "save_optimizer": False,
        }
    )
    made.run([DATA], TRAIN)
    assert [path.name for path in (tmp_path / "store" / "run").iterdir()] == ["e1.pth"]
    saved = torch.load(tmp_path / "store" / "run" / "e1.pth", weights_only=True)
    assert saved["meta"]["note"] == 1
    assert "optimizer" not in saved


# --- the small ones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"type": "TensorboardLoggerHook"}, "no place to write"),
        ({"type": "CheckpointHook"}, "CheckpointHook has no place to save"),
        (
            {"type": "CheckpointHook", "filename_tmpl": "{}_{}.pth", "out_dir": "."},
            "one place for the number",
        ),
    ],
)
def test_where_it_cannot_write(options: dict[str, Any], says: str) -> None:
    made = epochs()
    made.register_hook_from_cfg(options)
    with pytest.raises(ConfigError, match=says):
        made.run([DATA], TRAIN)


class Seeded(SequentialSampler):
    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.__dict__.setdefault("epochs", []).append(epoch)


@pytest.mark.parametrize("inner", [False, True])
def test_samplers_get_the_epoch(inner: bool) -> None:
    sampler = Seeded(range(4))
    batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if inner else {"sampler": sampler}
    loader = DataLoader(torch.ones(4, 3), **batches)  # type: ignore[arg-type]
    made = epochs(count=3)
    made.register_custom_hooks({"type": "DistSamplerSeedHook"})
    made.run([loader], TRAIN)
    assert sampler.epochs == [0, 1, 2]
    endless = IterLoader(loader)
    for _ in range(2 * len(loader) + 1):
        next(endless)
    assert sampler.epochs[3:] == [1, 2]


def test_an_endless_loader_without_batches() -> None:
    with pytest.raises(ConfigError, match="gives no batch"):
        next(IterLoader(DataLoader(torch.ones(1, 3), batch_size=2, drop_last=True)))
    loader = IterLoader(DataLoader(torch.ones(4), sampler=RandomSampler(range(4))))
    assert (len(loader), len(loader.data_loader)) == (4, 4)


def test_closures() -> None:
    calls: list[int] = []
    made = epochs(count=1)
    made.register_hook(hr.ClosureHook("after_iter", lambda runner: calls.append(runner.iter)))
    made.run([DATA], TRAIN)
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("moments", "count"),
    [
        ({}, 2),
        ({"before_epoch": True}, 4),
        ({"after_epoch": False}, 0),
        ({"after_epoch": False, "after_iter": True}, 8),
    ],
)
def test_empty_cache(moments: dict[str, bool], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", lambda: calls.append(1))
    made = epochs()
    made.register_hook(hr.EmptyCacheHook(**moments))
    made.run([DATA], TRAIN)
    assert len(calls) == count


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "EMAHook": [
        ({"momentum": 0}, "momentum=0 must"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"interval": 0}, "interval=0"),
        ({"warm_up": 0}, "warm_up=0"),
    ],
    "EvalHook": [
        ({"dataloader": 3}, "dataloader must be a DataLoader, not int"),
        ({"dataloader": DATA, "interval": 0}, "interval=0 must be an integer of 1"),
        ({"dataloader": DATA, "start": -1}, "start=-1"),
        ({"dataloader": DATA, "rule": "more"}, "rule='more' must be 'greater', 'less' or None"),
        ({"dataloader": DATA, "by_epoch": 1}, "by_epoch=1"),
        ({"dataloader": DATA, "save_best": "speed"}, "cannot tell from the name 'speed' whether"),
    ],
    "ProfilerHook": [
        ({"profile_iters": 0}, "profile_iters=0"),
        ({"activities": ["gpu"]}, r"activities=\['gpu'\] must be a list of 'cpu', 'cuda'"),
        ({"on_trace_ready": {"type": "print"}}, "'print'.* must have the type 'log_trace' or 'tb_trace'"),
    ],
    "TextLoggerHook": [
        ({"interval": 0}, "interval=0"),
        ({"interval": 1.5}, "interval=1.5"),
        ({"ignore_last": 1}, "ignore_last=1"),
        ({"by_epoch": None}, "by_epoch=None"),
        ({"out_dir": "s3://logs"}, "copies no logs to out_dir='s3://logs'.*leave out_dir out"),
    ],
    "CheckpointHook": [
        ({"interval": 0}, "interval=0 must be"),
        ({"max_keep_ckpts": 1.0}, "max_keep_ckpts=1.0"),
        ({"by_epoch": 1}, "by_epoch=1 must be True or False"),
        ({"file_client_args": {}}, "takes no 'file_client_args'"),
        ({"sync_buffer": None}, "sync_buffer=None"),
    ],
    "EmptyCacheHook": [({"after_iter": 1}, "after_iter=1")],
    "SyncBuffersHook": [({"distributed": "no"}, "distributed='no'")],
    "ClosureHook": [
        ({"fn_name": "after_step", "fn": print}, "unknown stage 'after_step'"),
        ({"fn_name": "after_run", "fn": 3}, "fn=3"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "message"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows]
)
def test_refused_arguments(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(hr, kind)(**options)
