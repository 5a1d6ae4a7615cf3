"""Old names and what answers to them: one table per library, no code trees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final, Literal

from halfpeak import amp, runner
from halfpeak.amp import fp16_utils
from halfpeak.migrate.findings import Refusal, Target

Bare = Literal["always", "as a type", "as a decorator", "never"]
"""Where a name may stand without being called and still be replaced."""

Arguments = Literal["keep", "device", "autocast", "custom", "ddp", "syncbn", "layer_norm", "rms_norm"]
"""How the arguments of a call change; :mod:`halfpeak.migrate.calls` does it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What answers to an old name.

    Attributes:
        module: where it is.
        name: what it is called there; with a dot it is reached through a class of the module.
        arguments: how the arguments of a call change.
        bare: where it may stand without a call.
        device: the device that the old name implied.
    """

    module: str
    name: str
    arguments: Arguments = "keep"
    bare: Bare = "always"
    device: str = "cuda"

    @property
    def path(self) -> str:
        """The name in full, as people write it."""
        return (
            "torch.autocast"
            if (self.module, self.name) == ("torch.amp", "autocast")
            else f"{self.module}.{self.name}"
        )


Answer = Rule | Refusal

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "apex.amp": "halfpeak.amp",
        "apex.fp16_utils": "halfpeak.amp.fp16_utils",
        "apex.multi_tensor_apply": "halfpeak.amp.multi_tensor",
        "apex.optimizers": "halfpeak.amp.optimizers",
        "amp_C": "halfpeak.amp.multi_tensor",
        "mmcv.runner": "halfpeak.runner",
        "torch.cuda.amp": "torch.amp",
        "torch.cpu.amp": "torch.amp",
    }
)
"""Modules that another one answers to under the same names."""

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
"""A file that uses one of these takes its other names of ``mmcv.runner`` along."""

_FUSED: Final = ("FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD")
_AMP_PARTS: Final = ("frontend", "handle", "amp", "_amp_state")
_FP16_PARTS: Final = ("fp16util", "fp16_optimizer", "loss_scaler")
_STEPS: Final = (
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_lamb",
    "multi_tensor_novograd",
    "multi_tensor_sgd",
)
_MULTI_TENSOR: Final = (
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
)
_RUNNER_PARTS: Final = re.compile(r"mmcv\.runner\.(?:[a-z]\w*\.)*(\w+)")

_GONE: Final = "has no counterpart in halfpeak"
_WHOLE: Final[Mapping[str, Refusal]] = MappingProxyType(
    {
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
        "apex.transformer": Refusal(
            _GONE, "use torch.distributed.tensor.parallel, or Megatron-LM's own package"
        ),
        "apex.pyprof": Refusal(_GONE, "use torch.profiler"),
        "apex.RNN": Refusal(_GONE, "use torch.nn.LSTM or torch.nn.GRU"),
        "apex.mlp": Refusal(_GONE, "use torch.nn.Linear and torch.compile"),
        "apex.fused_dense": Refusal(_GONE, "use torch.nn.Linear and torch.compile"),
        "apex.reparameterization": Refusal(_GONE, "use torch.nn.utils.parametrizations.weight_norm"),
        "apex": Refusal("halfpeak does not answer to this name", "import what you need by its full name"),
        "amp_C": Refusal(_GONE, "use torch._foreach_* functions"),
        "apex_C": Refusal(_GONE, "use torch._utils._flatten_dense_tensors and _unflatten_dense_tensors"),
        "torch.cuda.amp": Refusal("torch.amp has no such name", "write the code without it"),
        "torch.cpu.amp": Refusal("torch.amp has no such name", "write the code without it"),
    }
)
"""Names without a rule: the longest of these that they begin with speaks for them."""

_NEEDS_HALFPEAK: Final = Refusal("torch has no counterpart", "write --to amp, or do without it")


def answer(name: str, target: Target) -> Answer | None:
    """What to put in place of an old name; None if it is nobody's that this knows.

    >>> answer("apex.amp.scale_loss", "amp").path
    'halfpeak.amp.scale_loss'
    >>> answer("apex.pyprof", "amp").write
    'use torch.profiler'
    >>> answer("torch.nn.Linear", "amp")
    """
    found = _rules().get(name) or _mmcv(name)
    if found is not None:
        if target == "torch" and not found.module.startswith("torch"):
            return _torch_only(name)
        # Ours is a torch.amp.GradScaler, with the same numbers and without the orders of calls that it refuses.
        return (
            replace(found, module="halfpeak")
            if target == "halfpeak" and found.name == "GradScaler"
            else found
        )
    if target == "torch" and MODULES.get(name, "torch").startswith("halfpeak"):
        return _NEEDS_HALFPEAK
    parents = (name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1))
    return next((_WHOLE[parent] for parent in parents if parent in _WHOLE), None)


def module_for(name: str, target: Target) -> str | None:
    """The module that answers to an old module, if all of its names may be looked up there."""
    new = MODULES.get(name)
    return None if new is None or (target == "torch" and not new.startswith("torch")) else new


def is_ours(name: str) -> bool:
    """Whether an old name, or the module it is in, belongs to a library that is rewritten.

    >>> is_ours("apex.amp"), is_ours("apexpredator"), is_ours("torch.cuda.amp.autocast"), is_ours("torch.cuda")
    (True, False, True, False)
    """
    return any(
        name == root or name.startswith(f"{root}.") for root in (*_WHOLE, "mmcv.runner", "mmcv.parallel")
    )


def _mmcv(name: str) -> Rule | None:
    match = _RUNNER_PARTS.fullmatch(name)
    if match is None:
        return None
    if match[1] in runner.__all__:
        return Rule(module="halfpeak.runner", name=match[1])
    special = {"patch_norm_fp32": "fp16_model", "cast_tensor_type": "casting"}
    part = special.get(match[1])
    return None if part is None else Rule(module=f"halfpeak.runner.{part}", name=match[1])


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
def _rules() -> Mapping[str, Rule]:
    table: dict[str, Rule] = {}
    for name in amp.__all__:
        table[f"apex.amp.{name}"] = rule = Rule(module="halfpeak.amp", name=name)
        table.update({f"apex.amp.{part}.{name}": rule for part in _AMP_PARTS})
    table["apex.amp.scaler.LossScaler"] = Rule(module="halfpeak.amp.scaler", name="LossScaler")
    for name in fp16_utils.__all__:
        table[f"apex.fp16_utils.{name}"] = rule = Rule(module="halfpeak.amp.fp16_utils", name=name)
        table.update({f"apex.fp16_utils.{part}.{name}": rule for part in _FP16_PARTS})
    for name in ("MultiTensorApply", "multi_tensor_applier"):
        table[f"apex.multi_tensor_apply.{name}"] = Rule(module="halfpeak.amp.multi_tensor", name=name)
    table.update(
        {f"amp_C.{name}": Rule(module="halfpeak.amp.multi_tensor", name=name) for name in _MULTI_TENSOR}
    )
    table.update(
        {f"amp_C.{name}": Rule(module="halfpeak.amp.multi_tensor_steps", name=name) for name in _STEPS}
    )
    for name in _FUSED:
        table[f"apex.optimizers.{name}"] = rule = Rule(module="halfpeak.amp.optimizers", name=name)
        table[f"apex.optimizers.fused_{name[5:].lower()}.{name}"] = rule
    for name in ("flatten", "unflatten"):
        table[f"apex_C.{name}"] = Rule(module="torch._utils", name=f"_{name}_dense_tensors")
    table.update(_parallel())
    table.update(_normalization())
    for device in ("cuda", "cpu"):
        table.update(_torch(device))
    return MappingProxyType(table)


def _parallel() -> dict[str, Rule]:
    larc = Rule(module="halfpeak.amp.larc", name="LARC")
    ddp = Rule(module="torch.nn.parallel", name="DistributedDataParallel", arguments="ddp", bare="as a type")
    norm = Rule(module="torch.nn", name="SyncBatchNorm", arguments="syncbn", bare="as a type")
    convert = Rule(module="torch.nn", name="SyncBatchNorm.convert_sync_batchnorm", arguments="syncbn")
    return {
        "apex.parallel.DistributedDataParallel": ddp,
        "apex.parallel.distributed.DistributedDataParallel": ddp,
        "apex.parallel.convert_syncbn_model": convert,
        "apex.parallel.SyncBatchNorm": norm,
        "apex.parallel.LARC": larc,
        "apex.parallel.LARC.LARC": larc,
        "apex.parallel.ReduceOp": Rule(module="torch.distributed", name="ReduceOp"),
        **{
            f"mmcv.parallel.{name}": Rule(module="halfpeak.runner", name=name)
            for name in ("MMDataParallel", "MMDistributedDataParallel")
        },
    }


def _normalization() -> dict[str, Rule]:
    rules = {
        "FusedLayerNorm": Rule(module="torch.nn", name="LayerNorm", arguments="layer_norm"),
        "FusedRMSNorm": Rule(module="torch.nn", name="RMSNorm", arguments="rms_norm", bare="as a type"),
    }
    parts = ("apex.normalization", "apex.normalization.fused_layer_norm")
    return {f"{part}.{name}": rule for part in parts for name, rule in rules.items()}


def _torch(device: str) -> dict[str, Rule]:
    rules = {
        "autocast": Rule(
            module="torch.amp", name="autocast", arguments="autocast", bare="as a type", device=device
        ),
        "GradScaler": Rule(
            module="torch.amp", name="GradScaler", arguments="device", bare="as a type", device=device
        ),
    }
    for name in ("custom_fwd", "custom_bwd"):
        rules[name] = Rule(
            module="torch.amp", name=name, arguments="custom", bare="as a decorator", device=device
        )
    homes = {"autocast": "autocast_mode", "GradScaler": "grad_scaler"}
    table: dict[str, Rule] = {}
    for name, rule in rules.items():
        table[f"torch.{device}.amp.{name}"] = rule
        table[f"torch.{device}.amp.{homes.get(name, 'autocast_mode')}.{name}"] = rule
    return table


__all__ = ["FP16_OF_MMCV", "MODULES", "Rule", "answer", "is_ours", "module_for"]
