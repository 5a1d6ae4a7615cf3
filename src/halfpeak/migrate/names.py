"""The table of old names and their replacements, for apex, mmcv and ``torch.cuda.amp``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

from halfpeak import amp, runner
from halfpeak.amp import fp16_utils, optimizers
from halfpeak.migrate import calls
from halfpeak.migrate.calls import Change
from halfpeak.migrate.findings import Refusal, Target

Bare = Literal["always", "as a type", "as a decorator", "never"]
"""The uses, other than calls, in which a name may be replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """The new name for an old one.

    Attributes:
        module: the module of the new name.
        name: the new name in this module; ``Class.method`` for a method.
        arguments: how the arguments of a call change; None keeps them.
        bare: the uses, other than calls, in which the old name may be replaced.
        device: the device that the old name implied.
    """

    module: str
    name: str
    arguments: Change | None = None
    bare: Bare = "always"
    device: str = "cuda"

    @property
    def path(self) -> str:
        """The full new name in its usual spelling."""
        return (
            "torch.autocast"
            if (self.module, self.name) == ("torch.amp", "autocast")
            else f"{self.module}.{self.name}"
        )


MODULES: Final[Mapping[str, str]] = {
    "apex.amp": "halfpeak.amp",
    "apex.fp16_utils": "halfpeak.amp.fp16_utils",
    "apex.multi_tensor_apply": "halfpeak.amp.multi_tensor",
    "apex.optimizers": "halfpeak.amp.optimizers",
    "amp_C": "halfpeak.amp.multi_tensor",
    "mmcv.runner": "halfpeak.runner",
    "torch.cuda.amp": "torch.amp",
    "torch.cpu.amp": "torch.amp",
}
"""Old modules, each with the new module that has the same names."""

_FUSED: Final = tuple(optimizers.__all__)
_CONTRIB: Final = {
    "fp16_optimizer": "FP16_Optimizer",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLAMB",
    "fused_sgd": "FusedSGD",
}
_AMP_PARTS: Final = ("frontend", "handle", "amp", "_amp_state")
_FP16_PARTS: Final = ("fp16util", "fp16_optimizer", "loss_scaler")
_MULTI_TENSOR: Final = (
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
)
_NAME_OF_MMCV: Final = re.compile(r"(mmcv(?:\.[a-z]\w*)?)(?:\.[a-z]\w*)*\.(\w+)")

_GONE: Final = "has no counterpart in halfpeak"
_REFUSED: Final[Mapping[str, Refusal]] = {
    "apex.parallel": Refusal(_GONE, "use torch.nn.parallel and torch.distributed"),
    "apex.parallel.create_syncbn_process_group": Refusal(
        "groups of ranks are made by torch",
        "write process_group, _ = torch.distributed.new_subgroups(group_size) and pass it to "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    ),
    "apex.normalization": Refusal(
        "it takes inputs and weights of different dtypes, which torch's layers and functions do not",
        "write torch.nn.LayerNorm or RMSNorm, or torch.nn.functional.layer_norm or rms_norm, and cast the input",
    ),
    "apex.optimizers.FP16_Optimizer": Refusal(
        "it is elsewhere", "write halfpeak.amp.fp16_utils.FP16_Optimizer"
    ),
    "apex.optimizers": Refusal(
        _GONE, "write one of " + ", ".join(f"halfpeak.amp.optimizers.{name}" for name in _FUSED)
    ),
    "apex.contrib": Refusal(_GONE, "use what torch has: scaled_dot_product_attention, torch.compile"),
    "apex.transformer": Refusal(_GONE, "use torch.distributed.tensor.parallel, or Megatron-LM's own package"),
    "apex.pyprof": Refusal(_GONE, "use torch.profiler"),
    "apex.RNN": Refusal(_GONE, "use torch.nn.LSTM or torch.nn.GRU"),
    "apex.mlp": Refusal(_GONE, "use torch.nn.Linear and torch.compile"),
    "apex.fused_dense": Refusal(_GONE, "use torch.nn.Linear and torch.compile"),
    "apex.reparameterization": Refusal(_GONE, "use torch.nn.utils.parametrizations.weight_norm"),
    "apex": Refusal("halfpeak has no replacement for this name", "import what you need by its full name"),
    "amp_C": Refusal(_GONE, "use torch._foreach_* functions"),
    "apex_C": Refusal(_GONE, "use torch._utils._flatten_dense_tensors and _unflatten_dense_tensors"),
    "mmcv": Refusal(
        "halfpeak has no such name",
        "import it from mmcv 2 (cnn, image, ops, video) or from mmengine (config, fileio, utils)",
    ),
    "mmcv.parallel": Refusal(
        "halfpeak has no such name",
        "write torch.utils.data.default_collate, and move a batch to its device in train_step",
    ),
    "mmcv.runner": Refusal(
        "halfpeak has no such name", "see what halfpeak.runner has in docs/compat/mmcv.md"
    ),
    "torch.cuda.amp": Refusal("torch.amp has no such name", "write the code without it"),
    "torch.cpu.amp": Refusal("torch.amp has no such name", "write the code without it"),
}
"""The reasons for old names without a replacement, by prefix; the longest prefix of a name applies."""

_NEEDS_HALFPEAK: Final = Refusal("torch has no counterpart", "write --to halfpeak, or do without it")
_OTHER_LOOP: Final = Refusal(
    "torch.amp has other calls", "write the loop as docs/migrate/apex.md shows, or write --to halfpeak"
)


def look_up(name: str, target: Target) -> Replacement | Refusal | None:
    """The replacement of an old name, or the reason why there is none; None for a name of another library.

    >>> look_up("apex.amp.scale_loss", "halfpeak").path
    'halfpeak.amp.scale_loss'
    >>> look_up("apex.pyprof", "halfpeak").write
    'use torch.profiler'
    >>> look_up("torch.nn.Linear", "halfpeak")
    """
    found = _replacements().get(name) or _mmcv(name)
    if found is not None:
        if target == "torch" and not found.module.startswith("torch"):
            return _torch_only(name)
        # halfpeak.GradScaler is a torch.amp.GradScaler that computes the same and refuses fewer orders of calls.
        to_own = target == "halfpeak" and found.name == "GradScaler"
        return replace(found, module="halfpeak") if to_own else found
    if target == "torch" and MODULES.get(name, "torch").startswith("halfpeak"):
        return _torch_only(name)
    parents = (name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1))
    return next((_REFUSED[parent] for parent in parents if parent in _REFUSED), None)


def module_for(name: str, target: Target) -> str | None:
    """The module that replaces an old module for this target; None if there is none."""
    new = MODULES.get(name)
    return None if new is None or (target == "torch" and not new.startswith("torch")) else new


def is_old(name: str) -> bool:
    """Whether a name belongs to a module whose names are replaced or reported.

    >>> is_old("apex.amp"), is_old("apexpredator"), is_old("torch.cuda.amp.autocast"), is_old("torch.cuda")
    (True, False, True, False)
    """
    return any(name == root or name.startswith(f"{root}.") for root in _REFUSED)


def _mmcv(name: str) -> Replacement | None:
    """The replacement of a name of mmcv.

    >>> _mmcv("mmcv.runner.hooks.optimizer.OptimizerHook").path, _mmcv("mmcv.utils.get_logger").path
    ('halfpeak.runner.OptimizerHook', 'halfpeak.runner.utilities.get_logger')
    """
    match = _NAME_OF_MMCV.fullmatch(name)
    return None if match is None else _names_of_mmcv().get(match[1], {}).get(match[2])


@cache
def _names_of_mmcv() -> Mapping[str, Mapping[str, Replacement]]:
    """The replacements of names of mmcv by package and name, wherever below the package they are imported from."""
    checkpoints, curves = "halfpeak.runner.checkpoint", "halfpeak.runner.hooks.policies"
    wrappers = ("MMDataParallel", "MMDistributedDataParallel")
    utilities = {
        **_in("halfpeak.optim", "Registry"),
        **_in(
            "halfpeak.runner.utilities",
            *("build_from_cfg", "get_logger", "mkdir_or_exist", "print_log", "symlink"),
        ),
    }
    return {
        "mmcv": utilities,
        "mmcv.parallel": {
            **_in("halfpeak.runner", *wrappers),
            **_in("halfpeak.runner.parallel", "is_module_wrapper"),
        },
        "mmcv.runner": {
            **_in("halfpeak.runner", *runner.__all__, Runner="EpochBasedRunner"),
            **_in(checkpoints, "CheckpointLoader", "get_state_dict", _load_checkpoint="load_file"),
            **_in(checkpoints, _load_checkpoint_with_prefix="load_prefix"),
            **_in(curves, annealing_cos="cosine", annealing_linear="linear"),
        },
        "mmcv.utils": utilities,
    }


def _in(module: str, *names: str, **renamed: str) -> dict[str, Replacement]:
    """Replacements in a module, by old name: names that stay the same, and new names by their old ones."""
    news = {name: name for name in names} | renamed
    return {old: Replacement(module=module, name=new) for old, new in news.items()}


def _torch_only(name: str) -> Refusal:
    """The reason why a name that halfpeak has stays where only torch's names may be written."""
    plain = {"FusedAdam": "AdamW", "FusedSGD": "SGD", "FusedAdagrad": "Adagrad"}.get(name.rpartition(".")[2])
    if name.startswith("apex.optimizers.") and plain is not None:
        return Refusal(
            "the defaults of torch's optimizer differ",
            f"write torch.optim.{plain}(..., fused=True) and give weight_decay and eps explicitly, or write --to halfpeak",
        )
    return _OTHER_LOOP if name.startswith("apex.amp") else _NEEDS_HALFPEAK


@cache
def _replacements() -> Mapping[str, Replacement]:
    amp_parts = (f"apex.amp.{part}" for part in _AMP_PARTS)
    fp16_parts = (f"apex.fp16_utils.{part}" for part in _FP16_PARTS)
    applier = ("MultiTensorApply", "multi_tensor_applier")
    table = {
        **_same_names("halfpeak.amp", amp.__all__, "apex.amp", *amp_parts),
        **_same_names("halfpeak.amp.scaler", ("LossScaler",), "apex.amp.scaler"),
        **_same_names("halfpeak.amp.fp16_utils", fp16_utils.__all__, "apex.fp16_utils", *fp16_parts),
        **_same_names("halfpeak.amp.larc", ("LARC",), "apex.parallel", "apex.parallel.LARC"),
        **_same_names("halfpeak.amp.multi_tensor", applier, "apex.multi_tensor_apply"),
        **_same_names("halfpeak.amp.multi_tensor", _MULTI_TENSOR, "amp_C"),
        **_same_names("halfpeak.amp.optimizers", _FUSED, "apex.optimizers"),
        **_same_names("torch.distributed", ("ReduceOp",), "apex.parallel"),
    }
    for name in _FUSED:
        words = name.removeprefix("Fused").replace("MixedPrecision", "mixed_precision_").lower()
        table[f"apex.optimizers.fused_{words}.{name}"] = table[f"apex.optimizers.{name}"]
    for part, name in _CONTRIB.items():
        old = ("apex.contrib.optimizers", f"apex.contrib.optimizers.{part}")
        new = "halfpeak.amp.optimizers" if name in _FUSED else "halfpeak.amp.fp16_utils"
        table.update(_same_names(new, (name,), *old))
    for name in ("flatten", "unflatten"):
        table[f"apex_C.{name}"] = Replacement(module="torch._utils", name=f"_{name}_dense_tensors")
    for device in ("cuda", "cpu"):
        table.update(_torch_amp(device))
    return {**table, **_torch_modules()}


def _same_names(new: str, names: Iterable[str], *old: str) -> dict[str, Replacement]:
    """Replacements for names that stay the same while their module changes, for each of the old modules."""
    return {f"{module}.{name}": one for module in old for name, one in _in(new, *names).items()}


def _torch_modules() -> dict[str, Replacement]:
    """Replacements of apex's modules by torch's, which take other arguments."""
    ddp = Replacement(
        module="torch.nn.parallel", name="DistributedDataParallel", arguments=calls.for_ddp, bare="as a type"
    )
    norm = Replacement(module="torch.nn", name="SyncBatchNorm", arguments=calls.for_syncbn, bare="as a type")
    convert = Replacement(
        module="torch.nn", name="SyncBatchNorm.convert_sync_batchnorm", arguments=calls.for_syncbn
    )
    layer_norm = Replacement(module="torch.nn", name="LayerNorm", arguments=calls.for_layer_norm)
    rms_norm = Replacement(module="torch.nn", name="RMSNorm", arguments=calls.for_rms_norm, bare="as a type")
    return {
        "apex.parallel.DistributedDataParallel": ddp,
        "apex.parallel.distributed.DistributedDataParallel": ddp,
        "apex.parallel.convert_syncbn_model": convert,
        "apex.parallel.SyncBatchNorm": norm,
        "apex.normalization.FusedLayerNorm": layer_norm,
        "apex.normalization.fused_layer_norm.FusedLayerNorm": layer_norm,
        "apex.normalization.FusedRMSNorm": rms_norm,
        "apex.normalization.fused_layer_norm.FusedRMSNorm": rms_norm,
    }


def _torch_amp(device: str) -> dict[str, Replacement]:
    rows: tuple[tuple[str, str, Change, Bare], ...] = (
        ("autocast", "autocast_mode", calls.for_autocast, "as a type"),
        ("GradScaler", "grad_scaler", calls.with_device, "as a type"),
        ("custom_fwd", "autocast_mode", calls.for_custom, "as a decorator"),
        ("custom_bwd", "autocast_mode", calls.for_custom, "as a decorator"),
    )
    return {
        f"torch.{device}.amp.{prefix}{name}": Replacement(
            module="torch.amp", name=name, arguments=arguments, bare=bare, device=device
        )
        for name, part, arguments, bare in rows
        for prefix in ("", f"{part}.")
    }
