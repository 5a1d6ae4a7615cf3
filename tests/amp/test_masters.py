"""Master weights under amp: which parameters have one, and that masters take what is written to weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfpeak import amp
from support.nets import LEVELS, MASTERED, OPTIMIZERS, make_batch, make_net


def setup(
    level: str, net: nn.Module | None = None, lr: float = 0.1, **options: Any
) -> tuple[nn.Sequential, torch.optim.SGD]:
    net = make_net() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, max_loss_scale=256.0, **options)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x, y = make_batch(seed)
    optimizer.zero_grad()
    with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_master_params_takes_any_optimizer_at_any_time() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1.0)
    found = amp.master_params(optimizer)
    assert isinstance(found, Iterator)
    assert all(a is b for a, b in zip(found, parameters, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_who_is_stepped(level: str) -> None:
    net, optimizer = setup(level)
    for _ in range(2):
        for parameter, stepped in zip(net.parameters(), amp.master_params(optimizer), strict=True):
            if level in MASTERED and parameter.dtype is not torch.float32:
                assert stepped is not parameter
                assert stepped.dtype is torch.float32
                assert stepped.is_leaf
                assert stepped.requires_grad
            else:
                assert stepped is parameter
        train_step(net, optimizer)


@pytest.mark.parametrize("level", MASTERED)
def test_masters_start_from_the_unrounded_weights(level: str) -> None:
    exact = [parameter.detach().clone() for parameter in make_net().parameters()]
    net, optimizer = setup(level)
    for parameter, master, value in zip(net.parameters(), amp.master_params(optimizer), exact, strict=True):
        assert torch.equal(master, value)
        assert torch.equal(parameter, value.to(parameter.dtype))


@pytest.mark.parametrize("level", MASTERED)
def test_the_model_holds_the_rounded_masters_after_every_step(level: str) -> None:
    net, optimizer = setup(level)
    for step in range(5):
        train_step(net, optimizer, step)
        for parameter, master in zip(net.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("level", MASTERED)
def test_updates_below_the_low_precision_add_up(level: str) -> None:
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    net, optimizer = setup(level, net, lr=2.0**-14)
    for _ in range(64):
        optimizer.zero_grad()
        with amp.scale_loss(net(torch.ones(1, 1)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert next(amp.master_params(optimizer)).item() == 1 - 64 * 2.0**-14
    assert net.weight.item() == torch.tensor(1 - 64 * 2.0**-14).to(net.weight.dtype).item()


@pytest.mark.parametrize("level", MASTERED)
def test_master_weights_false(level: str) -> None:
    net, optimizer = setup(level, master_weights=False)
    for step in range(2):
        assert all(a is b for a, b in zip(amp.master_params(optimizer), net.parameters(), strict=True))
        train_step(net, optimizer, step)


def test_o3_with_masters_has_them_for_norms_too() -> None:
    net, optimizer = setup("O3", master_weights=True)
    train_step(net, optimizer)
    assert {p.dtype for p in net.parameters()} == {torch.float16}
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}


def test_step_before_anything_else() -> None:
    """apex raised ``AttributeError``."""
    net, optimizer = setup("O2")
    before = [parameter.clone() for parameter in net.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


class TestZeroGrad:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_clears_what_is_stepped(self, level: str, set_to_none: bool) -> None:
        net, optimizer = setup(level)
        x, y = make_batch(0)
        with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
            scaled.backward()
        assert all(p.grad is not None for p in amp.master_params(optimizer))
        optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in amp.master_params(optimizer):
            if set_to_none:
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                assert not parameter.grad.any()

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("kind", ["sgd", "adamw"])
    def test_both_ways_train_alike_where_all_are_used(self, level: str, kind: str) -> None:
        def run(set_to_none: bool) -> list[Tensor]:
            net = make_net()
            optimizer = OPTIMIZERS[kind](net.parameters())
            amp.initialize(net, optimizer, opt_level=level, verbosity=0, max_loss_scale=256.0)
            for step in range(4):
                x, y = make_batch(step)
                optimizer.zero_grad(set_to_none=set_to_none)
                with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            return [p.detach().clone() for p in amp.master_params(optimizer)]

        assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


class TestWhoChanges:
    @pytest.mark.parametrize("level", LEVELS)
    def test_a_parameter_frozen_at_first_trains_once_it_is_not(self, level: str) -> None:
        """In apex it never got a master and its gradient stayed 65536 times too large."""
        net = make_net()
        reference = make_net()
        for model in (net, reference):
            model[0].requires_grad_(False)
        net, optimizer = setup(level, net)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                for model in (net, reference):
                    model[0].requires_grad_(True)
            before = net[0].weight.detach().clone()
            train_step(net, optimizer, step)
            x, y = make_batch(step)
            plain.zero_grad()
            mse_loss(reference(x), y).backward()
            plain.step()
            assert torch.equal(before, net[0].weight) is (step < 2)
        tolerance = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 4e-3, "O4": 2e-2, "O5": 2e-2}[level]
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.float(), theirs, atol=tolerance)

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_parameter_frozen_later_stays(self, level: str) -> None:
        net, optimizer = setup(level)
        train_step(net, optimizer)
        net[0].requires_grad_(False)
        before = net[0].weight.detach().clone()
        train_step(net, optimizer, 1)
        assert torch.equal(net[0].weight, before)

    @pytest.mark.parametrize("level", LEVELS)
    def test_tied_weights(self, level: str) -> None:
        def make() -> nn.Sequential:
            torch.manual_seed(0)
            tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
            tied[2].weight = tied[0].weight
            return tied

        net, reference = make(), make()
        net, optimizer = setup(level, net)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(4):
            train_step(net, optimizer, step)
            x, y = make_batch(step)
            plain.zero_grad()
            mse_loss(reference(x), y).backward()
            plain.step()
        assert net[2].weight is net[0].weight
        assert len(list(amp.master_params(optimizer))) == len(list(net.parameters()))
        tolerance = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 4e-3, "O4": 2e-2, "O5": 2e-2}[level]
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.float(), theirs, atol=tolerance)

    @pytest.mark.parametrize("level", LEVELS)
    def test_an_unused_parameter_is_not_touched(self, level: str) -> None:
        net = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)})
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        amp.initialize(net, optimizer, opt_level=level, verbosity=0, max_loss_scale=256.0)
        before = net["unused"].weight.detach().clone()
        for step in range(3):
            x, y = make_batch(step)
            dtype = net["used"].weight.dtype
            with amp.scale_loss(mse_loss(net["used"](x.to(dtype)).float(), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(net["unused"].weight, before)

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("moment", ["at once", "after a step", "between block and step"])
    def test_a_model_loaded_later_is_what_trains_on(self, level: str, moment: str) -> None:
        """In apex the next step overwrote it with the old masters."""
        net, optimizer = setup(level)
        if moment == "after a step":
            train_step(net, optimizer)
            optimizer.zero_grad()
        loaded = make_net(7).state_dict()
        if moment == "between block and step":
            x, y = make_batch(0)
            with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.zero_grad()
        net.load_state_dict(loaded)
        optimizer.step()
        for name, value in net.state_dict().items():
            expected = (
                loaded[name].half().float() if level == "O3" and value.is_floating_point() else loaded[name]
            )
            assert torch.equal(value, expected), name
        train_step(net, optimizer, 1)
        assert all((a.float() - loaded[n]).abs().max() < 0.2 for n, a in net.named_parameters())

    @pytest.mark.parametrize("level", MASTERED)
    def test_in_place_writes_to_the_model_are_followed(self, level: str) -> None:
        net, optimizer = setup(level)
        train_step(net, optimizer)
        with torch.no_grad():
            net[4].weight.clamp_(-0.01, 0.01)
        kept = net[4].weight.detach().clone()
        optimizer.zero_grad()
        x, y = make_batch(1)
        with amp.scale_loss(0.0 * mse_loss(net(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert torch.equal(net[4].weight, kept)


class TwoWeights(nn.Module):
    """A half weight and a float32 one, as in apex's own tests."""

    def __init__(self, unique: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.arange(2, dtype=torch.float16) + unique)
        self.high = nn.Parameter(torch.arange(2, dtype=torch.float32) + 1 + unique)

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * self.low).float().sum() + (x * self.high).sum()


ZEROING: dict[str, Callable[[list[nn.Module], torch.optim.Optimizer], None]] = {
    "none": lambda nets, optimizer: [setattr(p, "grad", None) for n in nets for p in n.parameters()],  # type: ignore[func-returns-value]
    "model": lambda nets, optimizer: [net.zero_grad() for net in nets],  # type: ignore[func-returns-value]
    "optimizer": lambda nets, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("zeroing", ZEROING)
@pytest.mark.parametrize("zero_before_add", [True, False])
@pytest.mark.parametrize("accumulate_twice", [True, False])
def test_add_param_group(level: str, zeroing: str, zero_before_add: bool, accumulate_twice: bool) -> None:
    """A group added in the middle of training, against plain SGD with momentum on the same mixed parameters.

    Whole numbers and powers of two all the way: not a bit of difference is excused.
    """
    x = torch.tensor([1.0, 2.0])

    def run(mixed: bool) -> list[list[float]]:
        nets: list[nn.Module] = [TwoWeights(1), TwoWeights(2)]
        optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.25, momentum=0.125)
        if mixed:
            amp._amp_state.allow_incoming_model_not_fp32 = True
            amp.initialize(nets, optimizer, opt_level=level, cast_model_type=False, verbosity=0)
            amp._amp_state.loss_scalers[0]._loss_scale = 4.0

        def block(step: int) -> None:
            loss = nets[0](x) if step < 2 else nets[0](x) + nets[1](x)
            if mixed:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()

        for step in range(4):
            if zero_before_add:
                ZEROING[zeroing](nets, optimizer)
            if step == 2:
                optimizer.add_param_group({"params": iter(nets[1].parameters()), "lr": 0.5})
            if not zero_before_add:
                ZEROING[zeroing](nets, optimizer)
            block(step)
            if accumulate_twice:
                block(step)
            optimizer.step()
        return [p.tolist() for net in nets for p in net.parameters()]

    assert run(mixed=True) == run(mixed=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["tensor", "list", "iterator"])
def test_forms_of_an_added_group(level: str, form: str) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, max_loss_scale=256.0)
    rest: dict[str, Any] = {
        "tensor": net[4].weight,
        "list": list(net[4].parameters()),
        "iterator": itertools.chain(net[4].parameters()),
    }
    optimizer.add_param_group({"params": rest[form]})
    before = net[4].weight.detach().clone()
    train_step(net, optimizer)
    assert not torch.equal(net[4].weight, before)
    if level in MASTERED:
        assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": set(net[1].parameters())})


@pytest.mark.parametrize("level", MASTERED)
def test_a_parameter_added_twice_is_refused_as_torch_does(level: str) -> None:
    _, optimizer = setup(level)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [next(amp.master_params(optimizer))]})


class TestClipping:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize(
        "what",
        [amp.master_params, lambda optimizer: [p for g in optimizer.param_groups for p in g["params"]]],
    )
    def test_by_norm(self, level: str, what: Callable[[Any], Any]) -> None:
        net, optimizer = setup(level)
        x, y = make_batch(0)
        with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
            scaled.backward()
        reference = make_net()
        mse_loss(reference(x), y).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        norm = torch.nn.utils.clip_grad_norm_(what(optimizer), 0.1)
        tolerance = 1e-6 if level == "O0" else 3e-2
        assert torch.allclose(norm.float(), expected, rtol=tolerance)
        for ours, theirs in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
            assert torch.allclose(ours.grad.float(), theirs.grad, atol=tolerance * 0.1)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_two_optimizers_both_step_the_parameter_they_share(level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    first, second = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25))
    amp.initialize(model, [first, second], opt_level=level, loss_scale=8, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), [first, second]) as loss:
        loss.backward()
    first.step()
    second.step()
    assert model.weight.item() == 0.25


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_reading_a_state_dict_while_other_weights_are_in_place_changes_nothing(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    exact = [master.clone() for master in amp.master_params(optimizer)]
    backup = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(model.state_dict()["weight"], model.weight.float())
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), backup, strict=True):
            parameter.copy_(value)
    with amp.scale_loss(model(torch.ones(1, 3)).sum() * 0, optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert all(map(torch.equal, amp.master_params(optimizer), exact))
