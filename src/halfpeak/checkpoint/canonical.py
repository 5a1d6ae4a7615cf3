"""Contents: the one representation of a checkpoint that every format is read into and written from."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor

from halfpeak.checkpoint.safe_unpickle import Record
from halfpeak.checkpoint.scaler_states import recognise, translate
from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import renamed
from halfpeak.core.schedule import ScaleConfig, ScalerState
from halfpeak.core.state_checks import has_memory

HALFPEAK_KEY: Final = "halfpeak"
"""The key of a converted checkpoint that holds the state which the target format cannot express."""


@dataclass(frozen=True)
class FoundScaler:
    """A loss-scaler state (apex's may hold several scalers), its place in the file, and its format's name."""

    where: str
    kind: str
    state: Mapping[str, Any]

    def states(self) -> dict[str, ScalerState]:
        """The scalers in halfpeak's format, by their places in the file.

        Raises:
            StateError: a value is out of range.
        """
        found = translate(self.state)
        if len(found) == 1:
            return {self.where: found[0]}
        return {f"{self.where}.{number}": state for number, state in enumerate(found)}


@dataclass(kw_only=True)
class Contents:
    """The contents of a checkpoint: the readers of all formats produce this type, and the writers take it.

    Reading copies no tensors. Before writing, ``convert`` replaces the weights by their masters, translates the scalers
    to halfpeak's format, and removes the entries that the target format cannot hold.

    Attributes:
        form: the name of the format that was read (see :mod:`halfpeak.checkpoint.formats`).
        version: the version of the library that wrote the file, as the file says.
        models: state dicts of modules, by their places in the file.
        optimizers: ``state`` and ``param_groups`` of each optimizer, by their places.
        scalers: loss scalers.
        masters: lists of float32 master weights, by their places; each in the order of an optimizer's parameters.
        level: the opt level that the file names.
        counters: epochs and iterations, under the keys of the file.
        window: an open accumulation window of an engine.
        engine_counters: the steps that an engine counted.
        buffers: batch-norm statistics of an engine.
        rest: every other entry by its key; ``convert`` writes it or reports it as lost.
        rule: growth, backoff and interval of the loss scale. ``convert`` reads it from ``scalers``; writers use it.
    """

    form: str = "unknown"
    version: str = ""
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    scalers: list[FoundScaler] = field(default_factory=list[FoundScaler])
    masters: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    level: str | None = None
    counters: dict[str, int] = field(default_factory=dict[str, int])
    window: Mapping[str, Any] | None = None
    engine_counters: Mapping[str, Any] | None = None
    buffers: list[Any] = field(default_factory=list[Any])
    rest: dict[str, Any] = field(default_factory=dict[str, Any])
    rule: ScaleConfig = field(default_factory=ScaleConfig)

    @property
    def epoch(self) -> int | None:
        """The first counter that counts epochs; None if there is none."""
        return next((n for key, n in self.counters.items() if key in EPOCHS), None)

    @property
    def iteration(self) -> int | None:
        """The first counter that counts iterations, else the count of an engine; None if there is neither."""
        counted = None if self.engine_counters is None else self.engine_counters.get("index")
        return next((n for key, n in self.counters.items() if key in ITERATIONS), counted)

    @property
    def model(self) -> Mapping[str, Any]:
        """The first model's weights, for a format that holds one model."""
        return next(iter(self.models.values()))

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The first optimizer, for a format that holds one; None if there is none."""
        return next(iter(self.optimizers.values()), None)

    @property
    def scaler_states(self) -> list[ScalerState]:
        """All loss scalers in halfpeak's format.

        Raises:
            StateError: a value is out of range.
        """
        return [state for scaler in self.scalers for state in scaler.states().values()]

    @property
    def weights(self) -> list[Tensor]:
        """Every tensor of every model."""
        return [one for model in self.models.values() for one in model.values() if isinstance(one, Tensor)]

    def halfpeak_entry(self, key: str = HALFPEAK_KEY) -> dict[str, Any]:
        """The state that only halfpeak understands, under a key that other libraries ignore; empty if there is none."""
        states = self.scaler_states
        has_more = any((state["grace"], state["stuck"]) != (1, 0) for state in states)
        known = {
            "level": self.level,
            "counters": None if self.engine_counters is None else dict(self.engine_counters),
            "scalers": [dict(state) for state in states] if has_more else None,
        }
        known = {name: value for name, value in known.items() if value is not None}
        return {key: known} if known else {}

    def add(self, where: str, value: object, *, has_models: bool = True) -> None:
        """Add an entry; its content tells what it is. Weight averages, random states and hooks go to ``rest``.

        Args:
            has_models: False if the weights are in another entry, so a dict of tensors here is no model.
        """
        is_known = (
            self._add_counter(where.removeprefix("meta."), value)
            or self.add_engine(value, where)
            or (
                _ASIDE.search(where) is None
                and (
                    (has_models and _add_each(self.add_model, is_weights, where, value))
                    or _add_each(self.add_optimizer, _is_any_optimizer, where, value)
                    or self.add_scaler(where, value)
                    or self._add_masters(where, value)
                )
            )
        )
        if not is_known:
            self.rest[where] = value

    def add_model(self, where: str, value: object) -> bool:
        """Add weights. Like the methods below, returns False and adds nothing if the value is something else."""
        if not is_weights(value):
            return False
        self.models[where] = value  # type: ignore[assignment]
        return True

    def add_optimizer(self, where: str, value: object) -> bool:
        """Add an optimizer with the loss scaler that a wrapper saved in it, or an ``FP16_Optimizer``."""
        if isinstance(value, Mapping) and _is_fp16_optimizer(value):
            return self._add_fp16_optimizer(where, value)
        if not is_optimizer(value):
            return False
        assert isinstance(value, Mapping)
        self.optimizers[where] = {key: value[key] for key in ("state", "param_groups")}
        exact = value.get(HALFPEAK_KEY)
        own = exact.get("scalers") if isinstance(exact, Mapping) else None
        own = own if isinstance(own, list) else []
        for key in set(value) - {"state", "param_groups"}:
            at = f"{where}.{key}"
            if key == HALFPEAK_KEY and isinstance(exact, Mapping):
                self._add_window(exact.get("window"))
                self.scalers += [FoundScaler(at, "halfpeak", one) for one in own]
                self._keep(at, exact, beside=RESUME)
            elif not (key in ("loss_scaler", "apex_amp") and (own or self.add_scaler(at, value[key]))):
                self.rest[at] = value[key]
        return True

    def add_scaler(self, where: str, value: object) -> bool:
        """Add the state of a loss scaler, or the pickled scaler object that apex's ``FP16_Optimizer`` saves."""
        state = value.state if isinstance(value, Record) and value.name.endswith("LossScaler") else None
        if isinstance(state, Mapping):
            scale, clean = state.get("_loss_scale"), state.get("_unskipped")
            value = {"loss_scaler0": {"loss_scale": scale, "unskipped": clean}}
        kind = scaler_kind(value)
        if kind is None:
            return False
        self.scalers.append(FoundScaler(where, kind, value))  # type: ignore[arg-type]
        return True

    def _add_masters(self, where: str, value: object) -> bool:
        """Add master weights: a list of tensors under one of the keys in ``MASTERS``."""
        flat = _flat(value) if where.rpartition(".")[2] in MASTERS else []
        if not flat or not all(isinstance(one, Tensor) for one in flat):
            return False
        self.masters[where] = flat
        return True

    def _add_counter(self, key: str, value: object) -> bool:
        """Add a count of epochs or iterations."""
        if key not in EPOCHS | ITERATIONS or isinstance(value, bool) or not isinstance(value, int):
            return False
        self.counters[key] = value
        return True

    def add_engine(self, value: object, where: str = "") -> bool:
        """Add the state of a :class:`halfpeak.Engine`. Of a second engine, models, optimizers and scalers are added."""
        if not isinstance(value, Mapping) or not set(value) >= ENGINE:
            return False
        if not all(isinstance(value[key], list) for key in ("models", "optimizers", "scalers")):
            return False
        is_second = self.form == "engine"
        self._keep(where, value, beside=_ENGINE_PARTS if is_second else ENGINE)
        inside = f"{where}." if is_second else ""
        for number, model in enumerate(value["models"]):
            if not self.add_model(f"{inside}models[{number}]", model):
                self.rest[f"{inside}models[{number}]"] = model
        for number, optimizer in enumerate(value["optimizers"]):
            if not self.add_optimizer(f"{inside}optimizers[{number}]", optimizer):
                self.rest[f"{inside}optimizers[{number}]"] = optimizer
        for number, scaler in enumerate(value["scalers"]):
            self.scalers.append(FoundScaler(f"{inside}scalers[{number}]", "halfpeak", scaler))
        if is_second:
            return True
        self._add_level_and_counters(value)
        self._add_window(value["window"])
        self.buffers = value["buffers"] if isinstance(value["buffers"], list) else []
        self.form = "engine"
        return True

    def add_halfpeak_entry(self, value: object) -> None:
        """Add the ``HALFPEAK_KEY`` entry of an earlier conversion; its exact scalers replace the translated ones."""
        if not isinstance(value, Mapping):
            self.rest[HALFPEAK_KEY] = value
        else:
            self._keep(HALFPEAK_KEY, value, beside={"level", "counters", "scalers"})
            self._add_level_and_counters(value)
            own = value.get("scalers")
            if isinstance(own, list) and own:
                self.scalers = [
                    FoundScaler(f"{HALFPEAK_KEY}.scalers[{i}]", "halfpeak", one) for i, one in enumerate(own)
                ]

    def _add_level_and_counters(self, value: Mapping[str, Any]) -> None:
        level, counters = value.get("level"), value.get("counters")
        if isinstance(level, str):
            self.level = level
        if isinstance(counters, Mapping) and all(type(count) is int for count in counters.values()):
            self.engine_counters = counters

    def _add_fp16_optimizer(self, where: str, value: Mapping[str, Any]) -> bool:
        adders = {
            "optimizer_state_dict": self.add_optimizer,
            "fp32_from_fp16": self._add_masters,
            "loss_scaler": self.add_scaler,
        }
        for key, add in adders.items():
            if not add(f"{where}.{key}", value.get(key)):
                self.rest[f"{where}.{key}"] = value.get(key)
        self._keep(where, value, beside=adders.keys() | FP16_FLAGS)
        self.form = "fp16_optimizer"
        return True

    def _keep(self, where: str, value: Mapping[str, Any], *, beside: Set[str]) -> None:
        """Add the entries of a dict to ``rest``, apart from those under the keys ``beside``."""
        self.rest |= {f"{where}.{key}": one for key, one in value.items() if key not in beside}

    def _add_window(self, window: object) -> None:
        optimizers = window.get("lanes") if isinstance(window, Mapping) else None
        if isinstance(optimizers, list) and any(
            isinstance(one, Mapping) and one.get("phase") != "CLEAN" for one in optimizers
        ):
            self.window = window  # type: ignore[assignment]


def _add_each(
    add: Callable[[str, object], bool], is_one: Callable[[object], bool], where: str, value: object
) -> bool:
    """Add one item, or a list or dict of items; add nothing if an element is something else."""
    if is_one(value):
        return add(where, value)
    if isinstance(value, list):
        several = [(f"{where}[{i}]", one) for i, one in enumerate(value)]
    else:
        items = value.items() if isinstance(value, Mapping) else ()
        several = [(f"{where}.{key}", one) for key, one in items]
    # All or nothing: an entry that is only partly added would also go to `rest`.
    return bool(several) and all(is_one(one) for _, one in several) and all(add(*one) for one in several)


def is_weights(value: object) -> bool:
    """Whether a value is the ``state_dict`` of a module."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    others = [key for key, one in value.items() if not isinstance(one, Tensor)]
    return len(others) < len(value) and all(key.endswith("_extra_state") for key in others)


def is_optimizer(value: object) -> bool:
    """Whether a value is the ``state_dict`` of an optimizer; a wrapper may have added keys."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= set(value):
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and _is_listing(group.get("params")) for group in groups)
    )


def numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters numbered in the order of the groups; names are replaced.

    >>> numbered({"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]})
    {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    if not has_names(optimizer):
        return dict(optimizer)
    listed = (name for group in optimizer["param_groups"] for name in group["params"])
    return renamed(optimizer, {name: i for i, name in enumerate(listed)})


def has_names(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state identifies parameters by name instead of by number."""
    return any(isinstance(name, str) for group in optimizer["param_groups"] for name in group["params"])


def _is_fp16_optimizer(value: object) -> bool:
    return isinstance(value, Mapping) and {"optimizer_state_dict", "fp32_from_fp16"} <= set(value)


def _is_any_optimizer(value: object) -> bool:
    return is_optimizer(value) or _is_fp16_optimizer(value)


def _is_listing(parameters: object) -> bool:
    return isinstance(parameters, list) and all(isinstance(one, (int, str)) for one in parameters)


def read_steps(optimizer: Mapping[str, Any]) -> list[float]:
    """Every step count in an optimizer's state: torch keeps one per parameter, apex one per group."""
    holders = [*optimizer["state"].values(), *optimizer["param_groups"]]
    found = [holder["step"] for holder in holders if isinstance(holder, Mapping) and "step" in holder]
    return [float(one) for one in found if isinstance(one, (int, float)) or _is_scalar(one)]


def _is_scalar(value: object) -> bool:
    return has_values(value) and value.numel() == 1 and not value.is_complex()


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor. For a nested tensor, which has no shape, the number of tensors in it."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def has_values(value: object) -> TypeGuard[Tensor]:
    """Whether torch can compare a tensor's values: not sparse, nested, quantized, on meta or above 64 dimensions."""
    return isinstance(value, Tensor) and has_memory(value) and value.dim() <= 64


def scaler_kind(value: object) -> str | None:
    """The format of a loss-scaler state; None if the value is not one, or only contains one."""
    if not isinstance(value, Mapping):
        return None
    try:
        kind = recognise(value)
    except StateError:
        return None
    inside = {"loss_scaler", "apex_amp", "meta", "fp16"} & set(value)
    return None if inside else kind


def walk(value: object) -> Iterator[object]:
    """Every value inside a tree, breadth first. Each object comes once, because a file may contain cycles."""
    seen: set[int] = set()
    queue = deque([value])
    while queue:
        one = queue.popleft()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            queue.extend(_children(one))


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Record):
        return [value.state, value.entries, *value.args, *(value.items or ())]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _flat(value: object) -> list[Any]:
    """A list, or a list of lists, flattened."""
    groups: list[Any] = value if isinstance(value, list) else []
    return [one for group in groups for one in (group if isinstance(group, list) else [group])]


EPOCHS: Final = frozenset({"epoch", "epochs", "start_epoch", "last_epoch", "current_epoch"})
ITERATIONS: Final = frozenset(
    {
        "iter",
        "iters",
        "iteration",
        "iterations",
        "global_step",
        "step",
        "steps",
        "it",
        "current_iter",
        "num_updates",
    }
)
MASTERS: Final = frozenset({"fp32_from_fp16", "master params", "master_params", "masters", "main_params"})
ENGINE: Final = frozenset(
    {"version", "level", "models", "optimizers", "scalers", "counters", "buffers", "window"}
)
_ENGINE_PARTS: Final = frozenset({"version", "models", "optimizers", "scalers"})
RESUME: Final = frozenset({"version", "scalers", "window", "buffers", "inner_count"})
"""The keys of the ``HALFPEAK_KEY`` entry that a wrapper saves in an optimizer's state."""

FP16_FLAGS: Final = frozenset({"dynamic_loss_scale", "overflow", "first_closure_call_this_step"})
"""Keys of an ``FP16_Optimizer`` for which there is nothing to keep: two flags of the last step, and a setting."""

_ASIDE: Final = re.compile(
    r"(^|[_.])(ema|teacher|averaged?|random|rng|hooks|callbacks|hyper_parameters)([_.]|$)|ema$|^ema",
    re.IGNORECASE,
)
"""Names of entries whose tensors are not the model's weights."""

_LEVEL_KEYS: Final = ("opt_level", "amp_opt_level", "fp16_opt_level", "apex_opt_level", "amp_level", "level")
_LEVEL: Final = re.compile(r"O[0-5]")
_LEVEL_IN_TEXT: Final = re.compile(r"opt_level\W{1,4}(O[0-5])")


def find_level(tree: object) -> str | None:
    """The first opt level that saved arguments or a configuration in the file name; None if there is none."""
    for value in walk(tree):
        if isinstance(value, Mapping):
            named = next((value[key] for key in _LEVEL_KEYS if isinstance(value.get(key), str)), "")
            if _LEVEL.fullmatch(named):
                return named
        elif isinstance(value, str):
            found = _LEVEL_IN_TEXT.search(value)
            if found:
                return found[1]
    return None


def is_empty(value: object) -> bool:
    """Whether a tree holds nothing but empty containers and None."""
    return all(one is None or isinstance(one, (Mapping, list, tuple)) for one in walk(value))


def summary(value: object) -> str:
    """A description of a value in a few words, without its content."""
    for kind, words in _WORDS.items():
        if isinstance(value, kind):
            return words(value)
    name = getattr(value, "name", None)
    return f"an object of {name}" if isinstance(name, str) else f"a {type(value).__name__}"


_WORDS: Final[dict[type, Callable[[Any], str]]] = {
    Mapping: lambda value: f"a dict of {len(value)}",
    list: lambda value: f"a list of {len(value)}",
    tuple: lambda value: f"a tuple of {len(value)}",
    Tensor: lambda value: f"a {name_of(value.dtype)} tensor of {shape_of(value)}",
    str: lambda value: f"a str of length {len(value)}",
    bool: str,
    int: lambda value: f"the number {value}" if abs(value) < 10**18 else "a long integer",
    float: lambda value: f"the number {value:g}",
}
