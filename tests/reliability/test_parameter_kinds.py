"""Each kind of parameter at every level: trained as plain float32 torch trains it, or refused before a change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import halfpeak
from reliability.support import LEVELS, batch
from support.nets import LOW, MASTERED, PURE

ROUNDED = {None: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TOLERANCE = {level: ROUNDED[LOW.get(level)] * (5 if level in PURE else 1) for level in LEVELS}
"""Absolute error of parameters of size one after four steps: a few roundings in float16 or bfloat16, or of each step."""

Forward = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """A module whose parameters and forward pass are given."""

    def __init__(self, forward: Forward, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, part if isinstance(part, nn.Parameter) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Tagged(Tensor):
    """A tensor subclass without behaviour."""


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    return net


def sparse() -> nn.Module:
    table = nn.Embedding(5, 4, sparse=True)
    return Net(lambda net, x: net.table(x.abs().long() % 3).sum(1) * 0.3, table=table)


def dense() -> nn.Module:
    return Net(lambda net, x: net.table(x.abs().long() % 3).sum(1) * 0.3, table=nn.Embedding(5, 4))


def nothing_used() -> nn.Module:
    body = nn.Linear(4, 2)
    return Net(lambda net, x: net.body(x) + net.nothing.sum(), body=body, nothing=torch.ones(0))


def solid() -> nn.Module:
    return Net(lambda net, x: net.conv(x.reshape(-1, 1, 1, 2, 2)).flatten(1), conv=nn.Conv3d(1, 2, (1, 2, 2)))


def transposed() -> nn.Module:
    conv = nn.ConvTranspose1d(1, 2, 2)
    return Net(lambda net, x: net.conv(x.reshape(-1, 1, 4)).flatten(1), conv=conv)


def listed() -> nn.Module:
    values = nn.ParameterList([torch.ones(4), torch.zeros(4)])
    return Net(lambda net, x: x * net.values[0] + net.values[1], values=values)


def subclass() -> nn.Module:
    value = nn.Parameter(torch.ones(4).as_subclass(Tagged))
    return Net(lambda net, x: x * net.value.as_subclass(Tensor), value=value)


def integer() -> nn.Module:
    shift = nn.Parameter(torch.tensor(1), requires_grad=False)
    return Net(lambda net, x: net.body(x) + net.shift, body=nn.Linear(4, 2), shift=shift)


def bag() -> nn.Module:
    table = nn.EmbeddingBag(5, 4, sparse=True, mode="sum")
    return Net(lambda net, x: net.table(x.abs().long() % 3) * 0.3, table=table)


def unused() -> nn.Module:
    return Net(lambda net, x: net.used(x), used=nn.Linear(4, 2), idle=nn.Linear(4, 2))


def channels_last() -> nn.Module:
    net = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
    return Net(lambda net, x: net.conv(x.reshape(-1, 1, 2, 2)).flatten(1), conv=net)


def recurrent(cls: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda net, x: net.cell(x.unsqueeze(0))[0][0], cell=cls(4, 3))


def attention() -> nn.Module:
    return Net(
        lambda net, x: net.attend(x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0))[0][0],
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )


def recomputed() -> nn.Module:
    return Net(
        lambda net, x: checkpoint(net.body, x, use_reentrant=False),
        body=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
    )


def elementwise(value: Tensor) -> Callable[[], nn.Module]:
    return lambda: Net(lambda net, x: x * net.value, value=value.clone())


def normed(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 6), norm(), nn.Tanh(), nn.Linear(6, 2))


def hooked() -> nn.Module:
    net = nn.Linear(4, 2)
    net.weight.register_hook(double)
    return net


def double(grad: Tensor) -> Tensor:
    return grad * 2


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 2),
    "no bias": lambda: nn.Linear(4, 2, bias=False),
    "tied": tied,
    "module used twice": lambda: Net(lambda net, x: net.body(torch.tanh(net.body(x))), body=nn.Linear(4, 4)),
    "frozen": frozen,
    "no gradient": unused,
    "sparse embedding with duplicates": sparse,
    "sparse embedding bag": bag,
    "dense embedding": dense,
    "complex": lambda: Net(lambda net, x: (x * net.value).real, value=torch.full((4,), 0.5 + 0.25j)),
    "no dimension": elementwise(torch.tensor(0.7)),
    "one element": elementwise(torch.tensor([0.7])),
    "empty": lambda: Net(lambda net, x: net.body(x), body=nn.Linear(4, 2), nothing=torch.ones(0, 3)),
    "empty and used": nothing_used,
    "not contiguous": lambda: Net(lambda net, x: x @ net.weight, weight=torch.full((2, 4), 0.3).t()),
    "channels last": channels_last,
    "three-dimensional convolution": solid,
    "transposed convolution": transposed,
    "bilinear": lambda: Net(lambda net, x: net.body(x, x), body=nn.Bilinear(4, 4, 2)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 2)),
    "parameter list": listed,
    "parameter dict": lambda: Net(lambda net, x: x * net.values["a"], values=nn.ParameterDict({"a": torch.ones(4)})),
    "tensor subclass": subclass,
    "rnn": recurrent(nn.RNN),
    "gru": recurrent(nn.GRU),
    "lstm": recurrent(nn.LSTM),
    "attention": attention,
    "recomputed in backward": recomputed,
    "batch norm": normed(lambda: nn.BatchNorm1d(6)),
    "batch norm without affine": normed(lambda: nn.BatchNorm1d(6, affine=False)),
    "layer norm": normed(lambda: nn.LayerNorm(6)),
    "group norm": normed(lambda: nn.GroupNorm(2, 6)),
    "rms norm": normed(lambda: nn.RMSNorm(6)),
    "prelu": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)),
    "gradient hook": hooked,
    "an integer beside it": integer,
}  # fmt: skip


def loss_of(model: nn.Module, step: int) -> Tensor:
    return (model(batch(step)).float() - 0.5).square().mean()


def train_plain(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def train(engine: halfpeak.Engine, steps: range) -> None:
    for step in steps:
        with engine.forward():
            loss = loss_of(engine.model, step)
        engine.backward(loss)
        assert engine.step().stepped()


def prepare(model: nn.Module, level: str, **options: Any) -> halfpeak.Engine:
    scale = halfpeak.ScaleConfig(init=256.0)
    return halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level, scale=scale, **options)


def assert_close(model: nn.Module, reference: nn.Module, level: str) -> None:
    """In float32 through the state dict, which gives the masters' values."""
    ours, theirs = model.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        wide = ours[name].to(value.dtype)
        assert torch.allclose(wide, value, rtol=0, atol=TOLERANCE[level]), (name, (wide - value).abs().max())


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight"
)  # torch's, of RMSNorm in torch.autocast
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_trained_as_in_float32(kind: str, level: str) -> None:
    torch.manual_seed(0)
    model = KINDS[kind]()
    # Built anew, because a deep copy loses gradient hooks.
    torch.manual_seed(0)
    reference = KINDS[kind]()
    train_plain(reference, 4, torch.optim.SGD(reference.parameters(), lr=0.1))
    # torch.autocast to float16 does not support an LSTM on every CPU.
    engine = prepare(model, level, op_lists="apex" if kind == "lstm" else "torch")
    train(engine, range(4))
    assert_close(model, reference, level)


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        (level, dtype)
        for level in LEVELS
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
        # Levels that cast operations step no low weights.
        if dtype is torch.float64 or level not in ("O1", "O4")
    ],
)
def test_a_model_of_another_dtype(level: str, dtype: torch.dtype) -> None:
    model = elementwise(torch.full((4,), 0.5))().to(dtype)
    reference = copy.deepcopy(model).float()
    train(prepare(model, level), range(3))
    train_plain(reference, 3, torch.optim.SGD(reference.parameters(), lr=0.1))
    tolerance = max(TOLERANCE[level], 3 * torch.finfo(dtype).eps)
    assert torch.allclose(model.state_dict()["value"].float(), reference.value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
def test_without_storage(level: str) -> None:
    model = nn.Linear(4, 2, device="meta")
    with pytest.raises(halfpeak.ParameterError, match="meta"):
        prepare(model, level)
    assert model.weight.dtype is torch.float32
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("level", LEVELS)
def test_lazy_modules(level: str) -> None:
    """A lazy parameter has no shape yet, so it can have no master; without masters torch fills it in as ever."""
    model = nn.LazyLinear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level in MASTERED:
        with pytest.raises(halfpeak.ParameterError, match="forward pass"):
            halfpeak.prepare(model, optimizer, level)
        model(batch(0))
    engine = halfpeak.prepare(model, optimizer, level, scale=halfpeak.ScaleConfig(init=256.0))
    train(engine, range(3))
    assert model.weight.shape == (2, 4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_tensor_that_is_no_leaf(level: str) -> None:
    model = nn.Linear(4, 2)
    computed = torch.ones(3, requires_grad=True) * 2
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
    optimizer.param_groups[0]["params"].append(computed)
    with pytest.raises(halfpeak.ParameterError, match="leaf"):
        halfpeak.prepare(model, optimizer, level)
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_spectral_norm(level: str) -> None:
    """Its power iteration moves buffers in every forward pass, so the test checks only that the loss falls."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    engine = prepare(model, level)
    before = F.mse_loss(model(batch(0)).float(), torch.full((8, 2), 0.5))
    train(engine, range(4))
    assert F.mse_loss(model(batch(0)).float(), torch.full((8, 2), 0.5)) < before
