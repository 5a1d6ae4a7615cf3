"""halfpeak: mixed-precision training for PyTorch on any device.

>>> import torch, halfpeak
>>> model = torch.nn.Linear(4, 2)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> engine = halfpeak.prepare(model, optimizer)
>>> engine
Engine(O5, cpu, scale=1, num_steps=0, num_skipped=0)

Each name is imported on first access, so that ``halfpeak --help`` does not import torch, and using one part does not
import the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from halfpeak import amp
    from halfpeak import checkpoint as checkpoint
    from halfpeak import distributed as distributed
    from halfpeak import fused as fused
    from halfpeak import insight as insight
    from halfpeak import integrations as integrations
    from halfpeak import migrate as migrate
    from halfpeak import optim as optim
    from halfpeak import runner as runner
    from halfpeak import shim as shim
    from halfpeak.core.accumulation import Accumulation
    from halfpeak.core.errors import (
        BannedOpError,
        CheckpointError,
        ClosureError,
        ConfigError,
        ConfigTypeError,
        HalfpeakError,
        LossIdError,
        LossScaleCollapse,
        OrderError,
        ParameterError,
        RankMismatchError,
        RegistryError,
        StateError,
    )
    from halfpeak.core.levels import LEVELS, Level
    from halfpeak.core.policy import Float8
    from halfpeak.core.schedule import ScaleConfig
    from halfpeak.core.step_result import StepResult
    from halfpeak.diagnosis.diagnose import diagnose
    from halfpeak.diagnosis.report import Diagnosis
    from halfpeak.engine.averaged_model import AveragedModel
    from halfpeak.engine.engine import Engine
    from halfpeak.engine.grad_scaler import GradScaler
    from halfpeak.engine.memory_report import Memory
    from halfpeak.engine.prepare import prepare
    from halfpeak.insight.checkup import Checkup
    from halfpeak.insight.doctor import doctor
    from halfpeak.parts.clip import ClipNorm, ClipValue

__version__ = "0.1.0"

_NAMES_IN: Final = {
    "core.accumulation": "Accumulation",
    "core.errors": (
        "BannedOpError CheckpointError ClosureError ConfigError ConfigTypeError HalfpeakError LossIdError LossScaleCollapse "
        "OrderError ParameterError RankMismatchError RegistryError StateError"
    ),
    "core.levels": "LEVELS Level",
    "core.policy": "Float8",
    "core.schedule": "ScaleConfig",
    "core.step_result": "StepResult",
    "diagnosis.diagnose": "diagnose",
    "diagnosis.report": "Diagnosis",
    "engine.averaged_model": "AveragedModel",
    "engine.engine": "Engine",
    "engine.memory_report": "Memory",
    "engine.prepare": "prepare",
    "insight.checkup": "Checkup",
    "insight.doctor": "doctor",
    "engine.grad_scaler": "GradScaler",
    "parts.clip": "ClipNorm ClipValue",
}
_PACKAGES: Final = "amp checkpoint distributed fused insight integrations migrate optim runner shim"

_MODULE_OF: Final = {
    **{name: module for module, names in _NAMES_IN.items() for name in names.split()},
    **{package: package for package in _PACKAGES.split()},
}
"""The module of each public name. The imports above tell type checkers the same, and a test compares both."""


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept misspelt names

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'halfpeak' has no attribute {name!r}")
        module = import_module(f"halfpeak.{_MODULE_OF[name]}")
        value = module if name == _MODULE_OF[name] else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_MODULE_OF, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "LEVELS",
    "Accumulation",
    "AveragedModel",
    "BannedOpError",
    "CheckpointError",
    "Checkup",
    "ClipNorm",
    "ClipValue",
    "ClosureError",
    "ConfigError",
    "ConfigTypeError",
    "Diagnosis",
    "Engine",
    "Float8",
    "GradScaler",
    "HalfpeakError",
    "Level",
    "LossIdError",
    "LossScaleCollapse",
    "Memory",
    "OrderError",
    "ParameterError",
    "RankMismatchError",
    "RegistryError",
    "ScaleConfig",
    "StateError",
    "StepResult",
    "amp",
    "diagnose",
    "doctor",
    "prepare",
]
