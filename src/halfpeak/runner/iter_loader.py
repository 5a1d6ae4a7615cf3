"""IterLoader: a data loader without an end. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfpeak.core.errors import ConfigError
from halfpeak.runner.batches import Batches, set_epoch


class IterLoader(Iterator[Any]):
    """Gives the batches of a data loader for ever; when a pass ends, the next one begins.

    The sampler is told the number of the pass (``set_epoch``), as distributed samplers want it.

    Attributes:
        epoch: passes that ended.

    >>> loader = IterLoader([1, 2])
    >>> [next(loader) for _ in range(3)], loader.epoch
    ([1, 2, 1], 1)
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._batches: Batches | None = None
        self.epoch = 0

    @property
    def data_loader(self) -> Any:
        """The data loader inside."""
        return self._dataloader

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = Batches(self._dataloader)
        try:
            return next(self._batches)
        except StopIteration:
            if not self._batches.taken:
                raise ConfigError(
                    "the data loader gives no batch; its data is smaller than a batch, or empty"
                ) from None
        self.epoch += 1
        set_epoch(self._dataloader, self.epoch)
        self._batches = None
        return next(self)

    def __len__(self) -> int:
        return len(self._dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Where it is, as plain data."""
        return {"epoch": self.epoch, "batches": None if self._batches is None else self._batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where :meth:`state_dict` was called. Draws from the random generators."""
        self.epoch = state["epoch"]
        if self.epoch:
            set_epoch(self._dataloader, self.epoch)
        saved = state["batches"]
        self._batches = None if saved is None else Batches(self._dataloader, saved)
