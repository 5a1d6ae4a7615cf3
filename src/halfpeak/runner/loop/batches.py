"""The data of a run: resumable passes, endless loaders, and the parsed workflow. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from halfpeak.core.errors import ConfigError, ConfigTypeError, StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_count, require_list, require_mapping
from halfpeak.state import random_state


class Batches(Iterator[Any]):
    """One pass over a data loader that can be resumed at the same batch, bit for bit.

    The random state at the start of a pass determines the order of the samples and all numbers that loader workers
    draw. The state of a pass is therefore that random state and the number of batches. To resume, the pass starts from
    the same random state and loads that many batches without using them. The random state of persistent workers cannot
    be read, so their augmentations differ after a resume.

    Attributes:
        num_batches: the number of batches loaded so far.
    """

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None) -> None:
        self.loader = loader
        generators = generators_of(loader)
        if state is not None:
            random_state.restore(state["start"], zip(generators, state["generators"], strict=False))
        self._start = random_state.capture()
        self._generators = [generator.get_state() for generator in generators]
        self.num_batches = 0
        self._iterator = iter(loader)
        self._begun: list[Any] = []
        while state is not None and self.num_batches < state["taken"]:
            try:
                last = next(self)
            except StopIteration:
                raise StateError(
                    f"the run resumes after {state['taken']} batches of a pass over the data, but the data loader has only "
                    f"{self.num_batches}; resume with the same data and batch size"
                ) from None
            self._begun = [last] if self.num_batches == state["taken"] and state.get("begun") else []

    def __next__(self) -> Any:
        if self._begun:
            return self._begun.pop()
        batch = next(self._iterator)
        self.num_batches += 1
        return batch

    def state_dict(self, begun: bool = False) -> dict[str, Any]:
        """The position in the pass. With ``begun``, the last batch is repeated, because its iteration is unfinished."""
        place = {"taken": self.num_batches, "start": self._start, "generators": self._generators}
        return {**place, "begun": True} if begun else place


def check_place(state: object) -> None:
    """Raise StateError unless ``state`` is a position in a pass, as :meth:`Batches.state_dict` returns it."""
    what, keys = "the position in the data", ("taken", "start", "generators", "begun")
    known = require_mapping({"begun": False, **require_mapping(state, what)}, what, keys)
    require_count(known["taken"], "the number of batches")
    if not isinstance(known["begun"], bool):
        raise StateError(f"'begun' of {what} must be True or False, not {short_repr(known['begun'])}")
    random_state.parse(require_mapping(known["start"], "the state of random generators"))
    require_list(known["generators"], "generators")


def rescale(state: Mapping[str, Any] | None, old: int, new: int) -> dict[str, Any] | None:
    """Convert a position in a pass from ``old`` to ``new`` ranks, keeping the total number of finished batches.

    >>> rescale({"taken": 3, "begun": True}, 2, 1)
    {'taken': 4, 'begun': False}
    """
    if state is None or old == new:
        return None if state is None else dict(state)
    finished = state["taken"] - state.get("begun", False)
    return {**state, "taken": finished * old // new, "begun": False}


def generators_of(loader: Any) -> list[torch.Generator]:
    """The distinct ``torch.Generator`` objects of a loader and its samplers."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    owners = (loader, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers))
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(unique.values())


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

    Attributes:
        epoch: the number of finished passes.

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
        """The wrapped data loader."""
        return self._dataloader

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = Batches(self._dataloader)
        try:
            return next(self._batches)
        except StopIteration:
            if not self._batches.num_batches:
                raise ConfigError(
                    "the data loader gives no batch; its data is smaller than a batch, or empty"
                ) from None
        self.epoch += 1
        set_epoch(self._dataloader, self.epoch)
        self._batches = None
        return next(self)

    def __len__(self) -> int:
        return len(self._dataloader)

    def state_dict(self, begun: bool = False) -> dict[str, Any]:
        """The current pass and the position in it; ``begun`` as in :meth:`Batches.state_dict`."""
        return {
            "epoch": self.epoch,
            "batches": None if self._batches is None else self._batches.state_dict(begun),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position at which :meth:`state_dict` was called. Changes the state of random generators."""
        self.epoch = state["epoch"]
        if self.epoch:
            set_epoch(self._dataloader, self.epoch)
        saved = state["batches"]
        self._batches = None if saved is None else Batches(self._dataloader, saved)


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
