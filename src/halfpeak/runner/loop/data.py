"""The data of a run: endless loaders, and the parsed workflow. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader's sampler, its batch sampler, or that one's sampler: the first that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        tell = getattr(sampler, "set_epoch", None)
        if tell is not None:
            tell(epoch)
            return


class IterLoader(Iterator[Any]):
    """An endless data loader: when a pass ends, the next one begins.

    Before each pass but the first, the sampler gets its number by ``set_epoch``, for distributed samplers.

    Args:
        dataloader: the loader.
        epoch: the number of passes that an earlier run has finished.

    Attributes:
        epoch: the number of finished passes.

    >>> loader = IterLoader([1, 2])
    >>> [next(loader) for _ in range(3)], loader.epoch
    ([1, 2, 1], 1)
    """

    def __init__(self, dataloader: Any, epoch: int = 0) -> None:
        self._dataloader = dataloader
        self._batches: Iterator[Any] | None = None
        self.epoch = epoch

    @property
    def data_loader(self) -> Any:
        """The wrapped data loader."""
        return self._dataloader

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch += 1
            self._batches = self._begin()
        try:
            return next(self._batches)
        except StopIteration:
            raise ConfigError(
                "the data loader gives no batch; its data is smaller than a batch, or empty"
            ) from None

    def _begin(self) -> Iterator[Any]:
        if self.epoch:
            set_epoch(self._dataloader, self.epoch)
        return iter(self._dataloader)

    def __len__(self) -> int:
        return len(self._dataloader)


class Flow(NamedTuple):
    """One entry of a workflow: a loader, the runner method that takes it, and the number of turns in a row."""

    loader: Any
    mode: str
    times: int


def parse_workflow(
    runner: object, data_loaders: Sequence[Any], workflow: Sequence[tuple[str, int]]
) -> list[Flow]:
    """Check a workflow such as ``[("train", 2), ("val", 1)]`` against its loaders.

    Raises:
        ConfigTypeError: an argument has the wrong type.
        ConfigError: the lengths differ, the runner has no such mode, or the workflow never trains.
    """
    for name, value in (("data_loaders", data_loaders), ("workflow", workflow)):
        if not isinstance(value, (list, tuple)):
            raise ConfigTypeError(
                f"{name} must be a list, not {type(value).__name__}; write runner.run([loader], [('train', 1)])"
            )
    if len(data_loaders) != len(workflow):
        raise ConfigError(
            f"there are {len(data_loaders)} data loaders and {len(workflow)} entries in the workflow; give one loader per entry"
        )
    flows = [
        Flow(loader, *_entry(runner, entry)) for loader, entry in zip(data_loaders, workflow, strict=True)
    ]
    if not any(flow.mode == "train" and flow.times for flow in flows):
        raise ConfigError(f"workflow={short_repr(workflow)} never trains; write [('train', 1)]")
    return flows


def _entry(runner: object, entry: Any) -> tuple[str, int]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise ConfigTypeError(f"{short_repr(entry)} in the workflow must be a pair; write ('train', 1)")
    mode, times = entry
    if not isinstance(mode, str):
        raise ConfigTypeError(
            f"mode in the workflow must be a string, not {type(mode).__name__}; write 'train'"
        )
    if mode.startswith("_") or not callable(getattr(runner, mode, None)):
        raise ConfigError(
            f"{type(runner).__name__} has no method {short_repr(mode)}, which the workflow names; write 'train' or 'val'"
        )
    if isinstance(times, bool) or not isinstance(times, int) or times < 0:
        raise ConfigTypeError(
            f"{short_repr(times)} in the workflow must be an integer of 0 or more; write ('{mode}', 1)"
        )
    return mode, times
