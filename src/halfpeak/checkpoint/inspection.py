"""inspect: a report on the contents of a checkpoint, made without executing anything in the file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.checkpoint.canonical import Contents, FoundScaler, is_empty, name_of, read_steps, summary
from halfpeak.checkpoint.file import StrPath
from halfpeak.checkpoint.formats import FORMS, read_contents
from halfpeak.checkpoint.lint import is_half_rounded, lint, match_masters
from halfpeak.checkpoint.open import Opened, open_any
from halfpeak.core.errors import StateError


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """The state of a module.

    Attributes:
        dtypes: number of elements by dtype, buffers included.
    """

    where: str
    tensors: int
    elements: int
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
class OptimizerReport:
    """The state of an optimizer.

    Attributes:
        kind: the class that most likely wrote it.
        steps: the largest step count in the state; None if there is none.
        lr: the learning rate of each group.
    """

    where: str
    kind: str
    groups: int
    parameters: int
    with_state: int
    steps: int | None
    lr: list[float]
    dtypes: dict[str, int]
    size: int


@dataclass(frozen=True, kw_only=True)
class MastersReport:
    """Master weights that are saved beside the weights, and how they fit the weights."""

    where: str
    tensors: int
    elements: int
    match: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a checkpoint, and what is suspicious about them.

    Attributes:
        container: the kind of file.
        integrity: which checksums are right or wrong.
        readable: whether the file, or every file of the folder, could be read.
        form: the format, a key of :data:`~halfpeak.checkpoint.formats.FORMS`.
        made_by: the format in words, and the version of the library that wrote it.
        level: the opt level that the file names, or the levels that fit the dtypes.
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
    form: str
    made_by: str
    level: str
    epoch: int | None = None
    iteration: int | None = None
    models: list[ModelReport] = field(default_factory=list[ModelReport])
    masters: list[MastersReport] = field(default_factory=list[MastersReport])
    scalers: list[ScalerReport] = field(default_factory=list[ScalerReport])
    optimizers: list[OptimizerReport] = field(default_factory=list[OptimizerReport])
    rest: dict[str, str] = field(default_factory=dict[str, str])
    wants: list[str] = field(default_factory=list[str])
    findings: list[str] = field(default_factory=list[str])
    advice: list[str] = field(default_factory=list[str])


def inspect(path: StrPath) -> Report:
    """Report what is in a checkpoint: a file of torch, halfpeak or safetensors, or a folder of accelerate or DCP.

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
    ('grad_scaler', 2, 8.0, 'digest right')
    """
    opened = open_any(path)
    contents = Contents() if opened.tree is None else read_contents(opened.tree)
    made_by = FORMS[contents.form] + (f", version {contents.version}" if contents.version else "")
    unread = [opened.unread] if opened.unread else []
    unread += [f"{name}: {reason}" for name, reason in opened.left_out.items()]
    return Report(
        path=str(opened.path),
        container=opened.container,
        size=opened.size,
        integrity=opened.integrity,
        readable=not unread,
        form=contents.form,
        made_by=made_by,
        level=_level(contents),
        epoch=contents.epoch,
        iteration=contents.iteration,
        models=[_model(where, model) for where, model in contents.models.items()],
        masters=[_masters(contents, where, masters) for where, masters in contents.masters.items()],
        scalers=[one for scaler in contents.scalers for one in _scaler(scaler)],
        optimizers=[_optimizer(where, state) for where, state in contents.optimizers.items()],
        rest={name: summary(value) for name, value in contents.rest.items() if not is_empty(value)},
        wants=list(opened.symbols),
        findings=[*unread, *opened.notes, *lint(contents, opened.path)],
        advice=_advice(opened, contents),
    )


def _level(contents: Contents) -> str:
    if contents.level is not None:
        return f"{contents.level}, as the file says"
    dtypes = {value.dtype for value in contents.weights}
    for dtype, name in ((torch.float16, "O2 or O3"), (torch.bfloat16, "O5")):
        if dtype in dtypes:
            return f"not named; {name_of(dtype)} weights, as of {name}" + (
                " with masters" if contents.masters else ""
            )
    for dtype, name in ((torch.bfloat16, "O5"), (torch.float16, "O2 or O3")):
        if any(is_half_rounded(model, dtype) for model in contents.models.values()):
            return f"not named; float32 weights that are all {name_of(dtype)} numbers, as of {name} without masters"
    if torch.float32 in dtypes and any(scaler.kind == "grad_scaler" for scaler in contents.scalers):
        return "not named; float32 weights and torch's loss scale, as of torch.autocast in float16"
    if torch.float32 in dtypes and contents.scalers:
        return "not named; float32 weights and a loss scale, as of O1, or O2 with exact masters"
    return "not named"


def _model(where: str, model: Mapping[str, Any]) -> ModelReport:
    tensors = [value for value in model.values() if isinstance(value, Tensor)]
    dtypes, size = _count(tensors)
    return ModelReport(
        where=where, tensors=len(tensors), elements=sum(dtypes.values()), dtypes=dtypes, size=size
    )


def _masters(contents: Contents, where: str, masters: list[Tensor]) -> MastersReport:
    return MastersReport(
        where=where,
        tensors=len(masters),
        elements=sum(master.numel() for master in masters),
        match=match_masters(contents, masters)[1],
    )


def _scaler(scaler: FoundScaler) -> list[ScalerReport]:
    try:
        found = scaler.states()
    except StateError:  # lint() reports it
        return [ScalerReport(where=scaler.where, kind=scaler.kind, scale=None, clean=None)]
    return [
        ScalerReport(where=where, kind=scaler.kind, scale=one["scale"], clean=one["clean"])
        for where, one in found.items()
    ]


def _optimizer(where: str, state: Mapping[str, Any]) -> OptimizerReport:
    groups = [group for group in state["param_groups"] if isinstance(group, Mapping)]
    entries = [entry for entry in state["state"].values() if isinstance(entry, Mapping)]
    steps = max(read_steps(state), default=math.nan)
    dtypes, size = _count([one for entry in entries for one in entry.values() if isinstance(one, Tensor)])
    return OptimizerReport(
        where=where,
        kind=optimizer_kind(groups, entries),
        groups=len(groups),
        parameters=sum(len(group.get("params", ())) for group in groups),
        with_state=len(entries),
        steps=int(steps) if math.isfinite(steps) else None,
        lr=[float(group["lr"]) for group in groups if isinstance(group.get("lr"), (int, float))],
        dtypes=dtypes,
        size=size,
    )


def optimizer_kind(groups: list[Mapping[str, Any]], entries: list[Mapping[str, Any]]) -> str:
    """The optimizer class that most likely wrote a state, judged by the names of its hyper-parameters and state.

    >>> optimizer_kind([{"lr": 0.1, "momentum": 0.9, "nesterov": False}], [])
    'SGD'
    """
    settings = set[str]().union(*(map(str, group) for group in groups))
    kept = set[str]().union(*(map(str, entry) for entry in entries))
    for name, in_group, in_state in _KINDS:
        if in_group <= settings and (in_state <= kept or not kept):
            decoupled = name == "Adam" and any(group.get("decoupled_weight_decay") for group in groups)
            return "AdamW" if decoupled else name
    return "unknown"


def _count(tensors: list[Tensor]) -> tuple[dict[str, int], int]:
    """The number of elements by dtype, and the total number of bytes."""
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[name_of(tensor.dtype)] += tensor.numel()
    return dict(dtypes), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _advice(opened: Opened, contents: Contents) -> list[str]:
    advice: list[str] = []
    if opened.damaged:
        advice.append("do not load it; go back to the previous checkpoint")
    if opened.symbols:
        advice.append(
            "torch.load(weights_only=True) refuses it for the classes and functions above, which loading it otherwise would "
            "import and run. halfpeak convert takes the plain parts without them; what else you need of the file, save as "
            "plain data in the script that wrote it"
        )
    if contents.masters and contents.models:
        advice.append("halfpeak convert --to weights gives the float32 weights of its masters")
    return advice


_KINDS: Final[tuple[tuple[str, frozenset[str], frozenset[str]], ...]] = tuple(
    (name, frozenset(in_group.split()), frozenset(in_state.split()))
    for name, in_group, in_state in (
        ("FusedLAMB", "betas max_grad_norm bias_correction", "exp_avg exp_avg_sq"),
        ("FusedNovoGrad", "betas bias_correction norm_type", "exp_avg"),
        ("FusedAdam", "betas bias_correction", "exp_avg exp_avg_sq"),
        ("Adam", "betas amsgrad capturable", "exp_avg exp_avg_sq"),
        ("Adam or AdamW", "betas amsgrad", "exp_avg exp_avg_sq"),
        ("NAdam", "betas momentum_decay", "mu_product"),
        ("Adamax", "betas", "exp_inf"),
        ("Adam or AdamW", "betas", "exp_avg exp_avg_sq"),
        ("Lion", "betas", "exp_avg"),
        ("RMSprop", "alpha", "square_avg"),
        ("Adadelta", "rho", "acc_delta"),
        ("Adagrad", "lr_decay", "sum"),
        ("SGD", "momentum nesterov", ""),
        ("SGD", "momentum", "momentum_buffer"),
    )
)
"""Optimizer classes with the hyper-parameters and the state that identify them, the most specific first."""
