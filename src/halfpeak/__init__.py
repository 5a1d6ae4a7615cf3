"""halfpeak: mixed-precision training for PyTorch on any device.

>>> import torch, halfpeak
>>> model = torch.nn.Linear(4, 2)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> engine = halfpeak.prepare(model, optimizer, "O5")
>>> engine.policy.param
torch.bfloat16
"""

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
from halfpeak.engine.engine import Engine
from halfpeak.engine.memory_report import Memory
from halfpeak.engine.prepare import prepare
from halfpeak.insight.diagnosis import diagnose
from halfpeak.insight.report import Diagnosis
from halfpeak.integrations.grad_scaler import GradScaler
from halfpeak.state.clip import ClipNorm, ClipValue

__version__ = "0.1.0"

__all__ = [
    "LEVELS",
    "Accumulation",
    "BannedOpError",
    "CheckpointError",
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
    "prepare",
]
