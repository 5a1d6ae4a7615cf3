"""Saving a run and resuming it, bit for bit, at any iteration."""

from __future__ import annotations

import copy
import logging
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn

from halfpeak.checkpoint import save
from halfpeak.core.errors import ConfigTypeError, StateError
from halfpeak.core.outcome import StepResult
from halfpeak.engine.state_checks import check_optimizer
from halfpeak.optim.wrapped import unwrap
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.runner import hook_list, optimizers, random_state, windows
from halfpeak.runner.checkpoint import Location, ReviseKeys, StrPath, link_latest, load_weights, read
from halfpeak.runner.gather import gather
from halfpeak.runner.hook import Hook
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.runner.optimizers import Optimizers
from halfpeak.runner.progress import Progress

VERSION: Final = 1
_OF_RANK: Final = ("loop", "random")


class Persistence:
    """The half of a runner that turns it into a file and back.

    A file holds ``meta``, ``state_dict`` and ``optimizer``, as mmcv's do, and beside them what a bitwise resume needs:
    ``hooks`` (their states), ``loop`` (where the run is, in its data and in its workflow) and ``random``.
    """

    model: nn.Module
    optimizer: Optimizers
    logger: logging.Logger
    meta: dict[str, Any]
    log_buffer: LogBuffer
    _hooks: list[Hook]
    _epoch: int
    _iter: int
    _inner_iter: int
    _rank: int
    _world_size: int
    _progress: Progress
    _resumed: dict[str, Any] | None
    _stage: str | None
    step_result: StepResult | None

    _kind: ClassVar[str]

    @abstractmethod
    def _counters(self) -> dict[str, int]:
        """Finished epochs and iterations, once the stage that hooks are called for is over."""

    @abstractmethod
    def _loop_state(self) -> dict[str, Any]:
        """Where the loop goes on, once the stage that hooks are called for is over."""

    @abstractmethod
    def _foreign_counters(self, meta: Mapping[str, Any]) -> tuple[int, int]:
        """Finished epochs and iterations, from the ``meta`` of a file that mmcv wrote."""

    def load_checkpoint(
        self,
        filename: StrPath,
        map_location: Location = "cpu",
        strict: bool = False,
        revise_keys: ReviseKeys = ((r"^module\.", ""),),
    ) -> dict[str, Any]:
        """Load the weights in a file into the model, and return everything in it.

        Args:
            filename: a file of this runner, or of mmcv if it holds plain data.
            map_location: as in ``torch.load``.
            strict: refuse what does not fit exactly; otherwise it is left out, and the log says so.
            revise_keys: pairs of a regular expression and its replacement, applied to each key.

        Raises:
            CheckpointError: the file is damaged, missing, or holds something other than plain data.
            StateError: ``strict``, and keys or shapes differ. Nothing was loaded.
        """
        self.logger.info("load checkpoint from %s", filename)
        checkpoint = read(filename, map_location)
        load_weights(self.model, checkpoint, strict=strict, revise_keys=revise_keys, logger=self.logger)
        return checkpoint

    def resume(
        self, checkpoint: StrPath, resume_optimizer: bool = True, map_location: Location = "default"
    ) -> None:
        """Go on where a file was saved. Call it after the hooks are registered, and then :meth:`run`.

        Hooks, data order and random generators are restored when the run begins. With another number of ranks the
        iterations are counted anew in proportion. A file that mmcv wrote restores weights, optimizer, ``meta`` and
        counters.

        Args:
            checkpoint: the file.
            resume_optimizer: whether to restore the optimizer too.
            map_location: as in ``torch.load``; ``"default"`` reads on the host.

        Raises:
            CheckpointError: the file is damaged, missing, or holds something other than plain data.
            StateError: it does not fit this runner. Nothing was loaded.
        """
        state = read(checkpoint, map_location)
        meta, loop = self._check(state, checkpoint)
        if loop is not None:
            state, is_short = windows.of_rank(state, self._rank, self._world_size, checkpoint)
            if is_short:
                self.logger.warning(
                    "the file was saved on %d ranks inside an accumulation window, whose gradients are left out on %d",
                    loop["world_size"],
                    self._world_size,
                )
        if resume_optimizer:
            self._check_optimizer(state.get("optimizer"))
        load_weights(self.model, state, strict=loop is not None, logger=self.logger)
        if resume_optimizer:
            self._load_optimizer(state.get("optimizer"))
        self.meta = {**self.meta, **meta}
        if loop is None:
            self._epoch, self._iter = self._foreign_counters(meta)
            self._resumed = None
        else:
            self._epoch, self._iter = meta["epoch"], meta["iter"] * loop["world_size"] // self._world_size
            self._resumed = {"hooks": state["hooks"], **self._own_part(state)}
        self._inner_iter = 0
        self.logger.info("resumed epoch %d, iter %d", self._epoch, self._iter)

    def checkpoint(
        self, save_optimizer: bool = True, meta: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The run as plain data, with live tensors. Waits for the device.

        Between two stages it is complete. In a stage after an iteration or an epoch it counts that one as over, but
        hooks that come later in the stage have not done their part; :meth:`BaseRunner.defer` waits for them.

        Raises:
            ConfigTypeError: ``meta`` is not a dict.
        """
        if meta is not None and not isinstance(meta, Mapping):
            raise ConfigTypeError(f"meta must be a dict, not {type(meta).__name__}; write meta=dict(seed=0)")
        if self._stage == "after_train_iter":
            self._progress.note(self._iter, self.step_result)
        model = unwrap(self.model)
        classes = getattr(model, "CLASSES", None)
        state: dict[str, Any] = {
            "meta": {
                **(meta or {}),
                **copy.deepcopy(
                    self.meta
                ),  # hooks may keep there what turns into plain data when it is copied
                **self._counters(),
                "time": time.asctime(),
                **({} if classes is None else {"CLASSES": classes}),
            },
            "state_dict": model.state_dict(),
            "hooks": hook_list.take_states(self._hooks),
            "loop": {
                "version": VERSION,
                "kind": self._kind,
                "world_size": self._world_size,
                "progress": self._progress.state_dict(),
                "log_buffer": self.log_buffer.state_dict(),
                **self._loop_state(),
            },
            "random": random_state.take(parameter.device for parameter in model.parameters()),
        }
        if save_optimizer and self.optimizer is not None:
            states = {name: one.state_dict() for name, one in optimizers.by_name(self.optimizer).items()}
            state["optimizer"] = optimizers.unnamed(states)
        return state

    def write_checkpoint(
        self,
        path: StrPath,
        save_optimizer: bool = True,
        meta: Mapping[str, Any] | None = None,
        create_symlink: bool = False,
        every_rank: bool = False,
    ) -> None:
        """Save the run to a file of that name: whole or not at all, with a digest. Rank 0 writes.

        Args:
            path: its directory must exist.
            save_optimizer: whether to save the optimizer's state.
            meta: to be saved beside the runner's ``meta``.
            create_symlink: let ``latest.pth`` in the same directory lead to it.
            every_rank: keep the random generators, data positions and open accumulation windows of all ranks, each of
                which must call this then; otherwise those of rank 0.

        Raises:
            CheckpointError: something in it is not plain data (the message says where), or it cannot be written.
        """
        target = Path(path)
        state = self.checkpoint(save_optimizer, meta)
        if every_rank and self._world_size > 1:
            own = {name: state[name] for name in _OF_RANK}
            state["ranks"] = gather({**own, "windows": windows.take(state)})
        if self._rank == 0:
            save(target, state, keep_previous=False)
            if create_symlink:
                link_latest(target)

    def _restore(self) -> None:
        """Give hooks, log, counts and random generators what the file held for them."""
        if self._resumed is None:
            return
        unknown = hook_list.put_states(self._hooks, self._resumed["hooks"])
        if unknown:
            self.logger.warning(
                "the checkpoint holds state of %s, which are not registered", ", ".join(unknown)
            )
        self._progress.load_state_dict(self._resumed["loop"]["progress"])
        self.log_buffer.load_state_dict(self._resumed["loop"]["log_buffer"])
        random_state.put(self._resumed["random"])

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Data position and random generators of this rank; those of rank 0 where the file has no others."""
        ranks = state.get("ranks", [])
        if len(ranks) == self._world_size:
            return {name: ranks[self._rank][name] for name in _OF_RANK}
        if self._world_size > 1:
            self.logger.warning(
                "every rank takes the random generators of rank 0: the file has no others for it"
            )
        return {name: state[name] for name in _OF_RANK}

    def _check(
        self, state: Mapping[str, Any], source: object
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        meta, loop = state.get("meta"), state.get("loop")
        if not isinstance(meta, Mapping) or not {"epoch", "iter"} <= set(meta) or "state_dict" not in state:
            raise StateError(
                f"{source} is no checkpoint of a run: it has no meta with 'epoch' and 'iter'; write load_checkpoint to take "
                "its weights only"
            )
        if loop is not None and loop["version"] != VERSION:
            raise StateError(
                f"{source} has version {loop['version']!r}; this halfpeak reads version {VERSION}"
            )
        if loop is not None and loop["kind"] != self._kind:
            raise StateError(
                f"{source} is from a runner that counts by {loop['kind']}, {type(self).__name__} does not; use the same runner"
            )
        return dict(meta), loop

    def _check_optimizer(self, state: Any) -> None:
        if state is None or self.optimizer is None:
            return
        named = optimizers.by_name(self.optimizer)
        states = {"": state} if set(named) == {""} else state
        if not isinstance(states, Mapping) or set(states) != set(named):
            raise StateError(f"the file has optimizers {list(states)}, the runner {list(named)}")
        for name, one in named.items():
            if isinstance(one, OptimWrapper):
                one.check_state_dict(states[name])
            else:
                check_optimizer(one, states[name])

    def _load_optimizer(self, state: Any) -> None:
        if state is None or self.optimizer is None:
            self.logger.warning(
                "no optimizer was resumed: %s has none", "the file" if state is None else "the runner"
            )
            return
        named = optimizers.by_name(self.optimizer)
        for name, one in named.items():
            # torch keeps the tensors that it is given.
            one.load_state_dict(copy.deepcopy(state if name == "" else state[name]))
