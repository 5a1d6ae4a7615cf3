"""What a configuration may name: the hooks, the runners and their constructor."""

from __future__ import annotations

from halfpeak.runner.builder import HOOKS, RUNNER_BUILDERS, RUNNERS, DefaultRunnerConstructor
from halfpeak.runner.epoch import EpochBasedRunner
from halfpeak.runner.hooks.accumulate import GradientCumulativeOptimizerHook
from halfpeak.runner.hooks.checkpoint import CheckpointHook
from halfpeak.runner.hooks.closure import ClosureHook
from halfpeak.runner.hooks.dist_evaluation import DistEvalHook
from halfpeak.runner.hooks.ema import EMAHook
from halfpeak.runner.hooks.evaluation import EvalHook
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook
from halfpeak.runner.hooks.fp16_accumulate import GradientCumulativeFp16OptimizerHook
from halfpeak.runner.hooks.iter_timer import IterTimerHook
from halfpeak.runner.hooks.lr import (
    CosineAnnealingLrUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    InvLrUpdaterHook,
    LinearAnnealingLrUpdaterHook,
    OneCycleLrUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
)
from halfpeak.runner.hooks.memory import EmptyCacheHook
from halfpeak.runner.hooks.momentum import (
    CosineAnnealingMomentumUpdaterHook,
    CyclicMomentumUpdaterHook,
    LinearAnnealingMomentumUpdaterHook,
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
from halfpeak.runner.iteration import IterBasedRunner

for _hook in (
    CheckpointHook,
    ClosureHook,
    CosineAnnealingLrUpdaterHook,
    CosineAnnealingMomentumUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    CyclicMomentumUpdaterHook,
    DistEvalHook,
    DistSamplerSeedHook,
    EMAHook,
    EmptyCacheHook,
    EvalHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    InvLrUpdaterHook,
    IterTimerHook,
    LinearAnnealingLrUpdaterHook,
    LinearAnnealingMomentumUpdaterHook,
    OneCycleLrUpdaterHook,
    OneCycleMomentumUpdaterHook,
    OptimWrapperHook,
    OptimizerHook,
    PolyLrUpdaterHook,
    ProfilerHook,
    StepLrUpdaterHook,
    StepMomentumUpdaterHook,
    SyncBuffersHook,
    TensorboardLoggerHook,
    TextLoggerHook,
):
    HOOKS.register_module(module=_hook)

for _runner in (EpochBasedRunner, IterBasedRunner):
    RUNNERS.register_module(module=_runner)

RUNNER_BUILDERS.register_module(module=DefaultRunnerConstructor)
