"""The parts of a checkpoint of any library, told by their content: ``inspect`` reports them, ``convert`` takes them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.checkpoint.open import Folder
from halfpeak.checkpoint.read import Unknown, has_values, walk
from halfpeak.checkpoint.scaler_states import recognise
from halfpeak.core.errors import CheckpointError, StateError
from halfpeak.core.optimizer_state import renamed
from halfpeak.core.schedule import ScaleConfig, ScalerState
from halfpeak.core.state_checks import ENGINE_VERSION

FORMS: Final[Mapping[str, str]] = {
    "engine": "the state of a halfpeak engine",
    "train": "a run of halfpeak train",
    "runner": "a run of halfpeak.runner",
    "apex": "a script's dict with amp.state_dict(), of apex.amp or halfpeak.amp",
    "fp16_optimizer": "a script's dict with the state of an FP16_Optimizer",
    "grad_scaler": "a script's dict with the state of a GradScaler",
    "mmengine": "a run of mmengine",
    "mmengine_apex": "a run of mmengine with ApexOptimWrapper",
    "mmcv": "a run of mmcv 1.x",
    "lightning": "a run of Lightning",
    "accelerate": "a folder of accelerate's save_state, or a checkpoint folder of transformers",
    "recipe": "a script's dict without a loss scaler",
    "weights": "weights alone",
    "optimizer": "the state of an optimizer alone",
    "scaler": "the state of a loss scaler alone",
    "unknown": "no format that halfpeak knows",
}
"""A description of each format, by name."""

ITERATIONS: Final = ("iter", "global_step", "step")
"""The counter of iterations of mmcv and mmengine, of Lightning, and of ``halfpeak train``."""

_ENGINE: Final = frozenset({"models", "optimizers", "scalers", "counters", "window"})
_FP16_FLAGS: Final = frozenset({"dynamic_loss_scale", "overflow", "first_closure_call_this_step"})
_LIGHTNING: Final = "pytorch-lightning_version"
_VERSIONS: Final = (_LIGHTNING, "mmengine_version", "mmcv_version")
_AVERAGE: Final = re.compile(r"(^|[_.])(ema|teacher|averaged?|avg|swa|polyak)([_.]|$)", re.I)
"""Names of entries that are an average of the model, if another entry holds weights."""

_WHOLE: Final = "(the file)"


@dataclass(kw_only=True)
class Parts:
    """The parts of a checkpoint, by their places in it. Nothing is copied.

    Attributes:
        form: the name of the format, a key of :data:`FORMS`.
        version: the version of the library that wrote the file, as the file says.
        level: the opt level of the first engine in the file.
        models: state dicts of modules.
        optimizers: ``state`` and ``param_groups`` of each optimizer.
        scalers: states of loss scalers, as their library saves them; one of apex may hold several scales.
        masters: lists of float32 master weights, each in the order of an optimizer's parameters.
        counters: epochs and iterations.
        engine: the whole state of the first engine in the file.
        rest: every other entry.
        scales: the scales of ``scalers`` in halfpeak's format, and their ``rule``; only ``convert`` sets them.
    """

    form: str = "unknown"
    version: str = ""
    level: str | None = None
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    scalers: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    masters: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rest: dict[str, Any] = field(default_factory=dict[str, Any])
    scales: dict[str, ScalerState] = field(default_factory=dict[str, ScalerState])
    rule: ScaleConfig = field(default_factory=ScaleConfig)

    @property
    def epoch(self) -> int | None:
        """The counter of epochs; None if there is none."""
        return self.counters.get("epoch")

    @property
    def iteration(self) -> int | None:
        """The first counter that counts iterations, else the passes, or steps, of an engine; None if there is none."""
        own: Mapping[str, Any] = self.engine["counters"] if self.engine else {}
        passes = own.get("micro_step") or own.get("num_steps")
        return next((self.counters[key] for key in ITERATIONS if key in self.counters), passes)

    def has_window(self) -> bool:
        """Whether the engine was saved inside an accumulation window."""
        return bool(self.engine) and any(self.engine["window"].get("gradients", ()))

    def add(self, where: str, value: Any, *, has_models: bool = True) -> None:
        """Add an entry to the part that it is, told by its content, or by its name for counters.

        Args:
            has_models: False if the weights are in another entry, so that a dict of tensors here is no model.
        """
        key = where.rpartition(".")[2]
        if key in ("epoch", *ITERATIONS) and type(value) is int and where.removeprefix("meta.") == key:
            self.counters[key] = value
        elif isinstance(value, Mapping) and value.keys() >= _ENGINE:
            self._add_engine(where, value)
        elif has_models and (several := _each(is_weights, where, value)):
            self.models |= several
        elif several := _each(is_optimizer, where, value):
            for at, one in several.items():
                self.optimizers[at] = {name: one[name] for name in ("state", "param_groups")}
                self._add_all(at, {name: one[name] for name in one if name not in ("state", "param_groups")})
        elif isinstance(value, Mapping) and {"optimizer_state_dict", "fp32_from_fp16"} <= value.keys():
            self.form = "fp16_optimizer"
            own = {name: one for name, one in value.items() if name not in _FP16_FLAGS}
            if masters := _flat(value["fp32_from_fp16"]):
                self.masters[f"{where}.fp32_from_fp16"] = masters
                del own["fp32_from_fp16"]
            self._add_all(where, own)
        elif (scaler := scaler_in(value)) is not None:
            self.scalers[where] = scaler
        else:
            self.rest[where] = value

    def _add_all(self, where: str, entries: Mapping[str, Any]) -> None:
        for name, one in entries.items():
            self.add(f"{where}.{name}", one, has_models=False)

    def _add_engine(self, where: str, value: Mapping[str, Any]) -> None:
        if value.get("version") != ENGINE_VERSION:
            raise CheckpointError(
                f"{where or _WHOLE} is the state of an engine in version {str(value.get('version'))[:20]}, and this halfpeak "
                f"reads version {ENGINE_VERSION}",
                "load it with the halfpeak that saved it, and save the weights",
            )
        inside = f"{where}." if self.engine else ""
        tables = {"models": self.models, "optimizers": self.optimizers, "scalers": self.scalers}
        for what, table in tables.items():
            table |= {f"{inside}{what}[{i}]": one for i, one in enumerate(value[what])}
        known = {"version", *tables}
        if not self.engine:
            self.engine, self.form, self.level = value, "engine", value["level"]
            known |= _ENGINE | {"level", "parameters", "state_dtypes", "buffers"}
        self.rest |= {f"{where}.{key}": one for key, one in value.items() if key not in known}


def find_parts(tree: Any) -> Parts:
    """The parts and the format of a checkpoint; ``tree`` is not changed.

    Raises:
        CheckpointError: it holds the state of an engine in another version.
    """
    parts = Parts()
    if isinstance(tree, Folder):
        _find_in_folder(parts, tree)
    elif not isinstance(tree, Mapping):
        parts.rest[_WHOLE] = tree
    elif tree.keys() >= _ENGINE:
        parts.add("", tree)
    elif is_weights(tree) or is_optimizer(tree) or scaler_in(tree) is not None:
        parts.add(_WHOLE, tree)
        parts.form = "weights" if parts.models else "optimizer" if parts.optimizers else "scaler"
    else:
        _find_in_dict(parts, tree)
    averages = {name for name in parts.models if _AVERAGE.search(name) is not None}
    if averages < parts.models.keys():
        parts.rest |= {name: parts.models.pop(name) for name in averages}
    return parts


def _find_in_dict(parts: Parts, tree: Mapping[Any, Any]) -> None:
    is_run = isinstance(tree.get("meta"), Mapping) and "state_dict" in tree  # of mmcv or mmengine
    is_lightning = any(str(key).startswith(_LIGHTNING) for key in tree)
    meta = tree["meta"] if is_run else {}
    for key, value in tree.items():
        if not (key in _VERSIONS and isinstance(value, str)) and not (is_run and key == "meta"):
            # In these formats, tensors elsewhere belong to hooks and callbacks.
            parts.add(str(key), value, has_models=key == "state_dict" or not (is_run or is_lightning))
    for key, value in meta.items():
        inside = value.get("loss_scaler") if key == "fp16" and isinstance(value, Mapping) else None
        parts.add(f"meta.{key}", value if scaler_in(inside) is None else inside, has_models=False)
    told = {**tree, **meta}
    parts.version = next((told[key] for key in _VERSIONS if isinstance(told.get(key), str)), "")
    kinds = {kind_of(scaler) for scaler in parts.scalers.values()}
    if tree.get("format") == "halfpeak.train":
        parts.form = "train"
    elif is_lightning:
        parts.form = "lightning"
    elif is_run and {"loop", "hooks", "random"} <= tree.keys():
        parts.form = "runner"
    elif is_run and any(at.endswith("apex_amp") for at in parts.scalers):
        parts.form = "mmengine_apex"
    elif is_run:
        is_new = any("loss_scaler" in at for at in parts.scalers)
        parts.form = "mmengine" if is_new or {"message_hub", "mmengine_version"} & told.keys() else "mmcv"
    elif parts.form == "unknown" and (parts.models or parts.optimizers):
        parts.form = "apex" if "apex" in kinds else "grad_scaler" if kinds else "recipe"


def _find_in_folder(parts: Parts, files: Folder) -> None:
    """The files of accelerate's ``save_state`` or of transformers; a folder with only weights has the form ``weights``."""
    for name, value in files.items():
        model = re.fullmatch(r"((?:pytorch_)?model)(-\d+-of-\d+|_\d+)?\.(bin|safetensors)", name)
        if model is not None and is_weights(value):
            # Several files may hold one model.
            at = model[1] if "-of-" in name else name
            parts.models[at] = {**parts.models.get(at, {}), **value}
        elif re.fullmatch(r"optimizer(_\d+)?\.(bin|pt)|scaler\.pt", name):
            parts.add(name, value, has_models=False)
        else:
            parts.rest[name] = value
    is_run = (
        any(name.startswith(("random", "rng")) for name in parts.rest) or parts.optimizers or parts.scalers
    )
    parts.form = "accelerate" if is_run else "weights" if parts.models else "unknown"


def _each(is_one: Callable[[Any], bool], where: str, value: Any) -> dict[str, Any]:
    """A value that is one, or a list or dict of nothing else, by their places; empty if it is something else."""
    if is_one(value):
        return {where: value}
    if isinstance(value, list):
        several = {f"{where}[{i}]": one for i, one in enumerate(value)}
    else:
        several = {f"{where}.{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {}
    return several if all(map(is_one, several.values())) else {}


def is_weights(value: Any) -> bool:
    """Whether a value is the ``state_dict`` of a module. Generators, too, are saved as dicts of tensors, but of bytes."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    others = [key for key, one in value.items() if not isinstance(one, Tensor)]
    has_numbers = any(isinstance(one, Tensor) and one.is_floating_point() for one in value.values())
    return has_numbers and all(key.endswith("_extra_state") for key in others)


def is_optimizer(value: Any) -> bool:
    """Whether a value is the ``state_dict`` of an optimizer; a wrapper may have added keys."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(isinstance(one, (int, str)) for one in group["params"])
        for group in groups
    )


def numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters numbered in the order of the groups; names are replaced.

    >>> numbered({"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]})
    {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    listed = [name for group in optimizer["param_groups"] for name in group["params"]]
    has_names = any(isinstance(name, str) for name in listed)
    return renamed(optimizer, {name: i for i, name in enumerate(listed)}) if has_names else dict(optimizer)


def with_steps(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state whose parameters have the step count of their group, where apex keeps it, as torch's have.

    >>> with_steps({"state": {0: {"exp_avg": 1}}, "param_groups": [{"step": 3, "params": [0]}]})
    {'state': {0: {'exp_avg': 1, 'step': tensor(3.)}}, 'param_groups': [{'params': [0]}]}
    """
    rows, groups = dict(optimizer["state"]), list[Any]()
    for group in optimizer["param_groups"]:
        own = {name: rows[name] for name in group["params"] if isinstance(rows.get(name), Mapping)}
        steps = read_steps({"state": {}, "param_groups": [group]})
        if steps is not None and own and not any("step" in row for row in own.values()):
            rows |= {name: {**row, "step": torch.tensor(float(steps))} for name, row in own.items()}
            group = {key: value for key, value in group.items() if key != "step"}
        groups.append(group)
    return {**optimizer, "state": rows, "param_groups": groups}


def read_steps(optimizer: Mapping[str, Any]) -> int | None:
    """The largest step count in an optimizer's state: torch keeps one per parameter, apex one per group; None: no count."""
    holders = [*optimizer["state"].values(), *optimizer["param_groups"]]
    found = [holder["step"] for holder in holders if isinstance(holder, Mapping) and "step" in holder]
    numbers = [one.item() if has_values(one) and one.numel() == 1 else one for one in found]
    steps = [int(one) for one in numbers if isinstance(one, (int, float)) and abs(one) < 2**63]
    return max(steps, default=None)


def scaler_in(value: Any) -> Mapping[str, Any] | None:
    """The state of a loss scaler, also of the scaler object that apex's ``FP16_Optimizer`` pickled; else None."""
    if isinstance(value, Unknown) and value.name.endswith("LossScaler") and isinstance(value.state, Mapping):
        scale, clean = value.state.get("_loss_scale"), value.state.get("_unskipped")
        return {"loss_scaler0": {"loss_scale": scale, "unskipped": clean}}
    return value if isinstance(value, Mapping) and kind_of(value) is not None else None


def kind_of(value: Mapping[str, Any]) -> str | None:
    """The format of a loss-scaler state; None if the value is not one."""
    try:
        return recognise(value)
    except StateError:
        return None


def _flat(value: Any) -> list[Tensor]:
    """A list of tensors, or a list of such lists, flattened; empty if it is something else."""
    groups: list[Any] = value if isinstance(value, list) else []
    flat = [one for group in groups for one in (group if isinstance(group, list) else [group])]
    return flat if all(isinstance(one, Tensor) for one in flat) else []


def is_empty(value: Any) -> bool:
    """Whether a tree holds nothing but empty containers and None."""
    return all(one is None or isinstance(one, (Mapping, list, tuple)) for one in walk(value))


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def summary(value: Any) -> str:
    """A description of a value in a few words, without its content."""
    if isinstance(value, Unknown):
        return f"an object of {value.name}"
    kind = "dict" if isinstance(value, Mapping) else type(value).__name__
    if isinstance(value, (Mapping, list, tuple)):
        return f"a {kind} of {len(value)}"
    return f"an {kind}" if kind == "int" else f"a {kind}"
