"""Linear layers in float8: bitwise equal to torchao's layers; they resume, skip, compile and are diagnosed as at O5."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import halfpeak
from halfpeak import Float8
from halfpeak.casting.float8 import check_float8
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.extras import MissingExtraError
from halfpeak.core.policy import Policy
from support.states import differences

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class OwnLinear(nn.Linear):
    """Overrides ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32))
        self.own = OwnLinear(32, 32)
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.own(self.body(self.stem(x))))


def prepared(level: Any = "O5", **options: Any) -> tuple[Net, halfpeak.Engine]:
    torch.manual_seed(0)
    model = Net()
    return model, halfpeak.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, **options)


def batch(number: int) -> Tensor:
    return torch.randn(16, 10, generator=torch.Generator().manual_seed(number % 4))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def train(
    engine: halfpeak.Engine, numbers: range, model: Any = None, *, bad: int | None = None
) -> list[float]:
    losses: list[float] = []
    for number in numbers:
        with engine.forward():
            loss = loss_of(engine.models[0] if model is None else model, batch(number))
        engine.backward(loss * float("inf") if number == bad else loss)
        engine.step()
        losses.append(loss.item())
    return losses


def in_float8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_computes_what_torchaos_own_layers_do(recipe: Any) -> None:
    model, engine = prepared(float8=recipe)
    assert in_float8(model) == ["body.0", "body.3", "head"]
    theirs, by_hand = prepared()
    convert_to_float8_training(
        theirs,
        config=replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True),
        module_filter_fn=lambda _, name: name in in_float8(model),
    )
    losses = train(engine, range(40))
    assert losses == train(by_hand, range(40)) != train(prepared()[1], range(40))
    assert sum(losses[-4:]) < sum(losses[:4]) / 10
    assert model.head.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"float8": Float8("rowwise", exclude=["body.*"])}, ["head"]),
        ({"float8": Float8("rowwise", exclude=["head", "stem"])}, ["body.0", "body.3"]),
        ({"float8": Float8("rowwise", exclude=[nn.Sequential])}, ["head"]),
        ({"float8": "rowwise", "keep_fp32": ["body.0"]}, ["body.3", "head"]),
        ({"float8": None}, []),
    ],
)
def test_which_layers(options: dict[str, Any], names: list[str]) -> None:
    model, engine = prepared(**options)
    assert in_float8(model) == names
    train(engine, range(2))
    engine.remove()
    assert in_float8(model) == []
    assert {frozenset(vars(m)) for m in (model.stem, model.head)} == {frozenset(vars(nn.Linear(1, 1)))}


@pytest.mark.filterwarnings("ignore:a copy of a prepared model")
def test_hooks_and_names_of_a_layer_stay() -> None:
    torch.manual_seed(0)
    model, seen = nn.Linear(16, 16), []
    model.register_forward_hook(lambda *_: seen.append(1))
    keys, weight = list(model.state_dict()), model.weight
    engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5", float8="tensorwise")
    with engine.forward():
        engine.backward(model(torch.ones(16, 16)).sum())
    assert engine.step().stepped()
    assert seen == [1]
    assert (list(model.state_dict()), model.weight) == (keys, weight)
    assert in_float8(copy.deepcopy(model)) == [""]


@pytest.mark.parametrize("every", [1, 2])
def test_a_resume_is_exact(every: int) -> None:
    options: dict[str, Any] = {"float8": "tensorwise", "accumulate": every}
    _, straight = prepared(**options)
    train(straight, range(5), bad=2)
    _, other = prepared(**options)
    other.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert train(straight, range(5, 9)) == train(other, range(5, 9))
    assert not differences(straight.state_dict(), other.state_dict())
    # The state is that of O5, so a run without float8 can load it.
    prepared(accumulate=every)[1].load_state_dict(straight.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_has_the_bits_of_the_eager_run(recipe: Any) -> None:
    torch._dynamo.reset()
    eager = train(prepared(float8=recipe)[1], range(4))
    model, engine = prepared(float8=recipe)
    assert train(engine, range(4), torch.compile(model, fullgraph=True, backend="aot_eager")) == eager


def test_diagnose_replays_it_and_compares_with_float32() -> None:
    model, engine = prepared(float8="tensorwise")
    train(engine, range(2))
    assert halfpeak.diagnose(engine, lambda: loss_of(model, batch(0))).where is None
    ran: list[str] = []
    model.head.register_forward_hook(lambda layer, *_: ran.append(type(layer).__name__))
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    found = halfpeak.diagnose(engine, lambda: loss_of(model, batch(0)))
    assert (found.where, found.module) == ("weight", "head")
    assert (ran[0], set(ran), in_float8(model)[-1]) == ("Float8Linear", {"Float8Linear", "Linear"}, "head")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"level": "O2", "float8": "tensorwise"},
            ConfigError,
            r"stored in bfloat16; write prepare\(model, optimizer, 'O5', float8='tensorwise'\)",
        ),
        ({"level": "O4", "float8": "rowwise"}, ConfigError, "'O5', float8='rowwise'"),
        ({"float8": "blockwise"}, ConfigError, "'tensorwise', 'rowwise', 'rowwise_with_gw_hp', or a Float8"),
        ({"float8": True}, ConfigError, "float8=True must be one of"),
        ({"float8": Float8("rowwise", exclude=["tail"])}, ConfigError, "'tail' is none of the modules"),
        ({"float8": Float8("rowwise", exclude=["*"])}, ConfigError, "selects no layer"),
        ({"float8": "rowwise", "keep_fp32": [nn.Linear]}, ConfigError, "selects no layer"),
    ],
)
def test_what_is_refused_changes_nothing(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=text):
        halfpeak.prepare(model, optimizer, **{"level": "O5", **options})
    assert in_float8(model) == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_exclude_is_a_list() -> None:
    with pytest.raises(ConfigTypeError, match="exclude='head' must be a list"):
        Float8("rowwise", exclude="head")


def test_layers_of_torchao_are_not_converted_again() -> None:
    model = convert_to_float8_training(
        Net(), config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, n: n == "head"
    )
    with pytest.raises(ConfigError, match="layers of torchao"):
        halfpeak.prepare(model, torch.optim.SGD(model.parameters()), "O5", float8="rowwise")


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8.float8_linear", None)
    with pytest.raises(MissingExtraError, match="torchao is not installed; write pip install torchao"):
        prepared(float8="tensorwise")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_a_gpu_must_have_float8(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    policy = Policy(param=torch.bfloat16, float8=Float8("tensorwise"))
    with FakeTensorMode():
        layer = nn.Linear(16, 16, device="meta")
        layer.weight = nn.Parameter(torch.empty(16, 16, device="cuda"))
        check = partial(check_float8, [layer], policy)
        if capability >= (8, 9):
            check()
        else:
            with pytest.raises(ConfigError, match=r"capability 8\.9 or higher.*the model is on cuda"):
                check()
