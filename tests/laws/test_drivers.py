"""Laws that every way to train obeys. The table of drivers is in ``drivers.py``.

A skip moves nothing, and a run that only skips raises. A front end takes the engine's steps bit for bit. A resume at
any pass is bitwise, and so is a load of an earlier state. A dropped window leaves no trace. The
passes of a window add up to the whole batch. A closure equals an ordinary step. After an exception the run continues
as if the iteration had ended or had never begun.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfpeak import LossScaleCollapse
from laws.drivers import DRIVERS, TOTAL, Case, Run, cases, overflowing
from support.nets import LEVELS, LOW, MASTERED, make_batch, make_net
from support.states import differences, through_a_file


def ids(case: Case) -> str:
    return str(case)


EVERY_KIND = [
    Case(driver="native", level=level, optimizer=optimizer, every=3, clip=0.05)
    for optimizer, levels in {
        "adamw-fused": LEVELS,
        **dict.fromkeys(("sgd", "FusedSGD"), LEVELS[::2]),
        "adam-foreach": LEVELS[1::2],
        **dict.fromkeys(("FusedLAMB", "FusedNovoGrad"), MASTERED),
        **dict.fromkeys(("remainder", "8 bits"), MASTERED),
    }.items()
    for level in levels
]

VALUES = (float("inf"), float("nan"), -float("inf"))


@pytest.mark.parametrize("case", cases() + EVERY_KIND, ids=ids)
def test_a_skip_moves_nothing(case: Case) -> None:
    """Whichever parameter and pass of a window overflows, also in the first window: the scale halves, training goes on.

    The run then equals one without the skip, except with float16 gradients, which a lower scale rounds differently.
    """
    run, calm = case.run(), None if LOW.get(case.level) is torch.float16 else case.run()
    run.convert()
    parameters = len(list(run.net.parameters()))
    for place in range(parameters):
        # A skipped first step may create an optimizer's empty state, and some drivers have no scale before it.
        before = (weights(run), run.values(), run.scale()) if place else (weights(run),)
        for number in range(case.every):
            bad = number == place % case.every
            with overflowing(run, really=bad, value=VALUES[place % 3], place=place):
                run.train(number)
        assert not run.moved()
        assert weights(run) == before[0]
        if place:
            assert run.values() == before[1]
            assert run.scale() == (before[2] / 2 if before[2] != 1.0 else 1.0)
        for one in (run, calm):
            for number in range(case.every if one else 0):
                one.train(case.every * place + number)
        assert run.moved()
        assert calm is None or run.values() == calm.values()


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases(windows=((1, None),), optimizers=("sgd",))
        # The engine at every level, the others at one: 250 steps take seconds.
        if case.driver == "native"
        or case.level == next(level for level in ("O2", "O1", "O0") if level in DRIVERS[case.driver].levels)
    ],
    ids=ids,
)
def test_a_run_that_never_steps_is_ended_and_names_the_parameter(case: Case) -> None:
    run = case.run()
    run.train(0)
    before = run.values()

    def train() -> None:
        for number in range(1, 250):  # 136 halvings to 2**-126, and 100 skips more
            run.train(number)

    with pytest.raises(LossScaleCollapse) as caught, overflowing(run):
        train()
    by_number = {"FP16_Optimizer": "parameter 0 of optimizer 0", "GradScaler": "param_groups[0]['params'][0]"}
    assert caught.value.parameters == (by_number.get(case.driver, "0.weight"),)
    assert run.values() == before


def weights(run: Run) -> list[Any]:
    """The model's ``state_dict``, which has the masters' values for low-precision weights."""
    return [(name, str(value.dtype), value.tolist()) for name, value in run.net.state_dict().items()]


OVERFLOW = 4
"""Inside the second window of three: the first and the third are stepped."""


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
    """Bit for bit, with overflows, clipping and windows, although the run is saved before every pass."""
    run, engine = case.run(), DRIVERS[case.driver].reference(case, 0)
    for number in range(TOTAL):
        run.save()
        for one in (run, engine):
            with overflowing(one, really=number == OVERFLOW):
                one.train(number)
        assert run.moved() == engine.moved()
        # amp updates its scale at the end of a scale_loss block, not of a step.
        assert run.scale() == engine.scale() or (number + 1) % case.every
    assert run.values() == engine.values()


@pytest.mark.parametrize("case", cases() + EVERY_KIND, ids=ids)
def test_a_resume_is_bitwise_at_every_pass(case: Case) -> None:
    """Each pass is trained by a run that was just built, with other weights, and loaded."""
    straight, resumed = case.run(), case.run()
    for number in range(TOTAL if case.every > 1 else 6):
        if number % case.every == 0 or DRIVERS[case.driver].saves_windows:
            state = (through_a_file if number in (3, 4) else copy.deepcopy)(resumed.save())
            resumed = case.run(seed=number + 1)
            resumed.done = number
            resumed.load(state)
        for run in (straight, resumed):
            with overflowing(run, really=number == OVERFLOW):
                run.train(number)
        assert (resumed.moved(), resumed.scale()) == (straight.moved(), straight.scale())
        assert resumed.values() == straight.values()
        if (number + 1) % case.every == 0:
            assert not differences(resumed.save(), straight.save())


@pytest.mark.parametrize("case", cases(windows=((3, None),)) + EVERY_KIND, ids=ids)
def test_going_back_in_the_same_objects_is_bitwise(case: Case) -> None:
    """Twice each: to a state between two windows and to one inside a window, from inside another window."""
    run = case.run()
    for at in (3, 4) if DRIVERS[case.driver].saves_windows else (3,):
        for number in range(run.done, at):
            run.train(number)
        state = copy.deepcopy(run.save())
        image, ends = repr(state), []
        for _ in range(2):
            for number in range(at, TOTAL):
                with overflowing(run, really=number == OVERFLOW + 3):
                    run.train(number)
            ends.append((run.values(), run.progress()))
            run.train(TOTAL)
            if not DRIVERS[case.driver].saves_windows:
                run.drop()
            run.done = at
            run.load(state)
            assert repr(state) == image
        assert ends[0] == ends[1]


@pytest.mark.parametrize("case", cases(windows=((3, None),), has_norm=False), ids=ids)
def test_a_window_that_is_dropped_leaves_nothing_behind(case: Case) -> None:
    run, calm = case.run(), case.run()
    for number in range(5):
        run.train(number)
        if number < 3:
            calm.train(number)
    run.drop()
    for number in range(5, 11):
        run.train(number)
        calm.train(number)
        assert (run.values(), run.moved()) == (calm.values(), calm.moved())
    assert run.scale() == calm.scale()


@pytest.mark.parametrize("case", cases(windows=((4, None),), optimizers=("sgd",), has_norm=False), ids=ids)
def test_the_passes_of_a_window_add_up_to_the_whole_batch(case: Case) -> None:
    """Up to rounding, in a net without batch statistics."""

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
        # A fused step unscales float16 gradients without rounding them; a closure must see them unscaled, so rounded.
        if (case.level, case.optimizer) != ("O3", "FusedAdamW")
    ],
    ids=ids,
)
def test_a_closure_is_an_ordinary_step(case: Case) -> None:
    """A closure whose gradients overflow is called again, at half the scale, and its first call leaves no trace."""
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
    assert closed.values() == again.values() == plain.values()
    assert again.scale() == (plain.scale() / 2 if plain.scale() != 1.0 else 1.0)


@pytest.mark.parametrize("case", cases(windows=((1, None),)) + EVERY_KIND, ids=ids)
def test_the_default_dtype_of_torch_is_that_of_no_scalar_of_a_step(case: Case) -> None:
    """Scripts set it to build models. A bfloat16 step count would stay 256; kernels refuse a bfloat16 ``found_inf``."""

    def under(dtype: torch.dtype, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return call(*given)
            finally:
                torch.set_default_dtype(before)

        return called

    batch = under(torch.float32, make_batch)

    def end() -> list[Any]:
        run = replace(case, make_net=under(torch.float32, make_net)).run()
        for number in range(2 * case.every):
            with overflowing(run, really=number == 0):
                run.train(number, batch=batch)
        return [run.values(), run.scale()]

    assert under(torch.bfloat16, end)() == end()


class Stop(Exception):
    """Raised by a hook of the user."""


def stop(*_: Any) -> None:
    raise Stop


POINTS: dict[str, tuple[Callable[[Run], Any], bool]] = {
    "forward": (lambda run: run.net[-1].register_forward_pre_hook(stop), False),
    "loss": (lambda run: run.net.register_forward_hook(stop), False),
    "backward": (lambda run: run.net[0].weight.register_hook(stop), False),
    "before the step": (lambda run: run.optimizer.register_step_pre_hook(stop), False),
    "after the step": (lambda run: run.optimizer.register_step_post_hook(stop), True),
}
"""Where user code may raise, and whether the step has happened by then."""


@pytest.mark.parametrize("case", cases(windows=((1, None),), optimizers=("adamw",), has_norm=False), ids=ids)
@pytest.mark.parametrize("point", POINTS)
def test_after_an_exception_the_run_goes_on(case: Case, point: str) -> None:
    """Like a run that took the iteration, or like one that never began it."""
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
