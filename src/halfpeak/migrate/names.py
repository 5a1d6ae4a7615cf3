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
    "apex.contrib.optimizers": "halfpeak.amp.optimizers.contrib",
    "apex.fp16_utils": "halfpeak.amp.fp16_utils",
    "apex.multi_tensor_apply": "halfpeak.amp.multi_tensor",
    "apex.optimizers": "halfpeak.amp.optimizers",
    "amp_C": "halfpeak.amp.multi_tensor",
    "mmcv.runner": "halfpeak.runner",
    "torch.cuda.amp": "torch.amp",
    "torch.cpu.amp": "torch.amp",
}
"""Old modules, each with the new module that has the same names."""

FP16_OF_MMCV: Final = frozenset(
    {
        "EpochBasedRunner",
        "Fp16OptimizerHook",
        "GradientCumulativeFp16OptimizerHook",
        "GradientCumulativeOptimizerHook",
        "IterBasedRunner",
        "LossScaler",
        "OptimizerHook",
        "auto_fp16",
        "build_runner",
        "cast_tensor_type",
        "force_fp32",
        "patch_norm_fp32",
        "wrap_fp16_model",
    }
)
"""Names of mmcv's mixed precision and runners. Names of mmcv are replaced only in a file that uses one of these."""

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
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
)
_RUNNER_PARTS: Final = re.compile(r"mmcv\.runner\.(?:[a-z]\w*\.)*(\w+)")

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
    "torch.cuda.amp": Refusal("torch.amp has no such name", "write the code without it"),
    "torch.cpu.amp": Refusal("torch.amp has no such name", "write the code without it"),
}
"""The reasons for old names without a replacement, by prefix; the longest prefix of a name applies."""

_NEEDS_HALFPEAK: Final = Refusal("torch has no counterpart", "write --to amp, or do without it")


def look_up(name: str, target: Target) -> Replacement | Refusal | None:
    """The replacement of an old name, or the reason why there is none; None for a name of another library.

    >>> look_up("apex.amp.scale_loss", "amp").path
    'halfpeak.amp.scale_loss'
    >>> look_up("apex.pyprof", "amp").write
    'use torch.profiler'
    >>> look_up("torch.nn.Linear", "amp")
    """
    found = _replacements().get(name) or _mmcv(name)
    if found is not None:
        if target == "torch" and not found.module.startswith("torch"):
            return _torch_only(name)
        # halfpeak.GradScaler is a torch.amp.GradScaler that computes the same and refuses fewer orders of calls.
        return (
            replace(found, module="halfpeak")
            if target == "halfpeak" and found.name == "GradScaler"
            else found
        )
    if target == "torch" and MODULES.get(name, "torch").startswith("halfpeak"):
        return _NEEDS_HALFPEAK
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
    return any(
        name == root or name.startswith(f"{root}.") for root in (*_REFUSED, "mmcv.runner", "mmcv.parallel")
    )


def _mmcv(name: str) -> Replacement | None:
    match = _RUNNER_PARTS.fullmatch(name)
    if match is None or match[1] not in runner.__all__:
        return None
    return Replacement(module="halfpeak.runner", name=match[1])


def _torch_only(name: str) -> Refusal:
    if name.startswith("apex.optimizers."):
        plain = {"FusedAdam": "AdamW", "FusedSGD": "SGD", "FusedAdagrad": "Adagrad"}.get(
            name.rpartition(".")[2]
        )
        if plain is not None:
            return Refusal(
                "the defaults of torch's optimizer differ",
                f"write torch.optim.{plain}(..., fused=True) and give weight_decay and eps explicitly, or write --to amp",
            )
    return _NEEDS_HALFPEAK


@cache
def _replacements() -> Mapping[str, Replacement]:
    amp_parts = (f"apex.amp.{part}" for part in _AMP_PARTS)
    fp16_parts = (f"apex.fp16_utils.{part}" for part in _FP16_PARTS)
    applier = ("MultiTensorApply", "multi_tensor_applier")
    wrappers = ("MMDataParallel", "MMDistributedDataParallel")
    table = {
        **_same_names("halfpeak.amp", amp.__all__, "apex.amp", *amp_parts),
        **_same_names("halfpeak.amp.scaler", ("LossScaler",), "apex.amp.scaler"),
        **_same_names("halfpeak.amp.fp16_utils", fp16_utils.__all__, "apex.fp16_utils", *fp16_parts),
        **_same_names("halfpeak.amp.larc", ("LARC",), "apex.parallel", "apex.parallel.LARC"),
        **_same_names("halfpeak.amp.multi_tensor", applier, "apex.multi_tensor_apply"),
        **_same_names("halfpeak.amp.multi_tensor", _MULTI_TENSOR, "amp_C"),
        **_same_names("halfpeak.amp.optimizers", _FUSED, "apex.optimizers"),
        **_same_names("halfpeak.runner", wrappers, "mmcv.parallel"),
        **_same_names("torch.distributed", ("ReduceOp",), "apex.parallel"),
    }
    for name in _FUSED:
        words = name.removeprefix("Fused").replace("MixedPrecision", "mixed_precision_").lower()
        table[f"apex.optimizers.fused_{words}.{name}"] = table[f"apex.optimizers.{name}"]
    for part, name in _CONTRIB.items():
        old = ("apex.contrib.optimizers", f"apex.contrib.optimizers.{part}")
        table.update(_same_names("halfpeak.amp.optimizers.contrib", (name,), *old))
    for name in ("flatten", "unflatten"):
        table[f"apex_C.{name}"] = Replacement(module="torch._utils", name=f"_{name}_dense_tensors")
    for device in ("cuda", "cpu"):
        table.update(_torch_amp(device))
    return {**table, **_torch_modules()}


def _same_names(new: str, names: Iterable[str], *old: str) -> dict[str, Replacement]:
    """Replacements for names that stay the same while their module changes, for each of the old modules."""
    replacements = {name: Replacement(module=new, name=name) for name in names}
    return {f"{module}.{name}": one for module in old for name, one in replacements.items()}


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
