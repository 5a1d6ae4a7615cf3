"""EvalHook: evaluate during training and keep the best checkpoint. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.runner import naming
from halfpeak.runner.checkpoint import StrPath
from halfpeak.runner.hook import Hook
from halfpeak.runner.hooks.logger import EVAL_ITERS, LoggerHook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner

GREATER: Final = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS: Final = ("loss",)


class Best(NamedTuple):
    """The best model so far: its file, the file of the one before, and what to say."""

    path: Path
    previous: Path | None
    text: str

    def save(self, runner: BaseRunner, *, every_rank: bool) -> None:
        """Write the one file and then delete the other."""
        runner.write_checkpoint(self.path, every_rank=every_rank)
        runner.logger.info(self.text)
        if self.previous is not None:
            self.previous.unlink(missing_ok=True)


class EvalHook(Hook):
    """Evaluates the model after every ``interval`` epochs or iterations, logs the scores, and saves the best model.

    ::

        results = test_fn(model, dataloader)
        scores  = dataloader.dataset.evaluate(results, logger=runner.logger, **eval_kwargs)

    ``test_fn`` may return the scores themselves, as a dict; then the dataset is not asked. The best so far is in
    ``runner.meta["hook_msgs"]`` as ``best_score`` and ``best_ckpt``.

    Args:
        dataloader: the data to evaluate on.
        start: no evaluation before this epoch or iteration, counted from 1.
        interval: how often from there on.
        by_epoch: whether these count epochs or iterations.
        save_best: the score by which a model is the best; ``"auto"`` takes the first. None saves nothing.
        rule: ``"greater"`` or ``"less"``; None finds out from the name of the score.
        test_fn: None calls ``model(return_loss=False, **batch)`` on each batch and collects what it returns.
        greater_keys: names, or parts of names, of scores that should be great; None means those of common metrics.
        less_keys: of scores that should be small; None means ``loss``.
        out_dir: where to save, in a directory with the name of ``work_dir``; None means ``work_dir`` itself.
        eval_kwargs: for ``dataset.evaluate``.

    Raises:
        ConfigError: a value out of range.
        ConfigTypeError: a value has the wrong type.
    """

    def __init__(
        self,
        dataloader: Any,
        start: int | None = None,
        interval: int = 1,
        by_epoch: bool = True,
        save_best: str | None = None,
        rule: str | None = None,
        test_fn: Callable[..., Any] | None = None,
        greater_keys: Sequence[str] | None = None,
        less_keys: Sequence[str] | None = None,
        out_dir: StrPath | None = None,
        **eval_kwargs: Any,
    ) -> None:
        if not hasattr(dataloader, "__iter__") or not hasattr(dataloader, "__len__"):
            raise ConfigTypeError(f"dataloader must be a DataLoader, not {type(dataloader).__name__}")
        for name, number, least in (("interval", interval, 1), ("start", 0 if start is None else start, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ConfigError(f"{name}={number!r} must be an integer of {least} or more")
        if not isinstance(by_epoch, bool):
            raise ConfigTypeError(f"by_epoch={by_epoch!r} must be True or False")
        if rule not in (None, "greater", "less"):
            raise ConfigError(f"rule={rule!r} must be 'greater', 'less' or None")
        self.dataloader = dataloader
        self.start, self.interval, self.by_epoch = start, interval, by_epoch
        self.save_best, self.rule = save_best, rule
        self.test_fn = test_fn or collect_results
        self.greater_keys = tuple(greater_keys) if greater_keys is not None else GREATER
        self.less_keys = tuple(less_keys) if less_keys is not None else LESS
        self.out_dir = out_dir
        self.eval_kwargs = eval_kwargs
        if save_best not in (None, "auto"):
            self._is_greater(str(save_best))

    def before_run(self, runner: BaseRunner) -> None:
        """Find the directory for the best model.

        Raises:
            ConfigError: there is none.
        """
        if self.save_best is not None:
            self.out_dir = naming.directory(self.out_dir, runner.work_dir, "EvalHook")
            runner.meta.setdefault("hook_msgs", {})

    def after_train_iter(self, runner: BaseRunner) -> None:
        """Evaluate, if it is time."""
        if not self.by_epoch and self._is_due(runner.iter + 1):
            # What training has logged until now must not be averaged with the scores.
            for hook in runner.hooks:
                if isinstance(hook, LoggerHook):
                    hook.after_train_iter(runner)
            runner.log_buffer.clear()
            self._evaluate(runner)

    def after_train_epoch(self, runner: BaseRunner) -> None:
        """Evaluate, if it is time."""
        if self.by_epoch and self._is_due(runner.epoch + 1):
            self._evaluate(runner)

    def evaluate(self, runner: BaseRunner, results: Any) -> dict[str, Any]:
        """The scores of what the model gave.

        Raises:
            ConfigTypeError: neither the dataset nor ``test_fn`` gives a dict of scores.
        """
        if isinstance(results, Mapping):
            scores: Any = results
        else:
            dataset = getattr(self.dataloader, "dataset", None)
            if not callable(getattr(dataset, "evaluate", None)):
                raise ConfigTypeError(
                    f"{type(dataset).__name__} has no evaluate(results, logger=None, **kwargs); give it one, or let test_fn "
                    "return the scores as a dict"
                )
            scores = dataset.evaluate(results, logger=runner.logger, **self.eval_kwargs)  # type: ignore[union-attr]
        if not isinstance(scores, Mapping):
            raise ConfigTypeError(
                f"the scores must be a dict, not {type(scores).__name__}; write dict(acc=0.9)"
            )
        return dict(scores)

    def _is_due(self, number: int) -> bool:
        if self.start is None:
            return number % self.interval == 0
        return number >= self.start and (number - self.start) % self.interval == 0

    def _evaluate(self, runner: BaseRunner) -> None:
        best = self._score(runner, self._test(runner))
        if best is not None and runner.rank == 0:
            runner.defer(lambda: best.save(runner, every_rank=False))

    def _test(self, runner: BaseRunner) -> Any:
        """What ``test_fn`` gives, from the model as it validates."""
        was_training = runner.model.training
        runner.model.eval()
        try:
            with torch.no_grad(), runner.validation_step():
                return self.test_fn(runner.model, self.dataloader)
        finally:
            runner.model.train(was_training)

    def _score(self, runner: BaseRunner, results: Any) -> Best | None:
        """Log the scores; where to save the model, if it is the best so far."""
        scores = self.evaluate(runner, results)
        runner.log_buffer.output[EVAL_ITERS] = len(self.dataloader)
        runner.log_buffer.output.update(scores)
        runner.log_buffer.ready = True
        return self._note_best(runner, scores) if self.save_best is not None and scores else None

    def _note_best(self, runner: BaseRunner, scores: Mapping[str, Any]) -> Best | None:
        key = next(iter(scores)) if self.save_best == "auto" else str(self.save_best)
        if key not in scores:
            raise ConfigError(
                f"save_best={key!r} is not among the scores {list(scores)}; write one of them, or 'auto'"
            )
        score, messages = float(scores[key]), runner.meta.setdefault("hook_msgs", {})
        best = messages.get("best_score")
        is_better = best is None or (score > best if self._is_greater(key) else score < best)
        if not is_better or score != score:
            return None
        number, unit = (runner.epoch + 1, "epoch") if self.by_epoch else (runner.iter + 1, "iter")
        path = naming.target(str(self.out_dir), f"best_{key}_{unit}_{{}}.pth".replace("/", "_"), number)
        previous = messages.get("best_ckpt")
        messages.update(best_score=score, best_ckpt=str(path))
        text = f"Best {key} is {score:.4f} at {unit} {number}, saved as {path.name}"
        return Best(path, None if previous in (None, str(path)) else Path(previous), text)

    def _is_greater(self, key: str) -> bool:
        if self.rule is not None:
            return self.rule == "greater"
        for keys, is_greater in ((self.greater_keys, True), (self.less_keys, False)):
            if key.lower() in (one.lower() for one in keys):
                return is_greater
        for keys, is_greater in ((self.greater_keys, True), (self.less_keys, False)):
            if any(one.lower() in key.lower() for one in keys):
                return is_greater
        raise ConfigError(
            f"nothing says whether {key!r} should be great or small; write rule='greater' or rule='less'"
        )


def collect_results(model: Any, dataloader: Any) -> list[Any]:
    """What ``model(return_loss=False, **batch)`` returns for each batch, in one list."""
    results: list[Any] = []
    for batch in dataloader:
        results.extend(model(return_loss=False, **batch))
    return results
