"""EvalHook and DistEvalHook: evaluate during training and keep the best checkpoint. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import keywords_of
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_count, require_dict, require_flag
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.checkpoint import StrPath, checkpoint_directory, checkpoint_path
from halfpeak.runner.distributed import broadcast_tensors, gather
from halfpeak.runner.hook import Hook, RunState
from halfpeak.runner.hooks.loggers import EVAL_ITERS, LoggerHook

GREATER: Final = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS: Final = ("loss",)


@HOOKS.register_module()
class EvalHook(Hook):
    """Evaluates the model after every ``interval`` epochs or iterations, logs the scores, and saves the best model.

    ::

        results = test_fn(model, dataloader)
        scores  = dataloader.dataset.evaluate(results, logger=runner.logger, **eval_kwargs)

    If ``test_fn`` returns a dict, these are the scores. The best so far is in ``runner.meta["hook_msgs"]``.

    Args:
        dataloader: the data to evaluate on.
        start: the first epoch or iteration to evaluate, counted from 1.
        interval: epochs or iterations between two evaluations.
        by_epoch: whether ``start`` and ``interval`` count epochs or iterations.
        save_best: name of the score that selects the best model; ``"auto"`` takes the first score. None saves nothing.
        rule: ``"greater"`` or ``"less"``, the better direction; None decides by the name of the score.
        test_fn: None calls ``model(return_loss=False, **batch)`` on each batch and collects what it returns.
        greater_keys: names, or parts of names, of scores where greater is better; None means those of common metrics.
        less_keys: the same where less is better; None means ``loss``.
        out_dir: save in a subdirectory of this one, named like ``work_dir``; None saves in ``work_dir`` itself.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
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
        require_count("interval", interval)
        if start is not None:
            require_count("start", start, least=0)
        require_flag("by_epoch", by_epoch)
        if rule not in (None, "greater", "less"):
            raise ConfigError(f"rule={short_repr(rule)} must be 'greater', 'less' or None")
        if save_best is not None and not isinstance(save_best, str):
            raise ConfigTypeError(
                f"save_best={short_repr(save_best)} must be the name of a score, 'auto' or None"
            )
        for name, keys in (("greater_keys", greater_keys), ("less_keys", less_keys)):
            if keys is not None and not isinstance(keys, (list, tuple)):
                raise ConfigTypeError(
                    f"{name}={short_repr(keys)} must be a list of names; write {name}=['mAP']"
                )
        if test_fn is not None and not callable(test_fn):
            raise ConfigTypeError(f"test_fn={short_repr(test_fn)} must be a function of model and loader")
        self.dataloader = dataloader
        self.start, self.interval, self.by_epoch = start, interval, by_epoch
        self.save_best, self.rule = save_best, rule
        self.test_fn = test_fn or collect_results
        self.greater_keys = tuple(greater_keys) if greater_keys is not None else GREATER
        self.less_keys = tuple(less_keys) if less_keys is not None else LESS
        self.out_dir = out_dir
        self.eval_kwargs = eval_kwargs
        self.key_indicator = save_best
        """The name of the score that selects the best model; ``"auto"`` until the first evaluation has found it."""
        if save_best not in (None, "auto"):
            self._is_greater(save_best)

    def before_run(self, runner: RunState) -> None:
        """Find the directory for the best model.

        Raises:
            ConfigError: neither the hook nor the runner has a directory.
        """
        if self.save_best is not None:
            self.out_dir = checkpoint_directory(self.out_dir, runner.work_dir, "EvalHook")
            runner.meta.setdefault("hook_msgs", {})

    def after_train_iter(self, runner: RunState) -> None:
        if not self.by_epoch and self._should_evaluate(runner):
            # Log the training values first, because the scores must not be averaged with them.
            for hook in runner.hooks:
                if isinstance(hook, LoggerHook):
                    hook.after_train_iter(runner)
            runner.log_buffer.clear()
            self._do_evaluate(runner)

    def after_train_epoch(self, runner: RunState) -> None:
        if self.by_epoch and self._should_evaluate(runner):
            self._do_evaluate(runner)

    def evaluate(self, runner: RunState, results: Any) -> float | None:
        """Log the scores of the model's results. Return the one that selects the best model, or None.

        Raises:
            ConfigTypeError: neither the dataset nor ``test_fn`` returns a dict of scores.
            ConfigError: ``save_best`` is not among the scores.
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
        runner.log_buffer.output.update(
            require_dict("the result of the dataset's evaluate()", scores, "return dict(acc=0.9)")
        )
        runner.log_buffer.ready = True
        if self.save_best is None or not scores:
            return None
        self.key_indicator = key = next(iter(scores)) if self.save_best == "auto" else self.save_best
        if key not in scores:
            raise ConfigError(
                f"save_best={short_repr(key)} is not among the scores {list(scores)}; write one of them, or 'auto'"
            )
        return float(scores[key])

    def _should_evaluate(self, runner: RunState) -> bool:
        number = (runner.epoch if self.by_epoch else runner.iter) + 1
        if self.start is None:
            return number % self.interval == 0
        return number >= self.start and (number - self.start) % self.interval == 0

    def _do_evaluate(self, runner: RunState) -> None:
        self._score(runner, self._test(runner))

    def _test(self, runner: RunState) -> Any:
        """Run ``test_fn`` with the model in evaluation mode and under the casts of validation."""
        was_training = runner.model.training
        runner.model.eval()
        try:
            with torch.no_grad(), runner.validation_step():
                return self.test_fn(runner.model, self.dataloader)
        finally:
            runner.model.train(was_training)

    def _score(self, runner: RunState, results: Any) -> None:
        runner.log_buffer.output[EVAL_ITERS] = len(self.dataloader)
        score = self.evaluate(runner, results)
        if self.save_best is not None and score is not None:
            self._save_ckpt(runner, score)

    def _save_ckpt(self, runner: Any, key_score: float) -> None:
        """Note the score in ``runner.meta`` and save the model, if the score is better than the best so far."""
        key, score = str(self.key_indicator), float(key_score)
        messages = runner.meta.setdefault("hook_msgs", {})
        best, previous = messages.get("best_score"), messages.get("best_ckpt")
        is_better = best is None or (score > best if self._is_greater(key) else score < best)
        if not is_better or math.isnan(score):
            return
        number, unit = (runner.epoch + 1, "epoch") if self.by_epoch else (runner.iter + 1, "iter")
        path = checkpoint_path(str(self.out_dir), f"best_{key}_{unit}_{{}}.pth".replace("/", "_"), number)
        messages.update(best_score=score, best_ckpt=str(path))

        def save() -> None:
            runner.write_checkpoint(path)
            runner.logger.info("Best %s is %.4f at %s %d, saved as %s", key, score, unit, number, path.name)
            if previous not in (None, str(path)):
                Path(previous).unlink(missing_ok=True)

        if runner.rank == 0:
            runner.defer(save)

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
            f"cannot tell from the name {short_repr(key)} whether a greater score is better; write rule='greater' or "
            "rule='less'"
        )


def collect_results(model: Any, dataloader: Any) -> list[Any]:
    """The concatenated results of ``model(return_loss=False, **batch)`` for all batches."""
    results: list[Any] = []
    for batch in dataloader:
        results.extend(model(return_loss=False, **batch))
    return results


_NOTHING: Final = object()


@HOOKS.register_module()
class DistEvalHook(EvalHook):
    """:class:`EvalHook` on several ranks: each rank tests its share of the data, and rank 0 scores all results.

    Without ``test_fn``, rank 0 gathers the results of all ranks, in the order of a ``DistributedSampler`` without
    shuffling. Results must be plain data: tensors, numbers, text, lists and dicts. A user's ``test_fn`` gathers the
    results itself, and gets ``tmpdir`` and ``gpu_collect`` if its signature has them.

    Args:
        dataloader: this rank's share of the data.
        broadcast_bn_buffer: copy rank 0's running statistics of batch norms to the other ranks before testing.
        tmpdir: passed to ``test_fn``.
        gpu_collect: passed to ``test_fn``.

    The other arguments are those of :class:`EvalHook`.

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
        broadcast_bn_buffer: bool = True,
        tmpdir: str | None = None,
        gpu_collect: bool = False,
        out_dir: StrPath | None = None,
        **eval_kwargs: Any,
    ) -> None:
        super().__init__(
            dataloader, start, interval, by_epoch, save_best, rule, test_fn, greater_keys, less_keys, out_dir,
            **eval_kwargs,
        )  # fmt: skip
        self.broadcast_bn_buffer = broadcast_bn_buffer
        self.tmpdir, self.gpu_collect = tmpdir, gpu_collect
        if test_fn is None:
            self.test_fn = self._collect
            return
        takes = keywords_of(test_fn)
        options = {"tmpdir": tmpdir, "gpu_collect": gpu_collect}
        extra: dict[str, Any] = {
            name: value for name, value in options.items() if takes.is_open or name in takes.names
        }
        self.test_fn = partial(test_fn, **extra)

    def _do_evaluate(self, runner: RunState) -> None:
        if self.broadcast_bn_buffer:
            broadcast_tensors(_statistics(runner.model))
        results = self._test(runner)
        if runner.rank == 0:
            self._score(runner, results)

    def _collect(self, model: Any, loader: Any) -> list[Any]:
        """The results of all ranks on rank 0, in the order of the data."""
        parts = gather(collect_results(model, loader))
        interleaved = chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING))
        merged = [result for result in interleaved if result is not _NOTHING]
        dataset = getattr(loader, "dataset", None)
        # Cut the samples that the sampler repeats to give every rank the same number.
        return merged if dataset is None else merged[: len(dataset)]


def _statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    found = [buffer for norm in norms for buffer in (norm.running_var, norm.running_mean)]
    return [buffer for buffer in found if buffer is not None]
