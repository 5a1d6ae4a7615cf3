"""An exception at every line of library code that runs in an iteration leaves the iteration taken, or never begun.

Each point has its own run: warm up, raise there, catch outside, do what a caller must do after an exception
(``engine.abort()``, or the front end's ``zero_grad()``), and train on. The process must be unchanged, and two
iterations later every bit must be that of a run that took the iteration or of one that never began it. Lines of the
engine are tried with the engine and with amp. Of the other front ends, which call it, only their own lines are tried.

By default each line is tried in one of every five set-ups that run it, with the classes of exception in turn.
``HALFPEAK_THOROUGH=1`` tries it in all of them, every time it is reached.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from laws.drivers import Case, Run
from reliability.faults import KINDS, Injected, Point, inject, record
from reliability.support import clean_process, global_snapshot
from support.nets import make_batch

THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"
FAULTY = 2
AFTER = (3, 4)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, whether the faulty iteration overflows, and the folder whose lines are tried."""

    case: Case
    overflow: bool = False
    drops: bool = True
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.case}{' overflow' * self.overflow}{' goes on' * (not self.drops)}"

    @property
    def warm_up(self) -> range:
        """Iterations after which all later ones run the same lines."""
        return range(2 if "Fused" in self.case.optimizer else 1)


def native(
    level: str, optimizer: str = "adamw", *, overflow: bool = False, drops: bool = True, **options: Any
) -> Setup:
    case = Case(driver="native", level=level, optimizer=optimizer, **options)
    return Setup(case=case, overflow=overflow, drops=drops)


SETUPS = [
    native("O0"),
    native("O1"),
    native("O2", "adam-foreach", drops=False),
    native("O2", overflow=True),
    native("O2", "adamw-fused", clip=1.0, overflow=True),
    native("O2", "sgd", clip=1.0, every=2, has_norm=False),
    native("O2", "FusedAdamW", clip=1.0, overflow=True),
    native("O5", "FusedSGD", clip=1.0, every=2, has_norm=False),
    Setup(case=Case(driver="amp", level="O1")),
    Setup(case=Case(driver="amp", level="O2", optimizer="sgd"), overflow=True),
    *(
        Setup(case=Case(driver=driver, level=level, clip=0.05), folder=folder)
        for driver, level, folder in (
            ("OptimWrapper", "O0", "optim/"),
            ("AmpOptimWrapper", "O1", "optim/"),
            ("ApexOptimWrapper", "O1", "optim/"),
            ("ApexOptimWrapper", "O2", "optim/"),
            ("OptimizerHook", "O0", "runner/"),
            ("Fp16OptimizerHook master", "O2", "runner/"),
            ("Fp16OptimizerHook autocast", "O1", "runner/"),
            ("timm", "O2", "integrations/"),
        )
    ),
]
if THOROUGH:
    SETUPS += [
        native("O2"),
        native("O5"),
        native("O0", "sgd", overflow=True),
        native("O2", "adamw-fused", clip=1.0),
        native("O2", "FusedAdamW", clip=1.0),
        Setup(case=Case(driver="amp", level="O2")),
    ]


def loss_of(run: Run, number: int, factor: float = 1.0) -> Callable[[], Tensor]:
    return lambda: run.loss(make_batch(number)) * factor


def iterate(run: Run, step: int, factor: float = 1.0) -> None:
    """Train the passes of one window."""
    for number in range(run.every):
        run.take(loss_of(run, 10 * step + number, factor))
        run.done += 1


def warmed_up(setup: Setup) -> Run:
    run = setup.case.run()
    for step in setup.warm_up:
        iterate(run, step)
    return run


def faulty(setup: Setup, run: Run) -> None:
    iterate(run, FAULTY, float("inf") if setup.overflow else 1.0)


def end_of(setup: Setup, run: Run) -> str:
    """The state after two more iterations."""
    if setup.drops:
        run.drop()
    for step in AFTER:
        iterate(run, step)
    end = repr((run.values(), run.progress()))
    run.end()
    return end


def forward(run: Run) -> None:
    """Run the faulty iteration up to its loss."""

    def interrupted() -> Tensor:
        loss_of(run, 10 * FAULTY)()
        raise Injected

    with pytest.raises(Injected):
        run.take(interrupted)


def outcomes(setup: Setup) -> dict[str, str]:
    """The states in which a run may end, and what each means."""
    allowed: dict[str, str] = {}

    def allow(name: str, act: Callable[[Run], object]) -> None:
        run = warmed_up(setup)
        act(run)
        allowed.setdefault(end_of(setup, run), name)

    allow("dropped", lambda run: None)
    if setup.case.has_norm:
        allow("dropped, statistics moved", forward)
    allow("taken", lambda run: faulty(setup, run))
    if setup.case.driver == "amp" or not setup.drops:
        # The exception came when the backward pass was over and no step had begun.
        factor = float("inf") if setup.overflow else 1.0
        allow("backward only", lambda run: run.backward(loss_of(run, 10 * FAULTY, factor)))
    return allowed


def points_of(setup: Setup) -> list[Point]:
    """The line events of the faulty iteration, after a first run has filled the caches of the process."""
    points_of_one(setup)
    return points_of_one(setup)


def points_of_one(setup: Setup) -> list[Point]:
    run = warmed_up(setup)
    points = record(lambda: faulty(setup, run))
    run.end()
    return points


Line = tuple[str, int]


@functools.cache
def set_ups_that_run() -> dict[Line, list[Setup]]:
    """Each line, and the set-ups that run it."""
    found: dict[Line, list[Setup]] = {}
    for setup in SETUPS:
        for file, line in {point[:2] for point in points_of(setup) if point.file.startswith(setup.folder)}:
            found.setdefault((file, line), []).append(setup)
    return found


def chosen(setup: Setup, points: list[Point], turn: int) -> list[int]:
    """The points to try, as ordinals: all, or a fifth of the lines, each once, at an earlier or a later hit."""
    where: dict[Line, list[int]] = {}
    for ordinal, point in enumerate(points):
        if point.file.startswith(setup.folder):
            where.setdefault((point.file, point.line), []).append(ordinal)
    if THOROUGH:
        return [ordinal for hits in where.values() for ordinal in hits]
    tried = []
    for number, ((file, line), hits) in enumerate(where.items()):
        who = set_ups_that_run().get((file, line), [setup])
        if setup not in who or (who.index(setup) - line) % min(5, len(who)) == 0:
            tried.append(hits[(turn + number) % len(hits)])
    return tried


def try_point(
    setup: Setup, point: Point, ordinal: int, kind: type[BaseException], allowed: dict[str, str]
) -> str | None:
    """What is wrong after an exception of class ``kind`` at a point, or None."""
    run = warmed_up(setup)
    before = global_snapshot([run.net], [run.optimizer])
    raised_at, came_out = inject(lambda: faulty(setup, run), ordinal, kind)
    if setup.drops:
        run.drop()
    after = global_snapshot([run.net], [run.optimizer])
    changed = [key for key in before if before[key] != after[key]]
    if changed:
        clean_process()
    reached = allowed.get(end_of(setup, run))
    if raised_at == point and came_out and not changed and reached is not None:
        return None
    return f"{point}: {reached or 'half taken'}, changed {changed}, came out {came_out} at {raised_at}"


@pytest.mark.timeout(3000 if THOROUGH else 300)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_an_iteration_is_taken_or_never_begun(setup: Setup) -> None:
    gc.collect()  # An engine of an earlier test that dies meanwhile would change how many lines run.
    set_ups_that_run()  # Before its own points are counted: it fills caches of the process.
    allowed = outcomes(setup)
    points = points_of(setup)
    turn = SETUPS.index(setup)
    tried = chosen(setup, points, turn)
    assert len(tried) > (40 if not setup.folder else 5)
    complaints = (
        try_point(setup, points[ordinal], ordinal, KINDS[(turn + number) % len(KINDS)], allowed)
        for number, ordinal in enumerate(tried)
    )
    wrong = [complaint for complaint in complaints if complaint is not None]
    assert not wrong, "\n".join(wrong)


def test_the_tool_reaches_every_part_of_a_step() -> None:
    files = {point.file for point in points_of_one(SETUPS[2])}
    engine = {f"engine/{name}.py" for name in ("engine", "optimizer", "gradients/backward", "step_record")}
    parts = {f"state/{name}.py" for name in ("masters", "loss_scaler", "batch_norm", "found_inf")}
    assert files >= engine | parts | {"ops/foreach.py", "casting/modules.py", "core/schedule.py"}
    assert inject(lambda: None, 0, KINDS[0]) == (None, False)
