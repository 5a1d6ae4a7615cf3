"""An optimizer with remainders trains bit for bit as one with float32 masters, and its states have float32 values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from halfpeak.core.errors import ConfigError, OrderError, ParameterError
from halfpeak.fused import FusedAdamW
from halfpeak.fused.backends.choose import BackendName
from halfpeak.fused.state_dtypes.quantized_rule import MasterFormat
from support.digits import digits, learn
from support.states import differences, same

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""The import of torch's compiler gives this warning."""

TIE = 0x8000


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 24, bias=False), nn.Linear(24, 4)
    )


def prepared(*, accumulate: int = 1, level: str = "O5", clip: Any = 1.0, **adam: Any) -> halfpeak.Engine:
    model = network()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, **adam)
    scale = halfpeak.ScaleConfig(init=2.0**10, interval=7)
    return halfpeak.prepare(
        model,
        optimizer,
        halfpeak.LEVELS[level].replace(loss_scale="dynamic"),
        clip=clip,
        accumulate=accumulate,
        scale=scale,
    )


def iterate(
    engine: halfpeak.Engine, index: int, ties: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
) -> halfpeak.StepResult:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(index))
    for weight, value, _ in ties:
        weight.data.copy_(value)
    with engine.forward():
        loss = engine.model(inputs).float().square().mean()
    engine.backward(loss * (float("inf") if index % 13 == 5 else 1.0))
    for weight, _, own in ties:
        weight.data.copy_(own)
    return engine.step()


def follow(masters: halfpeak.Engine, remainders: halfpeak.Engine) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Weights that the two round differently, as masters are ties: (weight, value in ``remainders``, own value)."""
    ties: list[tuple[Tensor, Tensor, Tensor]] = []
    pairs = zip(masters.model.parameters(), remainders.model.parameters(), strict=True)
    for rounded, kept in pairs:
        differs = rounded.detach() != kept.detach()
        if bool(differs.any()):
            exact = masters.pairs.main_of(rounded)
            assert bool(((exact.detach().view(torch.int32)[differs] & 0xFFFF) == TIE).all())
            ties.append((rounded, kept.detach().clone(), rounded.detach().clone()))
    return ties


def assert_same(one: halfpeak.Engine, other: halfpeak.Engine) -> None:
    for name, value in one.model.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, other.model.state_dict()[name])
    for a, b in zip(states(one), states(other), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("exp_avg", "exp_avg_sq", "step"))


def states(engine: halfpeak.Engine) -> list[dict[str, torch.Tensor]]:
    state = engine.optimizers[0].state_dict()["state"]
    return [state[index] for index in sorted(state)]


@pytest.mark.parametrize(
    ("level", "backend", "accumulate", "clip"),
    [
        ("O5", "eager", 1, 1.0),
        ("O5", "eager", 3, halfpeak.ClipValue(value=0.05)),
        ("O5", "compiled", 3, 1.0),
        ("O2", "eager", 1, halfpeak.ClipValue(value=0.05)),
        ("O2", "compiled", 3, 1.0),
    ],
)
def test_training_is_that_of_float32_masters_bit_for_bit(
    level: str, backend: BackendName, accumulate: int, clip: Any
) -> None:
    options: dict[str, Any] = {"level": level, "accumulate": accumulate, "backend": backend, "clip": clip}
    masters, remainders = prepared(**options), prepared(**options, master="remainder")
    ties: list[tuple[Tensor, Tensor, Tensor]] = []
    for index in range(100 if accumulate == 1 else 120):
        if index == 40:
            state = copy.deepcopy(remainders.state_dict())
            remainders = prepared(**options, master="remainder")
            remainders.load_state_dict(state)
        expected, found = iterate(masters, index, ties), iterate(remainders, index)
        assert torch.equal(expected.found_inf, found.found_inf)
        ties = follow(masters, remainders)
    assert_same(masters, remainders)
    assert int(remainders.num_skipped) > 5
    assert len(remainders.pairs) == 0
    assert all("remainder" in row for row in states(remainders)[:2])


def test_the_state_dict_has_the_digits_that_were_there_before() -> None:
    exact = {name: value.clone() for name, value in network().state_dict().items()}
    engine = prepared(master="remainder")
    assert all(torch.equal(value, exact[name]) for name, value in engine.model.state_dict().items())
    other = {name: torch.randn_like(value) for name, value in exact.items()}
    engine.model.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in engine.model.state_dict().items())
    iterate(engine, 0)
    moved = engine.model.state_dict()["0.weight"] - other["0.weight"]
    assert 0 < float(moved.abs().max()) < 0.05


def test_a_state_without_rows_leaves_the_digits_of_the_weights() -> None:
    engine = prepared(master="remainder")
    exact = {name: value.clone() for name, value in engine.model.state_dict().items()}
    fresh = FusedAdamW(engine.model.parameters(), lr=1e-2, master="remainder")
    engine.optimizers[0].load_state_dict(fresh.state_dict())
    assert not differences(dict(engine.model.state_dict()), exact)


def test_remainders_of_another_size_are_not_taken_over() -> None:
    saved, engine = prepared(master="remainder"), prepared(master="remainder8")
    exact = {name: value.clone() for name, value in engine.model.state_dict().items()}
    engine.optimizers[0].load_state_dict(saved.optimizers[0].state_dict())
    assert not differences(dict(engine.model.state_dict()), exact)


def test_moments_of_another_memory_order_are_quantized_in_that_of_the_weight() -> None:
    moment = torch.randn(8, 16)
    row = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment.square()}
    for weight in (torch.randn(16, 8).t(), torch.randn(8, 16)):
        optimizer = FusedAdamW([nn.Parameter(weight)], moments="int8", backend="eager")
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: row}})
        row = optimizer.state_dict()["state"][0]
        codes, scale = row["exp_avg"], row["exp_avg_scale"]
        assert codes.stride() == weight.stride()
        value = (codes.as_strided((8, 16), (16, 1)).float() * scale).as_strided((8, 16), codes.stride())
        # The second time from codes in the first order.
        torch.testing.assert_close(value, moment, rtol=0, atol=2 * float(moment.abs().max()) / 127)


def test_gradients_that_a_removed_engine_has_left_are_zeroed() -> None:
    engine = prepared(master="remainder")
    optimizer = engine.optimizers[0]
    with engine.forward():
        loss = engine.model(torch.ones(8, 16)).float().square().mean()
    engine.backward(loss)
    engine.unscale()
    engine.remove()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    optimizer.step()
    assert same(engine.model.parameters(), before)
    engine.model(torch.ones(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert not any(same([one], [other]) for one, other in zip(engine.model.parameters(), before, strict=True))


def test_ties_are_loaded_too() -> None:
    engine = prepared(master="remainder")
    state = engine.model.state_dict()
    bits = state["0.weight"].view(torch.int32)
    state["0.weight"] = ((bits & ~0xFFFF) | TIE).view(torch.float32)
    engine.model.load_state_dict(state)
    assert torch.equal(engine.model.state_dict()["0.weight"], state["0.weight"])


def test_a_weight_is_worth_what_somebody_has_written() -> None:
    engine = prepared(master="remainder")
    iterate(engine, 0)
    weight = engine.model.get_parameter("0.weight")
    with torch.no_grad():
        weight.fill_(0.5)
    assert bool((engine.model.state_dict()["0.weight"] == 0.5).all())
    iterate(engine, 1)
    moved = engine.model.state_dict()["0.weight"] - 0.5
    assert float(moved.abs().max()) < 0.02
    weight.data = torch.full_like(weight, 0.25)
    assert bool((engine.model.state_dict()["0.weight"] == 0.25).all())


def test_gradients_of_a_window_are_summed_in_float32() -> None:
    engine = prepared(accumulate=3, master="remainder")
    for index in range(2):
        iterate(engine, index)
        grads = [parameter.grad for parameter in engine.model.parameters()]
        assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}


def test_the_engine_can_be_taken_off_and_put_on_again() -> None:
    engine = prepared(master="remainder")
    for index in range(3):
        iterate(engine, index)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    model, optimizer = engine.model, engine.optimizers[0]
    engine.remove()
    assert model.state_dict()["0.weight"].dtype is torch.bfloat16
    again = halfpeak.prepare(model, optimizer, "O5")
    assert all(torch.equal(value, before[name]) for name, value in again.model.state_dict().items())


def test_another_forms_state_goes_in() -> None:
    whole, small = prepared(), prepared(master="remainder8", moments="int8")
    for index in range(4):
        iterate(whole, index)
    small.load_state_dict(copy.deepcopy(whole.state_dict()))
    weights, loaded = whole.model.state_dict(), small.model.state_dict()
    assert all(torch.allclose(weights[name], loaded[name], rtol=2.0**-15, atol=0) for name in weights)
    assert states(small)[0]["exp_avg"].dtype is torch.int8
    iterate(small, 4)
    back = prepared()
    back.load_state_dict(copy.deepcopy(small.state_dict()))
    assert not differences(dict(back.model.state_dict()), dict(small.model.state_dict()))
    assert {value.dtype for row in states(back) for value in row.values()} == {torch.float32}
    iterate(back, 5)
    kept = prepared(master="remainder")
    kept.load_state_dict(copy.deepcopy(whole.state_dict()))
    iterate(whole, 5)
    iterate(kept, 5)
    follow(whole, kept)
    assert_same(whole, kept)
    masters = prepared()
    masters.load_state_dict(copy.deepcopy(kept.state_dict()))
    iterate(masters, 6, follow(masters, kept))
    iterate(kept, 6)
    follow(masters, kept)
    assert_same(masters, kept)
    assert all("remainder" not in row for row in states(masters))


def test_what_cannot_work_is_refused_before_anything_changes() -> None:
    model = network()
    optimizer = FusedAdamW(model.parameters(), master="remainder")
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ConfigError, match="no master weights"):
            halfpeak.prepare(model, optimizer, halfpeak.LEVELS["O3"].replace(cast_model_type=dtype))
    with pytest.raises(ParameterError, match="another optimizer"):
        halfpeak.prepare(model, [optimizer, torch.optim.SGD(model[0].parameters(), lr=0.1)], "O5")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not optimizer.state


@pytest.mark.parametrize("master", ["remainder", "remainder8"])
def test_a_float16_weight_that_grows_too_large_stays_at_the_end_and_comes_back(master: MasterFormat) -> None:
    weight = nn.Parameter(torch.full((4,), 65000.0, dtype=torch.float16))
    optimizer = FusedAdamW([weight], lr=200.0, betas=(0.0, 0.0), weight_decay=0.0, master=master)
    values: list[float] = []
    for sign in (-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0):
        weight.grad = torch.full_like(weight, sign)
        optimizer.step()
        values.append(weight[0].item())
    assert values == [65184.0, 65408.0, 65504.0, 65504.0, 65312.0, 65120.0, 64928.0]


def test_it_works_through_amp_which_has_no_masters_to_give() -> None:
    model = network()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, master="remainder")
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with amp.scale_loss(model(torch.ones(2, 16)).float().sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(OrderError, match=r"model.state_dict\(\)"):
        list(amp.master_params(optimizer))
    optimizer.step()
    after = model.state_dict()
    assert all(value.dtype is torch.float32 for value in after.values())
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_without_an_engine() -> None:
    torch.manual_seed(0)
    start = torch.randn(300).bfloat16()
    low = nn.Parameter(start.clone())
    master = nn.Parameter(start.float())
    kept, whole = FusedAdamW([low], lr=1e-4, master="remainder"), FusedAdamW([master], lr=1e-4)
    for _ in range(50):
        gradient = torch.randn(300).bfloat16()
        low.grad, master.grad = gradient, gradient.float()
        kept.step()
        whole.step()
    assert kept.remainders is not None
    assert torch.equal(kept.remainders.fp32_value(low), master.detach())
    copied = copy.deepcopy(kept)
    assert copied.remainders is not None
    assert torch.equal(copied.remainders.fp32_value(copied.param_groups[0]["params"][0]), master.detach())


@pytest.mark.parametrize(
    ("level", "adam", "gap"),
    [
        ("O5", {"master": "remainder", "moments": torch.bfloat16}, 0.002),
        ("O5", {"moments": "int8"}, 0.005),
        ("O5", {"master": "remainder8", "moments": "int8"}, 0.005),
        ("O2", {"master": "remainder8", "moments": "int8"}, 0.005),
    ],
    ids=str,
)
def test_compact_forms_learn_digits_as_well(level: str, adam: dict[str, Any], gap: float) -> None:
    """Within ``gap`` of the loss with float32 masters and moments, and within 0.01 of the accuracy."""
    whole, compact = learned(level), learned(level, **adam)
    assert whole[0] < 0.15
    assert compact[0] == pytest.approx(whole[0], abs=gap)
    assert compact[1] == pytest.approx(whole[1], abs=0.01)


@functools.cache
def learned(level: str, **adam: Any) -> tuple[float, float]:
    """Loss and accuracy after 300 steps on handwritten digits."""
    inputs, labels = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = FusedAdamW(model.parameters(), lr=2e-3, backend="eager", **adam)
    engine = halfpeak.prepare(model, optimizer, level, clip=1.0)
    draw = torch.Generator().manual_seed(1)
    learn(engine, inputs, labels, (torch.randint(len(labels), (128,), generator=draw) for _ in range(300)))
    with engine.forward(), torch.no_grad():
        answers = model(inputs)
    right = float((answers.argmax(1) == labels).float().mean())
    return float(nn.functional.cross_entropy(answers, labels)), right


def pair(**adam: Any) -> halfpeak.Engine:
    torch.manual_seed(0)
    models = [nn.Linear(8, 8), nn.Linear(8, 1)]
    optimizers = [FusedAdamW(model.parameters(), lr=1e-2, backend="eager", **adam) for model in models]
    return halfpeak.prepare(models, optimizers, "O5", clip=1.0)


def iterate_pair(engine: halfpeak.Engine, index: int) -> None:
    (maker, judge), (first, second) = engine.models, engine.optimizers
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
    with engine.forward():
        loss = judge(maker(inputs).detach()).float().square().mean()
    engine.backward(loss, optimizers=second)
    engine.step(optimizers=second)
    with engine.forward():
        loss = (judge(maker(inputs)).float() - 1).square().mean()
    engine.backward(loss * (float("inf") if index == 3 else 1.0), optimizers=first)
    engine.step(optimizers=first)


def test_two_optimizers_in_turn() -> None:
    masters, remainders = pair(), pair(master="remainder")
    for index in range(40):
        iterate_pair(masters, index)
        iterate_pair(remainders, index)
    for one, other in zip(masters.models, remainders.models, strict=True):
        state = other.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


def test_groups_may_come_parameters_may_freeze_and_closures_may_be_given() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = FusedAdamW(model[0].parameters(), lr=1e-2, master="remainder")
    engine = halfpeak.prepare(model, optimizer, "O5")

    def closure() -> Tensor:
        with engine.forward():
            loss = model(torch.ones(2, 8)).float().square().mean()
        engine.backward(loss)
        return loss

    closure()
    engine.step()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    closure()
    engine.step()
    assert all("remainder" in optimizer.state[parameter] for parameter in model.parameters())
    model[0].weight.requires_grad_(False)
    frozen, moving = (model.state_dict()[name].clone() for name in ("0.weight", "1.weight"))
    engine.step(closure)
    assert torch.equal(model.state_dict()["0.weight"], frozen)
    assert not torch.equal(frozen.bfloat16().float(), frozen)
    assert not torch.equal(model.state_dict()["1.weight"], moving)
