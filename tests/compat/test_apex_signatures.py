"""The interface of apex 25.04: each argument has apex's name, place and default, and reaches an optimizer's groups."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from compat.names import compared
from halfpeak import amp
from halfpeak.amp import fp16_utils
from halfpeak.amp.larc import LARC
from halfpeak.amp.optimizers import apex

ADAM = "lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8"
LAMB = (
    "bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False, adam_w_mode=True"
    ", grad_averaging=True"
)
SGD = "lr=0.1, momentum=0, dampening=0, weight_decay=0, nesterov=False, wd_after_momentum=False, materialize_master_grads=True"

OPTIMIZERS: list[tuple[Any, str]] = [
    (
        apex.FusedAdagrad,
        "params, lr=1e-2, eps=1e-10, weight_decay=0., set_grad_none=True, adagrad_w_mode=False",
    ),
    (
        apex.FusedAdam,
        f"params, {ADAM}, adam_w_mode=True, weight_decay=0., amsgrad=False, set_grad_none=True, capturable=False, "
        "master_weights=False",
    ),
    (apex.FusedLAMB, f"params, lr=1e-3, {LAMB}, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False"),
    (
        apex.FusedMixedPrecisionLamb,
        f"params, lr=1e-3, step=0, {LAMB}, max_grad_norm=1.0, use_nvlamb=False, reduced_precision_dtype=None",
    ),
    (
        apex.FusedNovoGrad,
        f"params, {ADAM}, weight_decay=0., amsgrad=False, reg_inside_moment=False, grad_averaging=True, norm_type=2, "
        "init_zero=False, set_grad_none=True",
    ),
    (apex.FusedSGD, f"params, {SGD}, set_grad_none=False"),
]
IDS = [f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for cls, _ in OPTIMIZERS]


def defaults(signature: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(f"def f({signature}): ...", scope)
    parameters = list(inspect.signature(scope["f"]).parameters.values())
    return {one.name: one.default for one in parameters[1:]}


@pytest.mark.parametrize(("cls", "signature"), OPTIMIZERS, ids=IDS)
def test_arguments_by_place_and_by_default(cls: Any, signature: str) -> None:
    """Passing every default by position gives the same groups as passing none, with the values that apex documents."""
    values = defaults(signature)
    params = [nn.Parameter(torch.ones(2))]
    by_place = cls(params, *values.values())
    by_default = cls(params, lr=values["lr"])
    group = by_place.param_groups[0]
    for name in group.keys() & values.keys():
        assert group[name] == by_default.param_groups[0][name] == pytest.approx(values[name]), name
    own = {name: one.default for name, one in inspect.signature(cls).parameters.items()}
    assert list(own) == ["params", *values]
    if cls is not apex.FusedSGD:  # which requires a rate
        assert own["lr"] == values["lr"]
    assert {**own, "params": None, "lr": None} == {"params": None, **values, "lr": None}
    named = [
        name for name in ("lr", "weight_decay", "betas", "eps", "momentum", "max_grad_norm") if name in values
    ]
    assert set(named) <= group.keys()


INITIALIZE = (
    "models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, patch_torch_functions=None, "
    "keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1, "
    "verbosity=1, min_loss_scale=None, max_loss_scale=2.0**24"
)
SCALE_LOSS = "loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False"
FP16 = "init_optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None, verbose=True"


@pytest.mark.parametrize(
    ("ours", "signature"),
    [
        (amp.initialize, INITIALIZE),
        (amp.scale_loss, SCALE_LOSS),
        (LARC, "optimizer, trust_coefficient=0.02, clip=True, eps=1e-8"),
        (fp16_utils.FP16_Optimizer, FP16),
        (fp16_utils.LossScaler, "scale=1"),
        (fp16_utils.DynamicLossScaler, "init_scale=2**32, scale_factor=2., scale_window=1000"),
    ],
)
def test_signatures_of_what_stands_around_them(ours: Any, signature: str) -> None:
    assert compared(f"({signature})", ours, is_method=False).startswith("same")
