"""Policy: in which dtype each thing is stored, computed and returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

NormRule = Literal["all", "batchnorm", "none"]
"""Which normalisation layers stay float32 in a low model.

``"all"``: every batch, instance, layer, group and RMS norm. ``"batchnorm"``: affine batch norms only, which is apex's
rule. ``"none"``: no layer.
"""

KeepFp32: TypeAlias = "type[Any] | str | Callable[[str, Any], bool]"
"""Which modules stay float32, with all that is in them: those of a class, those whose qualified name fits a pattern of
:mod:`fnmatch` (``"head.*"``), or those for which a function of name and module is true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A value that says in which dtype each thing is stored, computed and returned. It casts nothing itself.

    Attributes:
        param: what the module stores; None leaves it as given.
        compute: what matrix products and convolutions run in; None leaves them as given.
        output: what ``forward`` returns; None leaves it as given.
        masters: whether the optimizer steps float32 copies of the low parameters.
        norms: which normalisation layers stay float32 (see :data:`NormRule`).
        per_op: cast per operation (O1, O4) rather than per module (O0, O2, O3, O5).
        keep_fp32: which other modules are stored and computed in float32 (see :data:`KeepFp32`).

    >>> Policy(param=torch.bfloat16, compute=torch.bfloat16, output=torch.float32, masters=True).norms
    'all'
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    output: torch.dtype | None = None
    masters: bool = False
    norms: NormRule = "all"
    per_op: bool = False
    keep_fp32: tuple[KeepFp32, ...] = ()
