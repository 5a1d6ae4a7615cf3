"""``torch.compile`` in a scope of casts: one graph, the same values, and no compiled graph used in another scope."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfpeak.casting.casts import OpCasts, casts_on, disable_casts

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Expressions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h += x
        h = h * 2 - x @ x.t() @ x + h.shape[0]
        loss = h.pow(2).sum() + F.mse_loss(self.layer(x), x)
        return torch.cat([self.layer(x), x]) * loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1)),
        lambda: (torch.randn(4, 8),),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        lambda: (torch.randn(2, 1, 8, 8),),
    ),
    "cell": (lambda: nn.LSTMCell(8, 8), lambda: (torch.randn(4, 8),)),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda: (torch.randn(4, 1, 8),) * 3),
    "expressions": (Expressions, lambda: (torch.randn(4, 8),)),
}


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


@pytest.mark.parametrize(
    ("name", "low"), [("mlp", torch.float16), *((name, torch.bfloat16) for name in MODELS)], ids=str
)
def test_one_graph_and_the_same_values(name: str, low: torch.dtype) -> None:
    make, inputs = MODELS[name]
    model, args = make(), inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with OpCasts(low):
        expected, found = first(model(*args)), first(compiled(*args))
        found.float().sum().backward()
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert all(
        weight.grad is not None and weight.grad.dtype is torch.float32 for weight in model.parameters()
    )


def test_a_trace_is_used_where_it_belongs_only() -> None:
    traces: list[None] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        traces.append(None)
        return graph.forward

    x = torch.rand(3, 3)
    product = torch.compile(lambda x: x @ x, fullgraph=True, backend=backend)
    casts = OpCasts(torch.float16)
    for _ in range(3):
        with casts:
            assert product(x).dtype is torch.float16
    assert len(traces) == 1
    assert product(x).dtype is torch.float32
    with OpCasts(torch.bfloat16):
        assert product(x).dtype is torch.bfloat16
    with casts, disable_casts():
        assert product(x).dtype is torch.float32
    with OpCasts(torch.float16, registrations={(torch.Tensor, "matmul"): "float32"}):
        assert product(x).dtype is torch.float32
    count = len(traces)
    with OpCasts(torch.float16):
        assert product(x).dtype is torch.float16
    with casts:
        assert product(x).dtype is torch.float16
    assert len(traces) == count


def test_a_scope_entered_in_traced_code_has_the_rules_of_the_user() -> None:
    casts, x = OpCasts(torch.float16, registrations={(torch.Tensor, "matmul"): "float32"}), torch.rand(3, 3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        with casts_on(casts):
            return x @ x, x.mm(x)

    assert [y.dtype for y in products(x)] == [torch.float32, torch.float16]
