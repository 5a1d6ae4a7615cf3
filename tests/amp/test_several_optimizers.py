"""Several models, losses and optimizers, and parameter groups added later, against plain SGD."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from halfpeak import amp
from support.nets import MASTERED


class Mixed(nn.Module):
    """A float32 and a float16 weight whose gradients are whole numbers times powers of two."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.high = nn.Parameter(torch.tensor([first, -first]))
        self.low = nn.Parameter(torch.tensor([0.5, first + 0.5], dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.high).sum() + (x.half() * self.low).float().sum()


class Case(NamedTuple):
    """Which models each loss uses and each optimizer trains, and which optimizers each ``scale_loss`` block names."""

    models: int
    losses: tuple[tuple[int, ...], ...]
    optimizers: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]


CASES = {
    "a model per loss, one optimizer": Case(2, ((0,), (1,)), ((0, 1),), ((0,), (0,))),
    "a model in both losses, one optimizer": Case(3, ((0, 2), (1, 2)), ((0, 1, 2),), ((0,), (0,))),
    "a model and an optimizer per loss": Case(2, ((0,), (1,)), ((0,), (1,)), ((0,), (1,))),
    "a model in both losses, two optimizers": Case(3, ((0, 2), (1, 2)), ((0, 2), (1,)), ((0,), (0, 1))),
}


class Injection(NamedTuple):
    """The gradient that is set to inf after ``backward()``, inside the ``scale_loss`` block."""

    iteration: int
    backward: int
    model: int
    weight: str


def injections(case: Case) -> Iterator[Injection | None]:
    yield None
    for iteration, backward in itertools.product((0, 1), (0, 1)):
        for model in case.losses[backward]:
            for weight in ("low", "high"):
                yield Injection(iteration, backward, model, weight)


def make_all(case: Case) -> tuple[list[Mixed], list[torch.optim.Optimizer]]:
    models = [Mixed(float(number + 2)) for number in range(case.models)]
    optimizers: list[torch.optim.Optimizer] = []
    for number, trained in enumerate(case.optimizers):
        groups = [{"params": models[m].parameters(), "lr": 2.0 ** -(m + 1)} for m in trained]
        optimizers.append(torch.optim.SGD(groups, lr=1.0, momentum=0.25 * (number + 1)))
    return models, optimizers


ZEROING: dict[str, Callable[[list[Any], list[Any]], None]] = {
    "none": lambda models, optimizers: [setattr(p, "grad", None) for m in models for p in m.parameters()],  # type: ignore[func-returns-value]
    "model": lambda models, optimizers: [m.zero_grad() for m in models],  # type: ignore[func-returns-value]
    "optimizer": lambda models, optimizers: [o.zero_grad() for o in optimizers],  # type: ignore[func-returns-value]
}


def skipped(case: Case, injection: Injection | None, iteration: int) -> set[int]:
    """The optimizers that must skip: all that the block with the inf names."""
    hit = injection is not None and injection.iteration == iteration
    return set(case.blocks[injection.backward]) if injection is not None and hit else set()


def run_plain(case: Case, zeroing: str, injection: Injection | None) -> Iterator[list[list[float]]]:
    """Yield the gradients of each iteration, then the final weights; steps that amp must skip have no gradients."""
    models, optimizers = make_all(case)
    x = torch.tensor([2.0, -1.0])
    for iteration in range(3):
        ZEROING[zeroing](models, optimizers)
        for used in case.losses:
            sum(models[m](x) for m in used).backward()  # type: ignore[union-attr]
        yield [p.grad.tolist() for model in models for p in model.parameters() if p.grad is not None]
        for number, optimizer in enumerate(optimizers):
            if number in skipped(case, injection, iteration):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            optimizer.step()
    yield [p.tolist() for model in models for p in model.parameters()]


def masters_by_model(models: list[Mixed], optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    """The parameter that an optimizer steps for each model parameter, in the order of the models."""
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        run = amp._amp_state.run_of(optimizer)
        assert run is not None
        pairs = run.parts.pairs
        found.update({id(pairs.weight_of(main)): main for main in amp.master_params(optimizer)})
    return [found[id(p)] for model in models for p in model.parameters()]


def run_amp(
    case: Case, level: str, zeroing: str, injection: Injection | None, scalers: int
) -> Iterator[list[list[float]]]:
    models, optimizers = make_all(case)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(
        models, optimizers, opt_level=level, verbosity=0, cast_model_type=False, num_losses=scalers
    )
    for number, scaler in enumerate(amp._amp_state.loss_scalers):
        scaler._loss_scale = 32.0 / (number + 1)
    x = torch.tensor([2.0, -1.0])
    for iteration in range(3):
        ZEROING[zeroing](models, optimizers)
        for backward, used in enumerate(case.losses):
            passed = [optimizers[o] for o in case.blocks[backward]]
            loss = sum(models[m](x) for m in used)
            with amp.scale_loss(loss, passed, loss_id=backward % scalers) as scaled:  # type: ignore[arg-type]
                scaled.backward()
                if injection is not None and injection[:2] == (iteration, backward):
                    getattr(models[injection.model], injection.weight).grad[0] = float("inf")
        stepped = masters_by_model(models, optimizers)
        yield [p.grad.tolist() for p in stepped if p.grad is not None]
        for number, optimizer in enumerate(optimizers):
            optimizer.step()
            skips = number in skipped(case, injection, iteration)
            assert amp.last_step(optimizer).stepped() is not skips
    for parameter, master in zip((p for model in models for p in model.parameters()), stepped, strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))
    yield [p.tolist() for model in models for p in model.parameters()]
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()


WAYS = (("none", 1), ("model", 2), ("optimizer", 2))
"""How gradients are zeroed, and the number of loss scalers; every level and every case meets each pair."""


@pytest.mark.parametrize(
    ("name", "zeroing", "scalers", "level"),
    [
        (name, *WAYS[(i + j) % 3], level)
        for i, name in enumerate(CASES)
        for j, level in enumerate(("O0", "O1", "O2", "O3"))
    ],
)
def test_several_models_losses_and_optimizers(name: str, zeroing: str, scalers: int, level: str) -> None:
    """Gradients of clean iterations equal plain SGD's exactly, because all are sums of powers of two that float16 holds.

    Final weights are equal within float16's rounding: the reference rounds at each step, and masters do not.
    """
    case = CASES[name]
    for injection in injections(case):
        plain = list(run_plain(case, zeroing, injection))
        mixed = list(run_amp(case, level, zeroing, injection, scalers))
        for iteration, (ours, theirs) in enumerate(zip(mixed[:-1], plain[:-1], strict=True)):
            if injection is None or injection.iteration != iteration:
                assert ours == theirs, (injection, iteration)
        assert torch.allclose(torch.tensor(mixed[-1]), torch.tensor(plain[-1]), rtol=2e-3), injection


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("zeroing", ZEROING)
@pytest.mark.parametrize("zero_before_add", [True, False])
@pytest.mark.parametrize("accumulate_twice", [True, False])
def test_add_param_group(level: str, zeroing: str, zero_before_add: bool, accumulate_twice: bool) -> None:
    """A group added in the middle of training, against plain SGD with momentum on the same mixed parameters.

    All values are whole numbers and powers of two, so the weights must be equal bit for bit.
    """
    x = torch.tensor([2.0, -1.0])

    def run(mixed: bool) -> list[list[float]]:
        nets = [Mixed(3.0), Mixed(2.0)]
        optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.5, momentum=0.25)
        if mixed:
            amp._amp_state.allow_incoming_model_not_fp32 = True
            amp.initialize(nets, optimizer, opt_level=level, cast_model_type=False, verbosity=0)
            amp._amp_state.loss_scalers[0]._loss_scale = 8.0

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
                optimizer.add_param_group({"params": iter(nets[1].parameters()), "lr": 0.25})
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
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [next(amp.master_params(optimizer))]})
