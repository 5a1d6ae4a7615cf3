"""``install("mmcv")``: the modules of mmcv 1.7.2 that training needs, and halfpeak's hooks in the registry of a real mmcv.

Why the table is Python: see :mod:`halfpeak.shim.apex`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from halfpeak.runner import (
    HOOKS,
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    OptimizerHook,
)
from halfpeak.shim.registries import put
from halfpeak.shim.spec import Shim, Undo

VERSION: Final = "1.7.2"

_LR_HOOKS: Final = (
    "CosineAnnealingLrUpdaterHook CosineRestartLrUpdaterHook CyclicLrUpdaterHook ExpLrUpdaterHook "
    "FixedLrUpdaterHook FlatCosineAnnealingLrUpdaterHook InvLrUpdaterHook LinearAnnealingLrUpdaterHook "
    "LrUpdaterHook OneCycleLrUpdaterHook PolyLrUpdaterHook StepLrUpdaterHook"
)
_MOMENTUM_HOOKS: Final = (
    "CosineAnnealingMomentumUpdaterHook CyclicMomentumUpdaterHook LinearAnnealingMomentumUpdaterHook "
    "MomentumUpdaterHook OneCycleMomentumUpdaterHook StepMomentumUpdaterHook"
)
_OPTIMIZER_HOOKS: Final = (
    "Fp16OptimizerHook GradientCumulativeFp16OptimizerHook GradientCumulativeOptimizerHook OptimizerHook"
)
_HOOKS: Final = (
    "HOOKS CheckpointHook ClosureHook DistEvalHook DistSamplerSeedHook EMAHook EmptyCacheHook EvalHook Hook "
    "IterTimerHook LoggerHook ProfilerHook SyncBuffersHook TensorboardLoggerHook TextLoggerHook "
    f"{_LR_HOOKS} {_MOMENTUM_HOOKS} {_OPTIMIZER_HOOKS}"
)
_RUNNER: Final = (
    "OPTIMIZER_BUILDERS RUNNERS RUNNER_BUILDERS BaseModule BaseRunner DefaultOptimizerConstructor "
    "DefaultRunnerConstructor EpochBasedRunner IterBasedRunner IterLoader LogBuffer LossScaler ModuleDict "
    "ModuleList Priority Runner=EpochBasedRunner Sequential allreduce_grads allreduce_params auto_fp16 "
    "build_optimizer build_optimizer_constructor build_runner build_runner_constructor cast_tensor_type force_fp32 "
    "get_dist_info get_host_info get_priority get_time_str init_dist "
    "master_only patch_norm_fp32 set_random_seed wrap_fp16_model"
)

_CHECKPOINT: Final = (
    "CheckpointLoader _load_checkpoint=load_file _load_checkpoint_with_prefix=load_prefix load_checkpoint load_state_dict "
    "save_checkpoint weights_to_cpu"
)
_UTILITIES: Final = "build_from_cfg get_logger mkdir_or_exist print_log symlink"

_MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    "mmcv": {
        "halfpeak.optim": "Registry",
        "halfpeak.runner.utilities": _UTILITIES,
        "halfpeak.shim.mmcv": "__version__=VERSION",
    },
    "mmcv.fileio": {".": ""},
    "mmcv.parallel": {
        ".": "",
        "halfpeak.runner": "MMDataParallel MMDistributedDataParallel",
        "halfpeak.runner.parallel": "is_module_wrapper",
    },
    "mmcv.runner": {
        "halfpeak.runner": f"OPTIMIZERS TORCH_OPTIMIZERS {_RUNNER} {_HOOKS}",
        "halfpeak.runner.checkpoint": _CHECKPOINT,
    },
    "mmcv.runner.base_module": {"halfpeak.runner": "BaseModule ModuleDict ModuleList Sequential"},
    "mmcv.runner.base_runner": {"halfpeak.runner": "BaseRunner"},
    "mmcv.runner.builder": {
        "halfpeak.runner": "RUNNERS RUNNER_BUILDERS build_runner build_runner_constructor",
    },
    "mmcv.runner.checkpoint": {"halfpeak.runner.checkpoint": f"get_state_dict {_CHECKPOINT}"},
    "mmcv.runner.default_constructor": {
        "halfpeak.runner": "RUNNERS RUNNER_BUILDERS DefaultRunnerConstructor",
    },
    "mmcv.runner.dist_utils": {
        "halfpeak.runner": "allreduce_grads allreduce_params get_dist_info init_dist master_only",
    },
    "mmcv.runner.epoch_based_runner": {
        "halfpeak.runner": "RUNNERS BaseRunner EpochBasedRunner Runner=EpochBasedRunner save_checkpoint",
    },
    "mmcv.runner.fp16_utils": {
        "halfpeak.runner": (
            "LossScaler allreduce_grads auto_fp16 cast_tensor_type force_fp32 patch_norm_fp32 wrap_fp16_model"
        ),
    },
    "mmcv.runner.hooks": {"halfpeak.runner": _HOOKS},
    "mmcv.runner.hooks.checkpoint": {"halfpeak.runner": "HOOKS CheckpointHook Hook"},
    "mmcv.runner.hooks.closure": {"halfpeak.runner": "HOOKS ClosureHook Hook"},
    "mmcv.runner.hooks.ema": {"halfpeak.runner": "HOOKS EMAHook Hook"},
    "mmcv.runner.hooks.evaluation": {"halfpeak.runner": "HOOKS DistEvalHook EvalHook Hook"},
    "mmcv.runner.hooks.hook": {"halfpeak.runner": "HOOKS Hook"},
    "mmcv.runner.hooks.iter_timer": {"halfpeak.runner": "HOOKS Hook IterTimerHook"},
    "mmcv.runner.hooks.logger": {"halfpeak.runner": "LoggerHook TensorboardLoggerHook TextLoggerHook"},
    "mmcv.runner.hooks.logger.base": {"halfpeak.runner": "HOOKS LoggerHook"},
    "mmcv.runner.hooks.logger.tensorboard": {"halfpeak.runner": "HOOKS TensorboardLoggerHook"},
    "mmcv.runner.hooks.logger.text": {"halfpeak.runner": "HOOKS TextLoggerHook"},
    "mmcv.runner.hooks.lr_updater": {
        "halfpeak.runner": f"HOOKS Hook {_LR_HOOKS}",
        "halfpeak.runner.hooks.policies": "annealing_cos=cosine annealing_linear=linear",
    },
    "mmcv.runner.hooks.memory": {"halfpeak.runner": "HOOKS EmptyCacheHook Hook"},
    "mmcv.runner.hooks.momentum_updater": {"halfpeak.runner": f"HOOKS Hook {_MOMENTUM_HOOKS}"},
    "mmcv.runner.hooks.optimizer": {
        "halfpeak.runner": f"HOOKS Hook LossScaler allreduce_grads wrap_fp16_model {_OPTIMIZER_HOOKS}",
    },
    "mmcv.runner.hooks.profiler": {"halfpeak.runner": "HOOKS Hook ProfilerHook"},
    "mmcv.runner.hooks.sampler_seed": {"halfpeak.runner": "HOOKS DistSamplerSeedHook Hook"},
    "mmcv.runner.hooks.sync_buffer": {"halfpeak.runner": "HOOKS Hook SyncBuffersHook"},
    "mmcv.runner.iter_based_runner": {
        "halfpeak.runner": "RUNNERS BaseRunner IterBasedRunner IterLoader save_checkpoint",
    },
    "mmcv.runner.log_buffer": {"halfpeak.runner": "LogBuffer"},
    "mmcv.runner.optimizer": {
        "halfpeak.optim": "OPTIMIZERS",
        "halfpeak.runner": (
            "OPTIMIZER_BUILDERS DefaultOptimizerConstructor build_optimizer build_optimizer_constructor"
        ),
    },
    "mmcv.runner.optimizer.builder": {
        "halfpeak.optim": "OPTIMIZERS",
        "halfpeak.optim.members": "TORCH_OPTIMIZERS",
        "halfpeak.runner": "OPTIMIZER_BUILDERS build_optimizer build_optimizer_constructor",
    },
    "mmcv.runner.optimizer.default_constructor": {
        "halfpeak.optim": "OPTIMIZERS",
        "halfpeak.runner": "OPTIMIZER_BUILDERS DefaultOptimizerConstructor",
    },
    "mmcv.runner.priority": {"halfpeak.runner": "Priority get_priority"},
    "mmcv.runner.utils": {"halfpeak.runner": "get_host_info get_time_str set_random_seed"},
    "mmcv.utils": {
        ".": "",
        "halfpeak.optim": "Registry",
        "halfpeak.runner.utilities": _UTILITIES,
    },
    "mmcv.utils.config": {".": ""},
    "mmcv.utils.logging": {"halfpeak.runner.utilities": "get_logger print_log"},
    "mmcv.utils.parrots_wrapper": {".": ""},
    "mmcv.utils.registry": {"halfpeak.optim": "Registry", "halfpeak.runner.utilities": "build_from_cfg"},
}

_VERSION_2: Final = "install mmcv-lite 2.x, which has it; halfpeak adds mmcv.runner to it"

_CONFIG: Final = "Config ConfigDict DictAction"
_UTILS: Final = (
    "ProgressBar Timer TimerError check_file_exist check_prerequisites check_time concat_list deprecated_api_warning "
    "digit_version fopen get_git_hash has_method import_modules_from_strings is_filepath is_list_of is_method_overridden "
    "is_seq_of is_str is_tuple_of iter_cast list_cast requires_executable requires_package scandir slice_list to_1tuple "
    "to_2tuple to_3tuple to_4tuple to_ntuple track_iter_progress track_parallel_progress track_progress tuple_cast"
)
_TORCH_UTILS: Final = "TORCH_VERSION collect_env is_jit_tracing load_url torch_meshgrid"
_LAYERS: Final = (
    "SyncBatchNorm _AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd _BatchNorm _ConvNd _ConvTransposeMixin "
    "_InstanceNorm _MaxPoolNd is_rocm_pytorch"
)
_FILES: Final = "FileClient dict_from_file dump list_from_file load register_handler"

_LOGGERS: Final = "ClearML Dvclive Mlflow Neptune Pavi Segmind Wandb"
_LOGS: Final = (
    "use TextLoggerHook, TensorboardLoggerHook, or a LoggerHook of yours, whose log(runner) sends the values"
)

_ELSEWHERE: Final[Mapping[str, str]] = {
    f"{module}.{name}": f"{source}:{name}"
    for source, names, modules in (
        ("mmengine.config", _CONFIG, ("mmcv", "mmcv.utils", "mmcv.utils.config")),
        ("mmengine.utils", _UTILS, ("mmcv", "mmcv.utils")),
        ("mmengine.utils.dl_utils", _TORCH_UTILS, ("mmcv", "mmcv.utils")),
        ("mmengine.utils.dl_utils.parrots_wrapper", _LAYERS, ("mmcv.utils", "mmcv.utils.parrots_wrapper")),
        ("mmengine.fileio", _FILES, ("mmcv", "mmcv.fileio")),
    )
    for module in modules
    for name in names.split()
}

_ABSENT: Final[Mapping[str, str]] = {
    **dict.fromkeys(_ELSEWHERE, "install mmengine-lite, from which it is then imported"),
    "mmcv.cnn": _VERSION_2,
    "mmcv.engine": "use EvalHook or DistEvalHook, whose test_fn may be a loop of your own",
    "mmcv.image": _VERSION_2,
    "mmcv.ops": "install mmcv 2.x, which has it; halfpeak adds mmcv.runner to it",
    "mmcv.parallel": "use torch.utils.data.default_collate, and move a batch to its device in train_step",
    "mmcv.runner": "docs/compat/mmcv.md lists what it provides",
    "mmcv.runner.hooks": f"{_LOGS}; docs/compat/mmcv.md lists all hooks",
    "mmcv.runner.obj_from_dict": "use build_from_cfg of mmcv.utils, with a Registry of your classes",
    **{f"mmcv.runner.{name}LoggerHook": _LOGS for name in _LOGGERS.split()},
}


def register(runner: ModuleType) -> Undo:
    """Replace mmcv's optimizer hooks in its registry by halfpeak's.

    Args:
        runner: the module ``mmcv.runner``.
    """
    registry, base = vars(runner)["HOOKS"], vars(runner)["Hook"]
    if registry is HOOKS:  # this mmcv.runner is the shim's
        return put([])
    owns: tuple[type[Any], ...] = (
        OptimizerHook,
        GradientCumulativeOptimizerHook,
        Fp16OptimizerHook,
        GradientCumulativeFp16OptimizerHook,
    )
    # Subclasses of mmcv's Hook, because mmcv's runners require one.
    members = {"__module__": __name__}
    hooks = [type(own.__name__, (own, base), {**members, "__doc__": own.__doc__}) for own in owns]
    return put([(registry, hook.__name__, hook) for hook in hooks])


MMCV: Final = Shim(
    modules=_MODULES,
    table=__file__,
    distribution="mmcv",
    version=f"{VERSION}+halfpeak",
    elsewhere=_ELSEWHERE,
    absent=_ABSENT,
    after_import={"mmcv.runner": register},
    page="docs/compat/mmcv.md",
)
