"""Fused optimizers, compared with torch's of the same rule: values, state, groups, changes of parameters."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from fused.reference import give, gradients_for, parameters_of
from halfpeak import ParameterError, StateError
from halfpeak.fused import FusedAdagrad, FusedAdam, FusedAdamW, FusedLAMB, FusedNovoGrad, FusedSGD
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from support.states import differences, same, through_a_file

PAIRS: dict[str, tuple[type[FusedOptimizer], type[Optimizer], dict[str, Any]]] = {
    "SGD": (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 1e-2}),
    "SGD momentum": (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (
        FusedSGD,
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    "Adam": (FusedAdam, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-2, "maximize": True}),
    "AdamW": (FusedAdamW, torch.optim.AdamW, {"lr": 1e-3}),
    "AdamW amsgrad": (FusedAdamW, torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "eps": 1e-6}),
    "Adagrad": (
        FusedAdagrad,
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 1e-3, "weight_decay": 1e-3, "initial_accumulator_value": 0.1},
    ),
}

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
"""Tolerance for values of size one after a few steps, because both round differently."""


class Twins:
    """Equal parameters under a fused optimizer and under torch's."""

    def __init__(self, name: str, **others: Any) -> None:
        kind, theirs, options = PAIRS[name]
        self.ours = parameters_of()
        self.theirs = [torch.nn.Parameter(p.detach().clone()) for p in self.ours]
        self.fused: Optimizer = kind(self.ours, backend="eager", **copy.deepcopy({**options, **others}))
        self.plain: Optimizer = theirs(self.theirs, **{**options, **others})

    def step(self, skip: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        gradients: list[Tensor | None] = list(gradients_for(self.ours))
        for index in skip:
            gradients[index] = None
        give(self.ours, gradients)
        give(self.theirs, gradients)
        self.fused.step()
        self.plain.step()

    def agree(self, **tolerance: float) -> None:
        tolerance = tolerance or ROUNDING
        pairs = [*zip(self.ours, self.theirs, strict=True)]
        rows, plains = self.fused.state_dict()["state"], self.plain.state_dict()["state"]
        pairs += [
            (rows[i][key], value)
            for i, row in plains.items()
            for key, value in row.items()
            if value is not None
        ]
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, check_stride=False, **tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_agrees_over_hundreds_of_steps(name: str) -> None:
    twins = Twins(name)
    for _ in range(300):
        twins.step()
    # Hundreds of roundings of weights and moments of size one, which partly cancel.
    twins.agree(rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_parameters_without_gradient_stay_behind(name: str) -> None:
    twins = Twins(name)
    for skip in ({0, 3, 4}, {3}, set[int](), {6, 7}, {0, 3, 9}, set[int]()):
        twins.step(skip)
        twins.agree()


@pytest.mark.parametrize("name", PAIRS)
def test_the_state_goes_into_torchs_optimizer_and_back(name: str) -> None:
    twins = Twins(name)
    for skip in (set[int](), {0, 5}):
        twins.step(skip)
    ours, theirs = copy.deepcopy(twins.fused.state_dict()), copy.deepcopy(twins.plain.state_dict())
    assert ours["state"].keys() == theirs["state"].keys()
    for key, row in theirs["state"].items():
        assert {k for k, v in row.items() if v is not None} == ours["state"][key].keys()
    twins.fused.load_state_dict(theirs)
    twins.plain.load_state_dict(ours)
    for skip in (set[int](), {3}, set[int]()):
        twins.step(skip)
        twins.agree()


@pytest.mark.parametrize("name", PAIRS)
def test_groups_with_their_own_numbers_are_added_late(name: str) -> None:
    twins = Twins(name)
    twins.step()
    late = parameters_of()
    same = [torch.nn.Parameter(p.detach().clone()) for p in late]
    twins.fused.add_param_group({"params": late, "lr": 0.05, "weight_decay": 0.0})
    twins.plain.add_param_group({"params": same, "lr": 0.05, "weight_decay": 0.0})
    if name == "Adagrad":  # torch's makes state only in its constructor
        twins.plain.load_state_dict(copy.deepcopy(twins.fused.state_dict()))
    twins.ours += late
    twins.theirs += same
    for skip in (set[int](), {1, 12}, set[int]()):
        twins.step(skip)
        twins.agree()


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adagrad"])
def test_data_swapped_and_written(name: str) -> None:
    twins = Twins(name)
    twins.step()
    for parameter in (twins.ours[3], twins.theirs[3]):
        parameter.data = torch.ones(7, 5)
    for parameter in (twins.ours[6], twins.theirs[6]):
        parameter.data.mul_(2.0)
    with torch.no_grad():
        for parameter in (twins.ours[4], twins.theirs[4]):
            parameter.zero_()
    twins.step()
    twins.agree()
    twins.step()
    twins.agree()


def test_a_large_parameter_takes_a_state_of_another_dtype_and_memory_order() -> None:
    shape = (8, 8, 32, 33)
    weight = torch.randn(shape).to(memory_format=torch.channels_last)
    low = torch.randn(shape).to(torch.bfloat16, memory_format=torch.channels_last)
    row = {"step": torch.tensor(3.0), "exp_avg": low, "exp_avg_sq": torch.rand(shape)}
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    optimizers = FusedAdamW([ours], lr=0.1, backend="eager"), torch.optim.AdamW([theirs], lr=0.1)
    for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: row}})
        parameter.grad = torch.full(shape, 0.1)
        optimizer.step()
    mine, other = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    torch.testing.assert_close([ours, *mine.values()], [theirs, *other.values()], **ROUNDING)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_schedulers_and_tensor_learning_rates(kind: str) -> None:
    lr = 0.1 if kind == "number" else torch.tensor(0.1)
    twins = Twins("AdamW", lr=lr)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (twins.fused, twins.plain)]
    for _ in range(4):
        twins.step()
        twins.agree()
        for schedule in schedules:
            schedule.step()
    assert float(twins.fused.param_groups[0]["lr"]) == pytest.approx(0.1 * 0.5**4)


def test_momentum_switched_on_and_off() -> None:
    twins = Twins("SGD momentum")
    for momentum in (0.0, 0.0, 0.9, 0.9, 0.0, 0.9):
        for optimizer in (twins.fused, twins.plain):
            optimizer.param_groups[0]["momentum"] = momentum
        twins.step()
        twins.agree()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_a_copy_has_parameters_and_state_of_its_own(name: str, how: str) -> None:
    twins = Twins(name)
    twins.step()
    pair = (twins.ours, twins.fused)
    ours, fused = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = [parameter.detach().clone() for parameter in twins.ours]
    twins.ours, twins.fused = ours, fused
    twins.step()
    twins.agree()
    assert same(pair[0], before)


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_found_inf_of_any_size_leaves_everything_as_it_was(value: float) -> None:
    twins = Twins("SGD momentum")
    before = [parameter.detach().clone() for parameter in twins.ours]
    twins.fused.found_inf = torch.tensor(value)  # type: ignore[attr-defined]
    give(twins.ours, gradients_for(twins.ours))
    twins.fused.step()
    assert same(twins.ours, before)
    del twins.fused.found_inf
    twins.step()
    twins.agree()


def test_a_first_step_that_was_skipped_is_still_to_come() -> None:
    """``measure`` makes the state; adding a group then must not make the parameters look as if they had stepped."""
    twins = Twins("SGD momentum")
    give(twins.ours, gradients_for(twins.ours))
    assert isinstance(twins.fused, FusedOptimizer)
    twins.fused.measure(StepInputs([p.grad for p in twins.ours], twins.ours, torch.ones(())))
    late = torch.nn.Parameter(torch.randn(3))
    for optimizer in (twins.fused, twins.plain):
        twin = torch.nn.Parameter(late.detach().clone())
        optimizer.add_param_group({"params": [twin]})
        (twins.ours if optimizer is twins.fused else twins.theirs).append(twin)
    for _ in range(2):
        twins.step()
        twins.agree()


@pytest.mark.parametrize("members", [1, 2])
def test_autograd_sees_that_weights_have_moved(members: int) -> None:
    """Also those in a buffer that several share, which is written through another tensor."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(members)]
    optimizer = FusedAdamW(weights)
    for _ in range(2):
        loss = (weights[0] * weights[0]).sum()
        give(weights, [torch.ones(3)] * members)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SKIPS: dict[str, list[set[int]]] = {
    "frozen and trained again": [set(), {1, 3}, {1, 3}, set(), set(), set()],
    "trained later": [{1, 3}, {1, 3}, set(), set(), set()],
    "in turns": [{1, 3}, {0, 2}, set(), {1, 3}, {0, 2}, set()],
}


FUSED: dict[str, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    **{name: (kind, options) for name, (kind, _, options) in PAIRS.items()},
    "LAMB": (FusedLAMB, {"lr": 0.01}),
    "NovoGrad": (FusedNovoGrad, {"lr": 0.01, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("name", FUSED)
def test_a_run_goes_on_bit_for_bit_where_parameters_have_not_always_stepped_together(
    name: str, skips: str, how: str
) -> None:
    torch.manual_seed(1)
    run = [(skip, gradients_for(odd_parameters())) for skip in SKIPS[skips]]
    kind, options = FUSED[name]

    def train(stop: int) -> tuple[list[Tensor], dict[str, Any]]:
        parameters = odd_parameters()
        optimizer = kind(parameters, backend="eager", **options)
        for step, (skip, gradients) in enumerate(run):
            if step == stop and how == "deepcopy":
                parameters, optimizer = copy.deepcopy((parameters, optimizer))
            elif step == stop:
                state, optimizer = optimizer.state_dict(), kind(parameters, backend="eager", **options)
                optimizer.load_state_dict(through_a_file(state))
            give(parameters, [None if i in skip else grad for i, grad in enumerate(gradients)])
            optimizer.step()
        return [parameter.detach() for parameter in parameters], optimizer.state_dict()

    whole = train(len(run))
    for index, row in whole[1]["state"].items():
        assert "step" not in row or row["step"] == sum(index not in skip for skip, _ in run)
    for stop in range(1, len(run)):
        assert not differences(train(stop), whole), stop


def odd_parameters() -> list[torch.nn.Parameter]:
    """Parameters of one buffer that begin and end off the boundaries of CPU vectors; two have no elements or dimensions."""
    values = [torch.linspace(-1, 1, n) for n in (13, 6, 18, 3, 27, 0)]
    return [torch.nn.Parameter(value) for value in (*values, torch.tensor(0.5))]


WRITES: dict[str, Any] = {
    "in place": lambda state, p, key: state[p][key].mul_(0.5),
    "replaced": lambda state, p, key: state[p].update({key: state[p][key] * 0.5}),
    "other memory": lambda state, p, key: setattr(state[p][key], "data", state[p][key] * 0.5),
    "another row": lambda state, p, key: state.update({p: {**state[p], key: state[p][key] * 0.5}}),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW amsgrad", "Adagrad"])
def test_states_that_somebody_writes_are_stepped(name: str, write: str) -> None:
    twins = Twins(name)
    for _ in range(3):
        twins.step()
        for optimizer, parameters in ((twins.fused, twins.ours), (twins.plain, twins.theirs)):
            for parameter in parameters[::2]:
                for key in optimizer.state[parameter].keys() - {"step"}:
                    WRITES[write](optimizer.state, parameter, key)
                if "step" in optimizer.state[parameter] and write != "another row":
                    optimizer.state[parameter]["step"] = torch.tensor(1.0)
    twins.step()
    twins.agree()


DELETIONS: dict[str, Callable[[Optimizer], Any]] = {
    "all rows": lambda optimizer: optimizer.state.clear(),
    "the last row": lambda optimizer: optimizer.state.popitem(),
    "the whole state": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("delete", DELETIONS)
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW amsgrad"])
def test_states_that_somebody_deletes_start_anew(name: str, delete: str) -> None:
    twins = Twins(name)
    twins.step()
    for optimizer in (twins.fused, twins.plain):
        DELETIONS[delete](optimizer)
    twins.step()
    twins.agree()


def test_a_state_of_another_shape_is_refused() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    fused, plain = FusedAdamW([ours], lr=0.1, backend="eager"), torch.optim.AdamW([theirs], lr=0.1)
    for step in range(2):
        ours.grad = theirs.grad = torch.randn(3)
        if step == 1:
            right, fused.state[ours]["exp_avg"] = fused.state[ours]["exp_avg"], torch.zeros(())
            with pytest.raises(ParameterError, match=r"'exp_avg' of a parameter has shape \(\)"):
                fused.step()
            fused.state[ours]["exp_avg"] = right
        fused.step()
        plain.step()
    torch.testing.assert_close(ours, theirs, **ROUNDING)


def test_a_count_that_parameters_share_is_not_written_in_place() -> None:
    twins = Twins("AdamW")
    twins.step()
    before = [parameter.detach().clone() for parameter in twins.ours]
    rows = [twins.fused.state[parameter] for parameter in twins.ours]
    rows[1]["step"].zero_()
    give(twins.ours, gradients_for(twins.ours))
    with pytest.raises(StateError, match=r'assign another tensor: optimizer.state\[p\]\["step"\] = torch'):
        twins.fused.step()
    assert same(twins.ours, before)
    for row in rows:
        row["step"] = torch.tensor(1.0)
    twins.step()
    twins.agree()


def test_dtypes_mixed_in_one_group() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    mixed = [torch.nn.Parameter(torch.randn(9).to(dtype)) for dtype in dtypes]
    apart = [torch.nn.Parameter(parameter.detach().clone()) for parameter in mixed]
    optimizers = [FusedAdamW(mixed), *(FusedAdamW([parameter]) for parameter in apart)]
    for _ in range(3):
        gradients = gradients_for(mixed)
        give(mixed, gradients)
        give(apart, gradients)
        for optimizer in optimizers:
            optimizer.step()
    assert same(mixed, apart)
    state = {p.dtype: optimizers[0].state[p]["exp_avg"].dtype for p in mixed}
    assert state == {d: torch.promote_types(d, torch.float32) for d in dtypes}


def test_no_gradient_anywhere_is_no_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([weight])
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3))
    assert not optimizer.state[weight]
