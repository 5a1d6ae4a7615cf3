"""A short run of the fuzzer, always the same one; ``make fuzz`` runs it for longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.compare import Mismatch, compare
from fuzz.config import Config, Planned, draw
from fuzz.events import EVENTS, MOMENTS
from fuzz.explained import known
from fuzz.shrink import script, shrink

CHUNKS = 4
TRIES = 40


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_orders_of_calls_change_nothing_that_they_should_not(chunk: int) -> None:
    """A run for each event of the table, which happens among others."""
    for number, name in list(enumerate(EVENTS))[chunk::CHUNKS]:
        config = next(config for config in drawn(name, number * TRIES) if can_happen(config, name))
        try:
            compare(config)
        except Mismatch as error:
            pytest.fail(f"{error}\n{script(shrink(config))}")


def drawn(name: str, start: int) -> Iterator[Config]:
    return (draw(seed, MOMENTS, name) for seed in range(start, start + TRIES))


def can_happen(config: Config, name: str) -> bool:
    planned = [event for event in config.events if event.name == name]
    return EVENTS[name].fits(config) and not all(known(config, event, event.at) for event in planned)


def test_a_wrong_engine_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip that forgets one gradient: found in a run with many other things, and shrunk to one without them."""
    monkeypatch.setattr(
        "halfpeak.ops.foreach.clamp_", lambda grads, limit: [g.clamp_(-limit, limit) for g in grads[1:]]
    )
    config = Config(
        seed=3,
        parts=("linear", "layer norm"),
        level="O0",
        groups=2,
        accumulate=2,
        iterations=4,
        clip=("value", 0.001),
        events=(Planned(1, "after step", "evaluation"), Planned(2, "before forward", "save")),
    )
    with pytest.raises(Mismatch, match="differs by"):
        compare(config)
    small = shrink(config)
    assert (small.events, small.parts, small.accumulate, small.clip) == ((), (), 1, ("value", 0.001))
    with pytest.raises(Mismatch):
        exec(script(small))
