"""Batches: one pass over a data loader that can be taken up where it was left, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from halfpeak.core.errors import StateError
from halfpeak.runner import random_state


class Batches(Iterator[Any]):
    """Iterates a data loader and knows how to come back to the same place.

    The order of the samples, and whatever the loader's workers draw, follow from the random state in which the pass
    began. So the pass is told by that state and the number of batches taken; to take it up again, the pass begins in
    the same state and the batches that were taken are loaded and thrown away. (Workers that persist over epochs draw on
    where the last pass left them: no state of theirs can be read, so their augmentations differ after a resume.)

    Attributes:
        taken: batches given so far.
    """

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None) -> None:
        self.loader = loader
        generators = generators_of(loader)
        if state is not None:
            random_state.put(state["start"])
            for generator, saved in zip(generators, state["generators"], strict=False):
                generator.set_state(saved)
        self._start = random_state.take()
        self._generators = [generator.get_state() for generator in generators]
        self.taken = 0
        self._iterator = iter(loader)
        while state is not None and self.taken < state["taken"]:
            try:
                next(self)
            except StopIteration:
                raise StateError(
                    f"the run was {state['taken']} batches into its pass, and the data loader gives {self.taken} now; "
                    "resume with the data and the batch size it had"
                ) from None

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self.taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is, as plain data."""
        return {"taken": self.taken, "start": self._start, "generators": self._generators}


def rescale(state: Mapping[str, Any] | None, old: int, new: int) -> dict[str, Any] | None:
    """The place in a pass that ``new`` ranks share, if ``old`` ranks were at ``state``.

    >>> rescale({"taken": 6}, 2, 4)
    {'taken': 3}
    """
    return None if state is None else {**state, "taken": state["taken"] * old // new}


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of its own that a loader or its samplers draw from, each once."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    owners = (loader, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers))
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(unique.values())


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader's sampler, or the one in its batch sampler, which epoch begins, if it wants to know."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        tell = getattr(sampler, "set_epoch", None)
        if tell is not None:
            tell(epoch)
            return
