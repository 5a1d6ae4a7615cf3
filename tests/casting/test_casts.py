"""Modules and expressions under per-operation casts: dtypes of the results, and gradients of the right dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfpeak.casting.casts import OpCasts, disable_casts
from halfpeak.core.errors import BannedOpError, ConfigError

lows = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
inputs = pytest.mark.parametrize("wide", [False, True], ids=["low input", "float32 input"])


def dtype_of(wide: bool, low: torch.dtype) -> torch.dtype:
    return torch.float32 if wide else low


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, "float16", None])
def test_only_low_dtypes_are_accepted(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"torch\.float16 or torch\.bfloat16"):
        OpCasts(dtype)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8), "low"),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 2, 5, 5), "low"),
    "prelu": (nn.PReLU, (4, 8), "low"),
    "softmax": (lambda: nn.Softmax(-1), (4, 8), "float32"),
    "layer norm": (lambda: nn.LayerNorm(8), (4, 8), "float32"),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5), "float32"),
    "relu": (nn.ReLU, (4, 8), "input"),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4), "input"),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 3, 4, 4), "input"),
    "dropout": (lambda: nn.Dropout(0.5), (4, 8), "input"),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (4, 2, 8), "float32"),
    "rnn": (lambda: nn.RNN(8, 8), (5, 2, 8), "low"),
    "relu rnn, 2 layers": (lambda: nn.RNN(8, 8, 2, nonlinearity="relu"), (5, 2, 8), "low"),
    "gru, both directions": (lambda: nn.GRU(8, 8, 2, bidirectional=True), (5, 2, 8), "low"),
    "lstm": (lambda: nn.LSTM(8, 8, 2), (5, 2, 8), "low"),
    "lstm with projection": (lambda: nn.LSTM(8, 8, proj_size=4), (5, 2, 8), "low"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@lows
@inputs
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, wide: bool, low: torch.dtype) -> None:
    make, shape, kind = MODULES[name]
    given = dtype_of(wide, low)
    module, x = make(), torch.randn(shape).to(given).requires_grad_()
    with OpCasts(low):
        result = module(x)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    assert out.dtype is {"low": low, "float32": torch.float32, "input": given}[kind]
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is given
    assert all(
        weight.grad is not None and weight.grad.dtype is torch.float32 for weight in module.parameters()
    )


@lows
@inputs
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_unrolled_cells(kind: Any, wide: bool, low: torch.dtype) -> None:
    cell, given = kind(8, 8), dtype_of(wide, low)
    steps = [torch.randn(2, 8).to(given).requires_grad_() for _ in range(10)]
    hidden: Any = None
    with OpCasts(low):
        outputs: list[Tensor] = []
        for step in steps:
            hidden = cell(step, hidden)
            outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
        torch.stack(outputs).float().sum().backward()
    assert {output.dtype for output in outputs} == {low}
    assert all(step.grad is not None and step.grad.dtype is given for step in steps)


@lows
@inputs
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(kind: Any, wide: bool, low: torch.dtype) -> None:
    given = dtype_of(wide, low)
    x = [torch.randn(length, 8).to(given).requires_grad_() for length in (5, 3, 1)]
    with OpCasts(low):
        out = kind(8, 8, 2)(nn.utils.rnn.pack_sequence(x))[0]
    assert out.data.dtype is low
    out.data.float().sum().backward()
    assert all(item.grad is not None and item.grad.dtype is given for item in x)


def test_learned_initial_states_in_a_tuple_of_parameters() -> None:
    cell, states = nn.LSTMCell(4, 4), nn.ParameterList([torch.randn(1, 4), torch.randn(1, 4)])
    with OpCasts(torch.float16):
        out = cell(torch.randn(1, 4), tuple(states))[0]
        out.sum().backward()
    assert out.dtype is torch.float16
    assert all(state.grad is not None and state.grad.dtype is torch.float32 for state in states)


@lows
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h.softmax(0)", "float32"),
        ("f @ f", "low"),
        ("h @ f", "low"),
        ("h + f", "float32"),
        ("h * f[0, 0]", "float32"),
        ("h / f[0, 0]", "float32"),
        ("h + 1.5", "low"),
        ("2 - h", "low"),
        ("h + i", "low"),
        ("h + d", "float64"),
        ("h ** 2", "float32"),
        ("2 ** h", "float32"),
        ("h.mean()", "low"),
        ("torch.sigmoid(h)", "low"),
        ("h.sqrt()", "low"),
        ("torch.cat([h, f])", "float32"),
        ("torch.cat(tensors=[h, f])", "float32"),
        ("torch.cat([h, d])", "float64"),
        ("F.linear(input=f, weight=f, bias=f[0])", "low"),
        ("torch.exp(c).real", "float32"),
        ("(c @ c).real", "float32"),
    ],
)
def test_expressions(name: str, expected: str, low: torch.dtype) -> None:
    f = torch.rand(3, 3)
    names = {"f": f, "h": f.to(low), "d": f.double(), "i": torch.ones(3, 3, dtype=torch.int64), "c": f + 0j}
    with OpCasts(low):
        result = eval(name, {"torch": torch, "F": F, **names})
    assert result.dtype is (low if expected == "low" else getattr(torch, expected))


@pytest.mark.parametrize("pair", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_two_low_dtypes_promote_like_any_mix(pair: tuple[torch.dtype, torch.dtype]) -> None:
    left, right = (torch.rand(3, 3).to(dtype) for dtype in pair)
    with OpCasts(torch.float16):
        assert (left + right).dtype is torch.float32
        assert torch.dot(left[0], right[0]).dtype is torch.float32


@pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "**="])
@pytest.mark.parametrize("own", [torch.float16, torch.float32], ids=str)
def test_operators_in_place_keep_their_promise(operator: str, own: torch.dtype) -> None:
    for other in (torch.float16, torch.float32):
        x, y = torch.full((3,), 2.0, dtype=own), torch.full((3,), 4.0, dtype=other)
        alias = x
        expected = {"+=": 6.0, "-=": -2.0, "*=": 8.0, "/=": 0.5, "**=": 16.0}[operator]
        with OpCasts(torch.float16):
            names = {"x": x, "y": y}
            exec(f"x {operator} y", names)
        assert names["x"] is alias
        assert alias.dtype is own
        assert alias.tolist() == [expected] * 3


def test_out_is_the_callers_choice() -> None:
    x, out = torch.rand(3, 3), torch.empty(3, 3)
    with OpCasts(torch.float16):
        torch.mm(x, x, out=out)
        torch.exp(x, out=out)
    assert torch.equal(out, torch.exp(x))


def test_bans_can_be_lifted() -> None:
    h, target = torch.rand(3).half(), torch.rand(3)
    with OpCasts(torch.float16):
        with pytest.raises(NotImplementedError):  # the type that apex raised
            h.exp_()
        with pytest.raises(BannedOpError):
            nn.BCELoss()(h, target.half())
        with pytest.raises(NotImplementedError):
            torch.exp_(input=h)
        wide = torch.ones(2, dtype=torch.float64)
        assert torch.exp_(input=wide) is wide
        with disable_casts():
            assert h.exp_().dtype is torch.float16
            F.binary_cross_entropy(target.half(), target.half())
    with OpCasts(torch.float16, allow_banned=True):
        assert F.binary_cross_entropy(target.half(), target).dtype is torch.float32


def test_casts_are_told() -> None:
    told: list[str] = []
    layer, x = nn.Linear(3, 3), torch.rand(2, 3)
    with OpCasts(torch.float16, on_cast=told.append):
        h = layer(x)
        assert told == ["Float->Half (linear)"] * 3
        told.clear()
        (h.exp() + h).double() @ torch.rand(3, 3)
    assert told == ["Half->Float (exp)", "Half->Float (add)", "Double->Half (matmul)", "Float->Half (matmul)"]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("start", [Tensor.backward, torch.autograd.backward])
def test_backward_in_the_scope_recomputes_with_casts(reentrant: bool, start: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.rand(2, 4, requires_grad=True)
    grads: list[list[Tensor]] = []
    dtypes: set[torch.dtype] = set()
    net[2].register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    for run in (net, lambda x: checkpoint(net, x, use_reentrant=reentrant)):
        net.zero_grad()
        with OpCasts(torch.bfloat16):
            start(run(x).float().sum())
        grads.append([weight.grad for weight in net.parameters() if weight.grad is not None])
    assert dtypes == {torch.bfloat16}
    assert len(grads[0]) == 6
    assert all(torch.equal(left, right) for left, right in zip(*grads, strict=True))


class Doubled(torch.autograd.Function):
    seen: torch.dtype | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Doubled.seen = (grad[:, None] @ grad[None]).dtype
        return grad * 2


def test_python_code_in_backward_is_cast() -> None:
    x = torch.rand(3, requires_grad=True)
    with OpCasts(torch.float16):
        torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert Doubled.seen is torch.float16


def test_attention_computes_its_softmax_in_float32() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(4, 1, 8)
    with OpCasts(torch.float16):
        out, weights = attention(x, x, x)
    assert (out.dtype, weights.dtype) == (torch.float16, torch.float32)


def test_vmap_and_grad_of_torch_func() -> None:
    weight, x = nn.Parameter(torch.rand(3, 3)), torch.rand(5, 3)
    with OpCasts(torch.float16):
        out = torch.vmap(lambda row: weight @ row)(x)
        inner = torch.func.grad(lambda row: (weight @ row).sum())(x[0])
        after = weight @ weight
    assert (out.dtype, inner.dtype, after.dtype) == (torch.float16, torch.float32, torch.float16)
