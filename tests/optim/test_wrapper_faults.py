"""An exception at every line of a wrapper's own code leaves the iteration taken, or never begun.

What the engine below it does is in ``tests/reliability``. A caller who goes on after an exception writes
``wrapper.zero_grad()``, as after any interrupted iteration.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.functional import mse_loss

from conftest import global_torch_state
from optim.test_wrapper_state import KINDS as WRAPPERS
from reliability.faults import KINDS, Point, first_and_last, inject, record
from support.nets import OPTIMIZERS, make_batch, make_net
from support.snapshot import values

FAULTY = 2


class Run:
    """Two iterations of a wrapper; the third is where the exception comes."""

    def __init__(self, kind: str) -> None:
        self.model = make_net()
        self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())
        self.wrapper = WRAPPERS[kind](self.optimizer, clip_grad={"max_norm": 0.05})
        for i in range(FAULTY):
            self.iterate(i)

    def forward(self, i: int) -> Any:
        x, y = make_batch(i)
        with self.wrapper.optim_context(self.model):
            return mse_loss(self.model(x).float(), y / 64)

    def iterate(self, i: int) -> None:
        self.wrapper.update_params(self.forward(i))

    def after(self) -> list[Any]:
        """Where two iterations more lead."""
        self.wrapper.zero_grad()
        for i in (FAULTY + 1, FAULTY + 2):
            self.iterate(i)
        return values(self.model, self.optimizer)


def outcomes(kind: str) -> list[list[Any]]:
    never, forward_only, taken = Run(kind), Run(kind), Run(kind)
    forward_only.forward(FAULTY)
    taken.iterate(FAULTY)
    return [never.after(), forward_only.after(), taken.after()]


# Functions of their own: a run that still lives is another engine, which the next one looks at.


def points_of(kind: str) -> list[Point]:
    run = Run(kind)
    return record(lambda: run.iterate(FAULTY))


def end_of(kind: str, ordinal: int, error: type[BaseException]) -> tuple[Point | None, bool, list[Any]]:
    run = Run(kind)
    raised_at, came_out = inject(lambda: run.iterate(FAULTY), ordinal, error)
    return raised_at, came_out, run.after()


@pytest.mark.parametrize("kind", ["plain", "amp", "O1", "O2"])
def test_an_iteration_is_taken_or_never_begun(kind: str) -> None:
    allowed = outcomes(kind)
    assert len({repr(one) for one in allowed}) == 3
    points = points_of(kind)
    own = [ordinal for ordinal in first_and_last(points) if points[ordinal].file.startswith("optim/")]
    assert len(own) > 50
    calm = global_torch_state()
    for number, ordinal in enumerate(own):
        raised_at, came_out, after = end_of(kind, ordinal, KINDS[number % len(KINDS)])
        assert (raised_at, came_out) == (points[ordinal], True)
        assert global_torch_state() == calm, raised_at
        assert after in allowed, raised_at
