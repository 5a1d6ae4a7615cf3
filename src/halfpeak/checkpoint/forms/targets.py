"""The forms that a checkpoint can be converted to: what each has a place for, and where."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.checkpoint.foreign import ScalerState, to_apex, to_grad_scaler, to_mmengine
from halfpeak.checkpoint.forms.parts import BAGGAGE, read_steps
from halfpeak.core.errors import StateError
from halfpeak.core.schedule import ScaleConfig

Files = dict[str, Any]
"""What to write: a dict, and for a folder one by file name."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a target is made of.

    Attributes:
        models: state dicts by their names in the file, with the masters' values where the file had masters.
        optimizers: likewise.
        is_script: whether they come from a script's own dict.
        rule: what the file says of growth and interval, or the default.
        counters: epochs and iterations under the keys of the file.
        rest: entries that the target has a place for.
    """

    models: dict[str, Mapping[str, Any]]
    optimizers: dict[str, dict[str, Any]]
    scalers: list[ScalerState]
    is_script: bool
    rule: ScaleConfig
    level: str | None
    counters: dict[str, int]
    epoch: int | None
    iteration: int | None
    engine_counters: Mapping[str, Any] | None
    window: Mapping[str, Any] | None
    rest: dict[str, Any]

    @property
    def model(self) -> Mapping[str, Any]:
        """The weights of a form that holds one model."""
        return next(iter(self.models.values()))

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer of a form that holds one."""
        return next(iter(self.optimizers.values()), None)

    @property
    def baggage(self) -> dict[str, Any]:
        """What only halfpeak knows of, under the one key that others pass over; empty where there is nothing."""
        told = any((scaler["grace"], scaler["stuck"]) != (1, 0) for scaler in self.scalers)
        known = {
            "level": self.level,
            "counters": None if self.engine_counters is None else dict(self.engine_counters),
            "scalers": [dict(scaler) for scaler in self.scalers] if told else None,
        }
        known = {key: value for key, value in known.items() if value is not None}
        return {BAGGAGE: known} if known else {}


class Target(NamedTuple):
    """A form to convert to.

    Attributes:
        brief: what it is, and who reads it.
        write: makes it.
        models: how many it holds at most; None for any number.
        optimizers: likewise.
        scalers: likewise.
        family: forms whose entries have their places in it; None for a script's own dict, which takes those of a script.
        needs_scale: whether it is made around a loss scale.
        keeps_rule: whether growth factor and interval have a place.
        keeps_counters: whether epochs and iterations have.
        keeps_window: whether gradients of an open accumulation window have.
        weights_only: whether nothing but weights is asked for.
        is_folder: whether it is a folder of files.
    """

    brief: str
    write: Callable[[Material], Files]
    models: int | None = 1
    optimizers: int | None = 1
    scalers: int | None = 1
    family: tuple[str, ...] | None = ()
    needs_scale: bool = False
    keeps_rule: bool = True
    keeps_counters: bool = True
    keeps_window: bool = False
    weights_only: bool = False
    is_folder: bool = False


def _apex(m: Material) -> Files:
    return {**_script(m), **({"amp": to_apex(m.scalers)} if m.scalers else {})}


def _grad_scaler(m: Material) -> Files:
    return {**_script(m), **({"scaler": to_grad_scaler(m.scalers[0], m.rule)} if m.scalers else {})}


def _script(m: Material) -> Files:
    models = _under_keys(m.models, "model", keep=m.is_script)
    optimizers = _under_keys(m.optimizers, "optimizer", keep=m.is_script)
    return {**m.rest, **m.counters, **models, **optimizers, **m.baggage}


def _under_keys(things: Mapping[str, Any], key: str, *, keep: bool) -> dict[str, Any]:
    """Under the keys that they had in the file of a script, else under one that scripts use."""
    if not things or (keep and not any(set(name) & set(".[(") for name in things)):
        return dict(things)
    return {key: next(iter(things.values())) if len(things) == 1 else list(things.values())}


def _mmengine(m: Material) -> Files:
    return _openmm(m, to_mmengine(m.scalers, m.rule) if m.scalers else {})


def _mmengine_apex(m: Material) -> Files:
    return _openmm(m, to_mmengine(m.scalers, apex=True) if m.scalers else {})


def _openmm(m: Material, entry: dict[str, Any]) -> Files:
    hub = {"message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}}}
    return {**hub, **_run(m, {}, {**_inside(m.rest, "optimizer"), **entry})}


def _mmcv(m: Material) -> Files:
    fp16 = {"fp16": {"loss_scaler": to_grad_scaler(m.scalers[0], m.rule)}} if m.scalers else {}
    return _run(m, fp16, {})


def _run(m: Material, meta: dict[str, Any], beside_optimizer: dict[str, Any]) -> Files:
    """What mmengine and mmcv have in common."""
    return {
        **{name: value for name, value in m.rest.items() if "." not in name},
        "meta": {**_inside(m.rest, "meta"), "epoch": m.epoch or 0, "iter": m.iteration or 0, **meta},
        "state_dict": m.model,
        **({} if m.optimizer is None else {"optimizer": {**m.optimizer, **beside_optimizer}}),
        **m.baggage,
    }


def _inside(rest: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name.removeprefix(f"{key}."): value for name, value in rest.items() if name.startswith(f"{key}.")}


def _lightning(m: Material) -> Files:
    return {
        "callbacks": {},
        "lr_schedulers": [],
        **m.rest,
        "epoch": m.epoch or 0,
        "global_step": m.iteration or 0,
        # The first version whose checkpoints have this shape: later ones know how to bring it up to date.
        "pytorch-lightning_version": "2.0.0",
        "state_dict": m.model,
        "optimizer_states": list(m.optimizers.values()),
        **({"MixedPrecision": to_grad_scaler(m.scalers[0], m.rule)} if m.scalers else {}),
        **m.baggage,
    }


def _accelerate(m: Material) -> Files:
    def name(stem: str, number: int) -> str:
        return f"{stem}.bin" if number == 0 else f"{stem}_{number}.bin"

    return {
        **{name("pytorch_model", i): model for i, model in enumerate(m.models.values())},
        **{name("optimizer", i): optimizer for i, optimizer in enumerate(m.optimizers.values())},
        **({"scaler.pt": to_grad_scaler(m.scalers[0], m.rule)} if m.scalers else {}),
    }


def _engine(m: Material) -> Files:
    if not m.optimizers:
        raise StateError(
            "the file has no optimizer state, which an engine's state needs; convert it to weights, and load these with "
            "model.load_state_dict before halfpeak.prepare"
        )
    counted = max((step for one in m.optimizers.values() for step in read_steps(one)), default=0.0)
    taken = int(counted) if math.isfinite(counted) else 0
    return {
        "version": 1,
        "level": m.level,
        "models": list(m.models.values()),
        "optimizers": list(m.optimizers.values()),
        "scalers": [dict(scaler) for scaler in m.scalers],
        "counters": dict(m.engine_counters or {"taken": taken, "skipped": 0, "index": taken}),
        "buffers": [],
        "window": m.window or {"lanes": [_clean_lane() for _ in m.optimizers], "losses": {}},
    }


def _clean_lane() -> dict[str, Any]:
    return {
        "phase": "CLEAN",
        "found_inf": torch.zeros(()),
        "true_sized": {},
        "scaled": {},
        "frozen": None,
        "parked": {},
    }


def _weights(m: Material) -> Files:
    """float32: masters where there were any, and what was low is widened, which is exact."""
    if not m.models:
        raise StateError("the file holds no weights")
    return OrderedDict((name, _wide(value)) for name, value in m.model.items())


def _wide(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


_MM: Final = ("mmengine", "mmengine_apex")

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "apex": Target(
            "model, optimizer and amp, for apex.amp and halfpeak.amp",
            _apex,
            models=None,
            optimizers=None,
            scalers=None,
            family=None,
            needs_scale=True,
            keeps_rule=False,
        ),
        "grad_scaler": Target(
            "model, optimizer and scaler, for torch.amp",
            _grad_scaler,
            models=None,
            optimizers=None,
            family=None,
            needs_scale=True,
        ),
        "mmengine": Target("a checkpoint of mmengine's Runner with AmpOptimWrapper", _mmengine, family=_MM),
        "mmengine_apex": Target(
            "the same with ApexOptimWrapper", _mmengine_apex, scalers=None, family=_MM, keeps_rule=False
        ),
        "mmcv": Target("a checkpoint of mmcv 1.x and of halfpeak.runner", _mmcv, family=("mmcv", "runner")),
        "lightning": Target(
            "a checkpoint of Lightning 2 with precision 16-mixed",
            _lightning,
            optimizers=None,
            family=("lightning",),
        ),
        "accelerate": Target(
            "a folder for accelerate's load_state",
            _accelerate,
            models=None,
            optimizers=None,
            keeps_counters=False,
            is_folder=True,
        ),
        "engine": Target(
            "the state of a halfpeak engine",
            _engine,
            models=None,
            optimizers=None,
            scalers=None,
            needs_scale=True,
            keeps_rule=False,
            keeps_counters=False,
            keeps_window=True,
        ),
        "weights": Target(
            "the weights alone, in float32, for model.load_state_dict", _weights, weights_only=True
        ),
    }
)
"""What ``convert`` can write."""
