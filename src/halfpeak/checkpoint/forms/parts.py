"""The parts of a checkpoint, whoever wrote it: weights, optimizers, loss scalers, masters, counters, and the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from halfpeak.checkpoint.foreign import ScalerState, recognise, translate
from halfpeak.checkpoint.reading.records import Record
from halfpeak.core.errors import StateError

BAGGAGE: Final = "halfpeak"
"""The key under which a converted checkpoint keeps what only halfpeak knows of."""


@dataclass(frozen=True)
class FoundScaler:
    """A loss-scaler state (apex's may hold several), where it lay, and in whose keys: see ``foreign``."""

    where: str
    kind: str
    state: Mapping[str, Any]

    def numbers(self) -> list[ScalerState]:
        """The scalers as halfpeak's.

        Raises:
            StateError: a value that no scaler has.
        """
        return translate(self.state)


@dataclass(kw_only=True)
class Parts:
    """A checkpoint taken apart. Everything is what the file held, and nothing is copied.

    Attributes:
        form: what wrote it: a key of :data:`~halfpeak.checkpoint.forms.recognition.FORMS`.
        version: the version that the writer noted.
        models: state dicts of modules by where they lay.
        optimizers: torch's two keys per optimizer, by where they lay.
        scalers: loss scalers.
        masters: lists of float32 values beside the weights, by where they lay, in the order of an optimizer.
        level: the opt level that the file names.
        counters: epochs and iterations, under the keys of the file.
        window: an open accumulation window of an engine.
        engine_counters: the steps that an engine counted.
        rest: everything else by its key; converting has to find a place for it or drop it.
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
    rest: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def epoch(self) -> int | None:
        """Epochs, as far as one counter says it."""
        return next((n for key, n in self.counters.items() if key in EPOCHS), None)

    @property
    def iteration(self) -> int | None:
        """Iterations, as far as one counter or an engine says it."""
        told = next((n for key, n in self.counters.items() if key in ITERATIONS), None)
        return told if told is not None or self.engine_counters is None else self.engine_counters.get("index")

    def take_model(self, where: str, value: object) -> bool:
        """Take weights."""
        if not is_weights(value):
            return False
        self.models[where] = value  # type: ignore[assignment]
        return True

    def take_models(self, where: str, value: object) -> bool:
        """Take weights, or several in a list or dict of nothing else."""
        return _take_each(self.take_model, is_weights, where, value)

    def take_optimizers(self, where: str, value: object) -> bool:
        """Take an optimizer, or several in a list or dict of nothing else."""
        return _take_each(
            self.take_optimizer, lambda one: is_optimizer(one) or _is_fp16_optimizer(one), where, value
        )

    def take_optimizer(self, where: str, value: object) -> bool:
        """Take an optimizer, or the wrapper of one with its loss scaler."""
        if isinstance(value, Mapping) and _is_fp16_optimizer(value):
            return self._take_fp16_optimizer(where, value)
        if not is_optimizer(value):
            return False
        assert isinstance(value, Mapping)
        self.optimizers[where] = {key: value[key] for key in ("state", "param_groups")}
        exact = value.get(BAGGAGE)
        own = exact.get("scalers") if isinstance(exact, Mapping) else None
        own = own if isinstance(own, list) else []
        for key in set(value) - {"state", "param_groups"}:
            at = f"{where}.{key}"
            if key == BAGGAGE and isinstance(exact, Mapping):
                self._take_window(exact.get("window"))
                self.scalers += [FoundScaler(at, "halfpeak", one) for one in own]
            elif not (key in ("loss_scaler", "apex_amp") and (own or self.take_scaler(at, value[key]))):
                self.rest[at] = value[key]
        return True

    def take_scaler(self, where: str, value: object) -> bool:
        """Take the state of a loss scaler, or the object itself as apex's FP16_Optimizer saved it."""
        if (
            isinstance(value, Record)
            and value.name.endswith("LossScaler")
            and isinstance(value.state, Mapping)
        ):
            scale, clean = value.state.get("_loss_scale"), value.state.get("_unskipped")
            value = {"loss_scaler0": {"loss_scale": scale, "unskipped": clean}}
        kind = scaler_kind(value)
        if kind is None:
            return False
        self.scalers.append(FoundScaler(where, kind, value))  # type: ignore[arg-type]
        return True

    def take_masters(self, where: str, value: object) -> bool:
        """Take float32 values that somebody saved beside low weights."""
        flat = _flat(value)
        if (
            where.rpartition(".")[2] not in MASTERS
            or not flat
            or not all(isinstance(t, Tensor) for t in flat)
        ):
            return False
        self.masters[where] = flat
        return True

    def take_counter(self, key: str, value: object) -> bool:
        """Take a count of epochs or iterations."""
        if key not in EPOCHS | ITERATIONS or isinstance(value, bool) or not isinstance(value, int):
            return False
        self.counters[key] = value
        return True

    def take_engine(self, value: object) -> bool:
        """Take the state of a :class:`halfpeak.Engine`."""
        if not isinstance(value, Mapping) or not set(value) >= ENGINE:
            return False
        if not all(isinstance(value[key], list) for key in ("models", "optimizers", "scalers")):
            return False
        for number, model in enumerate(value["models"]):
            if not self.take_model(f"models[{number}]", model):
                self.rest[f"models[{number}]"] = model
        for number, optimizer in enumerate(value["optimizers"]):
            self.take_optimizer(f"optimizers[{number}]", optimizer)
        for number, scaler in enumerate(value["scalers"]):
            self.scalers.append(FoundScaler(f"scalers[{number}]", "halfpeak", scaler))
        self._take_names(value)
        self._take_window(value["window"])
        return True

    def take_baggage(self, value: object) -> None:
        """Take back what a conversion kept for halfpeak; the scalers in it are exacter than their translations."""
        if isinstance(value, Mapping):
            self._take_names(value)
            own = value.get("scalers")
            if isinstance(own, list) and own:
                self.scalers = [
                    FoundScaler(f"{BAGGAGE}.scalers[{i}]", "halfpeak", one) for i, one in enumerate(own)
                ]

    def _take_names(self, value: Mapping[str, Any]) -> None:
        level, counters = value.get("level"), value.get("counters")
        if isinstance(level, str):
            self.level = level
        if isinstance(counters, Mapping) and all(type(count) is int for count in counters.values()):
            self.engine_counters = counters

    def _take_fp16_optimizer(self, where: str, value: Mapping[str, Any]) -> bool:
        self.take_optimizer(f"{where}.optimizer_state_dict", value["optimizer_state_dict"])
        self.take_masters(f"{where}.fp32_from_fp16", value["fp32_from_fp16"])
        if not self.take_scaler(f"{where}.loss_scaler", value.get("loss_scaler")):
            self.rest[f"{where}.loss_scaler"] = value.get("loss_scaler")
        self.form = "fp16_optimizer"
        return True

    def _take_window(self, window: object) -> None:
        lanes = window.get("lanes") if isinstance(window, Mapping) else None
        if isinstance(lanes, list) and any(
            isinstance(lane, Mapping) and lane.get("phase") != "CLEAN" for lane in lanes
        ):
            self.window = window  # type: ignore[assignment]


def each(value: object, where: str) -> Iterator[tuple[str, Any]]:
    """One thing, several in a list, or several by name; each with where it lies."""
    if isinstance(value, list):
        yield from ((f"{where}[{i}]", one) for i, one in enumerate(value))
    elif isinstance(value, Mapping) and value and all(isinstance(one, Mapping) for one in value.values()):
        yield from ((f"{where}.{key}", one) for key, one in value.items())
    else:
        yield where, value


def _take_each(
    take: Callable[[str, object], bool], is_one: Callable[[object], bool], where: str, value: object
) -> bool:
    several = [(where, value)] if is_one(value) else list(each(value, where))
    # All or nothing: what is taken must not stay in the rest too.
    return bool(several) and all(is_one(one) for _, one in several) and all(take(*one) for one in several)


def is_weights(value: object) -> bool:
    """Whether this is the ``state_dict`` of a module."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(one, Tensor) for one in value.values())
    others = sum(
        not isinstance(one, Tensor) and not key.endswith("_extra_state") for key, one in value.items()
    )
    return tensors > 0 and others == 0


def is_optimizer(value: object) -> bool:
    """Whether this is the ``state_dict`` of an optimizer, with what a wrapper may have added."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= set(value):
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and _is_listing(group.get("params")) for group in groups)
    )


def _is_fp16_optimizer(value: object) -> bool:
    return isinstance(value, Mapping) and {"optimizer_state_dict", "fp32_from_fp16"} <= set(value)


def _is_listing(parameters: object) -> bool:
    return isinstance(parameters, list) and all(isinstance(one, (int, str)) for one in parameters)


def read_steps(optimizer: Mapping[str, Any]) -> list[float]:
    """Every count of steps in an optimizer's state: per parameter in torch's, per group in apex's."""
    holders = [*optimizer["state"].values(), *optimizer["param_groups"]]
    found = [holder["step"] for holder in holders if isinstance(holder, Mapping) and "step" in holder]
    return [float(one) for one in found if isinstance(one, (int, float)) or _is_scalar(one)]


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def scaler_kind(value: object) -> str | None:
    """In whose keys a loss-scaler state is; None if it is none."""
    if not isinstance(value, Mapping):
        return None
    try:
        kind = recognise(value)
    except StateError:
        return None
    inside = {"loss_scaler", "apex_amp", "meta", "fp16"} & set(value)
    return None if inside else kind


def walk(value: object) -> Iterator[object]:
    """Everything inside, each thing once and what lies higher first: a file may refer to itself."""
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
        return [value.state, value.entries, *value.args, *value.items]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _flat(value: object) -> list[Any]:
    """A list, or a list of lists, as one."""
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
