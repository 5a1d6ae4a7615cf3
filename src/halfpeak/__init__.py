"""halfpeak: mixed-precision training for PyTorch on any device.

>>> import torch, halfpeak
>>> model = torch.nn.Linear(4, 2)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> engine = halfpeak.prepare(model, optimizer)
>>> engine
Engine(O5, cpu, scale=1, num_steps=0, num_skipped=0)
"""

import importlib as _importlib

from halfpeak import amp
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
from halfpeak.core.levels import LEVELS, Level, Properties
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.step_result import StepResult
from halfpeak.engine.diagnosis.diagnose import diagnose
from halfpeak.engine.diagnosis.report import Diagnosis
from halfpeak.engine.engine import Engine
from halfpeak.engine.memory_report import Memory
from halfpeak.engine.prepare import prepare
from halfpeak.insight.checkup import Checkup
from halfpeak.insight.doctor import doctor
from halfpeak.integrations.grad_scaler import GradScaler
from halfpeak.state.clip import ClipNorm, ClipValue

__version__ = "0.1.0"

_ON_DEMAND = ("distributed", "fused", "insight", "integrations", "migrate", "optim", "runner", "shim")


def __getattr__(name: str) -> object:
    """A package that ``import halfpeak`` leaves alone, imported when it is first asked for."""
    if name in _ON_DEMAND:
        return _importlib.import_module(f"halfpeak.{name}")
    raise AttributeError(f"module 'halfpeak' has no attribute {name!r}")


__all__ = [
    "LEVELS",
    "Accumulation",
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
    "GradScaler",
    "HalfpeakError",
    "Level",
    "LossIdError",
    "LossScaleCollapse",
    "Memory",
    "OrderError",
    "ParameterError",
    "Policy",
    "Properties",
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
