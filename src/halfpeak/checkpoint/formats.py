"""The formats that ``convert`` writes: each takes out of the parts of a checkpoint what it can hold; the rest is lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfpeak.checkpoint.file import save
from halfpeak.checkpoint.parts import ITERATIONS, Parts, numbered, read_steps
from halfpeak.checkpoint.read import has_values
from halfpeak.checkpoint.scaler_states import to_apex, to_grad_scaler
from halfpeak.checkpoint.temporary import temporary_folder
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import state_dtypes
from halfpeak.core.schedule import ScaleConfig, ScalerState
from halfpeak.core.state_checks import ENGINE_VERSION

_SCRIPTS: Final = ("apex", "fp16_optimizer", "grad_scaler", "recipe", "engine")
"""Formats whose keys a training script chose; a conversion keeps those keys, because the script looks for them."""

_MESSAGES: Final = {"message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}}}


def _apex(parts: Parts) -> dict[str, Any]:
    return _script(parts, {"amp": to_apex(_scales(parts, is_needed=True))})


def _grad_scaler(parts: Parts) -> dict[str, Any]:
    return _script(parts, _scaler(parts, "scaler", is_needed=True))


def _script(parts: Parts, scale: dict[str, Any]) -> dict[str, Any]:
    """A dict for a training script; parts of a script's dict keep their keys."""
    is_script = parts.form in _SCRIPTS
    own = dict(scale)
    optimizers = {where: numbered(one) for where, one in parts.optimizers.items()}
    for table, usual in ((parts.models, "model"), (optimizers, "optimizer")):
        values = list(table.values())
        if is_script and not any(set(where) & set(".[(") for where in table):
            own |= table
        else:
            own |= {usual: values[0] if len(values) == 1 else values} if values else {}
    own |= parts.counters
    parts.models, parts.optimizers, parts.counters = {}, {}, {}
    return {**(_rest(parts, own) if is_script else {}), **own}


def _mmcv(parts: Parts) -> dict[str, Any]:
    entry = _scaler(parts, "loss_scaler")
    return _run(parts, ("mmcv", "runner"), {"fp16": entry} if entry else {}, {})


def _mmengine(parts: Parts) -> dict[str, Any]:
    return {**_MESSAGES, **_run(parts, ("mmengine", "mmengine_apex"), {}, _scaler(parts, "loss_scaler"))}


def _mmengine_apex(parts: Parts) -> dict[str, Any]:
    scales = _scales(parts)
    entry = {"apex_amp": to_apex(scales)} if scales else {}
    return {**_MESSAGES, **_run(parts, ("mmengine", "mmengine_apex"), {}, entry)}


def _run(
    parts: Parts, family: tuple[str, ...], in_meta: dict[str, Any], in_optimizer: dict[str, Any]
) -> dict[str, Any]:
    """A checkpoint of mmcv or mmengine, with entries to add to ``meta`` and to ``optimizer``."""
    meta = {
        "epoch": _count(parts, ("epoch",), 0),
        "iter": _count(parts, ITERATIONS, parts.iteration),
        **in_meta,
    }
    own: dict[str, Any] = {"meta": meta, "state_dict": _model(parts)}
    if parts.optimizers:
        own["optimizer"] = {**numbered(parts.optimizers.pop(next(iter(parts.optimizers)))), **in_optimizer}
    if parts.form in family:
        for name in own.keys() & {"meta", "optimizer"}:
            own[name] |= _rest(parts, own[name], f"{name}.")
        own |= _rest(parts, own)
    return own


def _lightning(parts: Parts) -> dict[str, Any]:
    own = {
        "epoch": _count(parts, ("epoch",), 0),
        "global_step": _count(parts, ITERATIONS, parts.iteration),
        # The first version with this layout: later versions of Lightning migrate it.
        "pytorch-lightning_version": "2.0.0",
        "state_dict": _model(parts),
        "optimizer_states": list(map(numbered, parts.optimizers.values())),
        **_scaler(parts, "MixedPrecision"),
    }
    parts.optimizers = {}
    return {
        "callbacks": {},
        "lr_schedulers": [],
        **(_rest(parts, own) if parts.form == "lightning" else {}),
        **own,
    }


def _accelerate(parts: Parts) -> dict[str, Any]:
    """The files of a folder, by name."""
    files: dict[str, Any] = _scaler(parts, "scaler.pt")
    optimizers = map(numbered, parts.optimizers.values())
    for stem, states in (("pytorch_model", parts.models.values()), ("optimizer", optimizers)):
        files |= {f"{stem}_{i}.bin" if i else f"{stem}.bin": state for i, state in enumerate(states)}
    parts.models, parts.optimizers = {}, {}
    return files


def _weights(parts: Parts) -> dict[str, Any]:
    """The weights in float32; low-precision weights without masters are widened, which is exact."""
    weights = _model(parts).items()
    return OrderedDict((name, v.float() if has_values(v) and is_low(v) else v) for name, v in weights)


def _engine(parts: Parts) -> dict[str, Any]:
    """The state for ``engine.load_state_dict``."""
    if not parts.optimizers:
        raise StateError(
            "the file has no optimizer state, which an engine's state needs; convert it to weights, and load these with "
            "model.load_state_dict before halfpeak.prepare"
        )
    optimizers, engine, each = list(parts.optimizers.values()), parts.engine, len(parts.optimizers)
    steps = max((read_steps(one) or 0 for one in optimizers), default=0)
    window = {
        "gradients": [{}] * each,
        "num_gradients": [0] * each,
        "losses": [{}] * each,
    }
    state = {
        "version": ENGINE_VERSION,
        "level": parts.level,
        "models": list(parts.models.values()),
        "parameters": engine.get("parameters", [{}] * each),
        "optimizers": optimizers,
        "state_dtypes": list(map(state_dtypes, optimizers)),
        "scalers": [dict(scale) for scale in _scales(parts, is_needed=True)],
        "counters": engine.get("counters", {"micro_step": 0, "num_steps": steps, "num_skipped": 0}),
        "buffers": engine.get("buffers", []),
        # torch.distributed.checkpoint leaves out the empty dicts of a window.
        "window": engine["window"] if "gradients" in engine.get("window", {}) else window,
    }
    parts.models, parts.optimizers, parts.engine = {}, {}, {}
    return state


def _model(parts: Parts) -> Mapping[str, Any]:
    if not parts.models:
        raise StateError("the format needs model weights, and the file has none")
    return parts.models.pop(next(iter(parts.models)))


def _scales(parts: Parts, *, is_needed: bool = False) -> list[ScalerState]:
    if is_needed and not parts.scales:
        raise StateError(
            "the format needs a loss scale, and the file has none; pass --scale 65536 (scale=65536.0)"
        )
    taken, parts.scales = list(parts.scales.values()), {}
    return taken


def _scaler(parts: Parts, key: str, *, is_needed: bool = False) -> dict[str, Any]:
    """The first loss scale with its rule, as torch's GradScaler saves it, under ``key``; empty if there is none."""
    if not parts.scales and not is_needed:
        return {}
    (first, *names), (state, *others) = list(parts.scales), _scales(parts, is_needed=is_needed)
    parts.scales = dict(zip(names, others, strict=True))
    rule, parts.rule = parts.rule, ScaleConfig()
    return {key: to_grad_scaler(state, rule)} if first else {}


def _count(parts: Parts, keys: tuple[str, ...], otherwise: int | None) -> int:
    """The first counter under one of the keys; equal ones are taken, too."""
    names = [key for key in keys if key in parts.counters]
    count = parts.counters[names[0]] if names else otherwise or 0
    for name in names:
        if parts.counters[name] == count:
            del parts.counters[name]
    return count


def _rest(parts: Parts, beside: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """The other entries, or those from inside an entry, whose keys the format does not use itself."""
    keys = {name: name.removeprefix(inside) for name in parts.rest if name.startswith(inside)}
    return {key: parts.rest.pop(name) for name, key in keys.items() if "." not in key and key not in beside}


def _store_files(place: Path, files: dict[str, Any]) -> None:
    """Write a folder, whole or not at all."""
    with temporary_folder(place) as folder:
        for name, state in files.items():
            save(folder / name, state)


class Target(NamedTuple):
    """A format to convert to: what it is, what takes the parts that it can hold, and what writes the result to the disk."""

    brief: str
    take: Callable[[Parts], dict[str, Any]]
    store: Callable[[Path, dict[str, Any]], None] = save


TARGETS: Final[Mapping[str, Target]] = {
    "engine": Target("the state of a halfpeak engine", _engine),
    "lightning": Target("a checkpoint of Lightning 2 with precision 16-mixed", _lightning),
    "mmengine": Target("a checkpoint of mmengine's Runner with AmpOptimWrapper", _mmengine),
    "mmengine_apex": Target("a checkpoint of mmengine's Runner with ApexOptimWrapper", _mmengine_apex),
    "mmcv": Target("a checkpoint of mmcv 1.x and of halfpeak.runner", _mmcv),
    "accelerate": Target("a folder for accelerate's load_state", _accelerate, _store_files),
    "weights": Target("the weights alone, in float32, for model.load_state_dict", _weights),
    "apex": Target("model, optimizer and amp, for apex.amp and halfpeak.amp", _apex),
    "grad_scaler": Target("model, optimizer and scaler, for torch.amp", _grad_scaler),
}
"""The formats that ``convert`` writes, by name."""
