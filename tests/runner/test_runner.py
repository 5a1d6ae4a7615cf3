"""Runners: their arguments and refusals, the order of hooks, and the attributes that hooks read."""

from __future__ import annotations

import copy
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak.runner as hr
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError, RegistryError
from halfpeak.optim import OptimWrapper, OptimWrapperDict
from halfpeak.runner.model_step import val_step
from runner import zoo

DATA = [torch.ones(2, 3)] * 4
TRAIN = [("train", 1)]


class Steps(nn.Linear):
    """A model that records the calls of its ``train_step`` and ``val_step``."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.calls: list[Any] = []

    def train_step(self, data: Any, optimizer: Any, **kwargs: Any) -> Any:
        self.calls.append(("train", optimizer, kwargs))
        return {"loss": self(data).mean()}

    def val_step(self, data: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        self.calls.append(("val", optimizer, kwargs))
        return {"loss": self(data).mean()}


class Silent(Steps):
    def train_step(self, data: Any, optimizer: Any, **kwargs: Any) -> Any:
        return None


def sgd(model: nn.Module | None = None, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD((model or Steps()).parameters(), **{"lr": 0.1, **options})


def epochs(model: Any = None, **options: Any) -> hr.EpochBasedRunner:
    return hr.EpochBasedRunner(model or Steps(), **{"max_epochs": 2, **options})


class Calls(hr.Hook):
    """Appends its name to a shared list at one stage."""

    def __init__(self, name: str, calls: list[str], stage: str = "before_run") -> None:
        setattr(self, stage, lambda runner: calls.append(name))


# --- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": nn.Linear(1, 1)}, ConfigTypeError, "Linear has no train_step; write def train_step"),
        ({"model": nn.DataParallel(Steps())}, ConfigTypeError, "DataParallel hides it"),
        ({"batch_processor": 3, "model": nn.Linear(1, 1)}, ConfigTypeError, "must be a function"),
        ({"batch_processor": print}, ConfigError, "leave out batch_processor"),
        ({"optimizer": "SGD"}, ConfigTypeError, "not str; write optimizer=SGD"),
        (
            {"optimizer": {"a": sgd(), "b": 1}},
            ConfigTypeError,
            r"optimizer\['b'\] must be a torch.optim.Optimizer",
        ),
        ({"logger": "log"}, ConfigTypeError, "logger must be a logging.Logger, not str"),
        ({"meta": [1]}, ConfigTypeError, "meta must be a dict"),
        ({"work_dir": 3}, ConfigTypeError, "work_dir=3 must be the path"),
        ({"max_iters": 3}, ConfigError, "Only one of max_epochs and max_iters"),
        ({"max_epochs": 0}, ConfigTypeError, "max_epochs=0 must be an integer of 1 or more"),
        ({"max_epochs": True}, ConfigTypeError, "max_epochs=True"),
    ],
)
def test_refused_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        epochs(**options)


def test_the_callers_meta_is_not_changed(tmp_path: Path) -> None:
    meta = {"seed": 1}
    made = epochs(meta=meta, work_dir=tmp_path / "deep" / "run")
    made.meta["more"] = 2
    assert meta == {"seed": 1}
    assert (tmp_path / "deep" / "run").is_dir()
    assert (epochs().meta, made.model_name, made.rank, made.world_size) == ({}, "Steps", 0, 1)
    assert isinstance(made.logger, logging.Logger)


def test_build_runner() -> None:
    model = Steps()
    cfg = {"type": "IterBasedRunner", "max_iters": 7}
    made = hr.build_runner(cfg, {"model": model, "optimizer": sgd(model)})
    assert (type(made), made.max_iters, made.model) == (hr.IterBasedRunner, 7, model)
    assert cfg == {"type": "IterBasedRunner", "max_iters": 7}


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ([], ConfigTypeError, "cfg must be a dict"),
        ({"type": "EpochRunner", "max_epochs": 1}, RegistryError, "did you mean 'EpochBasedRunner'"),
        ({"type": "EpochBasedRunner", "max_epoch": 1}, TypeError, "max_epoch"),
        (
            {"type": "EpochBasedRunner", "constructor": "Mine"},
            RegistryError,
            "'Mine' is not a registered runner",
        ),
    ],
)
def test_refused_runner_configurations(cfg: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hr.build_runner(cfg, {"model": Steps()})


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [hr.EpochBasedRunner, hr.IterBasedRunner])
@pytest.mark.parametrize(
    ("loaders", "workflow", "error", "message"),
    [
        (DATA[0], TRAIN, ConfigTypeError, "data_loaders must be a list, not Tensor"),
        ([DATA], ("train", 1), ConfigError, "1 data loaders and 2 entries"),
        ([DATA], ["train"], ConfigTypeError, "'train' in the workflow must be a pair"),
        ([DATA], [("test", 1)], ConfigError, "has no method 'test'"),
        ([DATA], [(1, "train")], ConfigTypeError, "mode in the workflow must be a string, not int"),
        ([DATA], [("train", 1.5)], ConfigTypeError, "1.5 in the workflow must be an integer of 0 or more"),
        ([DATA], [("val", 1)], ConfigError, "never trains"),
        ([DATA], [("train", 0)], ConfigError, "never trains"),
    ],
)
def test_refused_workflows(
    kind: Any, loaders: Any, workflow: Any, error: type[Exception], message: str
) -> None:
    calls: list[str] = []
    made = kind(Steps(), **({"max_epochs": 1} if kind is hr.EpochBasedRunner else {"max_iters": 2}))
    made.register_hook(Calls("begun", calls))
    with pytest.raises(error, match=message):
        made.run(loaders, workflow)
    assert not calls


def test_a_run_needs_a_length() -> None:
    with pytest.raises(ConfigError, match="write EpochBasedRunner"):
        hr.EpochBasedRunner(Steps()).run([DATA], TRAIN)
    with pytest.raises(ConfigError, match="write IterBasedRunner"):
        hr.IterBasedRunner(Steps(), max_epochs=2).run([DATA], TRAIN)


def test_the_length_as_an_argument_of_run_is_deprecated() -> None:
    made = hr.EpochBasedRunner(Steps())
    with pytest.warns(DeprecationWarning, match=r"of run\(\) is deprecated; write"):
        made.run([DATA], TRAIN, max_epochs=3)
    assert (made.epoch, made.iter) == (3, 12)


@pytest.mark.parametrize(
    ("kind", "length"), [(hr.EpochBasedRunner, {"max_epochs": 1}), (hr.IterBasedRunner, {"max_iters": 1})]
)
def test_keywords_and_the_optimizer_reach_both_steps(kind: Any, length: dict[str, int]) -> None:
    model = Steps()
    made = kind(model, optimizer=sgd(model), **length)
    made.run([DATA[:1], DATA[:1]], [("train", 1), ("val", 1)], flag=5)
    assert model.calls == [("train", made.optimizer, {"flag": 5}), ("val", made.optimizer, {"flag": 5})]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda data, optimizer: optimizer, "o"),
        (lambda data, *, optimizer: optimizer, "o"),
        (lambda data, other: other, "o"),
        (lambda *args: args[1], "o"),
        (lambda data, **kwargs: sorted(kwargs), ["x"]),
    ],
)
def test_val_step_is_called_by_its_signature(step: Any, expected: Any) -> None:
    model = type("Model", (), {"val_step": staticmethod(step)})()
    assert val_step(model, "d", "o", {} if expected == "o" else {"x": 1}) == expected


def test_validation_has_no_gradients_and_ends() -> None:
    seen: list[Any] = []

    class See(hr.Hook):
        def after_iter(self, runner: Any) -> None:
            seen.append((runner.mode, runner.model.training, runner.outputs["loss"].requires_grad))

    made = epochs(max_epochs=1)
    made.register_hook(See())
    made.run([DATA[:1], DATA[:1]], [("train", 1), ("val", 1)])
    assert seen == [("train", True, True), ("val", False, False)]


def test_outputs_must_be_a_dict() -> None:
    with pytest.raises(ConfigTypeError, match=r"model.train_step\(\) must return a dict, not NoneType"):
        epochs(Silent()).run([DATA], TRAIN)


def test_a_batch_processor_steps_a_model_without_steps() -> None:
    def process(model: nn.Module, data: Any, train_mode: bool, **kwargs: Any) -> Any:
        return {"loss": model(data).mean(), "log_vars": {"mode": float(train_mode)}}

    with pytest.warns(DeprecationWarning, match="batch_processor is deprecated"):
        made = hr.EpochBasedRunner(nn.Linear(3, 1), process, max_epochs=1)
    made.run([DATA[:1], DATA[:1]], [("train", 1), ("val", 1)])
    assert made.log_buffer.val_history["mode"] == [1.0, 0.0]


def test_contexts_of_hooks_surround_the_step_and_end_with_it() -> None:
    events: list[str] = []

    class Around(hr.Hook):
        def around_train_step(self, runner: Any) -> Any:
            @contextmanager
            def scope() -> Any:
                events.append("in")
                try:
                    yield
                finally:
                    events.append("out")

            return scope()

    made = epochs(max_epochs=1)
    made.register_hook(Around())
    made.run([DATA[:1]], TRAIN)
    assert events == ["in", "out"]
    made.model.train_step = lambda data, optimizer: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.run_iter(DATA[0], train_mode=True)
    assert events == ["in", "out"] * 2


def test_contexts_of_validation_surround_evaluation_too() -> None:
    seen: list[tuple[str, torch.dtype]] = []

    class Casts(hr.Hook):
        def around_val_step(self, runner: Any) -> Any:
            return torch.autocast("cpu", torch.bfloat16)

    def note(where: str, result: Any) -> Any:
        seen.append((where, (torch.ones(1, 1) @ torch.ones(1, 1)).dtype))
        return result

    made = epochs(max_epochs=1)
    made.register_hook(Casts())
    made.register_hook(hr.EvalHook(DATA[:1], test_fn=lambda model, data: note("evaluation", {"acc": 1.0})))
    made.model.train_step = lambda data, optimizer: note("train", {})
    made.model.val_step = lambda data: note("val", {})
    made.run([DATA[:1], DATA[:1]], [("train", 1), ("val", 1)])
    low = torch.bfloat16
    assert seen == [("train", torch.float32), ("evaluation", low), ("val", low)]
    with made.validation_step():
        note("own", None)
    assert seen[-1] == ("own", low)


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_are_called_by_priority_and_then_in_order_of_registration() -> None:
    calls: list[str] = []
    made = epochs()
    for name, priority in (
        ("d", 90),
        ("a", "highest"),
        ("c", 50),
        ("b", hr.Priority.HIGH),
        ("c2", "NORMAL"),
        ("e", 100),
    ):
        made.register_hook(Calls(name, calls), priority)
    made.call_hook("before_run")
    assert calls == ["a", "b", "c", "c2", "d", "e"]
    assert [hook.priority for hook in made.hooks] == [0, 30, 50, 50, 90, 100]


@pytest.mark.parametrize(
    ("priority", "error", "message"),
    [
        (101, ConfigError, "priority=101 must be from 0 to 100"),
        (-1, ValueError, "from 0 to 100"),
        ("URGENT", KeyError, "priority='URGENT' is unknown; write a number from 0 to 100 or one of HIGHEST"),
        (1.5, TypeError, "priority=1.5 must be a number"),
        (True, TypeError, "priority=True must be a number"),
        (None, TypeError, "priority=None"),
    ],
)
def test_refused_priorities(priority: Any, error: type[Exception], message: str) -> None:
    made = epochs()
    with pytest.raises(error, match=message):
        made.register_hook(hr.Hook(), priority)
    assert not made.hooks


def test_a_hook_is_registered_once() -> None:
    made, hook = epochs(), hr.Hook()
    made.register_hook(hook)
    with pytest.raises(ValueError, match="Hook has a priority already"):
        made.register_hook(hook)
    with pytest.raises(ConfigTypeError, match="hook must be a Hook, not str"):
        made.register_hook("EMAHook")  # type: ignore[arg-type]


def test_unknown_stages() -> None:
    made = epochs()
    for _ in range(2):  # without and with a hook
        with pytest.raises(ConfigError, match="unknown stage 'after_step'; the stages are before_run, "):
            made.call_hook("after_step")
        made.register_hook(hr.Hook())


def test_deferred_actions_run_when_the_iteration_is_over() -> None:
    seen: list[Any] = []

    class Defer(hr.Hook):
        def before_train_iter(self, runner: Any) -> None:
            runner.defer(lambda: seen.append(("begun", runner.iter, runner.epoch)))

        def after_train_iter(self, runner: Any) -> None:
            runner.defer(lambda: seen.append(("iter", runner.iter, runner.epoch)))

        def after_train_epoch(self, runner: Any) -> None:
            runner.defer(lambda: seen.append(("epoch", runner.iter, runner.epoch)))

    iters = [("begun", 1, 0), ("iter", 1, 0), ("begun", 2, 0), ("iter", 2, 0)]
    for made, expected in (
        (epochs(max_epochs=1), [*iters, ("epoch", 2, 1)]),
        (hr.IterBasedRunner(Steps(), max_iters=2), [*iters, ("epoch", 2, 0)]),
    ):
        seen.clear()
        made.register_hook(Defer())
        made.run([DATA[:2]], TRAIN)
        assert seen == expected
    made.defer(lambda: seen.append("now"))
    assert seen[-1] == "now"


@pytest.mark.parametrize("kind", [hr.EpochBasedRunner, hr.IterBasedRunner])
@pytest.mark.parametrize("stage", ["around_train_step", "after_train_iter"])
def test_an_iteration_that_is_interrupted_leaves_no_file(kind: Any, stage: str, tmp_path: Path) -> None:
    """The file would hold the weights of a step that the counters do not include."""
    finished: list[int] = []

    class Raises(hr.Hook):
        def before_train_iter(self, runner: Any) -> None:
            runner.defer(lambda: finished.append(runner.iter))

        def interrupt(self, runner: Any) -> None:
            if runner.iter == 1:
                raise KeyboardInterrupt

    setattr(Raises, stage, Raises.interrupt)
    made = kind(Steps(), work_dir=tmp_path, **{"max_epochs" if "Epoch" in kind.__name__ else "max_iters": 3})
    made.register_checkpoint_hook({"interval": 1, "by_epoch": False, "create_symlink": False})
    made.register_hook(Raises())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            made.run([DATA], TRAIN)
        if stage == "after_train_iter":
            made.call_hook("after_run")  # as a script may in its own `finally`
    assert [path.name for path in tmp_path.iterdir()] == ["iter_1.pth"]
    assert finished == [1]


CONFIGS: dict[str, dict[str, Any]] = {
    "lr_config": {"policy": "step", "step": [1]},
    "optimizer_config": {"grad_clip": {"max_norm": 1.0}},
    "checkpoint_config": {"interval": 1},
    "log_config": {"interval": 5, "hooks": [{"type": "TextLoggerHook"}]},
    "momentum_config": {"policy": "cyclic"},
}


@pytest.mark.parametrize("kind", [hr.EpochBasedRunner, hr.IterBasedRunner])
def test_training_hooks_and_their_order(kind: Any, tmp_path: Path) -> None:
    made = kind(Steps(), optimizer=sgd(momentum=0.9), work_dir=tmp_path, max_epochs=2)
    given = copy.deepcopy(CONFIGS)
    custom = [{"type": "EMAHook", "priority": 1}, hr.ClosureHook("after_run", print)]
    made.register_training_hooks(**given, custom_hooks_config=custom)
    assert [type(hook).__name__ for hook in made.hooks] == [
        "EMAHook",
        "StepLrUpdaterHook",
        "CyclicMomentumUpdaterHook",
        "OptimizerHook",
        "CheckpointHook",
        "ClosureHook",
        "IterTimerHook",
        "TextLoggerHook",
    ]
    assert given == CONFIGS
    assert custom[0] == {"type": "EMAHook", "priority": 1}
    by_epoch = {type(hook).__name__: hook.by_epoch for hook in made.hooks if hasattr(hook, "by_epoch")}
    assert by_epoch["StepLrUpdaterHook"] is by_epoch["TextLoggerHook"] is by_epoch["CheckpointHook"]
    assert by_epoch["StepLrUpdaterHook"] is (kind is hr.EpochBasedRunner)
    assert made.hooks[-1].interval == 5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"lr_config": {"policy": "stp"}},
            RegistryError,
            "no policy 'stp'; did you mean 'Step'.*CosineRestart",
        ),
        (
            {"lr_config": {"policy": "cosine"}},
            RegistryError,
            "no policy 'cosine'; did you mean 'CosineAnnealing' or 'CosineRestart'",
        ),
        ({"momentum_config": {"policy": "poly"}}, RegistryError, "momentum_config has no policy 'poly'; The"),
        ({"lr_config": {"step": [1]}}, ConfigTypeError, "lr_config must name a policy or a type"),
        ({"lr_config": "step"}, ConfigTypeError, "lr_config must be a dict or a hook, not str"),
        ({"optimizer_config": {"grad_clp": {}}}, ConfigTypeError, "OptimizerHook takes no 'grad_clp'"),
        ({"checkpoint_config": {"intervall": 1}}, ConfigTypeError, "CheckpointHook takes no 'intervall'"),
        (
            {"log_config": {"interval": 5}},
            ConfigTypeError,
            "log_config must have 'hooks' and may have 'interval'",
        ),
        (
            {"log_config": {"hooks": [{"type": "PaviLoggerHook"}]}},
            RegistryError,
            "'PaviLoggerHook' is not a registered",
        ),
        ({"timer_config": 3}, ConfigTypeError, "timer_config must be a dict or a hook"),
        ({"custom_hooks_config": [{"type": "os.system"}]}, RegistryError, "dotted names are never imported"),
        ({"custom_hooks_config": [{"type": "EMAHook", "priority": "X"}]}, KeyError, "priority='X'"),
    ],
)
def test_a_refused_configuration_adds_no_hook(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = epochs(optimizer=sgd(momentum=0.9))
    first = hr.ClosureHook("before_run", print)
    made.register_hook(first)
    own = hr.ClosureHook("after_run", print)
    configs = {**copy.deepcopy(CONFIGS), "momentum_config": own, **change}
    with pytest.raises(error, match=message):
        made.register_training_hooks(**configs)
    assert made.hooks == [first]
    made.register_hook(own)


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (lambda m: {"a": sgd(m), "b": sgd(m)}, "OptimizerHook", "optimizer_config=None"),
        (lambda m: {"a": sgd(m)}, "OptimWrapperHook", "optimizer_config=None"),
        (lambda m: OptimWrapperDict(a=OptimWrapper(sgd(m))), "OptimWrapperHook", "optimizer_config=None"),
        (lambda m: sgd(m), "OptimWrapperHook", "pass optimizer=OptimWrapper"),
        (lambda m: OptimWrapper(sgd(m)), "OptimizerHook", "cannot step a OptimWrapper"),
        (lambda m: None, "OptimizerHook", "pass optimizer="),
    ],
)
def test_an_optimizer_that_its_hook_cannot_step(optimizer: Any, kind: str, message: str) -> None:
    model = Steps()
    made = epochs(model, optimizer=optimizer(model))
    made.register_optimizer_hook({"type": kind})
    with pytest.raises(ConfigTypeError, match=message):
        made.run([DATA], TRAIN)


@pytest.mark.parametrize("kind", ["OptimizerHook", "OptimWrapperHook"])
@pytest.mark.parametrize("outputs", [{}, {"loss": 1.0}, {"loss": None}])
def test_a_step_without_a_loss(kind: str, outputs: dict[str, Any]) -> None:
    model = Steps()
    made = epochs(model, optimizer=sgd(model) if kind == "OptimizerHook" else OptimWrapper(sgd(model)))
    made.model.train_step = lambda data, optimizer: outputs
    made.register_optimizer_hook({"type": kind})
    with pytest.raises(ConfigTypeError, match=r"write return dict\(loss=loss"):
        made.run([DATA], TRAIN)


# --- what hooks read --------------------------------------------------------------------------------------------------


def test_rates_and_momenta() -> None:
    model = Steps()
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}]
    first = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    second = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.3, betas=(0.8, 0.9))
    third = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)], lr=0.4)
    made = epochs(model, optimizer=first)
    assert (made.current_lr(), made.current_momentum()) == ([0.2, 0.1], [0.9, 0.9])
    made.optimizer = OptimWrapper(first)
    assert made.current_lr() == [0.2, 0.1]
    made.optimizer = {"a": second, "b": third}
    assert (made.current_lr(), made.current_momentum()) == ({"a": [0.3], "b": [0.4]}, {"a": [0.8], "b": [0]})
    made.optimizer = OptimWrapperDict(a=OptimWrapper(second))
    assert made.current_lr() == {"a": [0.3]}
    made.optimizer = None
    for read in (made.current_lr, made.current_momentum):
        with pytest.raises(OrderError, match="this runner has no optimizer"):
            read()


def test_steps_counts_steps_that_were_not_skipped(tmp_path: Path) -> None:
    """Iteration 6 overflows: with windows of four, iterations 4 to 7 are skipped together."""
    for setup, steps, lost in (
        ("plain", 11, 1),
        ("fp16, accumulated", 2, 4),
        ("wrapper", 2, 4),
    ):
        made = zoo.build("IterBasedRunner", tmp_path, setup)
        zoo.run(made)
        assert (setup, made.steps, made.iter - made.scheduled_iter) == (setup, steps, lost)


def test_the_last_window_of_a_longer_second_run_is_its_own() -> None:
    model = Steps()
    made = hr.IterBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_iters=3)
    made.register_optimizer_hook({"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 2})
    made.run([DATA], TRAIN)
    made._max_iters = 7
    made.run([DATA], TRAIN)
    assert made.steps == 5  # after iterations 2, 3; 4, 6, 7


def test_a_subclass_with_its_own_train_ends(tmp_path: Path) -> None:
    """Subclasses written for mmcv override ``train``, and replace the list of hooks if they step by themselves."""

    class Own(hr.EpochBasedRunner):
        def run(self, *args: Any, **kwargs: Any) -> None:
            self._hooks = [hook for hook in self._hooks if not isinstance(hook, hr.OptimizerHook)]
            super().run(*args, **kwargs)

        def train(self, data_loader: Any, **kwargs: Any) -> None:
            self.call_hook("before_train_epoch")
            for self._inner_iter, batch in enumerate(data_loader):
                self.call_hook("before_train_iter")
                self.run_iter(batch, train_mode=True)
                self.call_hook("after_train_iter")
                self._iter += 1
            self.call_hook("after_train_epoch")
            self._epoch += 1

    model = Steps()
    before = model.weight.detach().clone()
    made = Own(model, optimizer=sgd(model), max_epochs=3, work_dir=tmp_path)
    made.register_training_hooks({"policy": "step", "step": [2]}, {}, {"interval": 1})
    made.run([DATA], [("train", 2)])
    assert (made.epoch, made.iter, made.current_lr()) == (3, 12, [pytest.approx(0.01)])
    assert torch.equal(model.weight, before)
    assert torch.load(tmp_path / "epoch_2.pth", weights_only=True)["meta"]["epoch"] == 2
