"""Pairs: which parameters have a master, in whose place, and how both sides agree. ``tests/promises`` trains with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from halfpeak.core.optimizer_state import params_of
from halfpeak.parts.pairs import LIVE, Pairs

LOW = [torch.float16, torch.bfloat16]


def low(*values: float, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, -2.0, 0.5), dtype=dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_a_master_takes_the_place_of_its_weight(dtype: torch.dtype) -> None:
    first, wide, frozen = low(dtype=dtype), nn.Parameter(torch.ones(2)), low(3.0, dtype=dtype)
    frozen.requires_grad_(False)
    first.grad = torch.ones_like(first)
    optimizer = SGD([{"params": [first, wide], "lr": 1.0}, {"params": [frozen], "lr": 0.5}])
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    pairs = Pairs([optimizer])
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    assert all(group["params"] is then for group, then in zip(groups, lists, strict=True))
    assert list(pairs) == [(first, lists[0][0]), (frozen, lists[1][0])]
    assert lists[0][1] is pairs.main_of(wide) is pairs.weight_of(wide) is wide
    for weight, master in pairs:
        assert (pairs.main_of(weight), pairs.weight_of(master)) == (master, weight)
        assert (master.dtype, master.is_leaf) == (torch.float32, True)
        assert (master.requires_grad, master.grad) == (weight.requires_grad, weight.grad)
        assert torch.equal(master, weight.float())
    assert first.grad.dtype is torch.float32


def test_state_moves_to_the_master_in_float32_and_back() -> None:
    first, wide = low(), nn.Parameter(torch.ones(2))
    optimizer = Adam([first, wide])
    for parameter in (first, wide):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = dict(optimizer.state[first])
    pairs = Pairs([optimizer])
    master = pairs.main_of(first)
    assert set(optimizer.state) == {master, wide}
    for name, value in optimizer.state[master].items():
        assert value.dtype is torch.float32
        assert torch.equal(value, before[name].float())
    pairs.release()
    assert set(optimizer.state) == {first, wide}
    assert all(now is then for now, then in zip(params_of(optimizer), (first, wide), strict=True))


@pytest.mark.parametrize("dtype", LOW)
def test_only_elements_that_were_written_lose_their_digits(dtype: torch.dtype) -> None:
    exact = torch.tensor([1 / 3, 2 / 3, torch.nan])
    weight = nn.Parameter(exact.to(dtype))
    pairs = Pairs([SGD([weight])], values={id(weight): exact})
    master = pairs.main_of(weight)
    with torch.no_grad():
        weight[0] = 0.25
        weight[2] = 1.0
    value = pairs.float32_value(weight)
    assert value is not None
    assert value.tolist() == [0.25, exact[1].item(), 1.0]
    assert torch.equal(master.nan_to_num(7.0), exact.nan_to_num(7.0)), "looking must not change a master"
    pairs.agree()
    assert torch.equal(master, value)
    version = master._version
    pairs.agree()
    assert master._version == version, "what nobody wrote is not touched"


def test_a_value_that_does_not_fit_is_left_to_the_load_itself() -> None:
    weight, wide = low(1.0, 2.0), nn.Parameter(torch.ones(2))
    pairs = Pairs([SGD([weight, wide])])
    for value in (torch.ones(3), torch.ones(1, 2), torch.ones(2, dtype=torch.int64)):
        assert pairs.set_value(weight, value) is value
    pairs.set_value(wide, torch.zeros(2))
    assert pairs.main_of(weight).tolist() == [1.0, 2.0]
    pairs.set_value(weight, torch.full((2,), 1 / 3, dtype=torch.float64))
    assert torch.equal(pairs.main_of(weight), torch.full((2,), 1 / 3))


def test_pairs_are_alive_as_long_as_their_engine() -> None:
    pairs = Pairs([SGD([low()])])
    assert pairs in LIVE
    pairs.release()
    assert pairs not in LIVE
    pairs = Pairs([SGD([low()])])
    before = len(LIVE)
    del pairs
    assert len(LIVE) == before - 1
