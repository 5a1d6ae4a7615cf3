"""convert: a checkpoint of one form written in another; what has no place there is named, and never lost unasked."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfpeak.checkpoint.file import StrPath, save
from halfpeak.checkpoint.forms.material import Account, prepare
from halfpeak.checkpoint.forms.recognition import take_apart
from halfpeak.checkpoint.forms.targets import TARGETS, Material, Target
from halfpeak.checkpoint.plain import plain
from halfpeak.checkpoint.reading.container import Opened, open_any
from halfpeak.checkpoint.reading.offline import execute_pickle
from halfpeak.core.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source: the form of the input.
        target: the form of the output.
        output: the file or folder that was written.
        kept: what is in the output, in words.
        dropped: what is not, in words, by its name.
        notes: what else is worth knowing.
    """

    source: str
    target: str
    output: Path
    kept: tuple[str, ...]
    dropped: dict[str, str]
    notes: tuple[str, ...]


def convert(
    path: StrPath,
    form: str,
    output: StrPath,
    *,
    drop: Iterable[str] = (),
    scale: float | None = None,
    level: str | None = None,
    unsafe_execute_pickle: bool = False,
) -> Conversion:
    """Write a checkpoint in another form; the input is not changed.

    Weights keep their names. Where the file has float32 masters beside low weights, they take the place of these, bit
    for bit. Optimizer states and loss scales are carried over as they stand.

    Args:
        path: a file, or a folder of accelerate.
        form: a key of :data:`~halfpeak.checkpoint.forms.targets.TARGETS`.
        output: a file, for ``accelerate`` a folder, that does not exist yet.
        drop: names of what may be lost, as the refusal lists them, or of parts to leave out; ``"all"`` allows every loss.
        scale: the loss scale to begin with, where the file has none.
        level: the opt level to note, where the file names none.
        unsafe_execute_pickle: unpickle a file that is not plain data in another process, **which runs the code in it**.

    Raises:
        StateError: something has no place in the target and ``drop`` does not name it, or does not fit together.
        CheckpointError: the file is damaged, unreadable, or not plain data where it matters.
        ConfigError: an argument makes no sense. In every case nothing was written.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder / "a.pt", {"model": {"w": torch.ones(2)}, "amp": {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}})
    >>> convert(folder / "a.pt", "weights", folder / "b.pt").kept
    ('1 tensor of weights',)
    """
    if form not in TARGETS:
        raise ConfigError(f"form={form!r} must be one of {', '.join(TARGETS)}")
    if isinstance(drop, str):
        raise ConfigError(f"drop={drop!r} must be a list of names; write drop=[{drop!r}]")
    target, account, place = TARGETS[form], Account(frozenset(drop)), _check_output(output)
    opened = open_any(path)
    tree = _read(opened, account, unsafe=unsafe_execute_pickle)
    parts = take_apart(tree, is_folder=opened.is_folder)
    material = prepare(parts, target, account, scale, level)
    account.settle(form)
    files = _as_plain(target.write(material), opened)
    if target.is_folder:
        _save_folder(place, files)
    else:
        save(place, files)
    return Conversion(
        parts.form, form, place, _describe(material, target), account.dropped, tuple(account.notes)
    )


def _check_output(output: StrPath) -> Path:
    place = Path(output)
    if os.path.lexists(place):
        raise ConfigError(f"output {str(place)!r} exists already; name one that does not")
    if not place.parent.is_dir():
        raise ConfigError(
            f"output {str(place)!r} cannot be written: there is no directory {str(place.parent)!r}"
        )
    return place


def _read(opened: Opened, account: Account, *, unsafe: bool) -> Any:
    if opened.damaged or (opened.unread and not unsafe):
        raise CheckpointError(f"{opened.path} ({opened.container}) cannot be converted: {opened.unread}")
    if not unsafe or not (opened.symbols or opened.unread):
        return opened.tree
    if opened.is_folder:
        raise ConfigError(f"{opened.path} is a folder; unsafe_execute_pickle takes one file at a time")
    executed = execute_pickle(opened.path)
    account.notes += [f"{where or 'the file'} was {what}" for where, what in executed.changed.items()]
    return executed.tree


def _as_plain(files: dict[str, Any], opened: Opened) -> dict[str, Any]:
    try:
        return plain(files, "the result")
    except CheckpointError as error:
        if not opened.symbols:
            raise
        found = str(error).partition(";")[0]
        raise CheckpointError(
            f"{found}: {opened.path} is not plain data. If you trust its author, write --unsafe-execute-pickle "
            "(unsafe_execute_pickle=True), which runs the code in it in another process"
        ) from None


def _save_folder(place: Path, files: dict[str, Any]) -> None:
    """All of a folder or nothing: its files are written under another name first."""
    hidden = place.with_name(f".{place.name}.{secrets.token_hex(8)}.halfpeak-tmp")
    hidden.mkdir()
    try:
        for name, state in files.items():
            save(hidden / name, state)
        os.rename(hidden, place)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _describe(material: Material, target: Target) -> tuple[str, ...]:
    tensors = sum(isinstance(value, Tensor) for model in material.models.values() for value in model.values())
    counted = [(tensors, "tensor", " of weights")]
    if not target.weights_only:
        counted += [(len(material.optimizers), "optimizer", ""), (len(material.scalers), "loss scale", "")]
    return tuple(f"{count} {what}{'s' * (count != 1)}{of}" for count, what, of in counted if count)
