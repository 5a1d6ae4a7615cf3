"""Two engines in one process: a loss of one may reach parameters of the other; each computes in its own precision."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import halfpeak
from engine.test_several_optimizers import furthest, sgd
from halfpeak import OrderError, amp
from halfpeak.engine.optimizer import claim_for_thread
from halfpeak.fused import FusedAdamW
from halfpeak.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from support.nets import LEVELS

SCALE = 1024.0


def _fused(module: nn.Module) -> FusedAdamW:
    return FusedAdamW(module.parameters(), lr=0.01)


def _networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _fake_loss(generator: nn.Module, critic: nn.Module) -> Tensor:
    return critic(generator(torch.linspace(-1, 1, 18).view(6, 3))).float().square().mean()


def _real_loss(critic: nn.Module) -> Tensor:
    return critic(torch.linspace(-1, 2, 24).view(6, 4)).float().mean()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [sgd, _fused])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_through_the_other_network_then_its_own_loss_then_both_step(
    level: str, make: type, accumulate: int
) -> None:
    """As in plain torch: the critic's gradients are sums over both losses, unscaled."""
    networks = _networks()
    plain = copy.deepcopy(networks)
    plain_optimizers = [make(network) for network in plain]
    engines = [
        halfpeak.prepare(network, make(network), level, loss_scale=SCALE, accumulate=accumulate)
        for network in networks
    ]
    for _ in range(3):
        for _ in range(accumulate):
            with engines[0].forward():
                loss = _fake_loss(*networks)
            engines[0].backward(loss)
            engines[0].step()
            with engines[1].forward():
                loss = _real_loss(networks[1])
            engines[1].backward(loss)
            engines[1].step()
        for _ in range(accumulate):
            (_fake_loss(*plain) / accumulate).backward()
            (_real_loss(plain[1]) / accumulate).backward()
        for optimizer in plain_optimizers:
            optimizer.step()
            optimizer.zero_grad()
    tolerance = {"O0": 1e-6}.get(level, 0.03)
    assert all(furthest(*pair) <= tolerance for pair in zip(networks, plain, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_network_frozen_after_the_loss_of_another_keeps_its_gradients(level: str) -> None:
    """Its own pass waits scaled at O0, O1 and O4, beside which the unscaled gradients of the other loss are kept."""
    networks = _networks()
    plain = copy.deepcopy(networks)
    generator, critic = (
        halfpeak.prepare(network, sgd(network), level, loss_scale=SCALE, accumulate=every)
        for network, every in zip(networks, (1, 2), strict=True)
    )
    with critic.forward():
        loss = networks[1][0](torch.ones(1, 4, dtype=networks[1][0].weight.dtype)).float().square().sum()  # type: ignore[index]
    critic.backward(loss)
    critic.step()
    with generator.forward(), critic.forward():
        loss = _fake_loss(*networks)
    generator.backward(loss)
    networks[1].requires_grad_(False)
    critic.unscale()
    assert critic.step().stepped()
    optimizer = sgd(plain[1])
    ((plain[1][0](torch.ones(1, 4)).square().sum()) / 2 + _fake_loss(*plain)).backward()  # type: ignore[index]
    optimizer.step()
    assert furthest(networks[1], plain[1]) <= {"O0": 1e-6}.get(level, 0.01)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reached", [0, 1])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("resumed", [False, True])
def test_zero_grad_drops_the_gradients_of_another_loss_beside_those_that_wait_scaled(
    level: str, reached: int, set_to_none: bool, resumed: bool
) -> None:
    """The first pass of the critic's engine reaches its weight alone or nothing, so nothing waits scaled for the others."""
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizer = sgd(critic)
    engines = [
        halfpeak.prepare(generator, sgd(generator), level, loss_scale=SCALE),
        halfpeak.prepare(critic, optimizer, level, loss_scale=SCALE, accumulate=2),
    ]
    engines[1].backward(
        (critic.weight if reached else torch.ones(1, requires_grad=True)).float().square().sum()
    )
    engines[1].step()
    with engines[0].forward(), engines[1].forward():
        loss = critic(generator(torch.ones(2, 3))).float().square().sum()
    engines[0].backward(loss)
    if resumed:
        engines[1].load_state_dict(engines[1].state_dict())
    optimizer.zero_grad(set_to_none)
    with engines[1].forward():
        loss = critic(torch.ones(2, 4)).float().sum()
    engines[1].backward(loss)
    engines[1].unscale()
    grads = [parameter.grad for parameter in engines[1].main_params()]
    assert all(grad is not None and torch.equal(grad, torch.ones_like(grad)) for grad in grads)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_another_loss_beside_those_that_wait_scaled_are_saved(level: str) -> None:
    """Of a bias that the critic's own pass has not reached, and that is frozen since."""
    engines = []
    for resumed in (False, True):
        generator, critic = _networks()
        first = halfpeak.prepare(generator, sgd(generator), level, loss_scale=SCALE)
        second = halfpeak.prepare(critic, sgd(critic), level, loss_scale=SCALE, accumulate=2)
        second.backward(critic[0].weight.float().square().sum())  # type: ignore[index]
        second.step()
        with first.forward(), second.forward():
            loss = _fake_loss(generator, critic)
        first.backward(loss)
        critic[0].bias.requires_grad_(False)  # type: ignore[index]
        if resumed:
            second.load_state_dict(second.state_dict())
        second.unscale()
        assert second.step().stepped()
        engines.append(critic)
    assert furthest(*engines) == 0


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_two_engines_train_one_trunk_in_turn(level: str) -> None:
    """A pass of one engine is no pass through the trunk of the other: the gradient is unscaled and stepped once."""
    torch.manual_seed(0)
    trunk = nn.Linear(4, 4)
    networks = [nn.Sequential(trunk, nn.Linear(4, 2)), nn.Sequential(trunk, nn.Linear(4, 3))]
    plain = copy.deepcopy(networks)
    plain_optimizers = [sgd(network) for network in plain]
    engines = [halfpeak.prepare(net, sgd(net), level, loss_scale=SCALE) for net in networks]
    batch = torch.linspace(-1, 2, 24).view(6, 4)
    for _ in range(4):
        for network, engine in zip(networks, engines, strict=True):
            with engine.forward():
                loss = network(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
        for network, optimizer in zip(plain, plain_optimizers, strict=True):
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(furthest(*pair) <= 0.01 for pair in zip(networks, plain, strict=True))


def test_an_engine_that_is_collected_in_the_middle_of_a_step_of_another() -> None:
    """The result of ``claim_for_thread`` keeps optimizers alive to which otherwise only a reference cycle refers."""
    forgotten = nn.Linear(2, 2)
    forgotten.engine = halfpeak.prepare(forgotten, sgd(forgotten), "O0")  # type: ignore[assignment]
    found = claim_for_thread(())
    del forgotten
    gc.collect()
    assert all(one.optimizer is optimizer for one, optimizer in found.items())


class _Net(nn.Module):
    """Records the dtype of its product, also when checkpointing computes it again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def _product(self, x: Tensor) -> Tensor:
        product = self.layer(x)
        self.dtypes.append(product.dtype)
        return product * product

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._product, x, use_reentrant=False)


Begin = Callable[
    [nn.Module, torch.optim.Optimizer], tuple[AbstractContextManager[Any], Callable[[Tensor], None]]
]


def _engine(level: str, **options: Any) -> Begin:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        engine = halfpeak.prepare(model, optimizer, level, **options)
        return engine.forward(), engine.backward

    return begin


def _wrapper(kind: Callable[..., OptimWrapper], **options: Any) -> Begin:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        wrapper = kind(optimizer=optimizer, **options)
        return wrapper.optim_context(model), wrapper.backward

    return begin


def _amp(**options: Any) -> Begin:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        amp.initialize(model, optimizer, verbosity=0, **options)

        def backward(loss: Tensor) -> None:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

        @contextmanager
        def forward() -> Generator[None]:
            yield

        return forward(), backward

    return begin


FRONT_ENDS: dict[str, tuple[Begin, torch.dtype, torch.dtype]] = {
    **{
        f"engine-{level}": (_engine(level), dtype, evaluated)
        for level, dtype, evaluated in (
            ("O0", torch.float32, torch.float32),
            ("O2", torch.float16, torch.float16),
            ("O4", torch.bfloat16, torch.float16),
            ("O5", torch.bfloat16, torch.bfloat16),
        )
    },
    "torch-O4": (_engine("O4", op_lists="torch"), torch.bfloat16, torch.float16),
    "OptimWrapper": (_wrapper(OptimWrapper), torch.float32, torch.float32),
    "AmpOptimWrapper": (_wrapper(AmpOptimWrapper, dtype="bfloat16"), torch.bfloat16, torch.float32),
    "ApexOptimWrapper": (_wrapper(ApexOptimWrapper, opt_level="O5"), torch.bfloat16, torch.bfloat16),
    "amp-O0": (_amp(opt_level="O0"), torch.float32, torch.float32),
    "amp-O1": (_amp(opt_level="O1"), torch.float16, torch.float16),
    "amp-O5": (_amp(opt_level="O5"), torch.bfloat16, torch.bfloat16),
    "amp-O4": (_amp(opt_level="O4"), torch.bfloat16, torch.bfloat16),
    "amp-disabled": (_amp(enabled=False), torch.float32, torch.float32),
}
"""How each begins a run, the dtype of its product in training, and in an evaluation outside of its own context."""


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("amp_first", [True, False])
def test_amp_casts_the_thread_then_another_run_computes_in_its_own_precision(
    front_end: str, amp_first: bool
) -> None:
    """In forward, in recomputation, and in evaluation, where the thread's casts also apply to a native O4."""
    begin, dtype, evaluated = FRONT_ENDS[front_end]
    alive, model = nn.Linear(4, 4), _Net()
    optimizer, x = sgd(model), torch.ones(2, 4)

    def cast_the_thread() -> None:
        amp.initialize(alive, sgd(alive), opt_level="O1", verbosity=0)

    if amp_first:
        cast_the_thread()
    forward, backward = begin(model, optimizer)
    if not amp_first:
        cast_the_thread()
    with forward:
        output = model(x)
    backward(output.float().mean())
    with torch.no_grad():
        model(x)
    assert model.dtypes == [dtype, dtype, evaluated]
    assert alive(x).dtype is torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_model_is_pickled_beside_another_run_then_loaded(level: str, tmp_path: Any) -> None:
    """The loaded model computes in the same dtype as the model and its deep copy."""
    models = {"O1": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    for kind, model in models.items():
        amp.initialize(model, sgd(model), opt_level=level if kind == "other" else kind, verbosity=0)
    x = torch.ones(2, 4)
    for model in models.values():
        torch.save(model, tmp_path / "model.pth")
        loaded = torch.load(tmp_path / "model.pth", weights_only=False)
        assert loaded(x).dtype is copy.deepcopy(model)(x).dtype is model(x).dtype


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("make", [sgd, _fused])
def test_gradients_in_buckets_of_ddp_wait_while_another_engine_has_its_pass(
    one_rank: None, level: Any, make: Any
) -> None:
    def train(*, wrap: bool) -> list[Tensor]:
        networks = _networks()
        engines = [halfpeak.prepare(one, make(one), level, loss_scale=SCALE) for one in networks]
        generator, critic = (
            DistributedDataParallel(one, gradient_as_bucket_view=True) if wrap else one for one in networks
        )
        for _ in range(3):
            with engines[0].forward():
                loss = _fake_loss(generator, critic)
            engines[0].backward(loss)
            with engines[1].forward():
                loss = _real_loss(critic)
            engines[1].backward(loss)
            assert all(engine.step().stepped() for engine in engines)
        return [p.detach() for one in networks for p in one.parameters()]

    for ours, plain in zip(train(wrap=True), train(wrap=False), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_loss_for_two_engines_that_is_not_reduced_yet_is_refused(one_rank: None, level: Any) -> None:
    """Later passes would reduce only what they add, so ranks would diverge."""
    networks = _networks()
    engine, _ = (halfpeak.prepare(one, sgd(one), level, loss_scale=SCALE, accumulate=2) for one in networks)
    generator, critic = map(DistributedDataParallel, networks)
    with engine.forward(generator):
        loss = _fake_loss(generator, critic)
    with pytest.raises(OrderError, match="not reduced over the ranks"):
        engine.backward(loss)
    assert all(p.grad is None for one in networks for p in one.parameters())
    critic.requires_grad_(False)
    with engine.forward(generator):
        loss = _fake_loss(generator, critic)
    engine.backward(loss)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_one_overflow_of_two_passes_through_the_other_network_lowers_the_scale(
    level: str, order: tuple[bool, bool]
) -> None:
    """The critic's step skips for both passes of the generator; a finite one does not undo the other."""
    networks = _networks()
    generator, critic = (halfpeak.prepare(network, sgd(network), level) for network in networks)
    before = generator.read_scale()
    for overflows in order:
        with generator.forward(), critic.forward():
            loss = _fake_loss(*networks) * (1e30 if overflows else 1.0)
        generator.backward(loss)
        generator.abort()  # The generator's own step does not move its scale.
    with critic.forward():
        loss = _real_loss(networks[1]) / 8
    critic.backward(loss)
    critic.step()
    assert generator.read_scale() < before


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_that_was_dropped_before_the_step_lowers_no_scale(level: str) -> None:
    networks = _networks()
    generator, critic = (halfpeak.prepare(network, sgd(network), level) for network in networks)
    before = generator.read_scale()
    with generator.forward(), critic.forward():
        loss = _fake_loss(*networks) * 1e30
    generator.backward(loss)
    generator.abort()
    critic.optimizers[0].zero_grad()
    with critic.forward():
        loss = _real_loss(networks[1]) / 8
    critic.backward(loss)
    assert critic.step().stepped()
    assert generator.read_scale() == before


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FusedAdamW])
@pytest.mark.parametrize("steps", [0, 1])
def test_one_overflow_in_both_networks_halves_the_scale_once(level: str, optimizer: Any, steps: int) -> None:
    """The generator's own step has counted it; the critic's step, which skips for it, does not count it again.

    A fused optimizer decides by itself after its first step.
    """
    networks = _networks()
    generator, critic = (
        halfpeak.prepare(network, optimizer(network.parameters(), lr=0.1), level) for network in networks
    )
    before = generator.read_scale()
    for factor in [1.0] * steps + [1e30]:
        with generator.forward(), critic.forward():
            loss = _fake_loss(*networks) * factor
        generator.backward(loss)
        assert generator.step().stepped() == (factor == 1.0)
        assert critic.step().stepped() == (factor == 1.0)
    assert generator.read_scale() == before / 2
