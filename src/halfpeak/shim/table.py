"""What can be installed: one row for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from halfpeak.shim.description import Shim

_APEX = Shim(
    packages={"apex": "apex", "amp_C": "amp_C.py"},
    distribution="apex",
    version="0.1+halfpeak",  # apex has called itself 0.1 in every release
    absent={
        "apex.transformer": "use Megatron-Core, which took it over",
        "apex.pyprof": "use torch.profiler",
        "apex.RNN": "use torch.nn.LSTM, GRU and RNN, which amp casts",
        "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
        "apex.contrib": "its kernels need CUDA; use the functions of torch.nn, which torch.compile fuses",
    },
)

SHIMS: Final[Mapping[str, Shim]] = MappingProxyType({"apex": _APEX})
"""The name that ``install`` takes -> what it brings."""
