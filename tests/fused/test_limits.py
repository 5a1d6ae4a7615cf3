"""Arguments that fused optimizers refuse, with their messages, and the bytes of optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused.reference import CASES, give, gradients_for
from halfpeak.core.errors import ConfigError, ConfigTypeError, HalfpeakError, ParameterError, StateError
from halfpeak.fused import FusedAdagrad, FusedAdamW, FusedLAMB, FusedNovoGrad, FusedSGD
from halfpeak.fused.base import FusedOptimizer


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


REFUSED: list[tuple[type[FusedOptimizer], dict[str, Any], str]] = [
    (FusedSGD, {"lr": -1.0}, "lr=-1.0 must be a number of at least 0"),
    (FusedSGD, {"lr": float("nan")}, "lr=nan must be"),
    (FusedSGD, {"lr": torch.ones(2)}, "lr is a tensor of shape"),
    (FusedSGD, {"lr": torch.tensor(-1.0)}, "must be a number of at least 0"),
    (FusedSGD, {"momentum": -0.1}, "momentum=-0.1 must be"),
    (FusedSGD, {"nesterov": True}, "nesterov=True needs momentum above 0"),
    (FusedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
    (FusedAdamW, {"weight_decay": -1}, "weight_decay=-1 must be"),
    (FusedAdamW, {"eps": -1e-8}, "eps=-1e-08 must be"),
    (FusedAdamW, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers of at least 0 and below 1"),
    (FusedAdamW, {"backend": "cuda"}, "backend='cuda' must be one of"),
    (FusedAdagrad, {"lr_decay": -1.0}, "lr_decay=-1.0 must be"),
    (FusedAdagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value=-1.0 must be"),
    (FusedLAMB, {"max_grad_norm": -1.0}, "max_grad_norm=-1.0 must be"),
    (FusedNovoGrad, {"norm_type": 1}, r"norm_type=1 must be 2 or float\('inf'\)"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_a_value_out_of_its_range(kind: type[FusedOptimizer], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind([weight()], **options)


@pytest.mark.parametrize("options", [{"lr": "0.1"}, {"betas": 0.9}, {"betas": (0.9,)}, {"betas": "09"}])
def test_a_value_of_another_type(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigTypeError, match=f"{next(iter(options))}="):
        FusedAdamW([weight()], **options)


def test_a_refused_group_is_not_added() -> None:
    optimizer = FusedAdamW([weight()])
    for group in ({"params": [weight()], "lr": -1.0}, {"params": [torch.zeros(2, dtype=torch.complex64)]}):
        with pytest.raises(HalfpeakError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.zeros(3, dtype=torch.complex64), "complex64"),
    ],
)
def test_a_parameter_that_no_kernel_can_step(make: Any, kind: str) -> None:
    parameter = make().requires_grad_()
    with pytest.raises(ParameterError, match=f"{kind}.*use torch.optim"):
        FusedAdamW([weight(), parameter])


@pytest.mark.parametrize("kind", [FusedAdamW, FusedSGD, FusedLAMB])
def test_a_sparse_gradient_is_refused_before_anything_moves(kind: type[FusedOptimizer]) -> None:
    dense, sparse = weight(), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = kind([dense, sparse.weight], lr=0.1)
    (dense + sparse(torch.tensor([1])).squeeze(0)).sum().backward()
    with pytest.raises(ParameterError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(dense.detach(), torch.ones(3))
    assert not optimizer.state


def test_a_state_of_another_model() -> None:
    first, second = FusedAdamW([weight()]), FusedAdamW([torch.nn.Parameter(torch.ones(2, 2))])
    for optimizer in (first, second):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    first.step()
    with pytest.raises(
        StateError, match=r"\['exp_avg'\] is a float32 tensor of \(3,\) and should be .* of \(2, 2\)"
    ):
        second.load_state_dict(first.state_dict())
    assert not second.state


def test_a_number_where_a_state_is_a_tensor() -> None:
    first, second = FusedNovoGrad([weight()]), FusedNovoGrad([weight()])
    first.param_groups[0]["params"][0].grad = torch.ones(3)
    first.step()
    state = first.state_dict()
    state["state"][0]["exp_avg_sq"] = 2.0
    with pytest.raises(StateError, match=r"\['exp_avg_sq'\] is 2.0 and should be a tensor of \(\)"):
        second.load_state_dict(state)
    assert not second.state


def test_a_hyper_parameter_of_a_state_that_is_out_of_its_range() -> None:
    optimizer = FusedNovoGrad([weight()])
    state = optimizer.state_dict()
    state["param_groups"][0]["norm_type"] = 1
    with pytest.raises(StateError, match="of state, norm_type=1 must be 2"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["norm_type"] == 2


BYTES = {"SGD": 0, "SGD momentum": 4, "Adam": 8, "Adam amsgrad": 12, "Adagrad": 4, "LAMB": 8, "NovoGrad": 4}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_state_per_parameter(name: str, dtype: torch.dtype) -> None:
    kind, options = CASES[name]
    parameters = [torch.nn.Parameter(torch.randn(1024).to(dtype)) for _ in range(64)]
    optimizer = kind(parameters, backend="eager", **options)
    give(parameters, gradients_for(parameters))
    optimizer.step()
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for row in optimizer.state.values()
        for value in row.values()
    }
    scalars = 4 + (4 * len(parameters) if name == "NovoGrad" else 0)
    assert sum(held.values()) <= BYTES[name] * 1024 * 64 + scalars
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    assert sum(weights.values()) == dtype.itemsize * 1024 * 64
