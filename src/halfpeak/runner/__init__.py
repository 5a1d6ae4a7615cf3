"""The interface of ``mmcv.runner``: training loops and the hooks that they call.

Compatible with mmcv 1.7.2, which need not be installed.
"""

from halfpeak.optim.members import OPTIMIZERS, TORCH_OPTIMIZERS
from halfpeak.runner.builder import (
    HOOKS,
    RUNNER_BUILDERS,
    RUNNERS,
    DefaultRunnerConstructor,
    build_runner,
    build_runner_constructor,
)
from halfpeak.runner.checkpoint import load_checkpoint, load_state_dict, save_checkpoint, weights_to_cpu
from halfpeak.runner.distributed import (
    allreduce_grads,
    allreduce_params,
    get_dist_info,
    init_dist,
    master_only,
)
from halfpeak.runner.fp16_decorators import auto_fp16, cast_tensor_type, force_fp32
from halfpeak.runner.fp16_model import patch_norm_fp32, wrap_fp16_model
from halfpeak.runner.hook import Hook
from halfpeak.runner.hook_list import Priority, get_priority
from halfpeak.runner.hooks.checkpoint import CheckpointHook
from halfpeak.runner.hooks.diagnosis import DiagnosisHook
from halfpeak.runner.hooks.ema import EMAHook
from halfpeak.runner.hooks.evaluation import DistEvalHook, EvalHook
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
from halfpeak.runner.hooks.loggers import LoggerHook, TensorboardLoggerHook, TextLoggerHook
from halfpeak.runner.hooks.optim_wrapper import OptimWrapperHook
from halfpeak.runner.hooks.optimizer import GradientCumulativeOptimizerHook, OptimizerHook
from halfpeak.runner.hooks.policies import (
    CosineAnnealingLrUpdaterHook,
    CosineAnnealingMomentumUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    CyclicMomentumUpdaterHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    InvLrUpdaterHook,
    LinearAnnealingLrUpdaterHook,
    LinearAnnealingMomentumUpdaterHook,
    OneCycleLrUpdaterHook,
    OneCycleMomentumUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
    StepMomentumUpdaterHook,
)
from halfpeak.runner.hooks.profiler import ProfilerHook
from halfpeak.runner.hooks.schedules import LrUpdaterHook, MomentumUpdaterHook
from halfpeak.runner.hooks.small import (
    ClosureHook,
    DistSamplerSeedHook,
    EmptyCacheHook,
    IterTimerHook,
    SyncBuffersHook,
)
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.runner.loop.base import BaseRunner
from halfpeak.runner.loop.data import IterLoader
from halfpeak.runner.loop.runners import EpochBasedRunner, IterBasedRunner
from halfpeak.runner.loss_scaler import LossScaler
from halfpeak.runner.modules import BaseModule, ModuleDict, ModuleList, Sequential
from halfpeak.runner.optimizer_builder import (
    OPTIMIZER_BUILDERS,
    DefaultOptimizerConstructor,
    build_optimizer,
    build_optimizer_constructor,
)
from halfpeak.runner.parallel import MMDataParallel, MMDistributedDataParallel
from halfpeak.runner.utilities import get_host_info, get_time_str, set_random_seed

__all__ = [
    "HOOKS",
    "OPTIMIZERS",
    "OPTIMIZER_BUILDERS",
    "RUNNERS",
    "RUNNER_BUILDERS",
    "TORCH_OPTIMIZERS",
    "BaseModule",
    "BaseRunner",
    "CheckpointHook",
    "ClosureHook",
    "CosineAnnealingLrUpdaterHook",
    "CosineAnnealingMomentumUpdaterHook",
    "CosineRestartLrUpdaterHook",
    "CyclicLrUpdaterHook",
    "CyclicMomentumUpdaterHook",
    "DefaultOptimizerConstructor",
    "DefaultRunnerConstructor",
    "DiagnosisHook",
    "DistEvalHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EmptyCacheHook",
    "EpochBasedRunner",
    "EvalHook",
    "ExpLrUpdaterHook",
    "FixedLrUpdaterHook",
    "FlatCosineAnnealingLrUpdaterHook",
    "Fp16OptimizerHook",
    "GradientCumulativeFp16OptimizerHook",
    "GradientCumulativeOptimizerHook",
    "Hook",
    "InvLrUpdaterHook",
    "IterBasedRunner",
    "IterLoader",
    "IterTimerHook",
    "LinearAnnealingLrUpdaterHook",
    "LinearAnnealingMomentumUpdaterHook",
    "LogBuffer",
    "LoggerHook",
    "LossScaler",
    "LrUpdaterHook",
    "MMDataParallel",
    "MMDistributedDataParallel",
    "ModuleDict",
    "ModuleList",
    "MomentumUpdaterHook",
    "OneCycleLrUpdaterHook",
    "OneCycleMomentumUpdaterHook",
    "OptimWrapperHook",
    "OptimizerHook",
    "PolyLrUpdaterHook",
    "Priority",
    "ProfilerHook",
    "Sequential",
    "StepLrUpdaterHook",
    "StepMomentumUpdaterHook",
    "SyncBuffersHook",
    "TensorboardLoggerHook",
    "TextLoggerHook",
    "allreduce_grads",
    "allreduce_params",
    "auto_fp16",
    "build_optimizer",
    "build_optimizer_constructor",
    "build_runner",
    "build_runner_constructor",
    "cast_tensor_type",
    "force_fp32",
    "get_dist_info",
    "get_host_info",
    "get_priority",
    "get_time_str",
    "init_dist",
    "load_checkpoint",
    "load_state_dict",
    "master_only",
    "patch_norm_fp32",
    "save_checkpoint",
    "set_random_seed",
    "weights_to_cpu",
    "wrap_fp16_model",
]
