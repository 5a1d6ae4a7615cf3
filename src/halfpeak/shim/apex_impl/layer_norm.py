"""``apex.normalization`` on torch's functions: layer norm and RMS norm, computed in float32."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError
from halfpeak.core.keywords import known_keywords

Shape: TypeAlias = int | Sequence[int] | torch.Size


def manual_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float
) -> Tensor:
    """``input / sqrt(mean(input**2) + eps)`` over the last dims, in a low-precision weight's dtype, ``* weight``."""
    dims = tuple(range(-len(normalized_shape), 0))
    normed = input * torch.rsqrt(input.float().pow(2).mean(dims, keepdim=True) + eps)
    if weight is None:
        return normed
    return weight * (normed.to(weight.dtype) if is_low(weight) else normed)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weight and bias, in the dtype of ``input``."""
    return _layer_norm(input, normalized_shape, weight, bias, eps).to(input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without weight and bias, in the dtype of ``input``."""
    return _layer_norm(input, normalized_shape, None, None, eps).to(input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weight and bias, in the dtype of ``weight``."""
    return _layer_norm(input, normalized_shape, weight, bias, eps).to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with weight, in the dtype of ``input``."""
    return _rms_norm(input, normalized_shape, weight, eps).to(input.dtype)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm without weight, in the dtype of ``input``."""
    return _rms_norm(input, normalized_shape, None, eps).to(input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with weight, in the dtype of ``weight``."""
    return _rms_norm(input, normalized_shape, weight, eps).to(weight.dtype)


class OlderName(NamedTuple):
    """By which older scripts call a function: ``FusedLayerNormFunction.apply(input, normalized_shape, eps)``."""

    apply: Callable[..., Tensor]


FusedLayerNormAffineFunction: Final = OlderName(fused_layer_norm_affine)
FusedLayerNormFunction: Final = OlderName(fused_layer_norm)
FusedRMSNormAffineFunction: Final = OlderName(fused_rms_norm_affine)
FusedRMSNormFunction: Final = OlderName(fused_rms_norm)


class _FusedNorm(nn.Module):
    """Adds apex's argument ``memory_efficient`` to torch's norms."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(list(_shape(normalized_shape)), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def _output_dtype(self, input: Tensor) -> torch.dtype:
        return input.dtype


class FusedLayerNorm(_FusedNorm, nn.LayerNorm):
    """``torch.nn.LayerNorm``, computed in float32 and returned in the input's dtype, for a weight of any dtype.

    Args:
        memory_efficient: no effect here.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the input over its last dimensions."""
        out = _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return out.to(self._output_dtype(input))


class FusedRMSNorm(_FusedNorm, nn.RMSNorm):
    """``torch.nn.RMSNorm``, computed in float32 and returned in the input's dtype, for a weight of any dtype.

    Args:
        memory_efficient: no effect here.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The input, divided by its root mean square over its last dimensions."""
        out = _rms_norm(x, self.normalized_shape, self.weight, self.eps or 0.0)
        return out.to(self._output_dtype(x))


class _MixedNorm(_FusedNorm):
    """A norm whose output has the dtype of its weight, so it requires a weight."""

    weight: nn.Parameter

    @known_keywords()
    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            raise ConfigError(
                f"{type(self).__name__} needs elementwise_affine=True, because its output has the dtype of its weight"
            )
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def _output_dtype(self, input: Tensor) -> torch.dtype:
        return self.weight.dtype


class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """:class:`FusedLayerNorm` whose output has the dtype of its weight.

    Raises:
        ConfigError: ``elementwise_affine=False``: there would be no weight.
    """


class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """:class:`FusedRMSNorm` whose output has the dtype of its weight.

    Raises:
        ConfigError: ``elementwise_affine=False``: there would be no weight.
    """


def _shape(normalized_shape: Shape) -> tuple[int, ...]:
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    return tuple(normalized_shape)  # type: ignore[arg-type]


def _layer_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Layer norm in the widest dtype of the arguments, at least float32."""
    wide = _widest(input, weight, bias)
    return F.layer_norm(
        input.to(wide),
        list(_shape(shape)),
        None if weight is None else weight.to(wide),
        None if bias is None else bias.to(wide),
        eps,
    )


def _rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    wide = _widest(input, weight)
    return F.rms_norm(input.to(wide), list(_shape(shape)), None if weight is None else weight.to(wide), eps)


def _widest(*tensors: Tensor | None) -> torch.dtype:
    dtypes = (tensor.dtype for tensor in tensors if tensor is not None)
    return reduce(torch.promote_types, dtypes, torch.float32)
