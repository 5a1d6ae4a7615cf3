"""The table of checkpoint formats: how each is recognised and written, and the reader that all share.

One reader suffices because the content of an entry tells what it is. To add a format, write a file with ``is_form``,
``write`` and a :class:`~halfpeak.checkpoint.formats.format.Format`, and add a row here; ``lightning.py`` is a simple
example. Reading returns, and ``write`` takes, a :class:`~halfpeak.checkpoint.canonical.Contents`. If ``write`` adds
``contents.halfpeak_entry()``, the file keeps the state that only halfpeak understands. An entry with the version of the
library that wrote the file is read if its key is in ``_VERSIONS``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from halfpeak.checkpoint.canonical import ENGINE, HALFPEAK_KEY, Contents, find_level, scaler_kind
from halfpeak.checkpoint.formats import accelerate, engine, lightning, openmmlab, plain, script
from halfpeak.checkpoint.formats.format import SCRIPTS, Files, Format, Target
from halfpeak.checkpoint.open import Folder

__all__ = ["FORMATS", "FORMS", "SCRIPTS", "TARGETS", "Files", "Format", "Target", "read_contents"]

FORMATS: Final[tuple[Format, ...]] = (
    engine.FORMAT,
    engine.DCP,
    engine.TRAIN,
    lightning.FORMAT,
    openmmlab.RUNNER,
    openmmlab.MMENGINE_APEX,
    openmmlab.MMENGINE,
    openmmlab.MMCV,
    accelerate.FORMAT,
    plain.WEIGHTS,
    plain.OPTIMIZER,
    plain.SCALER,
    script.APEX,
    script.GRAD_SCALER,
    script.FP16_OPTIMIZER,
    script.RECIPE,
)
"""Every format. ``is_form`` is tried in this order, so the most specific formats come first."""

FORMS: Final[Mapping[str, str]] = {
    **{one.name: one.brief for one in FORMATS},
    "unknown": "no format that halfpeak knows",
}
"""A description of each format, by name."""

TARGETS: Final[Mapping[str, Target]] = {one.name: one.target for one in FORMATS if one.target is not None}
"""The formats that ``convert`` can write, by name."""


_VERSIONS: Final = ("pytorch-lightning_version", "mmengine_version", "mmcv_version")
_COMMIT: Final = re.compile(r"\+?[0-9a-f]{40}$")
_WHOLE: Final = "(the file)"


def read_contents(tree: Any) -> Contents:
    """The contents and the format of a checkpoint; ``tree`` is not changed."""
    contents = accelerate.read(tree) if isinstance(tree, Folder) else _read(tree)
    if contents.level is None:
        contents.level = find_level(tree)
    return contents


def _read(tree: Any) -> Contents:
    """The contents of a file: one state saved alone, an engine, or a dict of entries."""
    contents = Contents()
    if not isinstance(tree, Mapping):
        contents.rest[_WHOLE] = tree
    elif contents.add_model(_WHOLE, tree):
        contents.form = "weights"
    elif contents.add_scaler(_WHOLE, tree):
        contents.form = "scaler"
    elif contents.add_optimizer(_WHOLE, tree):
        contents.form = contents.form if contents.form == "fp16_optimizer" else "optimizer"
    elif len(tree) != len(ENGINE) or not contents.add_engine(tree):
        _read_entries(contents, tree)
    return contents


def _read_entries(contents: Contents, tree: Mapping[Any, Any]) -> None:
    is_run = openmmlab.is_run(tree, contents)
    meta = tree["meta"] if is_run else {}
    # mmcv, mmengine and Lightning save the model under "state_dict"; tensors elsewhere belong to hooks and callbacks.
    in_one_place = is_run or lightning.is_form(tree, contents)
    for key, value in tree.items():
        is_version = key in _VERSIONS and isinstance(value, str)
        if not is_version and not (meta and key == "meta"):
            contents.add(str(key), value, has_models=not in_one_place or key == "state_dict")
    for key, value in meta.items():
        inside = value.get("loss_scaler") if key == "fp16" and isinstance(value, Mapping) else None
        contents.add(f"meta.{key}", value if scaler_kind(inside) is None else inside, has_models=False)
    told = {**tree, **meta}
    version = next((told[key] for key in _VERSIONS if isinstance(told.get(key), str)), "")
    contents.version = _COMMIT.sub("", version)
    forms = (one.name for one in FORMATS if one.is_form is not None and one.is_form(tree, contents))
    contents.form = next(forms, contents.form)
    if HALFPEAK_KEY in contents.rest:
        contents.add_halfpeak_entry(contents.rest.pop(HALFPEAK_KEY))
