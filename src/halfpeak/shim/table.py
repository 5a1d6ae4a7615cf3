"""What can be installed: one row for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from halfpeak.shim.description import Shim
from halfpeak.shim.emulated.amp import set_up as set_up_apex
from halfpeak.shim.mmcv_hooks import set_up as set_up_mmcv
from halfpeak.shim.mmengine import set_up as set_up_mmengine

_APEX = Shim(
    packages={"apex": "apex", "amp_C": "amp_C.py", "apex_C": "apex_C.py"},
    distribution="apex",
    version="0.1+halfpeak",  # apex has called itself 0.1 in every release
    absent={
        "apex.transformer": "use Megatron-Core, which took it over",
        "apex.parallel.multiproc": "use torchrun",
        "apex.pyprof": "use torch.profiler",
        "apex.RNN": "use torch.nn.LSTM, GRU and RNN, which amp casts",
        "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
        "apex.optimizers.FP16_Optimizer": "import it, and the FusedAdam that goes with it, from apex.contrib.optimizers",
        "apex.optimizers": "use torch.optim, or halfpeak.fused",
        "apex.mlp": "use torch.nn.Linear, which torch.compile fuses with what follows",
        "apex.fused_dense": "use torch.nn.Linear, which torch.compile fuses with what follows",
        "apex.contrib.optimizers": "use FullyShardedDataParallel of torch for sharded optimizers",
        "apex.contrib": "its kernels need CUDA; use the functions of torch.nn, which torch.compile fuses",
    },
    setup=set_up_apex,
)

_MMCV_2 = "install mmcv-lite, whose version 2 has it; mmcv.runner is added to that"

_MMCV = Shim(
    packages={"mmcv": "mmcv"},
    distribution="mmcv",
    version="1.7.2+halfpeak",
    absent={
        "mmcv.Config": "use mmengine.Config, its successor",
        "mmcv.utils.Config": "use mmengine.Config, its successor",
        "mmcv.cnn": _MMCV_2,
        "mmcv.image": _MMCV_2,
        "mmcv.ops": "install mmcv of version 2; mmcv.runner is added to that",
        "mmcv.fileio": "use mmengine.fileio",
        "mmcv.parallel": "use torch.utils.data.default_collate, and move a batch to its device in train_step",
        "mmcv.runner.hooks": "use TextLoggerHook or TensorboardLoggerHook for logs; docs/compat/mmcv.md lists all hooks",
        "mmcv.runner": "docs/compat/mmcv.md lists what is there",
    },
    setup=set_up_mmcv,
    page="docs/compat/mmcv.md",
)

_MMENGINE = Shim(setup=set_up_mmengine, page="docs/compat/mmengine.md")

SHIMS: Final[Mapping[str, Shim]] = MappingProxyType({"apex": _APEX, "mmcv": _MMCV, "mmengine": _MMENGINE})
"""The name that ``install`` takes -> what it brings."""
