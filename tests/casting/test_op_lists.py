"""Every function of the op lists, called with arguments of every dtype: dtypes of its result and its gradients."""

from __future__ import annotations

import functools
import types
import warnings
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_map_only

from casting.opcalls import arguments, named
from halfpeak.casting import oplists
from halfpeak.casting.casts import OpCasts
from halfpeak.casting.rule_table import listed_rules
from halfpeak.casting.tree import tensors
from halfpeak.core.errors import BannedOpError

LOWS = (torch.float16, torch.bfloat16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne", "greater", "less", "equal")

low_dtypes = pytest.mark.parametrize("low", LOWS, ids=str)


def call(path: str, function: Any, low: torch.dtype, *dtypes: torch.dtype) -> Any:
    args, kwargs = arguments(path, *dtypes)
    with OpCasts(low), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of single functions
        return function(*args, **kwargs)


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else next(tensors(result, {}))


def is_comparison(path: str) -> bool:
    return path.rsplit(".", 1)[1].strip("_").removeprefix("not_").split("_")[0] in COMPARISONS


@pytest.mark.parametrize(("path", "function"), named(oplists.LOW))
def test_low(path: str, function: Any) -> None:
    for low, given in product(LOWS, DTYPES):
        assert first(call(path, function, low, given)).dtype is low, given


@pytest.mark.parametrize(("path", "function"), named(oplists.FLOAT32))
def test_float32(path: str, function: Any) -> None:
    for low, given in product(LOWS, DTYPES):
        assert first(call(path, function, low, given)).dtype is torch.float32, given


@low_dtypes
@pytest.mark.parametrize(("path", "function"), named(oplists.UPCAST))
def test_upcast(path: str, function: Any, low: torch.dtype) -> None:
    results = [first(call(path, function, low, given)).dtype.to_real() for given in DTYPES]
    assert results == [torch.float32, torch.float32, torch.float32, torch.float64]


@low_dtypes
@pytest.mark.parametrize(
    ("path", "function"), [row for row in named(oplists.ARITHMETIC) if not is_comparison(row[0])]
)
def test_arithmetic_is_promoted_as_if_it_were_cast(path: str, function: Any, low: torch.dtype) -> None:
    """Bit for bit, values and gradients, also where one side is broadcast."""
    generator = torch.Generator().manual_seed(0)
    for left, right in (((5, 7), (7,)), ((7,), (5, 7)), ((5, 7), (5, 7))):
        values = torch.randn(left, generator=generator).to(low), torch.randn(right, generator=generator) + 2
        for low_first in (True, False):
            made: list[Tensor] = []
            for casts in (True, False):
                one, other = (value.clone().requires_grad_() for value in values)
                pair = (one.float(), other) if casts else (one, other)
                with nullcontext() if casts else OpCasts(low):
                    result = function(*(pair if low_first else pair[::-1]))
                (result * torch.linspace(-1, 1, 7)).sum().backward()
                made += [result.detach(), one.grad, other.grad]  # type: ignore[list-item]
            assert all(
                torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(made[:3], made[3:], strict=True)
            )


@low_dtypes
@pytest.mark.parametrize(("path", "function"), named((*oplists.PROMOTE, *oplists.ARITHMETIC)))
def test_promote(path: str, function: Any, low: torch.dtype) -> None:
    wide = torch.float32
    for left, right, widest in ((low, low, low), (low, wide, wide), (wide, low, wide), (wide, wide, wide)):
        result = call(path, function, low, left, right)
        if is_comparison(path):
            args, kwargs = arguments(path, left, right)
            expected = function(*[arg.float() for arg in args], **kwargs)
            assert result is expected if isinstance(result, bool) else torch.equal(result, expected)
        else:
            assert result.dtype is widest


@low_dtypes
@pytest.mark.parametrize(("path", "function"), named(oplists.CAST_TO_SELF))
def test_in_place_casts_to_self(path: str, function: Any, low: torch.dtype) -> None:
    for own in (low, torch.float32):
        for other in DTYPES[:3]:
            args, kwargs = arguments(path, own, other)
            where = args[0].data_ptr()
            with OpCasts(low):
                result = function(*args, **kwargs)
            assert result is args[0]
            assert result.dtype is own
            assert result.data_ptr() == where


@low_dtypes
@pytest.mark.parametrize(("path", "function"), named(oplists.BANNED_IN_PLACE))
def test_banned_in_place(path: str, function: Any, low: torch.dtype) -> None:
    for given in LOWS:
        with pytest.raises(BannedOpError, match="without the underscore"):
            call(path, function, low, given)
    assert call(path, function, low, torch.float32, low).dtype is torch.float32


@low_dtypes
@pytest.mark.parametrize(("path", "function"), named(oplists.BANNED))
def test_banned(path: str, function: Any, low: torch.dtype) -> None:
    for pair in ((low, torch.float32), (torch.float32, low), (low, low)):
        with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
            call(path, function, low, *pair)
    assert call(path, function, low, torch.float32).dtype is torch.float32


COMPOSITES = [pair for pair in named(oplists.COMPOSITE[:1]) if "multi_head" not in pair[0]]


@low_dtypes
@pytest.mark.parametrize("given", DTYPES[:3], ids=str)
@pytest.mark.parametrize(("path", "function"), COMPOSITES)
def test_composites_end_in_a_float32_operation(
    path: str, function: Any, given: torch.dtype, low: torch.dtype
) -> None:
    assert call(path, function, low, given).dtype is torch.float32


@pytest.mark.parametrize(
    ("path", "function"),
    [
        row
        for row in (*named(oplists.LOW), *named(oplists.FLOAT32), *named(oplists.PROMOTE), *COMPOSITES)
        if not is_comparison(row[0])
    ],
)
def test_gradients_have_the_dtype_of_what_they_belong_to(path: str, function: Any) -> None:
    for low, given in [(dtype, given) for dtype in LOWS for given in (dtype, torch.float32)]:
        args, kwargs = tree_map_only(Tensor, as_leaf, arguments(path, given, torch.float32))
        with OpCasts(low), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first(function(*args, **kwargs)).float().sum().backward()
        leaves = [leaf for leaf in tensors(args, kwargs) if leaf.grad is not None]
        assert leaves
        assert all(leaf.grad is not None and leaf.grad.dtype is leaf.dtype for leaf in leaves)


def as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


APEX = {
    "half": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu addmm addmv addr "
        "matmul mm mv addbmm baddbmm bmm",
        oplists.LOW,
    ),
    "float": (
        "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm "
        "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
        "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
        "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss acos "
        "asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum "
        "var renorm __pow__ __rpow__",
        oplists.FLOAT32,
    ),
    "promote": (
        "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne __add__ __div__ __eq__ __ge__ "
        "__gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__",
        (*oplists.PROMOTE, *oplists.ARITHMETIC),
    ),
}


@pytest.mark.parametrize("kind", APEX)
def test_the_lists_hold_all_of_apex(kind: str) -> None:
    names, rows = APEX[kind]
    assert set(names.split()) <= {name for _, row in rows for name in row.split()}


def test_no_function_is_in_two_lists() -> None:
    every = (
        oplists.LOW, oplists.FLOAT32, oplists.UPCAST, oplists.PROMOTE, oplists.CAST_TO_SELF, oplists.BANNED_IN_PLACE,
        oplists.BANNED, oplists.COMPOSITE, oplists.EXPOSES_MEMORY, oplists.UNCOUNTED_WRITES,
    )  # fmt: skip
    seen: dict[Any, int] = {}
    for number, rows in enumerate(every):
        for path, function in named(rows):
            assert seen.setdefault(function, number) == number, path


# Functions written in Python that torch dispatches as one call.

LEFT_ALONE: oplists.Rows = (("torch", "lobpcg pca_lowrank svd_lowrank"),)
"""Functions that call listed functions and run as written, because factorisations have no low kernels."""

SAME_NAME_ONLY = {"sym_sum", "unravel_index", "__deepcopy__"}
"""Functions that use only the name of a listed function: for sums of symbols, strides, the attribute ``grad``."""


def names_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(names_in(one) for one in inner))


@functools.cache
def listed_names() -> set[str]:
    return {
        function.__name__
        for function, rule in listed_rules().items()
        if rule not in ("upcast", "expose_memory", "uncounted_write", "call_as_function")
    }


def reaches(function: types.FunctionType, seen: set[types.FunctionType]) -> bool:
    """Whether the function calls a listed function, directly or through other Python functions of torch."""
    if function in seen:
        return False
    seen.add(function)
    for name in names_in(function.__code__):
        if name in listed_names():
            return True
        for place in (function.__globals__, vars(torch), vars(F), vars(torch.Tensor)):
            inner = place.get(name)
            own = isinstance(inner, types.FunctionType) and inner.__module__.startswith("torch.")
            if own and name != "handle_torch_function" and reaches(inner, seen):
                return True
    return False


def python_functions() -> list[types.FunctionType]:
    announced: list[Any] = [*get_testing_overrides(), torch.autograd.backward, torch.autograd.grad]
    return [
        one
        for one in announced
        if isinstance(one, types.FunctionType) and "distributed" not in one.__module__
    ]


def test_no_announced_python_function_hides_listed_calls() -> None:
    ruled = {*listed_rules(), *(function for _, function in named(LEFT_ALONE))}
    hiding = [
        function.__qualname__
        for function in python_functions()
        if function not in ruled and function.__name__ not in SAME_NAME_ONLY and reaches(function, set())
    ]
    assert hiding == []


def test_the_search_finds_what_is_there() -> None:
    assert len(python_functions()) > 100
    assert all(reaches(function, set()) for _, function in named(oplists.COMPOSITE))
    assert not reaches(F.dropout, set())
