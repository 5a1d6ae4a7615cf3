"""Masters: which parameters have one, how it follows its parameter, and that pairs never depend on positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from halfpeak.core.errors import ParameterError
from halfpeak.core.optimizer_state import params_of
from halfpeak.state.masters import Masters

LOW = [torch.float16, torch.bfloat16]


def low(*values: float, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, -2.0, 0.5), dtype=dtype))


def adopted(*parameters: nn.Parameter, lr: float = 2.0**-12) -> tuple[Masters, Optimizer]:
    masters, optimizer = Masters(), SGD(parameters, lr=lr, momentum=0.5)
    masters.adopt(optimizer)
    return masters, optimizer


def step(masters: Masters, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    masters.mark_stepped(masters.indices_of(params_of(optimizer)))
    optimizer.step()
    masters.publish()


def master(masters: Masters, parameter: Tensor) -> Tensor:
    found = masters.of(parameter)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", LOW)
def test_a_master_takes_the_place_of_its_parameter(dtype: torch.dtype) -> None:
    first, other, second = low(dtype=dtype), nn.Parameter(torch.ones(2)), low(3.0, dtype=dtype)
    optimizer = SGD([{"params": [first, other], "lr": 1.0}, {"params": [second], "lr": 0.5}])
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    masters = Masters()
    masters.adopt(optimizer)
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    assert all(group["params"] is then for group, then in zip(groups, lists, strict=True))
    assert lists[0][0] is masters.of(first)
    assert lists[0][1] is other
    assert lists[1][0] is masters.of(second)
    assert masters.of(other) is None
    assert [(low, high) for low, high in masters] == [(first, lists[0][0]), (second, lists[1][0])]
    for parameter, high in masters:
        assert masters.low_of(high) is parameter
        assert (high.dtype, high.requires_grad, high.is_leaf, high.grad) == (torch.float32, True, True, None)
        assert torch.equal(high, parameter.float())


def test_who_gets_none() -> None:
    frozen = low()
    frozen.requires_grad_(False)
    masters, optimizer = (
        Masters(),
        SGD([frozen, nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())]),
    )
    before = list(optimizer.param_groups[0]["params"])
    masters.adopt(optimizer)
    assert len(masters) == 0
    assert all(now is then for now, then in zip(optimizer.param_groups[0]["params"], before, strict=True))


def test_exact_values_are_where_a_master_starts() -> None:
    exact = torch.tensor([1 / 3, 2 / 3])
    parameter = nn.Parameter(exact.to(torch.float16))
    masters, optimizer = Masters(), SGD([parameter])
    masters.adopt(optimizer, {id(parameter): exact})
    masters.refresh()
    assert torch.equal(master(masters, parameter), exact)
    assert master(masters, parameter).data_ptr() != exact.data_ptr()


def test_a_parameter_of_several_groups_and_optimizers_has_one_master() -> None:
    shared, own = low(1.0), low(2.0)
    left, right = SGD([shared]), Adam([{"params": [own]}, {"params": [shared]}])
    masters = Masters()
    masters.adopt(left)
    masters.adopt(right)
    masters.adopt(left)
    assert len(masters) == 2
    assert left.param_groups[0]["params"][0] is right.param_groups[1]["params"][0] is masters.of(shared)


def test_state_moves_to_the_master_in_float32_and_back() -> None:
    parameter = low()
    optimizer = Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = dict(optimizer.state[parameter])
    assert before["exp_avg"].dtype is torch.bfloat16
    masters = Masters()
    masters.adopt(optimizer)
    high = master(masters, parameter)
    assert list(optimizer.state) == [high]
    for name, value in optimizer.state[high].items():
        assert value.dtype is torch.float32
        assert torch.equal(value, before[name].float())
    masters.release(optimizer)
    assert list(optimizer.state) == [parameter]
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_release_puts_every_parameter_back() -> None:
    first, other, second = low(), nn.Parameter(torch.ones(2)), low(3.0)
    optimizer = SGD([{"params": [first, other]}, {"params": [second]}])
    masters = Masters()
    masters.release(optimizer)
    masters.adopt(optimizer)
    masters.release(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(now is then for now, then in zip(held, (first, other, second), strict=True))


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.mul_(2),
    "one element": lambda p: p[1].fill_(7.0),
    "clamp": lambda p: p.clamp_(-1, 1),
    "initialise": lambda p: nn.init.constant_(p, 0.25),
    "copy": lambda p: p.copy_(torch.tensor([4.0, 5.0, 6.0])),
    "new data": lambda p: setattr(p, "data", torch.tensor([4.0, 5.0, 6.0], dtype=p.dtype)),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(
        torch.tensor([4.0, 5.0, 6.0]).to(p.dtype), [p]
    ),
    "not finite": lambda p: p[0].fill_(torch.nan),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("dtype", LOW)
def test_a_master_follows_who_writes_to_its_parameter(dtype: torch.dtype, steps: int, write: str) -> None:
    parameter, bystander = low(dtype=dtype), low(1.0, dtype=dtype)
    masters, optimizer = adopted(parameter, bystander)
    for _ in range(steps):
        masters.refresh()
        step(masters, optimizer)
    high = master(masters, parameter)
    was, high_was, aside = (
        parameter.detach().clone(),
        high.detach().clone(),
        master(masters, bystander).clone(),
    )
    with torch.no_grad():
        WRITES[write](parameter)
    wanted = torch.where(parameter == was, high_was, parameter.float())
    value = masters.fp32_value(parameter)
    assert value is not None
    assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(wanted))
    assert steps == 0 or torch.equal(high, high_was), "looking must not change a master"
    masters.refresh()
    assert torch.equal(torch.nan_to_num(high), torch.nan_to_num(wanted))
    assert torch.equal(high.isnan(), parameter.isnan())
    assert torch.equal(master(masters, bystander), aside)


def test_a_write_into_data_is_seen_before_the_first_refresh() -> None:
    parameter = low(1.0, 2.0)
    masters, _ = adopted(parameter)
    parameter.data[0] = 8.0
    masters.refresh()
    assert master(masters, parameter).tolist() == [8.0, 2.0]


def test_a_write_into_data_is_seen_after_masters_were_published_before_the_first_refresh() -> None:
    parameter = low(1.0, 2.0)
    masters, _ = adopted(parameter)
    with torch.no_grad():
        master(masters, parameter).mul_(2)
    masters.publish_written()
    parameter.data.mul_(4)
    masters.refresh_by_value([0])
    assert master(masters, parameter).tolist() == parameter.tolist() == [8.0, 16.0]


@pytest.mark.parametrize("dtype", LOW)
def test_a_nan_is_no_write(dtype: torch.dtype) -> None:
    # The check samples the larger parameter for both; its sample holds the NaN.
    sampled, other = low(torch.nan, 1.0, 2.0, dtype=dtype), low(1.0, 2.0, dtype=dtype)
    masters, optimizer = adopted(sampled, other)
    masters.refresh()
    step(masters, optimizer)
    # If the master counted as written, it would be published over this write.
    other.data[0] = 8.0
    masters.publish_written()
    assert other.tolist() == [8.0, 2.0]
    sampled.data[1] = 4.0
    masters.refresh_by_value([0, 1])
    assert master(masters, sampled)[1:].tolist() == [4.0, 2.0 - 2.0**-12]
    assert master(masters, other)[0].item() == 8.0


def test_memory_at_an_address_of_before_is_followed() -> None:
    # An allocator may place a new tensor at the address of a freed one.
    place = bytearray(2 * 16)
    parameter = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    masters, _ = adopted(parameter)
    master = masters.of(parameter)
    assert master is not None
    addresses: set[int] = set()
    for number in (1.0, 2.0, 3.0):
        parameter.data = torch.zeros(16, dtype=torch.bfloat16)
        torch.frombuffer(place, dtype=torch.bfloat16).fill_(number)
        parameter.data = torch.frombuffer(place, dtype=torch.bfloat16)
        addresses.add(parameter.data_ptr())
        masters.refresh()
        assert torch.equal(master, torch.full((16,), number))
    assert len(addresses) == 1


def test_refreshing_does_not_touch_what_nobody_wrote() -> None:
    parameter = low()
    masters, optimizer = adopted(parameter)
    step(masters, optimizer)
    before, version = master(masters, parameter).clone(), master(masters, parameter)._version
    masters.refresh()
    masters.refresh()
    assert torch.equal(master(masters, parameter), before)
    assert master(masters, parameter)._version == version


def test_a_step_that_was_not_published_is_published_late() -> None:
    for late in (Masters.refresh, Masters.publish_written):
        parameter = low(1.0)
        masters, optimizer = adopted(parameter, lr=0.5)
        masters.refresh()
        master(masters, parameter).grad = torch.ones(1)
        masters.mark_stepped(masters.indices_of(params_of(optimizer)))
        optimizer.step()
        assert parameter.item() == 1.0
        assert masters.fp32_value(parameter) is masters.of(parameter)
        late(masters)
        assert (parameter.item(), master(masters, parameter).item()) == (0.5, 0.5)


def test_publishing_one_optimizer_leaves_the_parameters_of_others_unwritten() -> None:
    first, second = low(1.0), low(1.0)
    masters = Masters()
    optimizers = [SGD([first], lr=0.5), SGD([second], lr=0.5)]
    for optimizer, parameter in zip(optimizers, (first, second), strict=True):
        masters.adopt(optimizer)
        master(masters, parameter).grad = torch.ones(1)
    for optimizer in optimizers:
        masters.mark_stepped(masters.indices_of(params_of(optimizer)))
        optimizer.step()
    version = second._version
    masters.publish(masters.indices_of(params_of(optimizers[0])))
    assert (first.item(), second.item(), second._version) == (0.5, 1.0, version)
    masters.publish_written()
    assert second.item() == 0.5


@pytest.mark.parametrize("dtype", LOW)
def test_a_loaded_value_stays_exact(dtype: torch.dtype) -> None:
    parameter = low(1.0, 2.0, dtype=dtype)
    masters, optimizer = adopted(parameter)
    step(masters, optimizer)
    value = torch.tensor([1 / 3, 1e6])
    masters.set_value(parameter, value)
    with torch.no_grad():
        parameter.copy_(value)
    masters.refresh()
    assert torch.equal(master(masters, parameter), value)


def test_values_that_do_not_fit_are_left_to_the_load_itself() -> None:
    parameter = low(1.0, 2.0)
    masters, _ = adopted(parameter)
    for value in (torch.ones(3), torch.ones(1, 2), torch.ones(2, dtype=torch.int64)):
        masters.set_value(parameter, value)
    masters.set_value(nn.Parameter(torch.ones(2)), torch.zeros(2))
    assert master(masters, parameter).tolist() == [1.0, 2.0]


def test_a_loaded_value_makes_a_master_of_low_parameters_alone() -> None:
    wide, frozen, other = nn.Parameter(torch.ones(1)), low(1.0).requires_grad_(False), low(1.0)
    masters, optimizer = adopted(low(1.0), wide)
    optimizer.add_param_group({"params": [frozen]})
    for parameter in (wide, frozen, other):
        masters.set_value(parameter, torch.full((1,), 1 / 3, dtype=torch.float64))
    assert [parameter is frozen for parameter, _ in masters] == [False, True]
    assert master(masters, frozen).item() == torch.tensor(1 / 3).item()


@pytest.mark.parametrize(
    "move",
    [
        lambda data: torch.zeros(5, dtype=data.dtype),
        pytest.param(lambda data: data.to(torch.accelerator.current_accelerator()), marks=pytest.mark.gpu),
    ],
    ids=["resized", "other device"],
)
def test_a_moved_or_resized_parameter_is_an_error(move: Callable[[Tensor], Tensor]) -> None:
    parameter = low()
    masters, optimizer = adopted(parameter)
    step(masters, optimizer)
    before = master(masters, parameter).clone()
    parameter.data = move(parameter.data)
    with pytest.raises(ParameterError, match=r"\(3,\) on cpu"):
        masters.refresh()
    assert torch.equal(master(masters, parameter), before)
    # A checkpoint can still be saved.
    value = masters.fp32_value(parameter)
    assert value is not None
    assert (value.shape, value.device, value.dtype) == (parameter.shape, parameter.device, torch.float32)
    assert torch.equal(value.cpu(), before if value.shape == before.shape else torch.zeros(5))
