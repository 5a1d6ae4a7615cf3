"""Open accumulation windows in a checkpoint: before the reduction, every rank has gradients of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.core.errors import StateError
from halfpeak.optim.exact import KEY, has_window


def take(state: Mapping[str, Any]) -> dict[str, Any]:
    """The windows that are open in a runner's checkpoint: whole states of hooks, and parts of those of wrappers.

    >>> lanes = [{"phase": "UNSCALED"}]
    >>> state = {"hooks": {"A": {KEY: {"window": {"lanes": lanes}}, "iter": 3}, "B": {}}, "optimizer": {"param_groups": []}}
    >>> take(state) == {"hooks": {"A": state["hooks"]["A"]}, "optimizer": {}}
    True
    """
    optimizers = _by_name(state.get("optimizer"))
    return {
        "hooks": {name: hook for name, hook in state["hooks"].items() if has_window(hook)},
        "optimizer": {name: one[KEY] for name, one in optimizers.items() if has_window(one)},
    }


def are_open(windows: Mapping[str, Any]) -> bool:
    """Whether :func:`take` found any."""
    return any(windows.values())


def put(state: Mapping[str, Any], windows: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint with these windows in place of its own."""
    own = take(state)
    hooks = {name: hook for name, hook in state["hooks"].items() if name not in own["hooks"]}
    changed = {**state, "hooks": {**hooks, **windows["hooks"]}}
    optimizers = _by_name(state.get("optimizer"))
    for name, one in optimizers.items():
        rest = {key: value for key, value in one.items() if key != KEY or name not in own["optimizer"]}
        window = windows["optimizer"].get(name)
        optimizers[name] = rest if window is None else {**rest, KEY: window}
    if optimizers:
        changed["optimizer"] = optimizers[""] if set(optimizers) == {""} else optimizers
    return changed


def of_rank(state: Mapping[str, Any], rank: int, world: int, source: object) -> tuple[dict[str, Any], bool]:
    """The checkpoint with the windows of one rank, and whether windows were left out because there were other ranks.

    Raises:
        StateError: the file has the windows of rank 0 alone.
    """
    before, ranks = state["loop"]["world_size"], state.get("ranks", ())
    if not are_open(take(state)) or before == world == 1:
        return dict(state), False
    if before != world:
        return put(state, {"hooks": {}, "optimizer": {}}), True
    if len(ranks) != world or "windows" not in ranks[rank]:
        raise StateError(
            f"{source} was saved by rank 0 alone and inside an accumulation window, whose gradients differ between the "
            f"{world} ranks; resume from a file of CheckpointHook, of write_checkpoint(..., every_rank=True), or from the "
            "end of a window"
        )
    return put(state, ranks[rank]["windows"]), False


def _by_name(optimizer: Any) -> dict[str, Any]:
    """The states of a checkpoint's optimizers; a single one has the empty name."""
    if optimizer is None:
        return {}
    return {"": optimizer} if "param_groups" in optimizer else dict(optimizer)
