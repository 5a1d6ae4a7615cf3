"""Who wrote a checkpoint, told by its keys, and where each of its parts lies in the forms that are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from halfpeak.checkpoint.forms.parts import BAGGAGE, ENGINE, Parts, is_weights, scaler_kind, walk

FORMS: Final[Mapping[str, str]] = MappingProxyType(
    {
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
        "accelerate": "a folder of accelerate's save_state",
        "recipe": "a script's dict without a loss scaler",
        "weights": "weights alone",
        "optimizer": "the state of an optimizer alone",
        "scaler": "the state of a loss scaler alone",
        "unknown": "no form that halfpeak knows",
    }
)
"""Every form that is recognised, and what it is."""

SCRIPTS: Final = frozenset({"apex", "fp16_optimizer", "grad_scaler", "recipe"})
"""Forms whose keys a script made up, and looks for again."""

_LEVEL_KEYS: Final = ("opt_level", "amp_opt_level", "fp16_opt_level", "apex_opt_level", "amp_level", "level")
_LEVEL: Final = re.compile(r"O[0-5]")
_LEVEL_IN_TEXT: Final = re.compile(r"opt_level\W{1,4}(O[0-5])")
_COMMIT: Final = re.compile(r"\+?[0-9a-f]{40}$")
_EMA: Final = re.compile(r"(^|[_.])(ema|teacher|averaged?)([_.]|$)|ema$|^ema", re.IGNORECASE)


def take_apart(tree: Any, *, is_folder: bool = False) -> Parts:
    """The parts of a checkpoint; ``tree`` is not changed."""
    parts = Parts()
    if is_folder:
        _take_folder(parts, tree)
    elif not isinstance(tree, Mapping):
        parts.rest["(the file)"] = tree
    elif set(tree.keys()) == set(ENGINE):
        parts.form = "engine"
        parts.take_engine(tree)
    elif tree.get("format") == "halfpeak.train" or {"plan", "driver", "fingerprint"} <= set(tree):
        _take_train(parts, tree)
    elif any(str(key).startswith("pytorch-lightning_version") for key in tree):
        _take_lightning(parts, tree)
    elif isinstance(tree.get("meta"), Mapping) and "state_dict" in tree:
        _take_openmm(parts, tree)
    elif not _take_alone(parts, tree):
        _take_script(parts, tree)
    if parts.level is None:
        parts.level = _find_level(tree)
    return parts


def _take_script(parts: Parts, tree: Mapping[str, Any]) -> None:
    """A dict that somebody's training script made up: what each entry is shows in its content."""
    for key, value in tree.items():
        name = str(key)
        if name == BAGGAGE or parts.take_counter(name, value):
            continue
        if parts.take_engine(value):
            parts.form = "engine"
        elif _EMA.search(name) or not (
            parts.take_models(name, value)
            or parts.take_optimizers(name, value)
            or parts.take_scaler(name, value)
            or parts.take_masters(name, value)
        ):
            parts.rest[name] = value
    parts.take_baggage(tree.get(BAGGAGE))
    kinds = {scaler_kind(value) for value in tree.values()}
    if parts.form == "unknown" and (parts.models or parts.optimizers):
        known = next((kind for kind in ("apex", "grad_scaler") if kind in kinds), None)
        parts.form = known or ("grad_scaler" if parts.scalers else "recipe")


def _take_alone(parts: Parts, tree: Mapping[str, Any]) -> bool:
    """One thing that was saved by itself."""
    if is_weights(tree):
        parts.form, parts.models["(the file)"] = "weights", tree
    elif scaler_kind(tree) is not None:
        parts.form = "scaler"
        parts.take_scaler("(the file)", tree)
    elif parts.take_optimizer("(the file)", tree):
        parts.form = parts.form if parts.form == "fp16_optimizer" else "optimizer"
    else:
        return False
    return True


def _take_openmm(parts: Parts, tree: Mapping[str, Any]) -> None:
    meta: Mapping[str, Any] = tree["meta"]
    parts.form = "mmcv"
    version = str(meta.get("mmengine_version") or meta.get("mmcv_version") or "")
    parts.version = _COMMIT.sub("", version)
    for key, value in tree.items():
        taken = (
            key in ("meta", BAGGAGE)
            or (key == "state_dict" and parts.take_model(key, value))
            or (key == "optimizer" and parts.take_optimizers(key, value))
            or parts.take_scaler(str(key), value)  # detection scripts kept apex's beside it
        )
        if not taken:
            parts.rest[str(key)] = value
    for key, value in meta.items():
        if (
            key == "fp16"
            and isinstance(value, Mapping)
            and parts.take_scaler("meta.fp16", value.get("loss_scaler"))
        ):
            continue
        if not parts.take_counter(str(key), value):
            parts.rest[f"meta.{key}"] = value
    parts.take_baggage(tree.get(BAGGAGE))
    wrappers = [str(scaler.where) for scaler in parts.scalers]
    if {"loop", "hooks", "random"} <= set(tree):
        parts.form = "runner"
    elif any(where.endswith("apex_amp") for where in wrappers):
        parts.form = "mmengine_apex"
    elif "message_hub" in tree or "mmengine_version" in meta or any("loss_scaler" in w for w in wrappers):
        parts.form = "mmengine"


def _take_lightning(parts: Parts, tree: Mapping[str, Any]) -> None:
    parts.form = "lightning"
    parts.version = str(tree.get("pytorch-lightning_version", ""))
    for key, value in tree.items():
        taken = (
            key in ("pytorch-lightning_version", BAGGAGE)
            or parts.take_counter(str(key), value)
            or (key == "state_dict" and parts.take_model(key, value))
            or (key == "optimizer_states" and parts.take_optimizers(key, value))
            or parts.take_scaler(str(key), value)
        )
        if not taken:
            parts.rest[str(key)] = value
    parts.take_baggage(tree.get(BAGGAGE))


def _take_train(parts: Parts, tree: Mapping[str, Any]) -> None:
    parts.form = "train"
    for key, value in tree.items():
        if key == "driver" and not parts.take_engine(value) and isinstance(value, Mapping):
            parts.take_model("driver.model", value.get("model"))
            parts.take_optimizer("driver.wrapper", value.get("wrapper"))
        elif key != "driver" and not parts.take_counter(key, value):
            parts.rest[key] = value


def _take_folder(parts: Parts, tree: Mapping[str, Any] | None) -> None:
    for name, value in (tree or {}).items():
        if re.fullmatch(r"(pytorch_)?model(_\d+)?\.(bin|safetensors)", name) and parts.take_model(
            name, value
        ):
            continue
        if re.fullmatch(r"optimizer(_\d+)?\.bin", name) and parts.take_optimizer(name, value):
            continue
        if not (name == "scaler.pt" and parts.take_scaler(name, value)):
            parts.rest[name] = value
    if parts.optimizers or parts.scalers or any(name.startswith("random_states") for name in parts.rest):
        parts.form = "accelerate"
    elif parts.models:
        parts.form = "weights"


def _find_level(tree: object) -> str | None:
    """An opt level that arguments or a configuration in the file name."""
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
