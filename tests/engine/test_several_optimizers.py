"""Several optimizers of one engine: each steps on its own gradients, once, as in a plain PyTorch loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak import amp
from support.nets import LEVELS, TYPICAL
from support.states import same


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def furthest(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("joint", [False, True])
def test_a_gan_needs_no_zero_grad(level: str, joint: bool) -> None:
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    plain_generator, plain_critic = copy.deepcopy((generator, critic))
    of_generator, of_critic = sgd(generator), sgd(critic)
    plain_of_generator, plain_of_critic = sgd(plain_generator), sgd(plain_critic)
    engine = halfpeak.prepare(
        [generator, critic], [of_generator, of_critic], level, num_losses=2, loss_scale=64.0
    )
    noise, real = torch.randn(6, 3), torch.randn(6, 4)

    for _ in range(4):
        with engine.forward():
            loss = critic(real).float().mean() - critic(generator(noise).detach()).float().square().mean()
        engine.backward(loss, loss_id=0, optimizers=of_critic)
        if not joint:
            engine.step(optimizers=of_critic)
        with engine.forward():
            loss = critic(generator(noise)).float().square().mean()
        engine.backward(loss, loss_id=1, optimizers=of_generator)
        engine.step(optimizers=None if joint else of_generator)

        plain_of_critic.zero_grad()
        fake = plain_critic(plain_generator(noise).detach()).square().mean()
        (plain_critic(real).mean() - fake).backward()
        if not joint:
            plain_of_critic.step()
        kept = [parameter.grad for parameter in plain_critic.parameters()]
        for parameter in plain_critic.parameters():
            parameter.grad = None
        plain_of_generator.zero_grad()
        plain_critic(plain_generator(noise)).square().mean().backward()
        plain_of_generator.step()
        for parameter, grad in zip(plain_critic.parameters(), kept, strict=True):
            parameter.grad = grad
        if joint:
            plain_of_critic.step()

    tolerance = 0.0 if level == "O0" else 0.02
    assert furthest(generator, plain_generator) <= tolerance
    assert furthest(critic, plain_critic) <= tolerance


@pytest.mark.parametrize("level", TYPICAL)
def test_an_exception_in_backward_leaves_the_others_their_gradients(level: str) -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    of_first, of_second = sgd(first), sgd(second)
    engine = halfpeak.prepare([first, second], [of_first, of_second], level, loss_scale=64.0)
    with engine.forward():
        engine.backward(second(torch.ones(2, 4)).float().sum(), optimizers=of_second)
    before = [target.clone() for target in engine.context.prepared[1].main_grads()]
    with engine.forward():
        loss = second(first(torch.ones(2, 3))).float().sum()
    loss.register_hook(lambda grad: grad.reshape(2))
    with pytest.raises(RuntimeError):
        engine.backward(loss, optimizers=of_first)
    assert same(engine.context.prepared[1].main_grads(), before)


def _tasks() -> list[nn.Module]:
    """A trunk and two heads."""
    torch.manual_seed(0)
    return [nn.Linear(4, 1), nn.Linear(1, 3), nn.Linear(1, 5)]


def _optimizers_of(parts: list[nn.Module]) -> list[torch.optim.Optimizer]:
    """An optimizer for each head, which steps the trunk as well."""
    trunk, *heads = parts
    return [torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1) for head in heads]


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("in_turns", [False, True])
def test_two_tasks_train_a_trunk_that_both_optimizers_step(level: str, in_turns: bool) -> None:
    trunk, *heads = parts = _tasks()
    x, plain = torch.randn(6, 4), copy.deepcopy(parts)
    optimizers, plain_optimizers = _optimizers_of(parts), _optimizers_of(plain)
    engine = halfpeak.prepare([trunk, *heads], optimizers, level, num_losses=2, loss_scale=64.0)
    for _ in range(3):
        for number, (optimizer, plain_optimizer) in enumerate(zip(optimizers, plain_optimizers, strict=True)):
            with engine.forward():
                loss = heads[number](trunk(x)).float().square().mean()
            engine.backward(loss, optimizers=[optimizer], loss_id=number)
            plain[1 + number](plain[0](x)).square().mean().backward()
            if in_turns:
                engine.step(optimizers=[optimizer])
                plain_optimizer.step()
                for part in plain:
                    part.zero_grad()
        if not in_turns:
            engine.step()
            for plain_optimizer in plain_optimizers:
                plain_optimizer.step()
            for part in plain:
                part.zero_grad()
    for part, other in zip(parts, plain, strict=True):
        assert furthest(part, other) <= (1e-6 if level == "O0" else 2e-2)


@pytest.mark.parametrize("level", TYPICAL)
def test_user_code_steps_two_optimizers_with_the_gradient_of_one_trunk(level: str) -> None:
    """The first step leaves the gradients of shared masters to the second one."""
    trunk, *heads = parts = _tasks()
    x, plain = torch.randn(6, 4), copy.deepcopy(parts)
    optimizers, plain_optimizers = _optimizers_of(parts), _optimizers_of(plain)
    amp.initialize(parts, optimizers, opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(3):
        loss = sum(head(trunk(x)).float().square().mean() for head in heads)
        with amp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
        sum(head(plain[0](x)).square().mean() for head in plain[1:]).backward()
        for optimizer in [*optimizers, *plain_optimizers]:
            optimizer.step()
        for optimizer in [*optimizers, *plain_optimizers]:
            optimizer.zero_grad()
    for part, other in zip(parts, plain, strict=True):
        assert furthest(part, other) <= (1e-6 if level == "O0" else 2e-3)


@pytest.mark.parametrize("level", TYPICAL)
def test_clipping_counts_a_shared_parameter_once(level: str) -> None:
    shared = nn.Linear(4, 4, bias=False)
    optimizers = [sgd(shared), sgd(shared)]
    engine = halfpeak.prepare(shared, optimizers, level, clip=1.0, loss_scale=64.0)
    with engine.forward():
        loss = shared(torch.randn(3, 4)).float().square().sum()
    engine.backward(loss)
    (grad,) = engine.context.prepared[0].main_grads()
    norm = grad.norm()
    read: list[torch.Tensor] = []
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: read.append(optimizer.param_groups[0]["params"][0].grad.clone())
        )
    said = engine.step().grad_norm
    assert said is not None
    torch.testing.assert_close(said, norm)
    for clipped in read:
        torch.testing.assert_close(clipped.norm(), torch.ones(()), atol=1e-4, rtol=0)
    assert len(read) == 2


def test_accumulation_and_steps_in_turn_are_refused() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    of_first, of_second = sgd(first), sgd(second)
    engine = halfpeak.prepare([first, second], [of_first, of_second], "O0", accumulate=2)
    with engine.forward():
        loss = second(first(torch.ones(2, 3))).sum()
    engine.backward(loss)
    with pytest.raises(halfpeak.OrderError, match="accumulate=2, all 2 optimizers must be stepped together"):
        engine.step(optimizers=of_second)
    assert engine.micro_step == 0
    assert not engine.step(optimizers=[of_second, of_first]).boundary


def test_an_engine_without_optimizer_says_so() -> None:
    model = nn.Linear(3, 1)
    engine = halfpeak.prepare(model, [], "O2")
    with engine.forward():
        loss = model(torch.ones(2, 3)).sum()
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(halfpeak.OrderError, match=r"without an optimizer; pass one to halfpeak\.prepare"):
            call()


def test_zeroing_one_of_two_drops_what_it_had_before_a_delay() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    of_first, of_second = sgd(first), sgd(second)
    models, optimizers = amp.initialize([first, second], [of_first, of_second], opt_level="O0", verbosity=0)

    def add(*, delay: bool) -> None:
        loss = sum(model(torch.ones(1, 2)).sum() for model in models)
        with amp.scale_loss(loss, optimizers, delay_unscale=delay) as scaled:
            scaled.backward()

    add(delay=False)
    add(delay=True)
    of_first.zero_grad()
    add(delay=False)
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    assert torch.equal(first.weight.grad, torch.ones(2, 2))
    assert torch.equal(second.weight.grad, torch.full((2, 2), 3.0))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_that_zero_grad_dropped_before_the_pass_of_another_skips_no_step(
    level: str, accumulate: int
) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    optimizers = [sgd(first), sgd(second)]
    engine = halfpeak.prepare([first, second], optimizers, level, accumulate=accumulate)
    before = second.weight.detach().clone()
    bad = torch.full((2, 3), torch.nan)
    for module, optimizer, batch in zip((first, second), optimizers, (bad, torch.ones(2, 3)), strict=True):
        with engine.forward():
            loss = module(batch).float().square().mean()
        engine.backward(loss, optimizers=optimizer)
        if accumulate == 2:
            engine.step()
        elif module is second:
            assert engine.step().stepped()
        optimizers[0].zero_grad()
    assert int(engine.num_skipped) == 0
    assert not torch.equal(second.weight, before)
