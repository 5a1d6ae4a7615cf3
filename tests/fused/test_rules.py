"""Properties of every rule that the backends rely on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fused.reference import CASES
from halfpeak import fused
from support.states import same


def test_every_optimizer_has_a_case_and_is_named_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fused.md").read_text()
    table = page.partition("| class | rule of |")[2].partition("\n\n")[0]
    assert {kind.__name__ for kind, _ in CASES.values()} == set(fused.__all__), "CASES in reference.py"
    assert set(re.findall(r"`(Fused\w+)`", table)) == set(fused.__all__), "the table of docs/fused.md"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [1, 2, 100])
def test_constants_are_the_same_from_a_step_that_only_the_device_knows(name: str, step: int) -> None:
    kind, options = CASES[name]
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], **options)
    group = optimizer.param_groups[0]
    rule = optimizer.rule(group)
    known = [float(number) for number in rule.constants(group, float(step))]
    found = rule.constants(group, torch.tensor(float(step), dtype=torch.float64))
    assert [float(number) for number in found] == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_writes_nothing_and_gives_weight_and_slots_in_float32(name: str) -> None:
    kind, options = CASES[name]
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], **options)
    group = optimizer.param_groups[0]
    rule = optimizer.rule(group)
    given = [torch.randn(5), torch.randn(5), *(torch.rand(5) for _ in rule.state_names)]
    if rule.per_param_scalars:
        given[-1] = torch.rand(1)
    before = [tensor.clone() for tensor in given]
    constants = [torch.tensor(float(number)) for number in rule.constants(group, 3.0)]
    moved = rule(given[0], given[1], given[2:], constants)
    assert same(given, before)
    assert [tensor.shape for tensor in moved] == [given[0].shape, *(slot.shape for slot in given[2:])]
    assert {tensor.dtype for tensor in moved} == {torch.float32}
    assert len(rule.initial(group)) == len(rule.state_names)
    assert hash(rule) == hash(optimizer.rule(group))
    assert rule == optimizer.rule(group)
