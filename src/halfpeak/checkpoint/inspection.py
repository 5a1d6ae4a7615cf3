"""inspect: a report on the contents of a checkpoint, made without executing anything in the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfpeak.checkpoint.match_params import match_params
from halfpeak.checkpoint.open import Folder, find_files, read_files
from halfpeak.checkpoint.parts import (
    FORMS,
    Parts,
    find_parts,
    is_empty,
    kind_of,
    name_of,
    read_steps,
    summary,
)
from halfpeak.checkpoint.read import ZIP, Content, StrPath, has_values, refusing
from halfpeak.checkpoint.scaler_states import translate
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import CheckpointError, StateError


@dataclass(frozen=True, kw_only=True)
class TensorsReport:
    """The tensors of a model, an optimizer's state or a list of masters: ``dtypes`` has the number of elements of each."""

    where: str
    tensors: int
    dtypes: dict[str, int]
    size: int


@dataclass(frozen=True, kw_only=True)
class ScalerReport:
    """A loss scale: its place, format and values; ``scale`` and ``clean`` are None if the state is invalid."""

    where: str
    kind: str
    scale: float | None
    clean: int | None


@dataclass(frozen=True, kw_only=True)
class OptimizerReport(TensorsReport):
    """The state of an optimizer: its largest step count, and the learning rate of each group."""

    groups: int
    parameters: int
    steps: int | None
    lr: list[float]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a checkpoint, and what is suspicious about them.

    Attributes:
        container: the kind of file.
        integrity: which checksums are right or wrong.
        readable: whether the file, or every file of the folder, could be read.
        form: the format, a key of :data:`~halfpeak.checkpoint.parts.FORMS`.
        made_by: the format in words, and the version of the library that wrote it.
        level: the opt level that the file names.
        wants: classes and functions that loading the file would import; empty for plain data.
        rest: descriptions of the other entries.
        findings: suspicious contents, as sentences.
        advice: recommendations, as sentences.
    """

    path: str
    container: str
    size: int
    integrity: str
    readable: bool
    form: str = "unknown"
    made_by: str = FORMS["unknown"]
    level: str | None = None
    epoch: int | None = None
    iteration: int | None = None
    models: list[TensorsReport] = field(default_factory=list[TensorsReport])
    masters: list[TensorsReport] = field(default_factory=list[TensorsReport])
    scalers: list[ScalerReport] = field(default_factory=list[ScalerReport])
    optimizers: list[OptimizerReport] = field(default_factory=list[OptimizerReport])
    rest: dict[str, str] = field(default_factory=dict[str, str])
    wants: list[str] = field(default_factory=list[str])
    findings: list[str] = field(default_factory=list[str])
    advice: list[str] = field(default_factory=list[str])


def inspect(path: StrPath) -> Report:
    """Report what is in a checkpoint: a file of torch, halfpeak or safetensors, or a folder of accelerate.

    A file with pickled objects is described, too, without importing their classes.

    Raises:
        CheckpointError: there is no such file, or it cannot be opened. The report of a damaged file names the damage.

    >>> import tempfile
    >>> from halfpeak.checkpoint import save
    >>> name = tempfile.mkdtemp() + "/last.pt"
    >>> save(name, {"model": {"w": torch.zeros(3)}, "scaler": {"scale": 8.0, "growth_factor": 2.0,
    ...     "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}, "epoch": 2})
    >>> report = inspect(name)
    >>> report.form, report.epoch, report.scalers[0].scale, report.integrity
    ('grad_scaler', 2, 8.0, 'checksums right')
    """
    target, files = find_files(path)
    size = sum(file.stat().st_size for file in files)
    try:
        found = read_files(target, files)
        with refusing(target, "cannot be described"):
            return _report(target, size, found, find_parts(found.tree))
    except CheckpointError as error:
        return Report(
            path=str(target),
            container="a file" if files == [target] else "a folder",
            size=size,
            integrity="damaged" if error.damaged else "no checksum",
            readable=False,
            findings=[str(error)],
            advice=["do not load it; go back to the previous checkpoint"] if error.damaged else [],
        )


def _report(target: Path, size: int, found: Content, parts: Parts) -> Report:
    left_out = found.tree.left_out if isinstance(found.tree, Folder) else {}
    advice: list[str] = []
    if found.wants:
        advice.append(
            "torch.load(weights_only=True) refuses it for the classes and functions above. halfpeak convert takes the plain "
            "parts without them; what else you need of the file, save as plain data in the script that wrote it"
        )
    if parts.masters and parts.models:
        advice.append("halfpeak convert --to weights gives the float32 weights of its masters")
    return Report(
        path=str(target),
        container=found.container,
        size=size,
        integrity="checksums right" if found.container == ZIP else "no checksum",
        readable=not left_out,
        form=parts.form,
        made_by=FORMS[parts.form] + (f", version {parts.version}" if parts.version else ""),
        level=parts.level,
        epoch=parts.epoch,
        iteration=parts.iteration,
        models=[TensorsReport(**_tensors(where, model.values())) for where, model in parts.models.items()],
        masters=[TensorsReport(**_tensors(where, masters)) for where, masters in parts.masters.items()],
        scalers=[one for where, scaler in parts.scalers.items() for one in _scalers(where, scaler)],
        optimizers=[_optimizer(where, state) for where, state in parts.optimizers.items()],
        rest={name: summary(value) for name, value in parts.rest.items() if not is_empty(value)},
        wants=list(found.wants),
        findings=[*(f"{name}: {reason}" for name, reason in left_out.items()), *_findings(parts)],
        advice=advice,
    )


def _tensors(where: str, values: Iterable[Any]) -> dict[str, Any]:
    tensors = [one for one in values if isinstance(one, Tensor)]
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[name_of(tensor.dtype)] += tensor.numel()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"where": where, "tensors": len(tensors), "dtypes": dict(dtypes), "size": size}


def _scalers(where: str, scaler: Mapping[str, Any]) -> list[ScalerReport]:
    kind = str(kind_of(scaler))
    try:
        states = translate(scaler)
    except StateError:  # among the findings
        return [ScalerReport(where=where, kind=kind, scale=None, clean=None)]
    names = [where] if len(states) == 1 else [f"{where}.{number}" for number in range(len(states))]
    return [
        ScalerReport(where=name, kind=kind, scale=state["scale"], clean=state["clean"])
        for name, state in zip(names, states, strict=True)
    ]


def _optimizer(where: str, state: Mapping[str, Any]) -> OptimizerReport:
    groups, rows = state["param_groups"], [one for one in state["state"].values() if isinstance(one, Mapping)]
    return OptimizerReport(
        **_tensors(where, (one for row in rows for one in row.values())),
        groups=len(groups),
        parameters=sum(len(group["params"]) for group in groups),
        steps=read_steps(state),
        lr=[float(group["lr"]) for group in groups if isinstance(group.get("lr"), float)],
    )


def _findings(parts: Parts) -> Iterator[str]:
    """What no healthy run saves, as sentences."""
    tables = {f"the weights in {where}": dict(model) for where, model in parts.models.items()}
    tables |= {where: dict(enumerate(masters)) for where, masters in parts.masters.items()}
    for where, optimizer in parts.optimizers.items():
        rows = [(number, row) for number, row in optimizer["state"].items() if isinstance(row, Mapping)]
        named = {f"{key} of parameter {number}": one for number, row in rows for key, one in row.items()}
        tables[f"the optimizer state in {where}"] = named
    for where, values in tables.items():
        bad = [str(name) for name, one in values.items() if has_values(one) and not _is_finite(one)]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            yield f"nan or inf in {where}: {', '.join(bad[:3])}{more}"
    for where, scaler in parts.scalers.items():
        try:
            low = [one["scale"] for one in translate(scaler) if one["scale"] < 1]
        except StateError as error:
            yield f"the loss scale in {where} is impossible: {str(error).partition(';')[0]}"
        else:
            yield from (f"the loss scale in {where} has fallen to {scale:g}" for scale in low)
    for where, masters in parts.masters.items():
        try:
            match_params(next(iter(parts.models.values()), {}), masters)
        except StateError as error:
            yield f"the masters in {where} do not fit the weights: {error}"
    weights = [one for model in parts.models.values() for one in model.values() if isinstance(one, Tensor)]
    if any(map(is_low, weights)) and parts.optimizers and not parts.masters:
        yield "the weights are low-precision, without masters: a resume begins from rounded weights"
    if parts.has_window():
        yield "it was saved inside an accumulation window: gradients are in it, which only halfpeak can load"


def _is_finite(tensor: Tensor) -> bool:
    # torch.isfinite supports no dtype of one byte (float8).
    return bool(torch.isfinite(tensor.float() if tensor.element_size() < 2 else tensor).all())
