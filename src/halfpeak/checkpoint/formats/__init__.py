"""The formats of checkpoints, as one table: who wrote a file, where its parts are, and how one is written.

A new format is a file with ``read``, ``write`` and a :class:`~halfpeak.checkpoint.formats.format.Format`, and a row here;
``lightning.py`` is a plain example. The value in between is :class:`~halfpeak.checkpoint.canonical.Contents`.
What only halfpeak knows is kept if ``write`` adds ``contents.halfpeak_entry`` and ``read`` gives it to ``add_halfpeak_entry``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from halfpeak.checkpoint.canonical import Contents, find_level
from halfpeak.checkpoint.formats import accelerate, engine, lightning, openmmlab, plain, script, train
from halfpeak.checkpoint.formats.format import SCRIPTS, Files, Format, Target

__all__ = ["FORMATS", "FORMS", "SCRIPTS", "TARGETS", "Files", "Format", "Target", "read_contents"]

FORMATS: Final[tuple[Format, ...]] = (
    engine.FORMAT,
    engine.FOR_DCP,
    train.FORMAT,
    lightning.FORMAT,
    openmmlab.RUNNER,
    openmmlab.MMCV,
    openmmlab.MMENGINE,
    openmmlab.MMENGINE_APEX,
    accelerate.FORMAT,
    plain.WEIGHTS,
    plain.OPTIMIZER,
    plain.SCALER,
    script.APEX,
    script.GRAD_SCALER,
    script.FP16_OPTIMIZER,
    script.RECIPE,
)
"""Every format, in the order in which the readers are asked: the most particular first."""

FORMS: Final[Mapping[str, str]] = MappingProxyType(
    {**{one.name: one.brief for one in FORMATS}, "unknown": "no form that halfpeak knows"}
)
"""What each is, by name."""

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {one.name: one.target for one in FORMATS if one.target is not None}
)
"""What ``convert`` can write, by name."""


def read_contents(tree: Any, *, is_folder: bool = False) -> Contents:
    """What is in a checkpoint, by the first reader that knows it; ``tree`` is not changed."""
    if is_folder:
        contents = accelerate.read_folder(tree)
    else:
        readers = dict.fromkeys(one.read for one in FORMATS if one.read is not None)
        found = (read(tree) for read in readers)
        contents = next((one for one in found if one is not None), Contents())
    if contents.level is None:
        contents.level = find_level(tree)
    return contents
