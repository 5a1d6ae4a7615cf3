"""TrainConfig: every setting of ``halfpeak train``, with its type, default, range and help, written once.

The command line and configuration files both become a dict of values, which :func:`parse_values` converts to the types
of the fields. This file does not import torch, so that ``--help`` is quick.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from types import UnionType
from typing import Any, Final, Literal, Self, Union, get_args, get_origin, get_type_hints

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr


def _setting(
    group: str,
    text: str,
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field with its help, range and choices. ``MISSING`` makes it required: each recipe has a default for it."""
    metadata = {
        "group": group,
        "help": text,
        "least": least,
        "above": above,
        "most": most,
        "choices": choices,
    }
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


_precision = partial(_setting, "precision")
_optimization = partial(_setting, "optimization")
_data = partial(_setting, "length and data")
_run = partial(_setting, "run")

OPTIMIZER_NAMES = ("adam", "adamw", "adagrad", "lamb", "nadam", "novograd", "radam", "rmsprop", "sgd")
SIZES = ("tiny", "small", "medium", "large", "xl")

AUTO = "auto"
"""The level name that stands for the level that suits the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The settings of a run, all plain values, so that they can be written to a file and into a checkpoint.

    Raises:
        ConfigError: a value has the wrong type, is out of its range, or contradicts another one.
    """

    recipe: str = _setting("", "The training job: digits or pysource.", "digits")

    level: str = _precision("Opt level, O0 to O5. auto takes the one that suits the device.", AUTO)
    cast_model_type: Literal["float16", "bfloat16", "float32"] | None = _precision(
        "Dtype of the model.", None
    )
    cast_model_outputs: Literal["float16", "bfloat16", "float32"] | None = _precision(
        "Dtype that the model returns.", None
    )
    keep_batchnorm_fp32: bool | None = _precision("Keep normalisation layers in float32.", None)
    master_weights: bool | None = _precision("Let the optimizer step float32 copies.", None)
    loss_scale: float | Literal["dynamic"] | None = _precision(
        "A number, or dynamic, instead of the level's own.", None, above=0
    )
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = _precision(
        "Recipe by which linear layers multiply in float8 (O5, torchao).", None
    )
    init_loss_scale: float = _precision("First dynamic loss scale.", 2.0**16, above=0)
    min_loss_scale: float = _precision("The dynamic loss scale never falls below this.", 2.0**-14, above=0)
    max_loss_scale: float = _precision("The dynamic loss scale never grows above this.", 2.0**24, above=0)
    loss_scale_interval: int = _precision("Clean steps in a row before the scale grows.", 2000, least=1)

    optimizer: str = _optimization(f"One of {', '.join(OPTIMIZER_NAMES)}.", MISSING, choices=OPTIMIZER_NAMES)
    lr: float = _optimization("Peak learning rate.", MISSING, above=0)
    weight_decay: float = _optimization("Weight decay of matrices and kernels.", MISSING, least=0)
    schedule: Literal["cosine", "linear", "constant"] = _optimization(
        "How the learning rate falls after the warm-up: cosine, linear or constant.", "cosine"
    )
    schedule_steps: int | None = _optimization(
        "Steps after which the learning rate has fallen. None: the length of the run.", None, least=1
    )
    warmup: int | None = _optimization(
        "Steps over which the learning rate rises; unless given, at most a tenth of the run.", None, least=0
    )
    accumulate: int = _optimization("Batches whose mean gradient makes one step.", 1, least=1)
    clip_norm: float = _optimization("Limit of the gradient norm. 0: none.", 0.0, least=0)
    clip_value: float = _optimization("Limit of every gradient element. 0: none.", 0.0, least=0)

    epochs: float | None = _data("Passes over the training data.", None, above=0)
    steps: int | None = _data("Steps, instead of epochs.", None, least=1)
    batch: int = _data("Samples in a batch.", MISSING, least=1)
    seed: int = _data("Seed of the weights and of the data order.", 0, least=0)
    size: str | None = _data(f"Model size (pysource): {', '.join(SIZES)}.", None, choices=SIZES)
    context: int | None = _data("Bytes that the model sees at once (pysource).", None, least=2)

    device: str = _run("auto, cpu, cuda, cuda:1, mps, xpu, ...", "auto")
    threads: int | None = _run(
        "Threads that share one operation on a CPU. None: torch's own.", None, least=1, most=1024
    )
    shard: bool = _run(
        "Divide weights and moments among the processes of torchrun (FSDP2), not the batches alone.", False
    )
    deterministic: bool = _run("Repeatable kernels only; a bitwise resume on a GPU needs them.", True)
    output: str | None = _run("Folder of the results. None: a new one under runs.", None)
    eval_every: int = _run("Steps between validations. 0: only at the end.", MISSING, least=0)
    save_every: int = _run("Steps between checkpoints. 0: only at the end.", MISSING, least=0)
    log_every: int = _run("Steps between reads of the device, unless a second has passed.", 10, least=1)
    diagnose: bool = _run("Replay steps that go wrong; write diagnosis-<step>.html. Waits for each.", False)
    tensorboard: bool = _run("Write TensorBoard events.", True)
    plot: bool = _run("Draw history.png at the end.", True)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from plain values, such as the values of a file.

        Raises:
            ConfigError: an unknown name (the message lists near ones), or a value that does not fit.
        """
        return cls(**parse_values(values))

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_value(item.name, getattr(self, item.name), item.metadata)
        for one, other in EXCLUSIVE:
            if getattr(self, one) and getattr(self, other):
                given = f"{one}={getattr(self, one)!r} and {other}={getattr(self, other)!r}"
                raise ConfigError(f"{given} exclude each other; leave one of them out")
        if self.min_loss_scale > self.max_loss_scale:
            raise ConfigError(
                f"min_loss_scale={self.min_loss_scale!r} is above max_loss_scale={self.max_loss_scale!r}; write a "
                "minimum that is not above the maximum"
            )

    def values(self) -> dict[str, Any]:
        """Every setting by its name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeInfo:
    """The description and the default settings of a recipe, known before its data is loaded.

    Attributes:
        brief: a line that says what it trains.
        defaults: settings, among them all that have no default of their own. A short run gets a shorter warm-up.
        own: the settings that only this recipe reads.
    """

    brief: str
    defaults: Mapping[str, Any]
    own: frozenset[str] = frozenset()


RECIPES: Final[Mapping[str, RecipeInfo]] = {
    "digits": RecipeInfo(
        brief="a residual network with batch norm on 8x8 images of digits; seconds on a CPU",
        # A large lr on normalised weights keeps updates above float16's resolution, because O3 has no masters.
        defaults={
            "optimizer": "sgd",
            "lr": 0.1,
            "weight_decay": 5e-4,
            "warmup": 22,
            "epochs": 20.0,
            "batch": 64,
            "eval_every": 44,
            "save_every": 110,
            # The tensors are small: more threads gain a third on idle cores, and cost far more on busy ones.
            "threads": 1,
        },
    ),
    "pysource": RecipeInfo(
        brief="a byte-level GPT on the standard library's source text; sizes that fill a laptop or a GPU",
        defaults={
            "optimizer": "adamw",
            "lr": 1e-3,
            "weight_decay": 0.1,
            "warmup": 30,
            "clip_norm": 1.0,
            "steps": 300,
            "batch": 16,
            "size": "tiny",
            "context": 128,
            "eval_every": 50,
            "save_every": 100,
        },
        own=frozenset({"size", "context"}),
    ),
}
"""Every recipe by its name."""

DEFAULT_RECIPE = "digits"

CHANGEABLE = frozenset({
    "steps", "epochs", "device", "threads", "shard", "output", "eval_every", "save_every", "log_every", "diagnose",
    "tensorboard", "plot",
})  # fmt: skip
"""Settings that may change when a run is resumed. The parameters after a given step do not depend on them, except in
their last bits on the device, its threads and the number of processes."""

COMMON = frozenset({"level", "optimizer", "lr", "clip_norm", "epochs", "steps", "batch", "output"})
"""Settings that ``--help`` shows; ``--help-all`` shows every one."""

EXCLUSIVE = (("steps", "epochs"), ("clip_norm", "clip_value"))
"""Pairs of settings that exclude each other; in later layers, one replaces the other."""


def find_recipe(name: object) -> RecipeInfo:
    """The recipe of that name.

    Raises:
        ConfigError: there is no such recipe.
    """
    if not isinstance(name, str) or name not in RECIPES:
        message = f"unknown recipe {short_repr(name)}; write one of {', '.join(RECIPES)}"
        raise ConfigError(message + _did_you_mean(name, RECIPES))
    return RECIPES[name]


def merge_layers(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge dicts of values; later ones override. A value also replaces the setting it excludes (:data:`EXCLUSIVE`).

    >>> merge_layers({"steps": 10, "lr": 0.1}, {"epochs": 2.0})
    {'lr': 0.1, 'epochs': 2.0}
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for names in EXCLUSIVE:
            if any(layer.get(name) is not None for name in names):
                for name in names:
                    merged.pop(name, None)
        merged.update(layer)
    return merged


def parse_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of their settings. Text is parsed as the setting's type.

    Raises:
        ConfigError: an unknown name; the message lists near ones.
        ConfigTypeError: a value does not have the setting's type.

    >>> parse_values({"lr": "1e-3", "steps": 10, "plot": "false", "init_loss_scale": "2**10"})
    {'lr': 0.001, 'steps': 10, 'plot': False, 'init_loss_scale': 1024.0}
    """
    kinds = get_type_hints(TrainConfig)
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(str(name)[:100], kinds, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the settings are {', '.join(kinds)}"
            raise ConfigError(f"unknown setting {short_repr(name)}; {hint}")
        parsed[name] = _parse_value(name, value, kinds[name])
    return parsed


def members_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself.

    >>> members_of(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _parse_value(name: str, value: Any, kind: Any) -> Any:
    kinds = members_of(kind)
    for one in kinds:
        fits, parsed = _read(value, one)
        if fits:
            return parsed
    allowed = ", ".join(_describe(one) for one in kinds if one is not type(None))
    choices = [choice for one in kinds if get_origin(one) is Literal for choice in get_args(one)]
    raise ConfigTypeError(f"{name}={short_repr(value)} must be {allowed}" + _did_you_mean(value, choices))


def _read(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether ``value`` is of type ``kind`` or text that spells such a value, and the parsed value."""
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
    """Parse a number, or text such as ``2**16``, the usual way to write large and small loss scales."""
    base, stars, exponent = str(value).partition("**")
    return math.pow(float(base), float(exponent)) if stars else float(value)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(repr(choice) for choice in get_args(kind))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _check_value(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    choices = metadata["choices"]
    if choices is not None and value is not None and value not in choices:
        message = f"{name}={short_repr(value)} must be one of {', '.join(choices)}"
        raise ConfigError(message + _did_you_mean(value, choices))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    least, above, most = metadata["least"], metadata["above"], metadata["most"]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={short_repr(value)} must be finite")
    if isinstance(value, int) and value >= 2**63:
        raise ConfigError(f"{name}={short_repr(value)} must be below 2**63")
    if least is not None and value < least:
        raise ConfigError(f"{name}={short_repr(value)} must be {least} or more")
    if above is not None and value <= above:
        raise ConfigError(f"{name}={short_repr(value)} must be above {above}")
    if most is not None and value > most:
        raise ConfigError(f"{name}={short_repr(value)} must be {most} or less")


def _did_you_mean(value: object, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(short_repr(value).strip("'"), list(choices), n=1)
    return f"; did you mean {near[0]}?" if near else ""
