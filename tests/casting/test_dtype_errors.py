"""torch's errors about dtypes name the module, its dtype and what to write; a low weight is not stepped in float32's place."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from support.nets import LEVELS, LOW, MASTERED, STORED

CAST = tuple(level for level in LEVELS if halfpeak.LEVELS[level].policy().param is not None)
"""The levels that give a model a dtype."""
PER_OP = tuple(level for level in LEVELS if level not in CAST)
ROUNDS = tuple(level for level in CAST if level in LOW)
"""The levels with a low model."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 1))


def prepared(model: nn.Module, level: str, **options: Any) -> halfpeak.Engine:
    return halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level, **options)


def train(model: nn.Module, engine: halfpeak.Engine) -> None:
    with engine.forward():
        loss = model(torch.ones(2, 8)).float().square().mean()
    engine.backward(loss)
    engine.step()


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "double": nn.Module.double,
    "float": nn.Module.float,
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "replaced": lambda model: model.__setitem__(3, nn.Linear(16, 16)),
    "one in float64": lambda model: model[3].double(),
}


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_after_prepare(level: str, change: str) -> None:
    model = net()
    engine = prepared(model, level)
    CHANGES[change](model)
    have = [(name, p.dtype) for name, p in model.named_parameters() if name.endswith("weight")]
    kept = "2.weight" if STORED[level] is not torch.float32 and level != "O3" else ""
    wrong = [
        (name[0], dtype)
        for name, dtype in have
        if dtype is not (torch.float32 if name == kept else STORED[level])
    ]
    if not wrong:
        train(model, engine)
        return
    ((name, dtype), *_) = wrong
    with pytest.raises(RuntimeError, match=r"torch: .*dtype") as caught:
        train(model, engine)
    message = str(caught.value)
    assert message.startswith(f"'{name}' ({type(model[int(name)]).__name__}) has {dtype} weights")
    assert "before" in message


@pytest.mark.parametrize(
    ("level", "lists"), [*((level, "apex") for level in ROUNDS), *((level, "torch") for level in PER_OP)]
)
def test_a_layer_in_float64(level: str, lists: Any) -> None:
    """apex's lists cast it at O1 and O4, torch's do not."""
    model = net()
    model[3].double()
    engine = prepared(model, level, **({"op_lists": lists} if level in PER_OP else {}))
    with pytest.raises(
        RuntimeError, match=r"'3' \(Linear\) has torch.float64 weights.*write model.float\(\) before"
    ):
        train(model, engine)


@pytest.mark.parametrize("level", ["O0", *PER_OP])
@pytest.mark.parametrize("change", ["half", "bfloat16"])
@pytest.mark.parametrize("part", ["", "3"])
def test_low_weights_are_not_stepped_where_the_level_has_float32_ones(
    level: str, change: str, part: str
) -> None:
    """Adam's eps is zero in float16: one step would make them NaN."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    engine = halfpeak.prepare(model, torch.optim.Adam(model.parameters()), level)
    getattr(model.get_submodule(part), change)()
    before = [parameter.clone() for parameter in model.parameters()]

    def step() -> None:
        with engine.forward():
            loss = model(torch.arange(4)).float().square().mean()
        engine.backward(loss)
        engine.step()

    with pytest.raises(RuntimeError if level == "O0" and part else halfpeak.ParameterError, match="weight"):
        step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("level", PER_OP)
def test_a_change_during_training_is_noticed_within_sixteen_steps(level: str) -> None:
    model = net()
    engine = prepared(model, level)
    train(model, engine)
    model.to(LOW[level])
    for _ in range(15):
        train(model, engine)
    with pytest.raises(halfpeak.ParameterError, match=rf"SGD steps parameter 0.weight in {LOW[level]}"):
        train(model, engine)


@pytest.mark.parametrize("level", PER_OP)
def test_a_change_that_an_optimizer_cannot_step_is_named_at_once(level: str) -> None:
    """torch's Adam raises in its second step, and speaks of an argument of lerp."""
    model = net()
    engine = halfpeak.prepare(model, torch.optim.AdamW(model.parameters(), foreach=False), level)
    train(model, engine)
    model.to(LOW[level])
    with pytest.raises(halfpeak.ParameterError, match=rf"AdamW steps parameter 0.weight in {LOW[level]}"):
        train(model, engine)


@pytest.mark.parametrize("level", PER_OP)
def test_frozen_weights_may_be_low(level: str) -> None:
    model = net()
    model[0].to(LOW[level]).requires_grad_(False)
    engine = prepared(model, level, op_lists="apex")
    train(model, engine)


@pytest.mark.parametrize("level", MASTERED)
def test_a_batch_norm_that_was_cast_after_prepare(level: str) -> None:
    """Its kernels take any dtype; torch raises where the backward pass ends."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    engine = prepared(model, level)
    model.to(LOW[level])
    with pytest.raises(
        RuntimeError, match=rf"'1' \(BatchNorm1d\) has {LOW[level]} weights where the prepared"
    ):
        train(model, engine)


@pytest.mark.parametrize("level", ROUNDS)
def test_a_replaced_layer_is_named_where_another_one_raises(level: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 1))
    engine = prepared(model, level)
    model[0] = nn.Embedding(4, 8)
    with (
        pytest.raises(RuntimeError, match=r"'0' \(Embedding\) has torch.float32 weights where the prepared"),
        engine.forward(),
    ):
        model(torch.arange(4))


# What a module gets.


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 8), between, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


@pytest.mark.parametrize("level", ROUNDS)
def test_a_layer_that_got_float32(level: str) -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(Block(lambda x: x), Block(lambda x: x.float()))})
    model.forward = lambda x: model["blocks"][1](x)  # type: ignore[method-assign]
    engine = prepared(model, level)
    with pytest.raises(RuntimeError) as caught:
        train(model, engine)
    assert str(caught.value).startswith(
        f"'blocks.1.last' (Linear) has {LOW[level]} weights and got torch.float32; write x.to({LOW[level]}) where it is "
        "called, or halfpeak.prepare(..., keep_fp32=['blocks.*.last']). torch: "
    )
    again = nn.Sequential(Block(lambda x: x.float()))
    train(again, prepared(again, level, keep_fp32=["*.last"]))


@pytest.mark.parametrize("level", ROUNDS)
def test_inputs_that_were_left_as_they_are(level: str) -> None:
    model = net()
    prepared(model, level, cast_forward_inputs=False)
    with pytest.raises(
        RuntimeError, match=r"'0' \(Linear\).* got torch.float32, since cast_forward_inputs=False"
    ):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("level", ROUNDS)
def test_a_layer_that_is_called_past_its_model(level: str) -> None:
    model = net()
    engine = prepared(model, level)
    with pytest.raises(
        RuntimeError, match=r"'4' \(Linear\).*outside of the model's forward.*prepare\(\[body, head\]"
    ):
        with engine.forward():
            model[4](torch.ones(2, 16))


def test_an_operation_in_a_module_without_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Mix(lambda x: x @ torch.ones(4, 1)))
    prepared(model, "O5")
    with pytest.raises(
        RuntimeError,
        match=r"'1' \(Mix\) computes in torch.bfloat16 and meets another dtype; .*keep_fp32=\['1'\]",
    ):
        model(torch.ones(2, 4))


class Mix(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "fft": (lambda x: torch.fft.fft2(x).real, "no kernel for"),
    "inverse": (lambda x: torch.linalg.inv(x.unflatten(-1, (2, 2))).flatten(-2), "no kernel for"),
    "cholesky": (lambda x: torch.linalg.cholesky(x.unflatten(-1, (2, 2))), "no kernel for"),
    "mask": (lambda x: x.masked_fill(x > 0, -1e39), "a number that"),
}


@pytest.mark.parametrize("level", ROUNDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_has_no_kernel_in_half(level: str, function: str) -> None:
    """The message has the entry of ``keep_fp32`` with which it works."""
    operation, reason = FUNCTIONS[function]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"mix": Mix(operation)})["mix"])

    model = build()
    prepared(model, level)
    x = torch.eye(4) if function == "cholesky" else torch.randn(4, 4)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    message = str(caught.value)
    assert message.startswith("'1' (Mix) ")
    assert reason in message
    assert str(LOW[level]) in message
    assert "write x.float() in it, or halfpeak.prepare(..., keep_fp32=['1']). torch: " in message
    if function in ("fft", "inverse"):
        model = build()
        prepared(model, level, keep_fp32=["1"])
        assert model(x).isfinite().all()


# What is left alone.


@pytest.mark.parametrize("level", LEVELS)
def test_other_errors_stay_as_they_are(level: str) -> None:
    model = net()
    engine = prepared(model, level)
    for wrong in (torch.ones(2, 7), "no tensor"):
        with pytest.raises((RuntimeError, TypeError)) as caught, engine.forward():
            model(wrong)
        assert "halfpeak" not in str(caught.value)
        assert ". torch: " not in str(caught.value)


def test_an_error_of_another_model_stays_as_it_is() -> None:
    other, model = nn.Linear(2, 2).double(), Mix(lambda x: None)  # type: ignore[arg-type, return-value]
    halfpeak.prepare(model, [], "O5")

    def fail() -> None:
        try:
            other(torch.ones(2))
        finally:
            model(torch.ones(2))  # a pass that returns None, while that error is being handled

    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        fail()


def test_an_explained_error_is_explained_once() -> None:
    model = net()
    engine = prepared(model, "O5")
    model.double()
    with pytest.raises(RuntimeError) as caught, engine.forward():
        model(torch.ones(2, 8))
    assert str(caught.value).count("torch: ") == 1
    assert not getattr(caught.value, "__notes__", [])


def test_a_model_with_functions_in_keep_fp32_can_be_pickled() -> None:
    model = net()
    prepared(model, "O5", keep_fp32=[lambda name, module: name == "3"])
    again = pickle.loads(pickle.dumps(model))
    again.double()
    with pytest.raises(RuntimeError, match=r"'0' \(Linear\) has torch.float64 weights"):
        again(torch.ones(2, 8))


def test_amp_explains_too() -> None:
    model = net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    model.float()
    with pytest.raises(
        RuntimeError, match=r"'0' \(Linear\) has torch.float32 weights where the prepared model had"
    ):
        model(torch.ones(2, 8))
