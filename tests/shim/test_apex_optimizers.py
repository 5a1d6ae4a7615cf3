"""``apex.optimizers`` as scripts call it, against apex's rules written by hand in float64."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from fused.formulas import lamb, novograd
from halfpeak.core.errors import ConfigError, StateError
from support.states import same

pytestmark = pytest.mark.usefixtures("apex_installed")

SHAPES = ((3, 4), (7,), (), (2, 2, 3))
STEPS = 4


def parameters_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def batches_for(parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    return [[torch.randn(p.shape).to(p.dtype) for p in parameters] for _ in range(STEPS)]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], batches: Any) -> None:
    for batch in batches:
        for parameter, gradient in zip(parameters, batch, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


Formula = Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]


def adam(*, decay: float, mode: int, correct: bool) -> Formula:
    def formula(weights: list[Tensor], batches: list[list[Tensor]]) -> list[Tensor]:
        lr, beta1, beta2, eps = 0.05, 0.8, 0.95, 1e-6
        first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        for t, batch in enumerate(batches, 1):
            scale1, scale2 = (1 - beta1**t, 1 - beta2**t) if correct else (1.0, 1.0)
            for i, w in enumerate(weights):
                g = batch[i].double() + (decay * w if mode == 0 else 0.0)
                first[i] = beta1 * first[i] + (1 - beta1) * g
                second[i] = beta2 * second[i] + (1 - beta2) * g * g
                update = (first[i] / scale1) / ((second[i] / scale2).sqrt() + eps)
                weights[i] = w - lr * (update + (decay * w if mode == 1 else 0.0))
        return weights

    return formula


def sgd(*, momentum: float, dampening: float, decay: float, nesterov: bool, late: bool) -> Formula:
    def formula(weights: list[Tensor], batches: list[list[Tensor]]) -> list[Tensor]:
        buffers: list[Tensor | None] = [None] * len(weights)
        for batch in batches:
            for i, w in enumerate(weights):
                g = batch[i].double() + (0.0 if late else decay * w)
                if momentum:
                    old = buffers[i]
                    new = g if old is None else momentum * old + (1 - dampening) * g
                    buffers[i] = new
                    g = g + momentum * new if nesterov else new
                weights[i] = w - 0.05 * (g + (decay * w if late else 0.0))
        return weights

    return formula


def adagrad(*, decay: float, mode: int) -> Formula:
    def formula(weights: list[Tensor], batches: list[list[Tensor]]) -> list[Tensor]:
        sums = [torch.zeros_like(w) for w in weights]
        for batch in batches:
            for i, w in enumerate(weights):
                g = batch[i].double() + (decay * w if mode == 0 else 0.0)
                sums[i] = sums[i] + g * g
                update = g / (sums[i].sqrt() + 1e-6) + (decay * w if mode == 1 else 0.0)
                weights[i] = w - 0.05 * update
        return weights

    return formula


BETAS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6}


def cases() -> Iterator[Any]:
    for decay in (0.0, 0.1):
        for mode in (0, 1):
            for correct in (True, False):
                options = {
                    **BETAS,
                    "weight_decay": decay,
                    "adam_w_mode": bool(mode),
                    "bias_correction": correct,
                }
                yield "FusedAdam", options, adam(decay=decay, mode=mode, correct=correct)
            yield (
                "FusedAdagrad",
                {"lr": 0.05, "eps": 1e-6, "weight_decay": decay, "adagrad_w_mode": bool(mode)},
                adagrad(decay=decay, mode=mode),
            )
            for everywhere in (True, False):
                options = {
                    **BETAS,
                    "weight_decay": decay,
                    "adam_w_mode": bool(mode),
                    "use_nvlamb": everywhere,
                }
                formula = partial(lamb, lr=0.05, decay=decay, decoupled=mode == 1, everywhere=everywhere)
                yield "FusedLAMB", options, formula
                yield "FusedMixedPrecisionLamb", options, formula
        for momentum, dampening, nesterov in ((0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)):
            for late in (True, False):
                options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
                yield (
                    "FusedSGD",
                    {"lr": 0.05, "weight_decay": decay, "wd_after_momentum": late, **options},
                    sgd(decay=decay, late=late, **options),
                )
        for inside in (True, False):
            for norm_type in (0, 2):
                yield (
                    "FusedNovoGrad",
                    {**BETAS, "weight_decay": decay, "reg_inside_moment": inside, "norm_type": norm_type},
                    partial(novograd, lr=0.05, decay=decay, inside=inside, inf=norm_type == 0),
                )


@pytest.mark.parametrize(("name", "options", "formula"), list(cases()))
def test_the_rule(name: str, options: dict[str, Any], formula: Formula) -> None:
    from apex import optimizers

    parameters = parameters_of()
    batches = batches_for(parameters)
    wanted = formula([p.detach().double() for p in parameters], batches)
    optimizer = getattr(optimizers, name)(parameters, **options)
    run(optimizer, parameters, batches)
    for parameter, weight in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-5, atol=2e-6)


KEYS = {
    "FusedAdam": ({"exp_avg", "exp_avg_sq"}, {"step": STEPS}),
    "FusedSGD": ({"momentum_buffer"}, {}),
    "FusedLAMB": ({"exp_avg", "exp_avg_sq"}, {"step": STEPS}),
    "FusedNovoGrad": ({"exp_avg"}, {"step": STEPS}),
    "FusedAdagrad": ({"sum"}, {}),
    "FusedMixedPrecisionLamb": ({"exp_avg", "exp_avg_sq"}, {"step": STEPS}),
}


def build(name: str, parameters: list[nn.Parameter], **options: Any) -> Any:
    from apex import optimizers

    given: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if name == "FusedSGD" else {"lr": 0.05}
    return getattr(optimizers, name)(parameters, **given, **options)


@pytest.mark.parametrize("name", KEYS)
def test_state_keys_and_an_exact_resume(name: str) -> None:
    parameters = parameters_of()
    batches = batches_for(parameters)
    optimizer = build(name, parameters)
    run(optimizer, parameters, batches)
    state = copy.deepcopy(optimizer.state_dict())
    keys, counts = KEYS[name]
    assert all(set(row) == keys for row in state["state"].values())
    assert {k: v for k, v in state["param_groups"][0].items() if k == "step"} == counts
    if name == "FusedNovoGrad":
        low, wide = state["param_groups"][0]["exp_avg_sq"]
        assert (len(low), len(wide)) == (0, len(SHAPES))
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = build(name, others)
    resumed.load_state_dict(state)
    more = batches_for(parameters)
    run(optimizer, parameters, more)
    run(resumed, others, more)
    assert same(parameters, others)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alone(name: str, how: str) -> None:
    parameters = parameters_of()
    optimizer = build(name, parameters)
    run(optimizer, parameters, batches_for(parameters))
    pair = (parameters, optimizer)
    others, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    more = batches_for(parameters)
    run(other, others, more)
    assert not torch.equal(parameters[0], others[0])
    run(optimizer, parameters, more)
    assert same(parameters, others)


@pytest.mark.parametrize("name", KEYS)
def test_low_parameters_are_stepped_in_float32_and_rounded(name: str) -> None:
    lows = parameters_of(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in lows]
    batch = batches_for(lows)[:1]
    run(build(name, lows), lows, batch)
    run(build(name, wide), wide, [[g.float() for g in batch[0]]])
    for low, master in zip(lows, wide, strict=True):
        assert torch.equal(low, master.to(torch.bfloat16))


def test_a_parameter_that_pauses_keeps_the_step_of_its_group() -> None:
    """apex counts steps for each group, torch for each parameter."""
    parameters = parameters_of()
    batches: list[Any] = batches_for(parameters)
    batches[1][0] = None
    optimizer = build("FusedAdam", parameters, eps=0.0, betas=(0.0, 0.5))
    run(optimizer, parameters, batches[:2])
    before = parameters[0].detach().clone()
    batches[2][0] = batches[0][0]
    run(optimizer, parameters, batches[2:3])
    # Moments 1/2 g**2, then 3/4 g**2; corrected at step 3 by 7/8.
    expected = before - 0.05 * batches[0][0].sign() / math.sqrt(0.75 / 0.875)
    torch.testing.assert_close(parameters[0].detach(), expected)


def test_a_step_that_somebody_writes_to_the_group_is_the_step() -> None:
    parameters = parameters_of()
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    batches = batches_for(parameters)
    optimizer, fresh = (build("FusedAdam", each, betas=(0.0, 0.5)) for each in (parameters, others))
    for one, each in ((optimizer, parameters), (fresh, others)):
        run(one, each, batches[:1])
        if one is optimizer:
            one.param_groups[0]["step"] = 100
        else:
            state = one.state_dict()
            state["param_groups"][0]["step"] = 100
            one.load_state_dict(state)
        run(one, each, batches[1:2])
    assert same(parameters, others)
    assert optimizer.state_dict()["param_groups"][0]["step"] == 101


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name][1]])
@pytest.mark.parametrize("level", [None, "O2"])
def test_a_group_counts_its_steps_in_an_int(name: str, level: str | None) -> None:
    """As in apex: a script that logs ``param_groups`` as JSON reads it. A count for a captured graph is a tensor."""
    from apex import amp

    net = nn.Linear(3, 2)
    optimizer = build(name, list(net.parameters()))
    if level is not None:
        amp.initialize(net, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    counts: list[Any] = []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        loss = net(torch.ones(4, 3)).float().square().mean()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss * factor, optimizer) as scaled:
                scaled.backward()
        layout = optimizer._layout
        optimizer.step()
        assert layout is None or optimizer._layout is layout, "the count is no reason to lay out anew"
        counts.append(optimizer.param_groups[0]["step"])
    if name == "FusedMixedPrecisionLamb":
        assert all(isinstance(count, Tensor) for count in counts)
    else:
        hyper = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        assert json.loads(json.dumps(hyper))["step"] == counts[-1]
        assert counts == ([1, 2, 3] if level is None else [1, 1, 2])


def test_a_state_of_torchs_adamw_loads() -> None:
    parameters = parameters_of()
    plain = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0)
    run(plain, parameters, batches_for(parameters))
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = build("FusedAdam", others)
    state = copy.deepcopy(plain.state_dict())
    state["param_groups"][0]["bias_correction"] = True
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["param_groups"][0]["step"] == STEPS
    more = batches_for(parameters)
    run(plain, parameters, more)
    run(optimizer, others, more)
    for mine, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_novograd_resumes_with_the_largest_norm_and_a_parameter_without_state() -> None:
    parameters = parameters_of()
    batches: list[Any] = [[batch[0], None, *batch[2:]] for batch in batches_for(parameters)]
    optimizer = build("FusedNovoGrad", parameters, norm_type=0)
    run(optimizer, parameters, batches)
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = build("FusedNovoGrad", others, norm_type=0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, parameters, batches)
    run(resumed, others, batches)
    assert same(parameters, others)


def test_novograd_refuses_norms_of_another_model() -> None:
    parameters = parameters_of()
    optimizer = build("FusedNovoGrad", parameters)
    run(optimizer, parameters, batches_for(parameters))
    state = optimizer.state_dict()
    state["param_groups"][0]["exp_avg_sq"][1] = torch.ones(2)
    with pytest.raises(StateError, match="2 norms for 4 float32 parameters"):
        build("FusedNovoGrad", parameters_of()).load_state_dict(state)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb"])
def test_amsgrad_is_refused_as_apex_does(name: str) -> None:
    with pytest.raises(RuntimeError, match="amsgrad=True is not in apex's optimizers"):
        build(name, parameters_of(), amsgrad=True)


def test_other_refusals() -> None:
    with pytest.raises(RuntimeError, match="master_weights=True needs capturable=True"):
        build("FusedAdam", parameters_of(), master_weights=True)
    with pytest.raises(TypeError, match="scale"):
        build("FusedAdam", parameters_of()).step(scale=2.0)
    with pytest.raises(ConfigError, match="norm_type=1 must be 2, or 0"):
        build("FusedNovoGrad", parameters_of(), norm_type=1)
    with pytest.raises(ValueError, match="nesterov=True needs momentum"):
        build("FusedSGD", parameters_of(), nesterov=True, dampening=0.1)


@pytest.mark.parametrize("name", KEYS)
def test_zero_grad_drops_or_zeroes(name: str) -> None:
    for drops in (True, False):
        parameters = parameters_of()
        given = {} if name == "FusedMixedPrecisionLamb" else {"set_grad_none": drops}
        optimizer = build(name, parameters, **given)
        run(optimizer, parameters, batches_for(parameters)[:1])
        optimizer.zero_grad()
        assert all((p.grad is None) == (drops or not given) for p in parameters)
        run(optimizer, parameters, batches_for(parameters)[:1])
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in parameters)


def with_masters(name: str, parameters: list[nn.Parameter]) -> Any:
    if name == "FusedAdam":
        return build(name, parameters, capturable=True, master_weights=True)
    return build(name, parameters, reduced_precision_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_own_masters_move_and_the_parameters_are_rounded_from_them(name: str) -> None:
    lows = parameters_of(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in lows]
    batches = batches_for(lows)
    optimizer, plain = with_masters(name, lows), build(name, wide)
    for batch in batches:
        run(optimizer, lows, [batch])
        run(plain, wide, [[g.float() for g in batch]])
        for low, master in zip(lows, wide, strict=True):
            assert torch.equal(low, master.to(torch.bfloat16))
    assert set(optimizer.state_dict()["state"][0]) == {"exp_avg", "exp_avg_sq"}
    assert optimizer.state_dict()["param_groups"][0]["step"] == STEPS
    copies, other = copy.deepcopy((lows, optimizer))
    with torch.no_grad():
        for low, master in ((lows[0], wide[0]), (copies[0], wide[0])):
            low.zero_()
            master.zero_()
    more = batches_for(lows)
    run(other, copies, more)
    run(optimizer, lows, more)
    run(plain, wide, [[g.float() for g in batch] for batch in more])
    for low, twin, master in zip(lows, copies, wide, strict=True):
        assert torch.equal(low, master.to(torch.bfloat16))
        assert torch.equal(low, twin)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("asked", ["by the scaler", "by the step"])
def test_torchs_gradient_scaler(name: str, masters: bool, asked: str) -> None:
    dtype = torch.bfloat16 if masters else torch.float32
    lows = parameters_of(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in lows]
    optimizer = with_masters(name, lows) if masters else build(name, lows)
    plain = build(name, wide)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        batch = batches_for(lows)[0]
        if not bad:
            run(plain, wide, [[g.float() for g in batch]])
        scaler.scale(torch.ones(()))
        for low, gradient in zip(lows, batch, strict=True):
            low.grad = gradient * (math.inf if bad else scaler.get_scale())
        if asked == "by the scaler":
            scaler.step(optimizer)
        else:
            optimizer.step(grad_scaler=scaler)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
    assert scaler.get_scale() == 2.0
    assert optimizer.state_dict()["param_groups"][0]["step"] == 2
    for low, master in zip(lows, wide, strict=True):
        torch.testing.assert_close(low.float(), master.to(dtype).float(), rtol=1e-5, atol=1e-6)


def assign_data_twice(weight: nn.Parameter, value: Tensor) -> None:
    # The second assignment may reuse the address that the first one freed.
    weight.data = value + 1
    weight.data = value.clone()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
@pytest.mark.parametrize("write", [assign_data_twice, lambda weight, value: weight.detach().copy_(value)])
def test_a_written_parameter_is_what_own_masters_take(name: str, write: Callable[..., object]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = with_masters(name, [weight])
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    value = torch.tensor([100.0, -100.0, 200.0, -200.0], dtype=torch.bfloat16)
    write(weight, value)
    optimizer.step()
    # One step moves a weight by the learning rate (Adam), or by a part of the weight's norm (LAMB).
    assert bool((weight - value).abs().max() < 16)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_an_engine_steps_own_masters_as_they_step_themselves(name: str) -> None:
    models = [nn.Linear(6, 3).to(torch.float16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    given = (
        {"reduced_precision_dtype": torch.float16}
        if "Lamb" in name
        else {"capturable": True, "master_weights": True}
    )
    by_engine, alone = (build(name, list(model.parameters()), **given) for model in models)
    engine = halfpeak.prepare(models[0], by_engine, level="O3")
    for step in range(1, 5):
        x = torch.randn(4, 6, dtype=torch.float16)
        with engine.forward():
            loss = models[0](x).float().square().mean()
        engine.backward(loss)
        engine.step()
        alone.zero_grad()
        models[1](x).float().square().mean().backward()
        alone.step()
        assert same(models[0].parameters(), models[1].parameters())
        assert by_engine.state_dict()["param_groups"][0]["step"] == step


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *(("FusedAdam", level) for level in ("O0", "O1", "O3", "O5")),
        *((name, "O2") for name in KEYS if name != "FusedMixedPrecisionLamb"),
    ],
)
def test_under_amp_it_learns(name: str, level: str) -> None:
    from apex import amp
    from apex.normalization import FusedLayerNorm

    model = nn.Sequential(nn.Linear(8, 16), FusedLayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = build(name, list(model.parameters()))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    x = torch.randn(64, 8)
    y = x[:, :1] - x[:, 1:2]
    losses: list[float] = []
    for _ in range(40):
        loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_sgd_needs_a_rate_for_every_group_and_takes_it_from_there() -> None:
    from apex.optimizers import FusedSGD

    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = FusedSGD(
        [{"params": [weight], "lr": rate} for weight, rate in zip(weights, (0.1, 0.5), strict=True)]
    )
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [weight[0].item() for weight in weights] == pytest.approx([0.9, 0.5])
    with pytest.raises(ValueError, match=r"has no lr,.*pass lr= to the optimizer or in the group"):
        FusedSGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:]}], momentum=0.9)
