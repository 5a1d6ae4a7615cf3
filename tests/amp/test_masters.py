"""Master weights under amp: which parameters have one, and masters follow values written to the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from amp.test_apex_suite import ZEROING, Mixed
from halfpeak import amp
from support.nets import LEVELS, MASTERED, PURE, STORED, make_batch, make_net


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


class TestWhoChanges:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("moment", ["at once", "after a step", "between block and step"])
    def test_a_model_loaded_later_is_what_trains_on(self, level: str, moment: str) -> None:
        """In apex the next step overwrote the loaded weights with the old masters."""
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
            expected = loaded[name]
            if level in PURE and value.is_floating_point():
                expected = expected.to(STORED[level]).float()
            assert torch.equal(value, expected), name
        train_step(net, optimizer, 1)
        assert all((a.float() - loaded[n]).abs().max() < 0.2 for n, a in net.named_parameters())

    @pytest.mark.parametrize("level", MASTERED)
    def test_weights_written_through_data_are_warned_of(self, level: str) -> None:
        net, optimizer = setup(level)

        def train() -> None:
            for step in range(20):
                train_step(net, optimizer, step)
                for parameter in net.parameters():
                    parameter.data.mul_(0.5)

        with pytest.warns(UserWarning, match=r"parameter\.data"):
            train()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("zeroing", ZEROING)
@pytest.mark.parametrize("zero_before_add", [True, False])
@pytest.mark.parametrize("accumulate_twice", [True, False])
def test_add_param_group(level: str, zeroing: str, zero_before_add: bool, accumulate_twice: bool) -> None:
    """A group added in the middle of training, against plain SGD with momentum on the same mixed parameters.

    All values are whole numbers and powers of two, so the weights must be equal bit for bit.
    """
    x = torch.tensor([1.0, 2.0])

    def run(mixed: bool) -> list[list[float]]:
        nets = [Mixed(1), Mixed(2)]
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
                ZEROING[zeroing](nets, [optimizer])
            if step == 2:
                optimizer.add_param_group({"params": iter(nets[1].parameters()), "lr": 0.5})
            if not zero_before_add:
                ZEROING[zeroing](nets, [optimizer])
            block(step)
            if accumulate_twice:
                block(step)
            optimizer.step()
        return [p.tolist() for net in nets for p in net.parameters()]

    assert run(mixed=True) == run(mixed=False)


@pytest.mark.parametrize("level", MASTERED)
def test_a_parameter_added_twice_is_refused_as_torch_does(level: str) -> None:
    _, optimizer = setup(level)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [next(amp.master_params(optimizer))]})
