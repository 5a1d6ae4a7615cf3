"""The checkpoint file of a run: its content, whether it fits a runner, and the part of it for one rank.

A file holds ``meta``, ``state_dict`` and ``optimizer``, as files of mmcv do. For a bitwise resume it also holds
``hooks`` (their states), ``loop`` (the position in the data and the workflow) and ``random``. A file of several ranks
has ``loop``, ``random`` and open windows of each rank, because gradients differ between ranks before the reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import Logger
from typing import Any, Final

from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_count, require_list, require_mapping
from halfpeak.engine.state_checks import check_optimizer
from halfpeak.optim.resume_state import RESUME_KEY, has_open_window
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.runner import optimizers
from halfpeak.runner.loop.batches import check_place
from halfpeak.runner.optimizers import Optimizers
from halfpeak.state import random_state

VERSION: Final = 1
OF_RANK: Final = ("loop", "random")


def parse(
    state: Mapping[str, Any], source: object, *, kind: str, runner: str, rank: int, world: int, logger: Logger
) -> tuple[dict[str, Any], Mapping[str, Any], dict[str, Any] | None]:
    """Check the content of a file and select the part of one rank.

    Args:
        source: the file's name, for messages.
        kind: the unit of the runner: ``"epoch"`` or ``"iter"``.
        runner: the name of the runner's class.
        rank: the rank that resumes.
        world: the number of ranks that resume.

    Returns:
        ``meta``; everything in the file, with the open windows of this rank; and hook states, position in the data and
        random generators of this rank, or None for a file of mmcv.

    Raises:
        StateError: the file is not a checkpoint of such a run.
    """
    meta, loop = state.get("meta"), state.get("loop")
    if not isinstance(meta, Mapping) or not {"epoch", "iter"} <= set(meta) or "state_dict" not in state:
        raise StateError(
            f"{source} is no checkpoint of a run, which has 'state_dict' and, in 'meta', 'epoch' and 'iter'; call "
            "load_checkpoint to load only its weights"
        )
    for name in ("epoch", "iter"):
        require_count(meta[name], name)
    if loop is None:
        return dict(meta), state, None
    version, counts_by = (
        require_mapping(loop, "the checkpoint's 'loop'").get(name) for name in ("version", "kind")
    )
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"{source} has format version {short_repr(version)}, and this halfpeak reads version {VERSION}; call "
            "load_checkpoint to load only its weights"
        )
    if not isinstance(counts_by, str) or counts_by != kind:
        raise StateError(
            f"{source} was saved by a runner that counts {short_repr(counts_by)}, but {runner} counts {kind!r}; resume with "
            "the same runner class"
        )
    _check_parts(state, kind)
    state, is_short = with_windows_of(state, rank, world, source)
    if is_short:
        logger.warning(
            "the file was saved on %d ranks inside an accumulation window; its gradients are dropped on %d ranks",
            loop["world_size"],
            world,
        )
    return dict(meta), state, {"hooks": state["hooks"], **_part_of(state, rank, world, logger)}


def _check_parts(state: Mapping[str, Any], kind: str) -> None:
    """Check the parts of a file that :func:`parse` and the runner read, for all ranks."""
    for hook in require_mapping(state.get("hooks"), "the checkpoint's 'hooks'").values():
        require_mapping(hook, "a hook's state in the checkpoint")
    for part in (state, *require_list(state.get("ranks", ()), "ranks")):
        known = require_mapping(part, "the checkpoint's entry for one rank")
        random_state.parse(require_mapping(known.get("random"), "the checkpoint's 'random'"))
        if "windows" in known:
            for one in require_mapping(
                known["windows"], "a rank's 'windows'", ("hooks", "optimizer")
            ).values():
                require_mapping(one, "an entry of a rank's 'windows'")
        loop = require_mapping(known.get("loop"), "the checkpoint's 'loop'")
        for name, least in (("world_size", 1), ("flow", 0), ("done", 0)):
            require_count(loop.get(name), name, least)
        for entry in require_list(loop.get("workflow"), "workflow"):
            if not isinstance(entry, (list, tuple)) or [type(part) for part in entry] != [str, int]:
                raise StateError(
                    f"an entry of the checkpoint's workflow must be a mode and a number, such as ['train', 1], not "
                    f"{short_repr(entry)}"
                )
        if kind == "epoch":
            places = [loop.get("open", ())]  # () fails check_place; halfpeak writes None between passes
        else:
            loaders = require_list(loop.get("loaders"), "loaders")
            known = [
                require_mapping(one, "the position in a loader", ("epoch", "batches")) for one in loaders
            ]
            places = [
                one["batches"] for one in known if require_count(one["epoch"], "the epoch of a loader") >= 0
            ]
        for place in places:
            if place is not None:
                check_place(place)


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


def open_windows(state: Mapping[str, Any]) -> dict[str, Any]:
    """The open windows of a checkpoint: whole states of hooks, and the ``RESUME_KEY`` parts of wrappers' states.

    >>> saved = {"version": 1, "scalers": [], "buffers": [], "window": {"lanes": [{"phase": "UNSCALED"}], "losses": {}}}
    >>> hooks = {"A": {RESUME_KEY: saved, "iter": 3}, "B": {}}
    >>> state = {"hooks": hooks, "optimizer": {"param_groups": []}}
    >>> open_windows(state) == {"hooks": {"A": state["hooks"]["A"]}, "optimizer": {}}
    True
    """
    named = _by_name(state.get("optimizer"))
    return {
        "hooks": {name: hook for name, hook in state["hooks"].items() if has_open_window(hook)},
        "optimizer": {name: one[RESUME_KEY] for name, one in named.items() if has_open_window(one)},
    }


def with_windows_of(
    state: Mapping[str, Any], rank: int, world: int, source: object
) -> tuple[dict[str, Any], bool]:
    """The checkpoint with the windows of one rank, and whether windows are dropped because the world size changed.

    Raises:
        StateError: the file has only the windows of rank 0.
    """
    before, ranks = state["loop"]["world_size"], state.get("ranks", ())
    if not any(open_windows(state).values()) or before == world == 1:
        return dict(state), False
    if before != world:
        return _with_windows(state, {"hooks": {}, "optimizer": {}}), True
    if len(ranks) != world or "windows" not in ranks[rank]:
        raise StateError(
            f"{source} was saved by rank 0 alone and inside an accumulation window, whose gradients differ between the "
            f"{world} ranks; resume from a file of CheckpointHook, of write_checkpoint(..., every_rank=True), or from the "
            "end of a window"
        )
    return _with_windows(state, ranks[rank]["windows"]), False


def _with_windows(state: Mapping[str, Any], windows: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint with its own open windows replaced by ``windows``."""
    own = open_windows(state)
    hooks = {name: hook for name, hook in state["hooks"].items() if name not in own["hooks"]}
    changed = {**state, "hooks": {**hooks, **windows["hooks"]}}
    named = _by_name(state.get("optimizer"))
    for name, one in named.items():
        rest = {key: value for key, value in one.items() if key != RESUME_KEY or name not in own["optimizer"]}
        window = windows["optimizer"].get(name)
        named[name] = rest if window is None else {**rest, RESUME_KEY: window}
    if named:
        changed["optimizer"] = optimizers.unnamed(named)
    return changed


def _part_of(state: Mapping[str, Any], rank: int, world: int, logger: Logger) -> dict[str, Any]:
    """The data position and random generators of a rank; rank 0's if the file has no others."""
    ranks = state.get("ranks", [])
    if len(ranks) == world:
        return {name: ranks[rank][name] for name in OF_RANK}
    if world > 1:
        logger.warning(
            "the file has no random states and data positions of %d ranks; every rank takes those of rank 0",
            world,
        )
    return {name: state[name] for name in OF_RANK}


def _by_name(optimizer: Any) -> dict[str, Any]:
    """The states of a checkpoint's optimizers by name; a single optimizer has the empty name."""
    if optimizer is None:
        return {}
    known = require_mapping(optimizer, "the state of the optimizer")
    named = {"": known} if "param_groups" in known else known
    return {name: dict(require_mapping(one, "the state of an optimizer")) for name, one in named.items()}
