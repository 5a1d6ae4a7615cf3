"""Laws that hold for every way to train: the table of drivers is in ``drivers.py``.

A skip moves nothing; a front end takes the engine's steps bit for bit; a resume at any pass is bitwise; passes of a window add
up to the whole batch; a closure is an ordinary step; after an exception the run goes on as if the iteration had been taken or
had never begun.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfpeak import amp
from laws.drivers import DRIVERS, TOTAL, Case, Run, cases, overflowing, through_a_file
from support.nets import LEVELS, MASTERED, make_batch
from support.snapshot import values
from support.states import differences


@pytest.fixture(autouse=True)
def without_casts() -> Iterator[None]:
    """Casts of ``amp.initialize`` end with the test."""
    yield
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()


def ids(case: Case) -> str:
    return str(case)


BAD = [(-1, float("inf")), (0, float("nan")), (1, -float("inf"))]
"""For the first window of all and two later ones, the pass that is spoilt, and what is put into its gradients."""


@pytest.mark.parametrize("case", cases(), ids=ids)
def test_a_skip_moves_nothing(case: Case) -> None:
    """Whichever pass of its window overflows; the scale halves and training goes on."""
    run = case.run()
    run.convert()
    numbers = iter(range(1000))
    for place, value in BAD:
        # A first step that is skipped may have made an optimizer's empty state.
        warm = run.done > 0
        before = (weights(run), run.values(), run.scale()) if warm else (weights(run),)
        for number in range(case.every):
            with overflowing(run, really=number == place % case.every, value=value):
                run.train(next(numbers))
        assert not run.moved()
        assert weights(run) == before[0]
        if warm:
            assert run.values() == before[1]
            assert run.scale() == (before[2] / 2 if before[2] != 1.0 else 1.0)
        for _ in range(case.every):
            run.train(next(numbers))
        assert run.moved()
        assert weights(run) != before[0]


def weights(run: Run) -> list[Any]:
    """The model in the form that is saved, in which masters stand for the weights that were made from them."""
    return [(name, str(value.dtype), value.tolist()) for name, value in run.net.state_dict().items()]


OVERFLOWS = (4, 6)
"""Inside the second window of three, and in the first pass of the third."""


@pytest.mark.parametrize(
    "case",
    [
        case
        for optimizer, window in (("adamw", (1, 0.05)), ("adamw-fused", (3, 0.05)), ("FusedAdamW", (3, None)))
        for case in cases(
            optimizers=(optimizer,), windows=(window,), where=lambda driver: driver is not DRIVERS["native"]
        )
    ],
    ids=ids,
)
def test_it_takes_the_steps_of_the_engine(case: Case) -> None:
    """Bit for bit, through overflows; clipped, and in windows; although it is saved at every pass."""
    run, engine = case.run(), DRIVERS[case.driver].reference(case, 0)
    for number in range(TOTAL):
        run.save()
        for one in (run, engine):
            with overflowing(one, really=number in OVERFLOWS):
                one.train(number)
        assert run.moved() == engine.moved()
        # amp moves its scale when a block ends, not when a step does.
        assert run.scale() == engine.scale() or (number + 1) % case.every
    assert run.values() == engine.values()


EVERY_KIND = [
    Case(driver="native", level=level, optimizer=optimizer, every=3, clip=0.05)
    for optimizer, levels in {
        **dict.fromkeys(("sgd", "adamw-fused", "adam-foreach", "FusedSGD"), LEVELS),
        **dict.fromkeys(("FusedLAMB", "FusedNovoGrad"), MASTERED),
        **dict.fromkeys(("remainder", "8 bits"), ("O5",)),
    }.items()
    for level in levels
]


@pytest.mark.parametrize("case", cases() + EVERY_KIND, ids=ids)
def test_a_resume_is_bitwise_at_every_pass(case: Case) -> None:
    """Each pass is taken by a run that has just been built and loaded, from other first weights."""
    straight, resumed = case.run(), case.run()
    for number in range(TOTAL if case.every > 1 else 6):
        if number % case.every == 0 or DRIVERS[case.driver].saves_windows:
            state = (through_a_file if number in (3, 4) else copy.deepcopy)(resumed.save())
            resumed = case.run(seed=number + 1)
            resumed.done = number
            resumed.load(state)
        for run in (straight, resumed):
            with overflowing(run, really=number in OVERFLOWS):
                run.train(number)
        assert (resumed.moved(), resumed.scale()) == (straight.moved(), straight.scale())
        assert resumed.values() == straight.values()
        if (number + 1) % case.every == 0:
            assert not differences(resumed.save(), straight.save())


@pytest.mark.parametrize("case", cases(windows=((4, None),), optimizers=("sgd",), has_norm=False), ids=ids)
def test_the_passes_of_a_window_add_up_to_the_whole_batch(case: Case) -> None:
    """But for rounding, in a net without statistics of single batches."""

    def quarter(number: int) -> tuple[Tensor, Tensor]:
        x, y = make_batch(number // 4)
        rows = slice(4 * (number % 4), 4 * (number % 4) + 4)
        return x[rows], y[rows]

    accumulated = case.run()
    for number in range(8):
        accumulated.train(number, batch=quarter)
        assert accumulated.moved() == (number % 4 == 3)
    whole = replace(case, every=1).run()
    for number in range(2):
        whole.train(number)
    exact = case.level == "O0"
    for a, b in zip(accumulated.net.state_dict().values(), whole.net.state_dict().values(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=1e-6 if exact else 5e-3)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases(windows=((1, None),), where=lambda driver: driver.closures)
        # A fused step divides float16 gradients and rounds only the weights; a closure must see them divided.
        if (case.level, case.optimizer) != ("O3", "FusedAdamW")
    ],
    ids=ids,
)
def test_a_closure_is_an_ordinary_step(case: Case) -> None:
    """One whose gradients overflow is called again, at half the scale, and leaves nothing behind."""
    plain, closed, again = case.run(), case.run(), case.run()
    for run in (plain, closed, again):
        run.convert()
    for number in range(3):
        plain.train(number)
        closed.step_with(lambda run=closed, number=number: run.loss(make_batch(number)))
        calls: list[float] = []

        def loss_of(number: int = number, calls: list[float] = calls) -> Tensor:
            calls.append(1.0)
            loss = again.loss(make_batch(number))
            return loss * float("inf") if number == 1 and len(calls) == 1 else loss

        if number == 1 and plain.scale() == 1.0:
            again.step_with(lambda run=again: run.loss(make_batch(1)))  # the scale cannot fall
        else:
            again.step_with(loss_of)
            assert len(calls) == (2 if number == 1 else 1)
    assert closed.values() == plain.values()
    if case.driver == "amp":
        # The statistics of the forward pass that succeeded are put back with those of the one that did not.
        assert again.values() != plain.values()
        assert stepped(again) == stepped(plain)
    else:
        assert again.values() == plain.values()
    assert again.scale() == (plain.scale() / 2 if plain.scale() != 1.0 else 1.0)


def stepped(run: Run) -> list[Any]:
    """What the optimizer steps and its state."""
    return values(run.optimizer)


class Stop(Exception):
    """Raised by what a user has hooked in."""


def stop(*_: Any) -> None:
    raise Stop


POINTS: dict[str, tuple[Callable[[Run], Any], bool]] = {
    "forward": (lambda run: run.net[-1].register_forward_pre_hook(stop), False),
    "loss": (lambda run: run.net.register_forward_hook(stop), False),
    "backward": (lambda run: run.net[0].weight.register_hook(stop), False),
    "before the step": (lambda run: run.optimizer.register_step_pre_hook(stop), False),
    "after the step": (lambda run: run.optimizer.register_step_post_hook(stop), True),
}
"""Where a user's code may raise, and whether the iteration has been taken by then."""


@pytest.mark.parametrize("case", cases(windows=((1, None),), optimizers=("adamw",), has_norm=False), ids=ids)
@pytest.mark.parametrize("point", POINTS)
def test_after_an_exception_the_run_goes_on(case: Case, point: str) -> None:
    """As the run that took the iteration, or as the one that never had it."""
    register, is_taken = POINTS[point]
    run, other = case.run(), case.run()
    for one in (run, other):
        one.train(0)
    handle = register(run)
    with pytest.raises(Stop):
        run.train(1)
    handle.remove()
    run.drop()
    if is_taken:
        other.train(1)
    run.done = other.done
    for number in (2, 3):
        run.train(number)
        other.train(number)
        assert run.moved()
    assert run.values() == other.values()
