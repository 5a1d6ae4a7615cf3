"""Books: what a step writes down beside the weights, so that one kernel can do it where the gradients are."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from halfpeak.core.host import is_on_host, read_host
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance


class Books(NamedTuple):
    """What a step needs to know before its gradients are read.

    Attributes:
        config: how the loss scale moves.
        state: where it stands.
        taken: steps so far.          # i32[]
        skipped: steps skipped so far.  # i32[]
        found_inf: anything but zero skips, whatever the gradients are.  # f32[]
        limit: the largest norm of all gradients; None does not clip.
    """

    config: ScaleConfig
    state: ScaleState
    taken: Tensor
    skipped: Tensor
    found_inf: Tensor
    limit: float | None


class Account(NamedTuple):
    """What has come of it. Nothing has moved yet.

    Attributes:
        found_inf: 1 if the step is to be skipped.       # f32[]
        norm: of the true-sized gradients.               # f32[]
        factor: makes gradients true-sized and clips.    # f32[]
        state: where the loss scale stands after the step.
        stuck: its last field as a float.                # f32[]
        taken: steps after it.                           # i32[]
        skipped: steps skipped after it.                 # i32[]
    """

    found_inf: Tensor
    norm: Tensor
    factor: Tensor
    state: ScaleState
    stuck: Tensor
    taken: Tensor
    skipped: Tensor


def settle_on_host(books: Books, squares: Tensor, found_inf: Tensor, factor: Tensor) -> Account | None:
    """What comes of gradients that have been read, in plain numbers: thirty tiny operations would cost more than a kernel.

    Bit for bit what operations on float32 give.

    Args:
        books: what was known before.
        squares: the sum of squares of the true-sized gradients.  # f32[]
        found_inf: 1 if one of them is not finite.                # f32[]
        factor: what makes them true-sized.                       # f32[]

    Returns:
        None where a number is not in host memory.

    Example:
        >>> config, zero, i = ScaleConfig(init=8.0), torch.zeros(()), torch.zeros((), dtype=torch.int32)
        >>> books = Books(config, config.start(), i, i, zero, limit=1.0)
        >>> account = settle_on_host(books, torch.tensor(16.0), zero, torch.tensor(0.125))
        >>> account.norm, account.factor
        (tensor(4.), tensor(0.0312))
    """
    if not is_on_host(squares, found_inf, factor, books.taken, books.skipped, books.found_inf, *books.state):
        return None
    # Its own root, which is not the same to the last bit in all of torch's kernels.
    root = squares.sqrt()
    norm, times = float(read_host(root)), float(read_host(factor))
    skips = bool(read_host(found_inf) or read_host(books.found_inf))
    if books.limit is not None:
        skips = skips or not math.isfinite(norm)
        # limit / x is to torch the reciprocal of x times limit.
        share = _single(_single(1 / _single(norm + _single(1e-6))) * _single(books.limit))
        times = _single(times * min(share, 1.0))
    verdict = _float(skips)
    state = advance(books.config, books.state, verdict)
    taken, skipped = int(read_host(books.taken)) + (not skips), int(read_host(books.skipped)) + skips
    return Account(
        verdict,
        root,
        _float(times),
        state,
        _float(read_host(state.stuck)),
        torch.scalar_tensor(taken, dtype=torch.int32, device="cpu"),
        torch.scalar_tensor(skipped, dtype=torch.int32, device="cpu"),
    )


def _float(number: float) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32, device="cpu")


def _single(number: float) -> float:
    """Rounded to float32."""
    return ctypes.c_float(number).value
