"""Codecs: pure functions that encode float32 vectors into stored tensors and decode them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfpeak.fused.rules.base import StateTensor

REMAINDER: Final = "remainder"
"""The key of a remainder in the state row of its parameter."""

BLOCK_SIZES: Final = (128, 64, 32, 16)
"""How many neighbouring 8-bit elements may share one scale, preferred first: 128 take 1/32 byte of scale per element."""

_SMALLEST: Final = 2.0**-126
"""The smallest scale, for blocks of zeros: a normal number, because a kernel may flush a subnormal one to zero."""


class Codec(Protocol):
    """A storage format of a float32 vector: a frozen, hashable value whose functions every backend traces or calls."""

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        """The stored tensors; the first has the shape of the vector. Their names are suffixes to the state's name."""
        ...

    @property
    def kernel_format(self) -> str:
        """The name of the format in the Triton kernels; see :mod:`halfpeak.ops.triton.codecs`."""
        ...

    def for_shape(self, shape: Sequence[int]) -> Codec:
        """The codec for a parameter of this (whole) shape; another one if the format depends on it."""
        return self

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """The vector that the stored tensors encode.  # f32[n]"""
        ...

    def encode(self, value: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        """The tensors that store a vector.

        Args:
            value: the vector.  # f32[n]
            seed: the number of the step, for codecs with stochastic rounding.  # f32[]
        """
        ...


@dataclass(frozen=True, slots=True)
class Identity(Codec):
    """Stores the vector unchanged."""

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        return (StateTensor("", None),)

    @property
    def kernel_format(self) -> str:
        return "identity"

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].float()

    def encode(self, value: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        return (value,)


@dataclass(frozen=True, slots=True)
class Bfloat16(Codec):
    """The upper half of a float32: 2 bytes, 8 bits of precision.

    Attributes:
        stochastic: round stochastically instead of to nearest, because a second moment shrinks by a thousandth per
            step, a quarter of the change that rounding to nearest would keep, so it would never fall.

    Source: stochastic rounding, Gupta et al., 2015 (arXiv:1502.02551).

    Example:
        >>> [float(Bfloat16(stochastic=True).encode(torch.full((1,), 0.999), torch.tensor(step))[0]) for step in (1.0, 2.0)]
        [1.0, 0.99609375]
    """

    stochastic: bool = False

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        return (StateTensor("", torch.bfloat16),)

    @property
    def kernel_format(self) -> str:
        return "bf16_stochastic" if self.stochastic else "bf16"

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].float()

    def encode(self, value: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        if not self.stochastic:
            return (value.to(torch.bfloat16),)
        bits = value.view(torch.int32)
        return (((bits + hash_bits(bits, seed)) >> 16).to(torch.int16).view(torch.bfloat16),)


@dataclass(frozen=True, slots=True)
class _Blocked(Codec):
    """Numbers in blocks of neighbours with one scale each.

    A block never crosses a row, which is an index of dimension 0. So the scales are a tensor ``[rows, blocks]``, and a part
    of a sharded parameter, which has whole rows, has the blocks and the bits that the whole parameter would have.

    Attributes:
        block: elements of a block, one of :data:`BLOCK_SIZES`.
    """

    block: int = BLOCK_SIZES[0]

    def for_shape(self, shape: Sequence[int]) -> Codec:
        """The largest blocks that divide the rows; float32 where none does, as for vectors, which have rows of one element.

        >>> [Int8Block().for_shape(shape) for shape in ((8, 4096), (8, 5, 64), (8, 3, 3, 3), (4096,))]
        [Int8Block(block=128), Int8Block(block=64), Identity(), Identity()]
        """
        row = math.prod(shape[1:]) if len(shape) > 1 else 1
        block = next((size for size in BLOCK_SIZES if row and row % size == 0), None)
        return Identity() if block is None else replace(self, block=block)


@dataclass(frozen=True, slots=True)
class Int8Block(_Blocked):
    """Signed 8-bit integers, from -127 to 127, in blocks with one scale each.

    Source: 8-bit state in blocks, Dettmers et al., 2022 (arXiv:2110.02861).

    Example:
        >>> value = torch.tensor([0.5, -1.27, 0.01])
        >>> parts = Int8Block().encode(value, torch.tensor(1.0))
        >>> parts[0].tolist(), [round(x, 3) for x in Int8Block().decode(parts).tolist()]
        ([50, -127, 1], [0.5, -1.27, 0.01])
    """

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        return (StateTensor("", torch.int8), StateTensor("_scale", torch.float32, self.block))

    @property
    def kernel_format(self) -> str:
        return "int8_block"

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return _unblocked(_blocked(parts[0].float(), self.block) * parts[1].unsqueeze(1), parts[0])

    def encode(self, value: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        rows = _blocked(value, self.block)
        # Not divided by 127: a GPU multiplies by the reciprocal of a host number, and other devices do not.
        scale = (rows.abs().amax(1) * (1 / 127)).clamp_min(_SMALLEST)
        return _unblocked(torch.round(rows / scale.unsqueeze(1)), value).to(torch.int8), scale


@dataclass(frozen=True, slots=True)
class UInt8SqrtBlock(_Blocked):
    """The root of non-negative numbers as integers from 0 to 255, in blocks with one scale each.

    Rounding is stochastic, for the reason that :class:`Bfloat16` gives. A number above zero is stored as at least 1,
    because a second moment divides a first moment that need not be zero.

    Source: 8-bit state in blocks, Dettmers et al., 2022 (arXiv:2110.02861); a curve before the 8 bits, FlashOptim, Gonzalez
    Ortiz et al., 2026 (arXiv:2602.23349).

    Example:
        >>> parts = UInt8SqrtBlock().encode(torch.tensor([4.0, 1e-12, 0.0]), torch.tensor(1.0))
        >>> parts[0].tolist(), round(UInt8SqrtBlock().decode(parts)[0].item(), 4)
        ([255, 1, 0], 4.0)
    """

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        return (StateTensor("", torch.uint8), StateTensor("_scale", torch.float32, self.block))

    @property
    def kernel_format(self) -> str:
        return "uint8_sqrt_block"

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return _unblocked(_blocked(parts[0].float(), self.block) * parts[1].unsqueeze(1), parts[0]).square()

    def encode(self, value: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        rows = _blocked(value.sqrt(), self.block)
        scale = (rows.amax(1) * (1 / 255)).clamp_min(_SMALLEST)
        steps = _unblocked(rows / scale.unsqueeze(1), value)
        up = hash_bits(value.view(torch.int32), seed).float() * 2.0**-16
        whole = (steps + up).floor().clamp(max=255.0)
        return torch.maximum(whole, (value > 0).float()).to(torch.uint8), scale


@dataclass(frozen=True, slots=True)
class Remainder:
    """A float32 weight as the low-precision weight of the model and the remainder that its rounding loses.

    Beside a bfloat16 weight 16 bits restore every float32 exactly, except for the payload of a nan. The bfloat16 is the
    nearest one. A value exactly between two goes to the one farther from zero, because rounding to even, as a cast does,
    would need 65,537 remainders. The result differs from a cast for one value in 130,000.

    Beside a float16 weight 16 bits restore a float32 from 2**-16 to 65520 exactly, and a smaller one to 2**-40; the
    float16 is that of a cast. A larger finite value becomes 65519.996, the largest that rounds to 65504, so that a weight
    that reaches the end of the range stays finite and can come back.

    With 8 bits a weight has 16 significant bits with bfloat16 and 18 with float16. It is rounded stochastically, so that
    updates smaller than a rounding are kept on average. The methods are those of a :class:`Codec`.

    Attributes:
        bits: of the remainder: 16 or 8.
        low: dtype of the model's weight: ``torch.bfloat16`` or ``torch.float16``. The remainder is a signed integer beside
            the first and an unsigned one (modulo 2**bits) beside the second, so that a state tells which it is of.

    Source: 16 bits, Split-SGD, Kalamkar et al., 2020 (arXiv:2005.04680), and ``store_param_remainders`` of NVIDIA's apex; 8
    bits, FlashOptim, Gonzalez Ortiz et al., 2026 (arXiv:2602.23349).

    Example:
        >>> value = torch.tensor([0.1, -3.0, 1e-30])
        >>> low, remainder = Remainder().encode(value, torch.tensor(1.0))
        >>> low.dtype, remainder.dtype, torch.equal(Remainder().decode((low, remainder)), value)
        (torch.bfloat16, torch.int16, True)
        >>> value = torch.tensor([0.1, -3.0, 1e6])
        >>> low, remainder = Remainder(low=torch.float16).encode(value, torch.tensor(1.0))
        >>> low.tolist(), [round(x, 3) for x in Remainder(low=torch.float16).decode((low, remainder)).tolist()]
        ([0.0999755859375, -3.0, 65504.0], [0.1, -3.0, 65519.996])
    """

    bits: int = 16
    low: torch.dtype = torch.bfloat16

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        return StateTensor("", self.low), StateTensor(REMAINDER, _REMAINDER_DTYPES[self.low, self.bits])

    def of(self, low: torch.dtype) -> Remainder:
        """The same for weights of another low-precision dtype."""
        return Remainder(self.bits, low)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        low, rest = parts[0].view(torch.int16).to(torch.int32), parts[1].view(self._signed).to(torch.int32)
        # encode never rounds up to zero: other code wrote this zero, and there is nothing below it.
        rest = torch.where(((low & 0x7FFF) == 0) & (rest < 0), 0, rest) << (16 - self.bits)
        return _join_float16(low, rest) if self.low is torch.float16 else _join_bfloat16(low, rest)

    def encode(self, value: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        noise = hash_bits(value.view(torch.int32), seed) >> 8 if self.bits == 8 else 0
        split = _split_float16 if self.low is torch.float16 else _split_bfloat16
        low, rest = split(value, noise, self.bits)
        return low.to(torch.int16).view(self.low), rest.to(self._signed).view(
            _REMAINDER_DTYPES[self.low, self.bits]
        )

    @property
    def _signed(self) -> torch.dtype:
        return torch.int16 if self.bits == 16 else torch.int8


_REMAINDER_DTYPES: Final = {
    (torch.bfloat16, 16): torch.int16,
    (torch.bfloat16, 8): torch.int8,
    (torch.float16, 16): torch.uint16,
    (torch.float16, 8): torch.uint8,
}


def _split_bfloat16(value: Tensor, noise: Tensor | int, size: int) -> tuple[Tensor, Tensor]:
    """The bits of the nearest bfloat16, and the rest of the float32's bits, which ``noise`` rounds to ``size`` bits."""
    # A nan with a large payload could round up to zero.
    bits = torch.where(torch.isnan(value), 0x7FC00000, value.view(torch.int32) + noise)
    rest = (bits << 16) >> (32 - size)
    return (bits >> 16) + (rest < 0).to(torch.int32), rest


def _join_bfloat16(low: Tensor, rest: Tensor) -> Tensor:
    """The inverse of :func:`_split_bfloat16`, with a rest of 16 bits."""
    return (((low - (rest < 0).to(torch.int32)) << 16) | (rest & 0xFFFF)).view(torch.float32)


def _split_float16(value: Tensor, noise: Tensor | int, size: int) -> tuple[Tensor, Tensor]:
    """The bits of the nearest float16, and how far the magnitude is from it, which ``noise`` rounds to ``size`` bits.

    The bits of float16 count its values from zero on. Between two of them the magnitude is written with 15 binary digits
    (one fewer than bits, for the sign): two more than a float32 has there, and steps of 2**-39 below 2**-14, where float16
    has steps of 2**-24.
    """
    magnitude, digits = value.view(torch.int32) & 0x7FFFFFFF, size - 1
    normal = (magnitude.clamp(max=_TWO_TO_16) - _BIAS) << 2
    subnormal = (value.abs().clamp(max=2.0**-14) * 2.0**39).round().to(torch.int32)
    count = torch.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    half = 1 << (digits - 1)
    count = ((count + noise) >> (15 - digits)).clamp(max=(0x7BFF << digits) + half - 1)
    low = (count + half - 1 + ((count >> digits) & 1)) >> digits  # ties to even
    is_finite = magnitude < _INFINITY
    rest = torch.where(is_finite, count - (low << digits), 0)
    low = torch.where(is_finite, low, torch.where(magnitude == _INFINITY, 0x7C00, 0x7E00))
    return low | ((value.view(torch.int32) >> 16) & 0x8000), rest


def _join_float16(low: Tensor, rest: Tensor) -> Tensor:
    """The inverse of :func:`_split_float16`, with a rest of 15 digits."""
    count = ((low & 0x7FFF) << 15) + rest
    normal = ((count >> 2) + _BIAS).view(torch.float32)
    value = torch.where(count < 1 << 25, count.float() * 2.0**-39, normal)
    value = torch.where(low < 0, -value, value)
    is_finite = (low & 0x7C00) != 0x7C00
    return torch.where(is_finite, value, low.to(torch.int16).view(torch.float16).float())


_BIAS: Final = 112 << 23
"""What the exponent of a float32 has more than that of a float16, in the bits of a float32."""

_SMALLEST_NORMAL: Final = 113 << 23
"""The bits of 2**-14 as a float32, the smallest normal float16."""

_TWO_TO_16: Final = 143 << 23
_INFINITY: Final = 255 << 23


def hash_bits(bits: Tensor, seed: Tensor) -> Tensor:
    """16 pseudo-random bits for each element, computed from its bits and the number of the step: the same in every run.

    Args:
        bits: of the values to be rounded.  # i32[n]
        seed: the number of the step.       # f32[]

    Source: the multipliers of MurmurHash3 and, for the seed, of Knuth's Fibonacci hashing.
    """
    mixed = (bits ^ (seed.to(torch.int32) * -1640531527)) * -2048144789
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -1028477387
    return (mixed >> 16) & 0xFFFF


def _blocked(value: Tensor, block: int) -> Tensor:
    return pad(value, (0, -value.shape[0] % block)).view(-1, block)


def _unblocked(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1)[: like.shape[0]]
