"""The loop of a training run and the hooks that it calls: the door for code written for ``mmcv.runner``.

Answers to mmcv 1.7.2 and does not need it.
"""

from halfpeak.runner.allreduce import allreduce_grads, allreduce_params
from halfpeak.runner.base import BaseRunner
from halfpeak.runner.builder import DefaultRunnerConstructor, build_runner, build_runner_constructor
from halfpeak.runner.data_parallel import MMDataParallel
from halfpeak.runner.ddp import MMDistributedDataParallel
from halfpeak.runner.dist import get_dist_info, init_dist, master_only
from halfpeak.runner.epoch import EpochBasedRunner
from halfpeak.runner.fp16_decorators import auto_fp16, force_fp32
from halfpeak.runner.fp16_model import wrap_fp16_model
from halfpeak.runner.hook import Hook
from halfpeak.runner.hooks.accumulate import GradientCumulativeOptimizerHook
from halfpeak.runner.hooks.checkpoint import CheckpointHook
from halfpeak.runner.hooks.closure import ClosureHook
from halfpeak.runner.hooks.dist_evaluation import DistEvalHook
from halfpeak.runner.hooks.ema import EMAHook
from halfpeak.runner.hooks.evaluation import EvalHook
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook
from halfpeak.runner.hooks.fp16_accumulate import GradientCumulativeFp16OptimizerHook
from halfpeak.runner.hooks.iter_timer import IterTimerHook
from halfpeak.runner.hooks.logger import LoggerHook
from halfpeak.runner.hooks.lr import (
    CosineAnnealingLrUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    InvLrUpdaterHook,
    LinearAnnealingLrUpdaterHook,
    LrUpdaterHook,
    OneCycleLrUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
)
from halfpeak.runner.hooks.memory import EmptyCacheHook
from halfpeak.runner.hooks.momentum import (
    CosineAnnealingMomentumUpdaterHook,
    CyclicMomentumUpdaterHook,
    LinearAnnealingMomentumUpdaterHook,
    MomentumUpdaterHook,
    OneCycleMomentumUpdaterHook,
    StepMomentumUpdaterHook,
)
from halfpeak.runner.hooks.optim_wrapper import OptimWrapperHook
from halfpeak.runner.hooks.optimizer import OptimizerHook
from halfpeak.runner.hooks.profiler import ProfilerHook
from halfpeak.runner.hooks.sampler_seed import DistSamplerSeedHook
from halfpeak.runner.hooks.sync_buffers import SyncBuffersHook
from halfpeak.runner.hooks.tensorboard import TensorboardLoggerHook
from halfpeak.runner.hooks.text_logger import TextLoggerHook
from halfpeak.runner.iter_loader import IterLoader
from halfpeak.runner.iteration import IterBasedRunner
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.runner.loss_scaler import LossScaler
from halfpeak.runner.members import HOOKS, RUNNER_BUILDERS, RUNNERS
from halfpeak.runner.modules import BaseModule, ModuleDict, ModuleList, Sequential
from halfpeak.runner.optimizer_builder import (
    OPTIMIZER_BUILDERS,
    DefaultOptimizerConstructor,
    build_optimizer,
    build_optimizer_constructor,
)
from halfpeak.runner.priority import Priority, get_priority
from halfpeak.runner.utilities import get_host_info, get_time_str, set_random_seed
from halfpeak.runner.weights import load_checkpoint, load_state_dict, save_checkpoint, weights_to_cpu

__all__ = [
    "HOOKS",
    "OPTIMIZER_BUILDERS",
    "RUNNERS",
    "RUNNER_BUILDERS",
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
    "force_fp32",
    "get_dist_info",
    "get_host_info",
    "get_priority",
    "get_time_str",
    "init_dist",
    "load_checkpoint",
    "load_state_dict",
    "master_only",
    "save_checkpoint",
    "set_random_seed",
    "weights_to_cpu",
    "wrap_fp16_model",
]
