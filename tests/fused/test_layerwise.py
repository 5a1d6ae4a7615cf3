"""LAMB and NovoGrad, compared with the formulas of ``formulas.py``, one parameter at a time in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fused.formulas import BETAS, lamb, novograd
from fused.reference import give, gradients_for, parameters_of
from halfpeak.amp.optimizers import apex
from halfpeak.core.errors import ConfigError
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedNovoGrad, FusedSGD
from support.states import same, through_a_file


def check(build: Any, expected: Any) -> None:
    parameters = parameters_of()
    batches = [gradients_for(parameters) for _ in range(4)]
    wanted = expected([parameter.detach() for parameter in parameters], batches)
    optimizer = build(parameters)
    for batch in batches:
        give(parameters, batch)
        optimizer.step()
    for parameter, weight in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-5, atol=1e-6)


FLAGS = list(itertools.product([True, False], repeat=4))


@pytest.mark.parametrize(("decoupled", "average", "correct", "everywhere"), FLAGS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb(decoupled: bool, average: bool, correct: bool, everywhere: bool, decay: float) -> None:
    check(
        lambda parameters: FusedLAMB(
            parameters,
            lr=0.02,
            betas=BETAS,
            weight_decay=decay,
            adam_w_mode=decoupled,
            grad_averaging=average,
            bias_correction=correct,
            use_nvlamb=everywhere,
        ),
        lambda weights, batches: lamb(
            weights,
            batches,
            decay=decay,
            decoupled=decoupled,
            average=average,
            correct=correct,
            everywhere=everywhere,
        ),
    )


@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0])
def test_lamb_clips_the_norm_of_all_groups_together(limit: float) -> None:
    check(
        lambda parameters: FusedLAMB(
            [{"params": parameters[:4]}, {"params": parameters[4:]}],
            lr=0.02,
            betas=BETAS,
            weight_decay=0.1,
            max_grad_norm=limit,
        ),
        lambda weights, batches: lamb(weights, batches, limit=limit or math.inf),
    )


def test_lamb_refuses_a_group_that_is_to_be_clipped_by_itself() -> None:
    weights = parameters_of()
    with pytest.raises(
        ConfigError, match=r"max_grad_norm=0\.0 in a parameter group.*pass max_grad_norm= to FusedLAMB"
    ):
        FusedLAMB([{"params": weights[:1], "max_grad_norm": 0.0}, {"params": weights[1:]}])
    optimizer = FusedLAMB([{"params": weights[:1], "max_grad_norm": 1.0}, {"params": weights[1:2]}])
    with pytest.raises(ConfigError, match=r"the optimizer's 1\.0"):
        optimizer.add_param_group({"params": weights[2:], "max_grad_norm": 2.0})
    assert len(optimizer.param_groups) == 2
    before = weights[0].detach().clone()
    give(weights, gradients_for(weights))
    optimizer.param_groups[1]["max_grad_norm"] = 0.0
    with pytest.raises(ConfigError, match=r"max_grad_norm=0\.0 in a parameter group"):
        optimizer.step()
    assert torch.equal(weights[0].detach(), before)
    assert not optimizer.state


@pytest.mark.parametrize("kind", [FusedLAMB, apex.FusedLAMB])
@pytest.mark.parametrize("saved", [(0.5, 0.5), (0.0, 1.0)])
def test_lamb_loads_a_state_with_another_clipping(kind: Any, saved: tuple[float, float]) -> None:
    """Older versions accepted a value per group, clipped all groups alike, and saved such states."""
    weights = parameters_of()
    others = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer, resumed = (kind([{"params": one[:4]}, {"params": one[4:]}]) for one in (weights, others))
    give(weights, gradients_for(weights))
    optimizer.step()
    state = through_a_file(optimizer.state_dict())
    for group, limit in zip(state["param_groups"], saved, strict=True):
        group["max_grad_norm"] = limit
    resumed.load_state_dict(state)
    assert [group["max_grad_norm"] for group in resumed.param_groups] == [1.0, 1.0]
    for weight, other in zip(weights, others, strict=True):
        other.data.copy_(weight.data)
    batch = gradients_for(weights)
    for parameters, one in ((weights, optimizer), (others, resumed)):
        give(parameters, batch)
        one.step()
    assert same(weights, others)


@pytest.mark.parametrize(("inside", "average", "correct", "inf"), FLAGS)
@pytest.mark.parametrize("from_zero", [True, False])
def test_novograd(inside: bool, average: bool, correct: bool, inf: bool, from_zero: bool) -> None:
    check(
        lambda parameters: FusedNovoGrad(
            parameters,
            lr=0.02,
            betas=BETAS,
            eps=1e-6,
            weight_decay=0.1,
            reg_inside_moment=inside,
            grad_averaging=average,
            bias_correction=correct,
            norm_type=float("inf") if inf else 2,
            init_zero=from_zero,
        ),
        lambda weights, batches: novograd(
            weights, batches, inside=inside, average=average, correct=correct, inf=inf, from_zero=from_zero
        ),
    )


BUILD: dict[str, Any] = {
    "LAMB": lambda parameters: FusedLAMB(parameters, lr=0.01, backend="eager"),
    "NovoGrad": lambda parameters: FusedNovoGrad(parameters, lr=0.01, weight_decay=0.1, backend="eager"),
}


SCALED = {
    **BUILD,
    "SGD momentum": lambda parameters: FusedSGD(parameters, lr=0.01, momentum=0.9, backend="eager"),
    "AdamW": lambda parameters: FusedAdamW(parameters, lr=0.01, backend="eager"),
}


@pytest.mark.parametrize("name", SCALED)
def test_under_torchs_gradient_scaler(name: str) -> None:
    parameters, plain = parameters_of(), parameters_of()
    for parameter, other in zip(parameters, plain, strict=True):
        other.data.copy_(parameter.data)
    optimizer, other = SCALED[name](parameters), SCALED[name](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False, True, False):
        gradients = gradients_for(parameters)
        if bad:
            gradients[3][0, 0] = math.inf
        else:
            give(plain, gradients)
            other.step()
        scaler.scale(torch.ones(()))
        give(parameters, [gradient * scaler.get_scale() for gradient in gradients])
        scaler.step(optimizer)
        scaler.update()
        assert same(parameters, plain)
    assert scaler.get_scale() == 1.0
