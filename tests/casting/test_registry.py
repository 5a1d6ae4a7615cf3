"""Rules for functions that user code registers or decorates."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfpeak.casting.casts import OpCasts, disable_casts
from halfpeak.casting.registry import float_function, low_function, promote_function
from halfpeak.core.errors import ConfigError

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def library() -> types.ModuleType:
    """Make a module of user code."""
    module = types.ModuleType("library")

    def scale(x: Tensor, y: Tensor | None = None) -> Any:
        """Its own documentation."""
        return x.dtype if y is None else (x.dtype, y.dtype)

    class Tools:
        @staticmethod
        def fixed(x: Tensor) -> torch.dtype:
            return x.dtype

        @classmethod
        def of_class(cls, x: Tensor) -> tuple[type, torch.dtype]:
            return cls, x.dtype

        def method(self, x: Tensor) -> tuple[type, torch.dtype]:
            return type(self), x.dtype

    class Heir(Tools):
        pass

    module.scale, module.Tools, module.Heir = scale, Tools, Heir  # type: ignore[attr-defined]
    return module


def test_a_torch_function_gets_the_rule_in_place_of_the_built_in_one() -> None:
    x = torch.full((1, 1), 1.0001)
    one = torch.ones(1, 1)
    with OpCasts(HALF, registrations={(F, "linear"): "float32"}):
        out = F.linear(x, one)
        assert out.dtype is FLOAT
        assert torch.equal(out, x)  # never rounded to float16
        assert F.linear(x.half(), one).dtype is FLOAT
        assert nn.Linear(1, 1)(x).dtype is FLOAT
        assert torch.mm(x, x).dtype is HALF
    with OpCasts(HALF, registrations={(torch, "sigmoid"): "low", (torch.Tensor, "exp"): "low"}):
        assert torch.sigmoid(x).dtype is HALF
        assert x.exp().dtype is HALF
    registered = {(F, "binary_cross_entropy"): "promote"}
    with OpCasts(HALF, allow_banned=True, registrations=registered):
        assert F.binary_cross_entropy(one.half(), one.half()).dtype is HALF
        assert torch.exp(x).dtype is FLOAT
    with OpCasts(HALF, registrations={(torch, "matmul"): "promote"}):
        assert torch.matmul(x, x.half()).dtype is FLOAT
        assert torch.matmul(x.half(), x.half()).dtype is HALF
    with OpCasts(HALF, registrations={(torch.Tensor, "__matmul__"): "float32"}):
        assert (x @ x).dtype is FLOAT


def test_the_sigmoid_of_the_documentation_makes_bce_possible() -> None:
    layer, target = nn.Linear(3, 1), torch.rand(2, 1)
    with OpCasts(HALF, registrations={(torch, "sigmoid"): "float32"}):
        loss = F.binary_cross_entropy(torch.sigmoid(layer(torch.rand(2, 3))), target)
    assert loss.dtype is FLOAT


def test_a_function_of_the_user_is_replaced_while_a_scope_is_open(library: Any) -> None:
    original, x = library.scale, torch.ones(1)
    casts = OpCasts(HALF, registrations={(library, "scale"): "low"})
    other = OpCasts(torch.bfloat16, registrations={(library, "scale"): "float32"})
    assert library.scale is original
    with casts:
        assert library.scale(x) is HALF
        assert library.scale(x=x, y=x.double()) == (HALF, HALF)
        assert library.scale.__doc__ == original.__doc__
        with other:
            assert library.scale(x.half()) is FLOAT
            with OpCasts(HALF):
                assert library.scale(x) is FLOAT  # no rule of this scope replaces the outer one
        with disable_casts():
            assert library.scale(x) is FLOAT
        with casts:
            assert library.scale(x) is HALF
        assert library.scale(x) is HALF
    assert library.scale is original


def test_replacements_outlive_neither_scope_nor_order(library: Any) -> None:
    original, x = library.scale, torch.ones(1)
    first, second = (OpCasts(HALF, registrations={(library, "scale"): "low"}) for _ in range(2))
    first.install()
    second.__enter__()
    first.uninstall()
    assert library.scale(x) is HALF
    second.__exit__(None, None, None)
    assert library.scale is original


def test_what_someone_else_put_there_stays(library: Any) -> None:
    def theirs(x: Tensor) -> None: ...

    with OpCasts(HALF, registrations={(library, "scale"): "low"}):
        library.scale = theirs
    assert library.scale is theirs


def test_functions_of_classes(library: Any) -> None:
    tools, heir, x = library.Tools, library.Heir, torch.ones(1)
    before = dict(vars(tools)), dict(vars(heir))
    places = ((tools, "fixed"), (tools, "of_class"), (tools, "method"), (heir, "fixed"))
    with OpCasts(HALF, registrations=dict.fromkeys(places, "low")):
        assert tools.fixed(x) is tools().fixed(x) is heir.fixed(x) is HALF
        assert tools.of_class(x) == tools().of_class(x) == (tools, HALF)
        assert tools().method(x) == (tools, HALF)
    assert (dict(vars(tools)), dict(vars(heir))) == before
    assert tools().method(x) == (tools, FLOAT)


def test_what_cannot_be_registered(library: Any) -> None:
    with pytest.raises(ConfigError, match=r"'nothing' in library"):
        OpCasts(HALF, registrations={(library, "nothing"): "low"})
    with pytest.raises(ValueError, match=r"'nothing' in torch"):
        OpCasts(HALF, registrations={(torch, "nothing"): "promote"})
    with pytest.raises(ConfigError, match=r"'pi' in torch"):
        OpCasts(HALF, registrations={(torch, "pi"): "low"})


def test_a_place_that_cannot_be_written_changes_nothing(library: Any) -> None:
    original = library.scale
    casts = OpCasts(HALF, registrations={(library, "scale"): "low", (dict, "fromkeys"): "low"})
    with pytest.raises(ConfigError, match=r"dict\.fromkeys cannot be replaced"):
        casts.install()
    assert library.scale is original
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is FLOAT


def test_decorators_decide_at_the_call() -> None:
    told: list[str] = []

    def both(x: Tensor, y: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """Its own documentation."""
        return x.dtype, y.dtype

    low, wide, widest = low_function(both), float_function(both), promote_function(both)
    assert {function.__name__ for function in (low, wide, widest)} == {"both"}
    assert low.__doc__ == both.__doc__
    x = torch.ones(1)
    assert low(x, y=x) == wide(x, x) == widest(x, x) == (FLOAT, FLOAT)
    with OpCasts(HALF, on_cast=told.append):
        assert low(x, y=x.double()) == (HALF, HALF)
        assert told == ["Float->Half (both)", "Double->Half (both)"]
        assert wide(x.half(), x) == (FLOAT, FLOAT)
        assert widest(x.half(), x) == (FLOAT, FLOAT)
        assert promote_function(lambda pair: pair[0].dtype)((x.half(), x)) is FLOAT
        assert widest(x.half(), x.half()) == (HALF, HALF)
        with disable_casts():
            assert low(x, x) == (FLOAT, FLOAT)
    assert low(x, x) == (FLOAT, FLOAT)


def test_a_decorated_function_runs_with_casts_on_and_shares_weights() -> None:
    weight = nn.Parameter(torch.rand(3, 3))
    seen: list[Tensor] = []

    @low_function
    def apply(weight: Tensor, x: Tensor) -> Tensor:
        seen.append(weight)
        return torch.softmax(weight @ x, 0)

    with OpCasts(HALF):
        out = apply(weight, torch.rand(3, 3, requires_grad=True)) + apply(weight, torch.rand(3, 3))
        out.sum().backward()
    assert out.dtype is FLOAT
    assert seen[0] is seen[1]
    assert weight.grad is not None
