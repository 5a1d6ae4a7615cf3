"""Compact state dtypes in the Triton update: the bits of the codecs, for every rule and start of an 8-bit block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fused.reference import give, step_as_on_a_device
from halfpeak.fused import FusedAdagrad, FusedAdam, FusedAdamW, FusedSGD
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.state_dtypes.codecs import BLOCK_SIZES
from halfpeak.fused.state_dtypes.quantized_rule import StateFormat
from support.triton import (
    DEVICES,
    INTERPRETER_WARNS,
    ExactRoots,
    bits_of,
    everything,
    gradients_on,
    parameters_on,
)

pytestmark = INTERPRETER_WARNS

FORMS: dict[str, StateFormat] = {
    "remainders": StateFormat("remainder"),
    "short remainders": StateFormat("remainder8"),
    "bfloat16 moments": StateFormat("remainder", torch.bfloat16),
    "8-bit moments": StateFormat("remainder", "int8"),
    "8 bits": StateFormat("remainder8", "int8"),
}


class CompactSGD(FusedSGD):
    """Uses state dtypes that no public optimizer offers for SGD; the kernels have them for every elementwise rule."""

    form = StateFormat()

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return self.form.of(super().rule(group), squares=(False,))


class CompactAdagrad(FusedAdagrad):
    form = StateFormat()

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return self.form.of(super().rule(group), squares=(True,))


def adam(form: StateFormat, kind: type[FusedAdam], **options: Any) -> Any:
    return lambda parameters: kind(
        parameters, lr=0.01, backend="triton", master=form.master, moments=form.moments, **options
    )


def compact(form: StateFormat, kind: type[CompactSGD] | type[CompactAdagrad], **options: Any) -> Any:
    def make(parameters: Any) -> FusedOptimizer:
        optimizer = kind(parameters, lr=0.01, backend="triton", **options)
        optimizer.form = form
        return optimizer

    return make


RULES: dict[str, Any] = {
    "AdamW": lambda form: adam(form, FusedAdamW),
    "Adam amsgrad": lambda form: adam(form, FusedAdam, amsgrad=True, weight_decay=0.1, maximize=True),
    "SGD nesterov": lambda form: compact(form, CompactSGD, momentum=0.9, nesterov=True),
    "Adagrad": lambda form: compact(form, CompactAdagrad, weight_decay=0.1),
}
CASES = [("AdamW", form) for form in FORMS] + [(rule, "8 bits") for rule in RULES if rule != "AdamW"]


def train(make: Any, device: str, dtype: torch.dtype, steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = parameters_on(device, dtype)
    optimizer = make(parameters)
    for _ in range(steps):
        give(parameters, gradients_on(device, parameters, dtype))
        with ExactRoots():
            optimizer.step()
    return everything(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rule", "form", "dtype"),
    [
        *((rule, form, torch.bfloat16) for rule, form in CASES),
        *(("AdamW", form, torch.float16) for form in ("remainders", "8 bits")),
        *(("AdamW", form, torch.float32) for form in ("bfloat16 moments", "8 bits")),
    ],
)
def test_the_update_has_the_bits_of_the_codecs(
    rule: str, form: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = RULES[rule](FORMS[form])
    ours = train(make, device, dtype)
    step_as_on_a_device(monkeypatch)
    assert bits_of(ours) == bits_of(train(make, device, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [16, 8])
def test_every_kind_of_float16_weight_is_kept_as_the_codec_keeps_it(
    bits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros, subnormal numbers, ties, the end of the range, infinities and nans, moved by a step from 2**-40 to 2**6."""
    every = torch.arange(-(2**15), 2**15, 37, dtype=torch.int32).to(torch.int16).view(torch.float16)
    edges = torch.tensor([0.0, -0.0, 2.0**-24, 2.0**-14, 65504.0, math.inf, math.nan], dtype=torch.float16)
    form = StateFormat("remainder" if bits == 16 else "remainder8")

    def moved() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for lr in (2.0**-40, 2.0**-26, 2.0**-12, 2.0**6):
            weight = torch.nn.Parameter(torch.cat([every, edges]).to(device))
            optimizer = adam(form, FusedAdamW)([weight])
            optimizer.param_groups[0]["lr"] = lr
            for sign in (1.0, -1.0, -1.0):
                weight.grad = torch.linspace(0.5, 1.0, len(weight), device=device).half() * sign
                with ExactRoots():
                    optimizer.step()
            found += [weight.detach(), optimizer.state[weight]["remainder"]]
        return found

    ours = moved()
    step_as_on_a_device(monkeypatch)
    assert bits_of(map(torch.nan_to_num, ours[::2])) == bits_of(
        map(torch.nan_to_num, (theirs := moved())[::2])
    )
    assert bits_of(ours[1::2]) == bits_of(theirs[1::2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_remainders_give_the_updates_of_a_float32_master(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    lows = parameters_on(device, dtype)
    wide = [torch.nn.Parameter(low.detach().float()) for low in lows]
    compact = FusedAdamW(lows, lr=0.01, backend="triton", master="remainder")
    plain = FusedAdamW(wide, lr=0.01, backend="triton")
    for _ in range(3):
        gradients = gradients_on(device, lows, dtype)
        give(lows, gradients)
        give(wide, [gradient.float() for gradient in gradients])
        compact.step()
        plain.step()
    remainders = compact.remainders
    assert remainders is not None
    assert all(torch.equal(remainders.fp32_value(low), value) for low, value in zip(lows, wide, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_no_number_spoils_its_own_block_and_no_other(device: str) -> None:
    block = BLOCK_SIZES[0]
    parameters = [
        torch.nn.Parameter(torch.ones(shape, device=device)) for shape in ((2, 3 * block), (1, block))
    ]
    optimizer = FusedAdamW(parameters, lr=0.1, backend="triton", moments="int8")
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    gradients[0][0, 2 * block + 7] = math.nan
    give(parameters, gradients)
    optimizer.step()
    row = optimizer.state[parameters[0]]
    expected = [[False, False, True], [False, False, False]]
    assert row["exp_avg_scale"].isnan().tolist() == row["exp_avg_sq_scale"].isnan().tolist() == expected
    assert not optimizer.state[parameters[1]]["exp_avg_scale"].isnan().any()
    assert int(parameters[0].isnan().sum()) == 1
