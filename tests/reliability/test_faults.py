"""An exception at every line of library code that runs in an iteration leaves the iteration taken, or never begun.

Each point is a run of its own: warm up, raise there, catch outside, do what a caller is told to do after an exception
(``engine.abort()``; with amp, the ``zero_grad()`` that begins an iteration), and train on. The process must look as
before, and two iterations later every bit must be that of a run which took the iteration or of one which never had it.

By default each line is tried once per set-up, with the classes of exception in turn. ``HALFPEAK_THOROUGH=1`` tries
every line every time it is reached.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from torch import Tensor

import halfpeak
from halfpeak import amp
from reliability.faults import KINDS, Point, inject, record
from reliability.support import OPTIMIZERS, batch, clean_process, global_snapshot, net, state_hash

THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"
WARM = (0, 1)
FAULTY = 2
AFTER = (3, 4)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and whether the faulty iteration overflows."""

    door: str
    level: str
    optimizer: str = "AdamW"
    norm: str = "batch"
    accumulate: int = 1
    clip: float | None = None
    overflow: bool = False
    aborts: bool = True

    def __str__(self) -> str:
        extras = [f"accumulate={self.accumulate}"] if self.accumulate > 1 else []
        extras += ["overflow"] if self.overflow else []
        extras += [] if self.aborts else ["no abort"]
        return " ".join([self.door, self.level, self.optimizer, *extras])


SETUPS = [
    Setup(door="native", level="O0"),
    Setup(door="native", level="O1"),
    Setup(door="native", level="O2", aborts=False),
    Setup(door="native", level="O2", overflow=True),
    Setup(door="native", level="O2", optimizer="AdamW fused", clip=1.0, overflow=True),
    Setup(door="native", level="O2", optimizer="SGD", clip=1.0, accumulate=2, norm="layer"),
    Setup(door="native", level="O2", optimizer="FusedAdamW", clip=1.0, overflow=True),
    Setup(door="native", level="O5", optimizer="FusedSGD", clip=1.0, accumulate=2, norm="layer"),
    Setup(door="amp", level="O1"),
    Setup(door="amp", level="O2", optimizer="SGD", overflow=True),
]
if THOROUGH:
    SETUPS += [
        Setup(door="native", level="O2"),
        Setup(door="native", level="O5"),
        Setup(door="native", level="O0", optimizer="SGD", overflow=True),
        Setup(door="native", level="O2", optimizer="AdamW fused", clip=1.0),
        Setup(door="native", level="O2", optimizer="FusedAdamW", clip=1.0),
        Setup(door="amp", level="O2"),
    ]


class Run:
    """One training run of a set-up, warmed up."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = net(norm=setup.norm)
        self.optimizer = OPTIMIZERS[setup.optimizer](self.model.parameters())
        if setup.door == "amp":
            amp.initialize(self.model, self.optimizer, opt_level=setup.level, verbosity=0)
            run = amp._amp_state.run_of(self.optimizer)
            assert run is not None
            self.engine = run.engine
        else:
            self.engine = halfpeak.prepare(
                self.model, self.optimizer, setup.level, accumulate=setup.accumulate, clip=setup.clip
            )
        for step in WARM:
            self.iterate(step)

    def iterate(self, step: int) -> None:
        """One iteration as users write it."""
        for micro in range(self.setup.accumulate):
            self.backward(step, micro)
            if self.setup.door == "amp":
                self.optimizer.step()
            else:
                self.engine.step()

    def backward(self, step: int, micro: int = 0) -> None:
        """The part of an iteration that ends with its gradients."""
        if self.setup.door == "amp":
            self.optimizer.zero_grad()
            with amp.scale_loss(self.forward(step, micro), self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            self.engine.backward(self.forward(step, micro))

    def forward(self, step: int, micro: int = 0) -> Tensor:
        """The part that ends with its loss."""
        # Casts of the door are on all the time.
        with nullcontext() if self.setup.door == "amp" else self.engine.forward():
            loss = self.model(batch(10 * step + micro)).float().square().mean()
        return loss * float("inf") if self.setup.overflow and step == FAULTY else loss

    def after(self) -> str:
        """Two iterations more, and the digest of where they lead."""
        for step in AFTER:
            self.iterate(step)
        return state_hash(self.engine)

    def end(self) -> None:
        """A run that lives is another one for those that follow, which would take more lines."""
        self.engine.remove()

    def snapshot(self) -> dict[str, object]:
        """The process, the model and the optimizer."""
        return global_snapshot([self.model], [self.optimizer])


@pytest.fixture(autouse=True)
def without_casts() -> Iterator[None]:
    yield
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()


def outcomes(setup: Setup) -> dict[str, str]:
    """The digests that a run may end with, and what they mean."""
    allowed: dict[str, str] = {}

    def allow(name: str, act: Callable[[Run], object]) -> None:
        run = Run(setup)
        act(run)
        allowed.setdefault(run.after(), name)
        run.end()

    allow("dropped", lambda run: None)
    if setup.norm == "batch":
        allow("dropped, statistics moved", lambda run: run.forward(FAULTY))
    allow("taken", lambda run: run.iterate(FAULTY))
    if setup.door == "amp" or not setup.aborts:
        # The exception came when the backward pass was over and no step had begun.
        allow("backward only", lambda run: run.backward(FAULTY))
    return allowed


def points_of(setup: Setup) -> list[Point]:
    """Where an exception can come in the faulty iteration, once caches of the process are filled."""
    points_of_one(setup)
    return points_of_one(setup)


def points_of_one(setup: Setup) -> list[Point]:
    """A function of its own, because with amp a run that still lives changes the next one's."""
    run = Run(setup)
    points = record(lambda: run.iterate(FAULTY))
    run.end()
    return points


def chosen(points: list[Point], turn: int) -> list[int]:
    """The points to try: all of them, or each line once, now at its first hit and now at a later one."""
    if THOROUGH:
        return list(range(len(points)))
    where: dict[tuple[str, int], list[int]] = {}
    for ordinal, point in enumerate(points):
        where.setdefault((point.file, point.line), []).append(ordinal)
    return [hits[(turn + number) % len(hits)] for number, hits in enumerate(where.values())]


def try_point(
    setup: Setup, point: Point, ordinal: int, kind: type[BaseException], allowed: dict[str, str]
) -> str | None:
    """What is wrong after an exception of class ``kind`` at a point, or None."""
    run = Run(setup)
    before = run.snapshot()
    raised_at, came_out = inject(lambda: run.iterate(FAULTY), ordinal, kind)
    if setup.aborts and setup.door == "native":
        run.engine.abort()
    after = run.snapshot()
    changed = [key for key in before if before[key] != after[key]]
    if changed:
        clean_process()
    reached = allowed.get(run.after())
    run.end()
    if raised_at == point and came_out and not changed and reached is not None:
        return None
    return f"{point}: {reached or 'half taken'}, changed {changed}, came out {came_out} at {raised_at}"


@pytest.mark.timeout(3000 if THOROUGH else 300)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_an_iteration_is_taken_or_never_begun(setup: Setup) -> None:
    allowed = outcomes(setup)
    points = points_of(setup)
    turn = SETUPS.index(setup)
    complaints = (
        try_point(setup, points[ordinal], ordinal, KINDS[(turn + number) % len(KINDS)], allowed)
        for number, ordinal in enumerate(chosen(points, turn))
    )
    wrong = [complaint for complaint in complaints if complaint is not None]
    assert not wrong, "\n".join(wrong)


def test_the_tool_reaches_every_part_of_a_step() -> None:
    run = Run(SETUPS[2])
    files = {point.file for point in record(lambda: run.iterate(FAULTY))}
    engine = {f"engine/{name}.py" for name in ("engine", "optimizer", "gradients/backward", "step_record")}
    parts = {f"state/{name}.py" for name in ("masters", "loss_scaler", "batch_norm", "found_inf")}
    assert files >= engine | parts | {"ops/foreach.py", "casting/modules.py", "core/schedule.py"}
    assert inject(lambda: None, 0, KINDS[0]) == (None, False)
