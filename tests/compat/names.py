"""Makes docs/compat/names.md: every name of the originals, and how halfpeak's compares.

``PYTHONPATH=src:tests python -m compat.names`` writes the page again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import halfpeak.optim
import halfpeak.runner
from compat.facts import HERE, MMENGINE, Facts, of_files, read

PAGE = HERE.parents[1] / "docs" / "compat" / "names.md"

REASONS = {
    # mmengine
    "register_torch_optimizers": "absent; importing `halfpeak.optim` registers torch's optimizers",
    "register_torch_npu_optimizers": "absent; write `OPTIMIZERS.register_module(...)`",
    "NPU_OPTIMIZERS": "absent; names are looked up in mmengine's registry where mmengine is in use",
    **{
        name: "absent; names are looked up in mmengine's registry where mmengine is in use"
        for kind in ("dadaptation", "lion", "sophia", "bitsandbytes", "transformers")
        for name in (f"register_{kind}_optimizers", f"{kind.upper()}_OPTIMIZERS")
    },
    "TORCH_OPTIMIZERS": "absent; it is `halfpeak.optim.members.TORCH_OPTIMIZERS`",
    "ZeroRedundancyOptimizer": "absent; mmengine's is found by its name where mmengine is in use",
    "ZeroRedundancyOptimizer.state_dict": "absent with its class",
    "OptimWrapperDict.initialize_count_status": "tells every wrapper; the arguments are `model`, `init_counts`, `max_counts`",
    # mmcv
    "init_dist": "`backend=None` chooses the device's backend, which is gloo on a CPU",
    "GradientCumulativeFp16OptimizerHook": "`cumulative_iters` by place or name, all others by name",
    "patch_forward_method": "absent; `patch_norm_fp32` casts by module hooks",
}
"""Names that differ from the original's, and why. A name that is the same must not be listed."""


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


_PARTS: dict[str, tuple[ModuleType, dict[str, Callable[[type], Any]]]] = {
    "mmengine.optim": (
        halfpeak.optim,
        {
            "OptimWrapper": lambda cls: cls(_optimizer(), clip_grad={"max_norm": 1.0}),
            "AmpOptimWrapper": lambda cls: cls(optimizer=_optimizer()),
            "ApexOptimWrapper": lambda cls: cls(optimizer=_optimizer()),
            "OptimWrapperDict": lambda cls: cls(),
            "DefaultOptimWrapperConstructor": lambda cls: cls({"optimizer": {"type": "SGD"}}),
            "BaseOptimWrapper": lambda cls: halfpeak.optim.OptimWrapper(_optimizer()),
        },
    ),
    "mmcv.runner": (
        halfpeak.runner,
        {
            "LossScaler": lambda cls: cls(),
            "OptimizerHook": lambda cls: cls(),
            "GradientCumulativeOptimizerHook": lambda cls: cls(),
            "Fp16OptimizerHook": lambda cls: cls(),
            "GradientCumulativeFp16OptimizerHook": lambda cls: cls(),
            "DefaultOptimizerConstructor": lambda cls: cls({"type": "SGD"}),
        },
    ),
}


def originals() -> dict[str, Facts]:
    """The names of each original: mmengine's from its source, mmcv's from the table."""
    spec = find_spec("mmengine")
    assert spec is not None
    assert spec.origin is not None
    return {
        "mmengine.optim": of_files(Path(spec.origin).parent / "optim" / "optimizer", MMENGINE),
        "mmcv.runner": read(HERE / "mmcv.csv"),
    }


def verdicts(library: str, table: Facts) -> Iterator[tuple[str, str, str]]:
    """Each name, its signature, and the result of the comparison."""
    module, makers = _PARTS[library]
    for name, signature in table.items():
        yield name, signature, found(module, makers, name, signature)


def found(module: ModuleType, makers: dict[str, Callable[[type], Any]], name: str, signature: str) -> str:
    owner, _, attribute = name.partition(".")
    ours = getattr(module, owner, None)
    if ours is None:
        return "absent"
    if attribute:
        # Properties are found on the class, which needs no instance.
        holder = ours if hasattr(ours, attribute) else makers[owner](ours)
        if not hasattr(holder, attribute):
            return "absent"
        ours = getattr(ours, attribute, None)
    if not signature or not callable(ours):
        return "same"
    return compared(signature, ours, is_method=bool(attribute))


def compared(signature: str, ours: Any, *, is_method: bool) -> str:
    """Compare signatures: does every call that fits the original's mean the same with halfpeak's?"""
    theirs = _parsed(signature)
    own = list(inspect.signature(ours).parameters.values())[is_method:]
    by_name = {one.name: one for one in own}
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in own)
    for place, one in enumerate(theirs):
        if one.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            if one.kind not in {p.kind for p in own}:
                return f"no {one}"
            continue
        mine = by_name.pop(one.name, None)
        if mine is None:
            if not takes_any:
                return f"no `{one.name}`"
        elif mine.default != one.default or (
            one.kind is Parameter.POSITIONAL_OR_KEYWORD and own.index(mine) != place
        ):
            return f"`{mine}`"
    more = [
        one.name
        for one in by_name.values()
        if one.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    ]
    if any(by_name[name].default is Parameter.empty for name in more):
        return f"needs `{more[0]}`"
    return f"same, and {', '.join(f'`{name}`' for name in more)}" if more else "same"


def _parsed(signature: str) -> list[Parameter]:
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(f"def f{signature}: ...", scope)
    return list(inspect.signature(scope["f"]).parameters.values())


def page() -> str:
    lines = [
        "# Names of mmengine.optim and of mixed precision in mmcv.runner",
        "",
        "`python -m compat.names` makes this page from the sources of mmengine 0.10.7 and mmcv 1.7.2, and a test compares it.",
        "What the names do stands on the pages of [mmengine](mmengine.md) and [mmcv](mmcv.md). mmengine's schedulers",
        "(`mmengine.optim.scheduler`) take halfpeak's wrappers, and so do torch's.",
    ]
    for library, table in originals().items():
        found = {
            name: REASONS.get(name, f"also takes {verdict.removeprefix('same, and ')}")
            for name, _, verdict in verdicts(library, table)
            if name in REASONS or verdict != "same"
        }
        reasons = dict.fromkeys(found.values())
        named = {why: ", ".join(f"`{name}`" for name in found if found[name] == why) for why in reasons}
        lines += ["", f"## {library}", "", "| name | here |", "| --- | --- |"]
        lines += [f"| {names} | {why} |" for why, names in named.items()]
        lines += [
            "",
            "These are the same: each call that fits the original's signature fits here, with the same defaults.",
            "",
        ]
        lines += _listed(name for name in table if name not in found)
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> list[str]:
    """A line of functions and other single names, and one for the members of each class."""
    alone: list[str] = []
    members: dict[str, list[str]] = {}
    for name in names:
        owner, _, member = name.partition(".")
        members.setdefault(owner, []).append(member) if member else alone.append(name)
    lines = [f"- {', '.join(f'`{name}`' for name in alone)}"]
    lines += [f"- of `{owner}`: {', '.join(f'`{name}`' for name in own)}" for owner, own in members.items()]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
