"""mmengine's Runner, with AmpOptimWrapper or ApexOptimWrapper: the loss scale stands in the optimizer's entry."""

from __future__ import annotations

from typing import Any, Final

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.formats.format import Files, Format, Target
from halfpeak.checkpoint.formats.mmcv import inside, read, write_run
from halfpeak.checkpoint.scaler_states import to_mmengine


def write(contents: Contents) -> Files:
    """A checkpoint for mmengine's Runner with AmpOptimWrapper."""
    states = contents.scaler_states
    return _write(contents, to_mmengine(states, contents.rule) if states else {})


def write_apex(contents: Contents) -> Files:
    """A checkpoint for mmengine's Runner with ApexOptimWrapper."""
    states = contents.scaler_states
    return _write(contents, to_mmengine(states, apex=True) if states else {})


def _write(contents: Contents, entry: dict[str, Any]) -> Files:
    hub = {"message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}}}
    return {**hub, **write_run(contents, {}, {**inside(contents.rest, "optimizer"), **entry})}


_FAMILY: Final = ("mmengine", "mmengine_apex")

FORMAT = Format(
    "mmengine",
    "a run of mmengine",
    read,
    Target("a checkpoint of mmengine's Runner with AmpOptimWrapper", write, family=_FAMILY),
)
APEX = Format(
    "mmengine_apex",
    "a run of mmengine with ApexOptimWrapper",
    read,
    Target("the same with ApexOptimWrapper", write_apex, scalers=None, family=_FAMILY, keeps_rule=False),
)
