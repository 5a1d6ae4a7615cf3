"""DistEvalHook: the ranks share an evaluation. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from halfpeak.optim.registry import keywords_of
from halfpeak.runner.allreduce import broadcast_tensors
from halfpeak.runner.checkpoint import StrPath
from halfpeak.runner.gather import gather
from halfpeak.runner.hooks.evaluation import EvalHook, collect_results

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner

_NOTHING: Final = object()


class DistEvalHook(EvalHook):
    """:class:`EvalHook` on every rank: each tests its share of the data, rank 0 scores the results in their order.

    Without ``test_fn``, what the ranks collected is brought together as a ``DistributedSampler`` that does not shuffle had
    dealt it out, and must be plain data: tensors, numbers, text, lists and dicts. A ``test_fn`` of your own brings it
    together itself, and gets ``tmpdir`` and ``gpu_collect`` if it has places for them. The best model is saved with the
    random generators and open windows of all ranks.

    Args:
        dataloader: this rank's share.
        broadcast_bn_buffer: give every rank the running statistics of rank 0 first.
        tmpdir: for ``test_fn``.
        gpu_collect: for ``test_fn``.

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
        taken = keywords_of(test_fn)
        places = {"tmpdir": tmpdir, "gpu_collect": gpu_collect}
        extra: dict[str, Any] = {
            name: value for name, value in places.items() if taken.is_open or name in taken.names
        }
        self.test_fn = partial(test_fn, **extra)

    def _evaluate(self, runner: BaseRunner) -> None:
        if self.broadcast_bn_buffer:
            broadcast_tensors(_statistics(runner.model))
        results = self._test(runner)
        best = self._score(runner, results) if runner.rank == 0 else None
        if self.save_best is None:
            return
        device = next((parameter.device for parameter in runner.model.parameters()), torch.device("cpu"))
        is_best = torch.tensor(float(best is not None), device=device)
        broadcast_tensors([is_best])
        if best is not None:
            runner.defer(lambda: best.save(runner, every_rank=True))
        elif is_best:
            # Rank 0 writes; this brings it what this rank has of its own.
            runner.defer(lambda: runner.write_checkpoint("", every_rank=True))

    def _collect(self, model: Any, loader: Any) -> list[Any]:
        """The results of all ranks on rank 0, in the order of the data."""
        parts = gather(collect_results(model, loader))
        dealt = chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING))
        merged = [result for result in dealt if result is not _NOTHING]
        dataset = getattr(loader, "dataset", None)
        # The sampler gives a few samples twice, so that all ranks have as many.
        return merged if dataset is None else merged[: len(dataset)]


def _statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    found = [buffer for norm in norms for buffer in (norm.running_var, norm.running_mean)]
    return [buffer for buffer in found if buffer is not None]
