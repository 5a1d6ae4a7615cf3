"""Plan: every setting of a training run, its type, default, range and meaning, written once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from halfpeak.core.errors import ConfigError, ConfigTypeError


def _setting(
    group: str,
    text: str,
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with its help text and range. Required fields have no default here: each recipe brings one."""
    metadata = MappingProxyType({"group": group, "help": text, "least": least, "above": above, "most": most})
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does. Plain values only, so a plan is also a configuration file and a part of a checkpoint.

    Raises:
        ConfigError: a value has the wrong type, is out of its range, or contradicts another one.
    """

    recipe: str = _setting("", "The training job: digits or pysource.", "digits")

    level: str = _setting(
        "precision", "Opt level, O0 to O5. auto takes the one that suits the device.", "auto"
    )
    cast_model_type: Literal["float16", "bfloat16", "float32"] | None = _setting(
        "precision", "Dtype of the model.", None
    )
    cast_model_outputs: Literal["float16", "bfloat16", "float32"] | None = _setting(
        "precision", "Dtype that the model returns.", None
    )
    keep_batchnorm_fp32: bool | None = _setting("precision", "Keep normalisation layers in float32.", None)
    master_weights: bool | None = _setting("precision", "Let the optimizer step float32 copies.", None)
    loss_scale: float | Literal["dynamic"] | None = _setting(
        "precision", "A number, or dynamic, instead of the level's own.", None, above=0
    )
    init_loss_scale: float = _setting("precision", "First dynamic loss scale.", 2.0**16, above=0)
    min_loss_scale: float = _setting(
        "precision", "The dynamic loss scale never falls below this.", 2.0**-14, above=0
    )
    max_loss_scale: float = _setting(
        "precision", "The dynamic loss scale never grows above this.", 2.0**24, above=0
    )
    loss_scale_interval: int = _setting(
        "precision", "Clean steps in a row before the scale grows.", 2000, least=1
    )

    optimizer: str = _setting(
        "optimization", "One of adam, adamw, adagrad, lamb, nadam, novograd, radam, rmsprop, sgd.", MISSING
    )
    lr: float = _setting("optimization", "Peak learning rate.", MISSING, above=0)
    weight_decay: float = _setting("optimization", "Weight decay of matrices and kernels.", MISSING, least=0)
    schedule: Literal["cosine", "linear", "constant"] = _setting(
        "optimization", "How the learning rate falls after the warm-up: cosine, linear or constant.", "cosine"
    )
    schedule_steps: int | None = _setting(
        "optimization",
        "Steps after which the learning rate has fallen. None: the length of the run.",
        None,
        least=1,
    )
    warmup: int | None = _setting(
        "optimization",
        "Steps over which the learning rate rises; unless given, at most a tenth of the run.",
        None,
        least=0,
    )
    accumulate: int = _setting("optimization", "Batches whose mean gradient makes one step.", 1, least=1)
    clip_norm: float = _setting("optimization", "Limit of the gradient norm. 0: none.", 0.0, least=0)
    clip_value: float = _setting("optimization", "Limit of every gradient element. 0: none.", 0.0, least=0)

    epochs: float | None = _setting("length and data", "Passes over the training data.", None, above=0)
    steps: int | None = _setting("length and data", "Steps, instead of epochs.", None, least=1)
    batch: int = _setting("length and data", "Samples in a batch.", MISSING, least=1)
    seed: int = _setting("length and data", "Seed of the weights and of the data order.", 0, least=0)
    size: str | None = _setting(
        "length and data", "Model size (pysource): tiny, small, medium, large, xl.", None
    )
    context: int | None = _setting(
        "length and data", "Bytes that the model sees at once (pysource).", None, least=2
    )

    wrapper: Literal["optim", "amp", "apex"] | None = _setting(
        "run",
        "Drive the run through OptimWrapper, AmpOptimWrapper or ApexOptimWrapper, instead of the engine itself.",
        None,
    )
    runner: Literal["epoch", "iter"] | None = _setting(
        "run", "Let an EpochBasedRunner or an IterBasedRunner take the loop's place.", None
    )
    device: str = _setting("run", "auto, cpu, cuda, cuda:1, mps, xpu, ...", "auto")
    threads: int | None = _setting(
        "run", "Threads that share one operation on a CPU. None: torch's own.", None, least=1, most=1024
    )
    deterministic: bool = _setting(
        "run", "Repeatable kernels only; a bitwise resume on a GPU needs them.", True
    )
    output: str | None = _setting("run", "Folder of the results. None: a new one under runs.", None)
    eval_every: int = _setting("run", "Steps between validations. 0: only at the end.", MISSING, least=0)
    save_every: int = _setting("run", "Steps between checkpoints. 0: only at the end.", MISSING, least=0)
    log_every: int = _setting(
        "run", "Steps between reads of the device, unless a second has passed.", 10, least=1
    )
    tensorboard: bool = _setting("run", "Write TensorBoard events.", True)
    plot: bool = _setting("run", "Draw history.png at the end.", True)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """A plan from plain values, such as those of a configuration file.

        Raises:
            ConfigError: an unknown name (the message lists near ones), or a value that does not fit.
        """
        return cls(**check(values))

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_range(item.name, getattr(self, item.name), item.metadata)
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(f"epochs={self.epochs!r} and steps={self.steps!r} exclude each other; give one")
        if self.clip_norm and self.clip_value:
            raise ConfigError("clip_norm and clip_value exclude each other; give one")
        if self.min_loss_scale > self.max_loss_scale:
            raise ConfigError(
                f"min_loss_scale={self.min_loss_scale!r} is above max_loss_scale={self.max_loss_scale!r}"
            )

    def values(self) -> dict[str, Any]:
        """Every setting by its name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


FREE = frozenset({
    "steps", "epochs", "device", "threads", "output", "eval_every", "save_every", "log_every", "tensorboard", "plot",
})  # fmt: skip
"""Settings that may change when a run is resumed: the parameters after a given step do not depend on them, or on the
device and its threads in the last bits only."""


def names() -> tuple[str, ...]:
    """The settings in their order."""
    return tuple(item.name for item in fields(Plan))


def defaults() -> dict[str, Any]:
    """The settings that have a default of their own, and it."""
    return {item.name: item.default for item in fields(Plan) if item.default is not MISSING}


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values under their own types. Text is read as the type that the setting has.

    Raises:
        ConfigError: an unknown name; the message lists near ones.
        ConfigTypeError: a value that is not of the setting's type.

    >>> check({"lr": "1e-3", "steps": 10, "plot": "false", "init_loss_scale": "2**10"})
    {'lr': 0.001, 'steps': 10, 'plot': False, 'init_loss_scale': 1024.0}
    """
    hints = get_type_hints(Plan)
    for name in values:
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the settings are {', '.join(hints)}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    return {name: _convert(name, value, hints[name]) for name, value in values.items()}


def _convert(name: str, value: Any, kind: Any) -> Any:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for one in kinds:
        found, converted = _read(value, one)
        if found:
            return converted
    allowed = ", ".join(_spell(one) for one in kinds if one is not type(None))
    raise ConfigTypeError(f"{name}={value!r} must be {allowed}")


def _read(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether ``value`` is of ``kind``, or text that spells one, and the value."""
    if get_origin(kind) is Literal:
        return value in get_args(kind), value
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return True, value.lower() == "true"
    if kind in (int, float) and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return True, _power(value) if kind is float else kind(value)
        except (ValueError, OverflowError):
            return False, None
    return type(value) is kind, value


def _power(value: str | int) -> float:
    """A number, or text such as ``2**16``, which is how large and small scales are written."""
    base, stars, exponent = str(value).partition("**")
    return math.pow(float(base), float(exponent)) if stars else float(value)


def _spell(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(repr(choice) for choice in get_args(kind))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    least, above, most = metadata["least"], metadata["above"], metadata["most"]
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be finite")
    if isinstance(value, int) and value >= 2**63:
        raise ConfigError(f"{name}={value!r} must be below 2**63")
    if least is not None and value < least:
        raise ConfigError(f"{name}={value!r} must be {least} or more")
    if above is not None and value <= above:
        raise ConfigError(f"{name}={value!r} must be above {above}")
    if most is not None and value > most:
        raise ConfigError(f"{name}={value!r} must be {most} or less")
