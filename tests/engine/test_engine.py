"""What an engine shows, and what it makes of optimizers that share parameters or are of no common kind."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from promises.cases import batch, critic, each, generator, two_layers
from support.nets import LEVELS, TYPICAL, make_batch, make_net
from support.states import same


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def test_it_shows_where_it_stands_and_its_public_names() -> None:
    (net,) = two_layers()
    engine = halfpeak.prepare(net, sgd(net), "O2", scale=halfpeak.ScaleConfig(init=1024.0))
    assert repr(engine) == "Engine(O2, cpu, scale=1024, num_steps=0, num_skipped=0)"
    assert repr(engine.scalers[0]) == "LossScaler(scale=1024, dynamic)"
    shown = dir(engine)
    assert {"backward", "forward", "step", "num_steps"} <= set(shown)
    assert not [name for name in shown if name.startswith("_")]


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_part_that_another_engine_steps_in_float32_is_not_cast(level: str) -> None:
    trunk = nn.Linear(3, 3)
    one, other = nn.Sequential(trunk, nn.Linear(3, 1)), nn.Sequential(trunk, nn.Linear(3, 2))
    optimizer = sgd(one)
    engine = halfpeak.prepare(one, optimizer, "O1")
    with pytest.raises(
        halfpeak.OrderError, match=r"parameter 0\.weight of Sequential .* steps it in float32"
    ):
        halfpeak.prepare(other, sgd(other), level)
    assert trunk.weight.dtype is torch.float32
    assert halfpeak.prepare(other, sgd(other), "O1") is not engine


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_low_already(level: str, low: torch.dtype) -> None:
    """Norms become float32 at O2 and O5, as the level says; levels that cast operations step no low weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)).to(low)
    optimizer = sgd(model)
    if level in ("O1", "O4"):
        with pytest.raises(halfpeak.ParameterError, match=r"model\.float\(\)"):
            halfpeak.prepare(model, optimizer, level)
        assert {p.dtype for p in model.parameters()} == {low}
        whole = nn.Sequential(model[0].requires_grad_(False), nn.Linear(4, 1))
        engine = halfpeak.prepare(whole, sgd(whole), level)
        with engine.forward():
            loss = whole(batch(0).to(low)).float().square().mean()
        engine.backward(loss)
        assert engine.step().stepped()
        return
    halfpeak.prepare(model, optimizer, level)
    of_weight = {"O0": torch.float32, "O5": torch.bfloat16}.get(level, torch.float16)
    of_norms = torch.float16 if level == "O3" else torch.float32
    assert {p.dtype for p in model[0].parameters()} == {of_weight}
    assert {t.dtype for t in (*model[1].parameters(), *model[2].parameters(), model[1].running_mean)} == {
        of_norms
    }


@pytest.mark.parametrize("level", TYPICAL)
def test_clipping_counts_a_shared_parameter_once(level: str) -> None:
    shared = nn.Linear(4, 4, bias=False)
    optimizers = [sgd(shared), sgd(shared)]
    engine = halfpeak.prepare(shared, optimizers, halfpeak.LEVELS[level].replace(loss_scale=64.0), clip=1.0)
    with engine.forward():
        loss = shared(batch(0)).float().square().sum()
    engine.backward(loss)
    assert shared.weight.grad is not None
    norm, read = shared.weight.grad.norm(), list[Tensor]()
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: read.append(optimizer.param_groups[0]["params"][0].grad.clone())
        )
    said = engine.step().grad_norm
    assert said is not None
    torch.testing.assert_close(said, norm)
    assert len(read) == 2
    for clipped in read:
        torch.testing.assert_close(clipped.norm(), torch.ones(()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_pass_for_one_optimizer_leaves_the_others_their_gradients(level: str) -> None:
    nets = generator() + critic()
    optimizers = each(nets)
    engine = halfpeak.prepare(nets, optimizers, halfpeak.LEVELS[level].replace(loss_scale=64.0))
    with engine.forward():
        loss = nets[1](batch(0)).float().sum()
    engine.backward(loss, optimizers=optimizers[1])
    before = [parameter.grad for parameter in nets[1].parameters()]
    values = [grad.clone() for grad in before if grad is not None]
    with engine.forward():
        loss = nets[1](nets[0](batch(0))).float().sum()
    loss.register_hook(lambda grad: grad.reshape(2))
    with pytest.raises(RuntimeError):
        engine.backward(loss, optimizers=optimizers[0])
    now = [parameter.grad for parameter in nets[1].parameters()]
    assert all(one is other for one, other in zip(now, before, strict=True))
    assert same([grad for grad in now if grad is not None], values)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from an import of torch
@pytest.mark.parametrize("level", TYPICAL)
def test_an_optimizer_without_init_and_defaults_is_stepped(level: str) -> None:
    """torch's ``PostLocalSGDOptimizer`` calls no ``Optimizer.__init__``; its averager writes the stepped parameters."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    def halve(params: list[dict[str, Any]]) -> None:
        for parameter in params[0]["params"]:
            parameter.detach().mul_(0.5)

    found: list[Tensor] = []
    for wraps in (False, True):
        model = make_net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
        if wraps:
            optimizer = PostLocalSGDOptimizer(optimizer, SimpleNamespace(average_parameters=halve, step=0))  # type: ignore[arg-type]
        engine = halfpeak.prepare(model, optimizer, level, scale=halfpeak.ScaleConfig(init=256.0))
        x, y = make_batch(0)
        for _ in range(3):
            with engine.forward():
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
            engine.backward(loss)
            engine.step()
            if not wraps:
                halve(optimizer.param_groups)
        found.append(torch.cat([main.detach().flatten() for main in engine.main_params()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("level", LEVELS)
def test_values_written_into_a_state_dict_are_the_masters_own(level: str) -> None:
    """As in torch, where a state dict shares the memory of the model: an average kept so is the run's."""
    (net,) = two_layers()
    engine = halfpeak.prepare(net, sgd(net), halfpeak.LEVELS[level].replace(loss_scale=64.0))
    before = copy.deepcopy(net.state_dict())
    for value in net.state_dict().values():
        value.mul_(0.5)
    scale = 0.5 if level != "O3" else 1.0  # without masters the float32 values of low weights are copies
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name] * scale)
    with torch.no_grad(), engine.forward():
        net(batch(0))
    for (name, weight), value in zip(net.named_parameters(), before.values(), strict=True):
        assert torch.equal(weight, (value * scale).to(weight.dtype)), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", LEVELS)
def test_an_evaluation_before_a_backward_pass_does_not_make_its_gradients_reduced(level: str) -> None:
    net = nn.Linear(4, 2)
    engine = halfpeak.prepare(net, sgd(net), level)
    wrapped = nn.parallel.DistributedDataParallel(net)
    with wrapped.no_sync():
        with engine.forward():
            loss = wrapped(torch.ones(3, 4)).float().mean()
        with torch.no_grad(), engine.forward():
            net(torch.ones(3, 4))
        engine.backward(loss)
    with pytest.raises(halfpeak.OrderError, match="no_sync"):
        engine.step()
