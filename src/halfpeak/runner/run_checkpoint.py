"""The checkpoint file of a run: what it holds, and whether it fits a runner.

A file holds ``meta``, ``state_dict`` and ``optimizer``, as files of mmcv do, and beside them ``hooks`` (their states),
``loop`` (counts of steps) and ``random``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from logging import Logger
from typing import Any, Final, NamedTuple

from torch import nn

from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import Schema, require, require_count, require_mapping
from halfpeak.engine.state_checks import check_optimizer
from halfpeak.optim.unwrap import unwrap
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.parts import random_state
from halfpeak.runner import optimizers
from halfpeak.runner.checkpoint import listed, load_weights
from halfpeak.runner.optimizers import Optimizers
from halfpeak.runner.step_counter import STEP_COUNTS

VERSION: Final = 2


class SavedRun(NamedTuple):
    """What a file has beside the entries of mmcv's.

    Attributes:
        hooks: the states of hooks by name.
        progress: the state of a :class:`~halfpeak.runner.step_counter.StepCounter`.
        random: the random generators of rank 0.
        world_size: the number of ranks that saved it.
    """

    hooks: Mapping[str, Any]
    progress: Mapping[str, Any]
    random: Mapping[str, Any]
    world_size: int


def parse(
    state: Mapping[str, Any], source: object, kind: str, runner: str
) -> tuple[dict[str, Any], SavedRun | None]:
    """Check the content of a file; returns ``meta``, and what only files of halfpeak have, or None.

    Args:
        state: everything in the file.
        source: the file's name, for messages.
        kind: the unit of the runner: ``"epoch"`` or ``"iter"``.
        runner: the name of the runner's class.

    Raises:
        StateError: the file is not a checkpoint of such a run.
    """
    meta, loop = state.get("meta"), state.get("loop")
    if not isinstance(meta, Mapping) or not {"epoch", "iter"} <= set(meta) or "state_dict" not in state:
        raise StateError(
            f"{source} is no checkpoint of a run, which has 'state_dict' and, in 'meta', 'epoch' and 'iter'; call "
            "load_checkpoint to load only its weights"
        )
    require(meta, "checkpoint['meta']", {"epoch": require_count, "iter": require_count, object: ...})
    if loop is None:
        return dict(meta), None
    require_mapping(loop, "checkpoint['loop']")
    if loop.get("version") != VERSION:
        raise StateError(
            f"{source} has format version {short_repr(loop.get('version'))}, and this halfpeak reads version {VERSION}; call "
            "load_checkpoint to load only its weights"
        )
    if loop.get("kind") != kind:
        raise StateError(
            f"{source} was saved by a runner that counts {short_repr(loop.get('kind'))}, but {runner} counts {kind!r}; resume "
            "with the same runner class"
        )
    saved_loop: Schema = {"progress": STEP_COUNTS, "world_size": partial(require_count, least=1), object: ...}
    require(
        state, "checkpoint", {"hooks": {object: Mapping}, "random": Mapping, "loop": saved_loop, object: ...}
    )
    random_state.parse(state["random"])
    return dict(meta), SavedRun(state["hooks"], loop["progress"], state["random"], loop["world_size"])


def load_model(model: nn.Module, state: Mapping[str, Any], logger: Logger, *, strict: bool) -> None:
    """Load the weights of a file.

    Args:
        model: in any wrapper.
        state: everything in the file.
        logger: gets a warning of what does not fit.
        strict: refuse a file that lacks weights of the model. Others, which a hook may register later, are only logged.

    Raises:
        StateError: with ``strict``, weights are missing or have another shape. Nothing was loaded.
    """
    weights = require_mapping(state["state_dict"], "the weights of a checkpoint")
    if not strict:
        load_weights(model, weights, logger=logger)
        return
    known = unwrap(model).state_dict()
    unknown = [name for name in weights if name not in known]
    load_weights(model, {name: value for name, value in weights.items() if name in known}, strict=True)
    if unknown:
        logger.warning("unexpected key in source state_dict: %s", listed(unknown))


def check_optimizers(optimizer: Optimizers, state: Any) -> None:
    """Raise StateError unless the optimizer states of a file fit the runner's optimizers."""
    if state is None or optimizer is None:
        return
    own = optimizers.by_name(optimizer)
    states = require_mapping(optimizers.named(state, own), "the state of the optimizers")
    if set(states) != set(own):
        found = "one optimizer" if "param_groups" in states else f"the optimizers {short_repr(list(states))}"
        raise StateError(f"the file has {found}, but the runner has {list(own)}")
    for name, one in own.items():
        if isinstance(one, OptimWrapper):
            one.check_state_dict(states[name])
        else:
            check_optimizer(one, states[name])


def load_optimizers(optimizer: Optimizers, state: Any, logger: Logger) -> None:
    """Restore one optimizer, or several by name; log a warning if the file or the runner has none."""
    if state is None or optimizer is None:
        logger.warning("no optimizer was resumed: %s has none", "the file" if state is None else "the runner")
        return
    own = optimizers.by_name(optimizer)
    states = optimizers.named(state, own)
    for name, one in own.items():
        one.load_state_dict(states[name])  # keeps these tensors, which nothing else uses
