"""``keep_fp32=``: dtypes that kept modules store, compute and return, and values that are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from support.nets import LOW, MASTERED, STORED, product


class Spy(nn.Module):
    """A linear layer that records the dtypes of its input and of its product."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen = [x.dtype, y.dtype]
        if self.fails:
            raise ArithmeticError
        return y


def prepared(level: str, **options: Any) -> tuple[nn.Sequential, halfpeak.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(Spy(), Spy(), Spy())
    return model, halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level, **options)


@pytest.mark.parametrize(("level", "lists"), [*((level, "torch") for level in LOW), ("O1", "apex")])
@pytest.mark.parametrize("entry", ["1", "[12]", "1*", lambda name, module: name == "1"])
def test_what_is_kept_computes_in_float32(level: str, lists: Any, entry: Any) -> None:
    model, engine = prepared(level, keep_fp32=[entry], op_lists=lists)
    for _ in range(2):
        with engine.forward():
            loss = model(torch.ones(2, 4)).float().square().mean()
        engine.backward(loss / 2**20)
        assert engine.step().stepped()
    kept = [1, 2] if entry == "[12]" else [1]
    for number, spy in enumerate(model):
        assert spy.seen[-1] is (torch.float32 if number in kept else LOW[level])
        assert spy.linear.weight.dtype is (torch.float32 if number in kept else STORED[level])
    assert model[1].seen[0] is torch.float32


def test_what_is_kept_in_a_low_model_becomes_float32_at_o0() -> None:
    model = nn.Sequential(Spy(), Spy()).half()
    halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O0", keep_fp32=["1"])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LOW)
def test_a_class_means_all_of_its_modules(level: str) -> None:
    model, engine = prepared(level, keep_fp32=[Spy])
    with engine.forward():
        assert model(torch.ones(2, 4)).dtype is torch.float32
    assert all(spy.seen == [torch.float32] * 2 for spy in model)


@pytest.mark.parametrize("level", LOW)
@pytest.mark.parametrize("whole", [False, True])
def test_nothing_inside_of_a_kept_module_is_rounded(level: str, whole: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.rand(2, 4) if whole else torch.rand(2, 4).to(LOW[level]).float()
    expected = block(x)
    model = block if whole else nn.Sequential(block)
    keep = [lambda name, module: module is block]
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level, keep_fp32=keep)
    seen: list[Tensor] = []
    block[2].register_forward_hook(lambda module, args, output: seen.append(output))
    with engine.forward():
        model(x)
    assert seen[0].dtype is torch.float32
    assert torch.equal(seen[0], expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_diagnose_suggests_helps(level: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 1)
        )
        nn.init.ones_(model[0].weight)
        nn.init.constant_(model[1][0].weight, 300.0)
        return model

    x = torch.full((2, 4), 300.0)
    model = build()
    found = halfpeak.diagnose(model, lambda: model(x).float().mean() / 2**10, level=level)
    assert found.module == "1.0"
    assert f"keep_fp32={json.dumps(found.keep_fp32)}" in found.suggestion
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, level, keep_fp32=found.keep_fp32)
    assert halfpeak.diagnose(engine, lambda: model(x).float().mean() / 2**10).where is None


@pytest.mark.parametrize("lists", ["apex", "torch"])
def test_an_exception_in_a_kept_module_leaves_casts_on(lists: Any) -> None:
    model, engine = prepared("O1", keep_fp32=["1"], op_lists=lists)
    model[1].fails = True
    with engine.forward():
        with pytest.raises(ArithmeticError):
            model(torch.ones(2, 4))
        assert product() is torch.float16
    assert product() is torch.float32


def test_an_interrupt_in_a_kept_module_does_not_reach_the_next_pass() -> None:
    """torch calls no hook after a KeyboardInterrupt, after which a notebook goes on."""
    model, engine = prepared("O4", keep_fp32=["1"])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[1].linear.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), engine.forward():
        model(torch.ones(2, 4))
    handle.remove()
    model(torch.ones(2, 4))
    assert product() is torch.float32
    with engine.forward():
        first = model(torch.ones(2, 4))
        assert product() is torch.bfloat16
    engine.backward(first.float().square().mean())
    assert engine.step().stepped()
    with engine.forward():  # with no cast of a weight kept from the interrupted pass
        assert not torch.equal(model(torch.ones(2, 4)), first)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, at a graph break
@pytest.mark.parametrize("lists", ["apex", "torch"])
def test_a_copy_and_a_compiled_model_keep_too(lists: Any) -> None:
    model, engine = prepared("O4", keep_fp32=["1"], op_lists=lists)
    copied = copy.deepcopy(model)
    for one in (copied, torch.compile(model, backend="eager")):
        with engine.forward():
            one(torch.ones(2, 4))
            assert product() is torch.bfloat16
    for one in (model, copied):
        assert [spy.seen[1] for spy in one] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_fp32": ["haed.*"]}, r"'haed.\*' is none of the modules; they are called '0'"),
        ({"keep_fp32": "0"}, "must be a list"),
        ({"keep_fp32": [3]}, "must be a list"),
        ({"keep_fp32": ["2"]}, "keeps '2', which shares a weight with '0'; write keep_fp32="),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with pytest.raises(halfpeak.ConfigError, match=message):
        halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


# Buffers.


class Constants(nn.Module):
    """A buffer without a parameter in its module, saved with the model or not."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1 / 3, 1 / 7]), persistent)
        self.register_buffer("index", torch.arange(2))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, (x * self.frequencies).dtype]
        return x * self.frequencies


class WithBuffers(nn.Module):
    """A module without parameters, and one whose layer takes its buffer."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.constants, self.layer = Constants(persistent), nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2, 2) / 3, persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.constants(self.layer(x))) + self.layer(self.table)


@pytest.mark.parametrize("level", LOW)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_module_with_buffers_alone_stays_float32_and_returns_low(level: str, persistent: bool) -> None:
    model = WithBuffers(persistent)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    assert torch.equal(model.constants.frequencies, torch.tensor([1 / 3, 1 / 7]))
    assert model.constants.index.dtype is torch.int64
    assert model.table.dtype is model.layer.weight.dtype is STORED[level]
    outputs: list[Tensor] = []
    model.constants.register_forward_hook(lambda module, args, output: outputs.append(output))
    with engine.forward():
        loss = model(torch.ones(2, 2)).float().square().mean()
    engine.backward(loss)
    assert engine.step().stepped()
    if STORED[level] is not torch.float32:
        assert model.constants.seen == [torch.float32, torch.float32]
        assert outputs[0].dtype is LOW[level]
    elif level in ("O1", "O4"):
        assert model.constants.seen[0] is LOW[level], "nothing is added where operations are cast"


@pytest.mark.parametrize("level", MASTERED)
def test_amp_casts_every_buffer_as_apex_does(level: str) -> None:
    model = WithBuffers(True)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert model.constants.frequencies.dtype is model.table.dtype is STORED[level]


def test_advice_names_what_the_user_keeps_alone() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model = nn.Sequential(Constants(True), nn.Linear(2, 4), block, nn.Linear(4, 1))
    nn.init.constant_(block[0].weight, 3e4)
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", keep_fp32=["1"])
    found = halfpeak.diagnose(engine, lambda: model(torch.full((2, 2), 300.0)).mean() / 2**10)
    assert 'keep_fp32=["1", "2"]' in found.suggestion


def test_diagnose_tries_a_level_with_the_buffers_of_prepare() -> None:
    model = nn.Sequential(Constants(True), nn.Linear(2, 1))
    model[0].frequencies.fill_(1e6)
    assert (
        halfpeak.diagnose(model, lambda: model(torch.full((2, 2), 1e-6)).mean(), level="O2", scale=1.0).where
        is None
    )
