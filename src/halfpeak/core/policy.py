"""Policy: the dtypes of a model's parameters, computation and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr

NormRule = Literal["all", "batchnorm", "none"]
"""Which normalisation layers stay float32 in a low-precision model.

``"all"``: every batch, instance, layer, group and RMS norm. ``"batchnorm"``: affine batch norms only, which is apex's
rule. ``"none"``: no layer.
"""

KeepFp32: TypeAlias = "type[Any] | str | Callable[[str, Any], bool]"
"""An entry that selects modules to stay float32 with all submodules: a class, a pattern of :mod:`fnmatch` for qualified names
(``"head.*"``), or a function of name and module."""


def parse_modules(keyword: str, given: object) -> tuple[KeepFp32, ...]:
    """The entries of a keyword argument that selects modules.

    Raises:
        ConfigTypeError: ``given`` is no list, or an entry has another type.

    >>> parse_modules("keep_fp32", ["head.*"])
    ('head.*',)
    """
    entries: tuple[Any, ...] | None = (
        tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else None
    )
    modules = any(isinstance(entry, torch.nn.Module) for entry in entries or (given,))
    if entries is None or modules or not all(isinstance(entry, str) or callable(entry) for entry in entries):
        example = "['3'] for model[3]" if modules else '[nn.LayerNorm, "head.*"]'
        raise ConfigTypeError(
            f"{keyword}={short_repr(given)} must be a list of module classes, patterns of names, or functions of name and "
            f"module; write {keyword}={example}"
        )
    return entries


Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""torchao's names for what shares a scale in float8 products: a tensor; a row; or a row, with the gradients of weights
computed in bfloat16."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Which linear layers of a bfloat16 model compute in float8, and how.

    Attributes:
        recipe: see :data:`Float8Recipe`; the fastest first, the most accurate last.
        exclude: layers that stay bfloat16, such as the last one: a list like ``keep_fp32`` (see :data:`KeepFp32`).

    Source: the recipes and the products, torchao; the formats, Micikevicius et al., 2022 (arXiv:2209.05433).

    Raises:
        ConfigError: an unknown recipe.
        ConfigTypeError: ``exclude`` is no list, or an entry has another type.

    >>> Float8("rowwise", exclude=["head"])
    Float8(recipe='rowwise', exclude=('head',))
    """

    recipe: Float8Recipe
    exclude: Sequence[KeepFp32] = ()

    def __post_init__(self) -> None:
        if self.recipe not in get_args(Float8Recipe):
            allowed = ", ".join(map(repr, get_args(Float8Recipe)))
            raise ConfigError(f"float8={short_repr(self.recipe)} must be one of {allowed}, or a Float8")
        object.__setattr__(self, "exclude", parse_modules("exclude", self.exclude))


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The dtypes of a model's parameters, computation and output. A value: it casts nothing itself.

    Attributes:
        param: dtype of parameters and buffers; None leaves them as given.
        compute: dtype of matrix products and convolutions; None leaves them as given.
        output: dtype that ``forward`` returns; None leaves it as given.
        masters: whether the optimizer steps float32 copies of the low parameters.
        norms: which normalisation layers stay float32 (see :data:`NormRule`).
        per_op: cast per operation (O1, O4) rather than per module (O0, O2, O3, O5).
        keep_fp32: which other modules are stored and computed in float32 (see :data:`KeepFp32`).
        cast_forward_inputs: whether a model casts its inputs to ``param``.
        float8: which linear layers multiply in float8; None for no layer.

    Raises:
        ConfigError: an unknown norm rule.
        ConfigTypeError: ``cast_forward_inputs`` is no bool.

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
    cast_forward_inputs: bool = True
    float8: Float8 | None = None

    @property
    def may_step_low(self) -> bool:
        """Whether optimizers may step low weights: not where a level makes the model float32, or casts its operations."""
        return not self.per_op and self.param is not torch.float32

    def __post_init__(self) -> None:
        if self.norms not in get_args(NormRule):
            raise ConfigError(
                f"norms={short_repr(self.norms)} must be one of {', '.join(map(repr, get_args(NormRule)))}"
            )
        if not isinstance(self.cast_forward_inputs, bool):
            raise ConfigTypeError(
                f"cast_forward_inputs={short_repr(self.cast_forward_inputs)} must be True or False"
            )
