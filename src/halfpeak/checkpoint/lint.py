"""Checks for suspicious contents of a checkpoint: values that no healthy run has, and contradictions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.checkpoint.canonical import Contents, has_values, name_of, read_steps, shape_of
from halfpeak.checkpoint.match_params import LOW, match_params
from halfpeak.core.errors import StateError
from halfpeak.core.levels import LEVELS
from halfpeak.core.optimizer_state import PER_ELEMENT

_ENOUGH: Final = 64
"""Minimum number of elements to conclude that float32 weights were rounded, because all are low-precision values."""

_NARROWEST_FIRST: Final = (torch.bfloat16, torch.float16)
"""bfloat16 first, because nearly every bfloat16 value of a weight's magnitude is a float16 value, too."""

_WITH_MASTERS: Final = frozenset(name for name, level in LEVELS.items() if level.properties.master_weights)
_DYNAMIC: Final = frozenset(
    name for name, level in LEVELS.items() if level.properties.loss_scale == "dynamic"
)


def lint(contents: Contents, path: Path) -> list[str]:
    """Every finding, as a sentence that names its place in the file."""
    return [
        *_nonfinite(contents),
        *_scales(contents),
        *_lost_masters(contents),
        *_contradicting_masters(contents),
        *_optimizers(contents),
        *_missing(contents),
        *_counters(contents),
        *_off_by_one(contents, path),
    ]


def match_masters(contents: Contents, masters: Sequence[Tensor]) -> tuple[bool, str]:
    """Whether masters fit the weights, and how well, in words."""
    if len(contents.models) != 1:
        return False, f"not compared: there are {len(contents.models)} models"
    (weights,) = contents.models.values()
    try:
        found = match_params(weights, masters)
    except StateError as error:
        return False, str(error)
    return True, f"{len(found)} fit the weights, bit for bit after rounding"


def is_half_rounded(model: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether all float32 weights are values of a low-precision dtype, as after an upcast of low-precision weights.

    Vectors are ignored, because the weights of norms stay float32 and begin as ones and zeros.
    """
    wide = [v for v in model.values() if has_values(v) and v.dtype == torch.float32 and v.dim() > 1]
    told = [v for v in map(_elements, wide) if not bool((v == v.round()).all())]
    return sum(v.numel() for v in told) >= _ENOUGH and all(torch.equal(v.to(dtype).float(), v) for v in told)


def _nonfinite(contents: Contents) -> Iterator[str]:
    for where, model in contents.models.items():
        yield from _name_nonfinite(model.items(), f"the weights in {where}")
    for where, optimizer in contents.optimizers.items():
        entries = optimizer["state"].items()
        inside = (
            (f"{name} of parameter {number}", value)
            for number, entry in entries
            if isinstance(entry, Mapping)
            for name, value in entry.items()
        )
        yield from _name_nonfinite(inside, f"the optimizer state in {where}")
    for where, masters in contents.masters.items():
        yield from _name_nonfinite(((f"master {i}", m) for i, m in enumerate(masters)), where)


def _name_nonfinite(values: Any, where: str) -> Iterator[str]:
    bad = [name for name, value in values if isinstance(value, Tensor) and not _is_finite(value)]
    if bad:
        others = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        yield f"nan or inf in {where}: {', '.join(map(str, bad[:3]))}{others}"


def _scales(contents: Contents) -> Iterator[str]:
    for scaler in contents.scalers:
        try:
            found = scaler.states()
        except StateError as error:
            yield f"the loss scale in {scaler.where} is impossible: {str(error).partition(';')[0]}"
            continue
        for name, one in found.items():
            if one["scale"] < 1:
                yield f"the loss scale in {name} has fallen to {one['scale']:g}: gradients kept overflowing"
            if one["stuck"]:
                yield f"the loss scale in {name} could not fall any further {one['stuck']} times in a row"


def _lost_masters(contents: Contents) -> Iterator[str]:
    if contents.masters or contents.form == "weights":
        return
    for where, model in contents.models.items():
        dtypes = {value.dtype for value in model.values() if isinstance(value, Tensor)}
        low = next((dtype for dtype in LOW if dtype in dtypes), None)
        if low is not None and contents.level in _WITH_MASTERS:
            yield (
                f"the file says {contents.level}, but the weights in {where} are {name_of(low)} and there are no masters: "
                "their float32 precision is lost"
            )
        elif low is not None and contents.optimizers:
            yield f"the weights in {where} are {name_of(low)} without masters: a resume begins from rounded weights"
        rounded = next((one for one in _NARROWEST_FIRST if low is None and is_half_rounded(model, one)), None)
        if rounded is not None:
            yield (
                f"the float32 weights in {where} are all {name_of(rounded)} numbers: they were widened from rounded weights, "
                "and the masters were not saved"
            )


def _contradicting_masters(contents: Contents) -> Iterator[str]:
    for where, masters in contents.masters.items():
        if contents.models:
            fits, words = match_masters(contents, masters)
            if not fits:
                yield f"the masters in {where} do not fit the weights: {words}"
        else:
            yield f"there are masters in {where}, and no weights to match them with"


def _optimizers(contents: Contents) -> Iterator[str]:
    shapes = {shape_of(value) for value in contents.weights}
    tensors = sum(value.is_floating_point() for value in contents.weights)
    listed = 0
    for where, optimizer in contents.optimizers.items():
        groups, entries = optimizer["param_groups"], optimizer["state"]
        numbers = [one for group in groups if isinstance(group, Mapping) for one in group.get("params", ())]
        listed += len(numbers)
        known = set(numbers)
        strangers = [number for number in entries if number not in known]
        if strangers:
            yield f"the optimizer in {where} has state for parameters that none of its groups lists: {strangers[:3]}"
        if len(known) < len(numbers):
            yield f"the optimizer in {where} lists a parameter twice"
        yield from _odd_steps(where, read_steps(optimizer))
        yield from _odd_entries(where, entries, shapes)
    if contents.models and listed > tensors:
        yield f"the optimizers list {listed} parameters, and the weights have {tensors} floating-point tensors"


def _odd_steps(where: str, steps: Sequence[float]) -> Iterator[str]:
    if any(not math.isfinite(step) or step < 0 for step in steps):
        yield f"the optimizer in {where} counts an impossible number of steps"
    elif len(set(steps)) > 1:
        yield f"the parameters of the optimizer in {where} have stepped between {min(steps):g} and {max(steps):g} times"


def _odd_entries(where: str, entries: Mapping[Any, Any], shapes: set[tuple[int, ...]]) -> Iterator[str]:
    tensors = [
        (name, value)
        for entry in entries.values()
        if isinstance(entry, Mapping)
        for name, value in entry.items()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    unfit = sum(name in PER_ELEMENT and shape_of(value) not in shapes for name, value in tensors)
    if unfit and shapes:
        yield f"{unfit} tensors of the optimizer state in {where} have the shape of no weight"
    if any(value.dtype == torch.float16 for _, value in tensors):
        yield f"the optimizer state in {where} is float16: small second moments are zero in it"


def _missing(contents: Contents) -> Iterator[str]:
    if contents.form in ("weights", "scaler", "optimizer", "unknown"):
        return
    if not contents.models:
        yield "there are no weights in it"
    if not contents.optimizers:
        yield "there is no optimizer state in it: training cannot be resumed from it"
    if not contents.scalers and contents.level in _DYNAMIC:
        yield f"the file says {contents.level}, and there is no loss scale in it: a resume begins at the initial scale"


def _counters(contents: Contents) -> Iterator[str]:
    for name, value in contents.counters.items():
        if value < 0:
            yield f"the counter {name} is {value}"
    if contents.window is not None:
        yield "it was saved inside an accumulation window: gradients are in it, which only halfpeak can load"


def _off_by_one(contents: Contents, path: Path) -> Iterator[str]:
    named = re.fullmatch(r"iter_(\d+)", path.stem)
    told = contents.counters.get("iter")
    if contents.form == "mmcv" and named and told == int(named[1]) - 1:
        yield f"it says iter={told}, one less than its name: mmcv 1.x saved iterations so, and repeats one on resume"


def _elements(tensor: Tensor) -> Tensor:
    """The elements of a tensor; for one that repeats elements by a stride of zero, the elements of its storage."""
    storage = tensor.untyped_storage()
    if tensor.numel() <= storage.nbytes() // tensor.element_size():
        return tensor
    return torch.empty(0, dtype=tensor.dtype).set_(storage)


def _is_finite(tensor: Tensor) -> bool:
    if not (has_values(tensor) and (tensor.is_floating_point() or tensor.is_complex())):
        return True
    elements = _elements(tensor)
    # torch.isfinite supports no dtype of one byte (float8).
    return bool(torch.isfinite(elements.float() if elements.element_size() < 2 else elements).all())
