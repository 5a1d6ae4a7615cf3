"""Clipping, compared with ``torch.nn.utils``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.parts.clip import ClipNorm, ClipValue, NoClip, parse_clip

SHAPES = [(3, 4), (), (1,), (17,), (2, 3, 5), (1000,)]


def parameters(magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made: list[Tensor] = []
    for shape in SHAPES:
        parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
        parameter.grad = (torch.randn(shape) * magnitude).to(dtype)
        made.append(parameter)
    return made


def both(magnitude: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters for torch, and copies of their gradients for halfpeak."""
    theirs = parameters(magnitude)
    return theirs, [parameter.grad.clone() for parameter in theirs if parameter.grad is not None]


def equal(theirs: list[Tensor], ours: list[Tensor]) -> bool:
    return all(
        torch.equal(torch.nan_to_num(grad, 1234.5), torch.nan_to_num(parameter.grad, 1234.5))
        for parameter, grad in zip(theirs, ours, strict=True)
        if parameter.grad is not None
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 5.0, 1e6, math.inf])
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-6, 1.0, 1e4, 1e18, 3e38])
def test_by_norm_is_that_of_torch(magnitude: float, max_norm: float, norm_type: float) -> None:
    theirs, ours = both(magnitude)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert torch.equal(ClipNorm(max_norm=max_norm, norm_type=norm_type)(ours), expected)
    assert equal(theirs, ours)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_by_norm_of_a_bad_gradient_is_that_of_torch(bad: float) -> None:
    theirs, ours = both()
    assert theirs[0].grad is not None
    theirs[0].grad[1, 2] = ours[0][1, 2] = bad
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    norm = ClipNorm(max_norm=1.0)(ours)
    assert not norm.isfinite()
    assert torch.equal(torch.nan_to_num(norm, 1.5), torch.nan_to_num(expected, 1.5))
    assert equal(theirs, ours)


@pytest.mark.parametrize("value", [1e-3, 0.5, 100.0])
def test_by_value_is_that_of_torch(value: float) -> None:
    theirs, ours = both()
    for grads in (ours, [parameter.grad for parameter in theirs]):
        grads[0][0, 0], grads[0][0, 1], grads[0][0, 2] = math.inf, -math.inf, math.nan  # type: ignore[index]
    torch.nn.utils.clip_grad_value_(theirs, value)
    assert ClipValue(value=value)(ours) is None  # type: ignore[func-returns-value]
    assert equal(theirs, ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_low_gradients_are_measured_in_float32(dtype: torch.dtype) -> None:
    grads = [torch.full((4,), 6e4).to(dtype), torch.full((2, 2), 6e4)]
    whole = torch.cat([grad.float().flatten() for grad in grads])
    norm = ClipNorm(max_norm=1.0)(grads)
    torch.testing.assert_close(norm, whole.norm())
    clipped = torch.cat([grad.float().flatten() for grad in grads])
    torch.testing.assert_close(clipped.norm(), torch.tensor(1.0), rtol=1e-2, atol=0)
    assert [grad.dtype for grad in grads] == [dtype, torch.float32]


def test_sparse_gradients_are_clipped_by_their_sum() -> None:
    rows = torch.tensor([[0, 2, 0]])
    values = torch.tensor([[3.0], [0.1], [1.0]])

    def grad() -> Tensor:
        return torch.sparse_coo_tensor(rows, values.clone(), (3, 1), check_invariants=True)

    by_norm, by_value = grad(), grad()
    torch.testing.assert_close(ClipNorm(max_norm=1.0)([by_norm]), torch.tensor((16 + 0.01) ** 0.5))
    torch.testing.assert_close(by_norm.to_dense().norm(), torch.tensor(1.0))
    ClipValue(value=0.5)([by_value])
    assert by_value.to_dense().flatten().tolist() == pytest.approx([0.5, 0.0, 0.1])


def test_no_gradients() -> None:
    assert ClipNorm(max_norm=1.0)([]) == 0
    ClipValue(value=1.0)([])


def test_off_is_an_object() -> None:
    grad = torch.tensor([math.nan, 1e30])
    assert parse_clip(None)([grad]) is None
    assert grad.isnan().tolist() == [True, False]
    assert grad[1] == 1e30


def test_parse() -> None:
    assert parse_clip(None) == NoClip()
    assert parse_clip(5) == parse_clip(5.0) == ClipNorm(max_norm=5.0)
    assert parse_clip(math.inf) == ClipNorm(max_norm=math.inf)
    for clip in (ClipNorm(max_norm=1.0), ClipValue(value=0.5), lambda grads: None):
        assert parse_clip(clip) is clip


@pytest.mark.parametrize("clip", [0, 0.0, -1.0, math.nan, -math.inf, 10**400], ids=str)
def test_a_refused_number(clip: Any) -> None:
    with pytest.raises(ConfigError, match=r"^clip=.* must be a number above zero"):
        parse_clip(clip)


@pytest.mark.parametrize("clip", ["1.0", True, [1.0], {"max_norm": 1.0}, torch.ones(()), ClipNorm], ids=str)
def test_what_cannot_clip(clip: Any) -> None:
    with pytest.raises(ConfigTypeError, match="ClipNorm"):
        parse_clip(clip)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "1", None, True, 10**400], ids=str)
def test_refused_limits(value: Any) -> None:
    for make in (
        lambda: ClipNorm(max_norm=value),
        lambda: ClipNorm(max_norm=1.0, norm_type=value),
        lambda: ClipValue(value=value),
    ):
        with pytest.raises(ConfigError, match="must be a"):
            make()
    with pytest.raises(ConfigError, match="finite"):
        ClipValue(value=math.inf)
