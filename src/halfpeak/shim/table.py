"""What can be installed: one row for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from halfpeak.shim.description import Shim
from halfpeak.shim.emulated.amp import set_up as set_up_apex
from halfpeak.shim.mmengine import set_up as set_up_mmengine

_APEX = Shim(
    packages={"apex": "apex", "amp_C": "amp_C.py"},
    distribution="apex",
    version="0.1+halfpeak",  # apex has called itself 0.1 in every release
    absent={
        "apex.transformer": "use Megatron-Core, which took it over",
        "apex.parallel.multiproc": "use torchrun",
        "apex.pyprof": "use torch.profiler",
        "apex.RNN": "use torch.nn.LSTM, GRU and RNN, which amp casts",
        "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
        "apex.contrib": "its kernels need CUDA; use the functions of torch.nn, which torch.compile fuses",
    },
    setup=set_up_apex,
)

_MMENGINE = Shim(setup=set_up_mmengine, page="docs/compat/mmengine.md")

SHIMS: Final[Mapping[str, Shim]] = MappingProxyType({"apex": _APEX, "mmengine": _MMENGINE})
"""The name that ``install`` takes -> what it brings."""
