"""Objects and open files do not grow in a long run, and a run that is over leaves nothing behind.

A thousand steps by default; ``HALFPEAK_THOROUGH=1`` takes a hundred thousand.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import halfpeak
from halfpeak import amp
from reliability.support import LEVELS, OPTIMIZERS, batch, function_modes, global_snapshot, net, open_files

THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"
STEPS = 100_000 if THOROUGH else 1000


def iterate_native(engine: halfpeak.Engine, step: int, factor: float) -> None:
    with engine.forward():
        loss = engine.model(batch(step % 7)).float().square().mean()
    engine.backward(loss * factor)
    engine.step()


def iterate_amp(model: Any, optimizer: Any, step: int, factor: float) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(model(batch(step % 7)).float().square().mean() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.timeout(3000 if THOROUGH else 300)
@pytest.mark.parametrize(
    ("front_end", "level", "kind"),
    [
        ("native", "O1", "AdamW"),
        ("native", "O2", "FusedAdamW"),
        ("amp", "O1", "FusedAdamW"),
        ("amp", "O2", "AdamW"),
    ],
)
def test_a_long_run_with_overflows_grows_nothing(front_end: str, level: str, kind: str) -> None:
    """With an overflow in every 37 steps, and a growth of a dynamic scale. At most 20 objects more."""
    model = net(norm="batch")
    optimizer = OPTIMIZERS[kind](model.parameters())
    scale = halfpeak.ScaleConfig(interval=20)
    if front_end == "native":
        engine = halfpeak.prepare(model, optimizer, level, scale=scale)
    else:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def run(steps: range) -> tuple[int, int | None]:
        for step in steps:
            factor = float("inf") if step % 37 == 36 else 1.0
            if front_end == "native":
                iterate_native(engine, step, factor)
            else:
                iterate_amp(model, optimizer, step, factor)
        gc.collect()
        return len(gc.get_objects()), open_files()

    objects, files = run(range(100))
    objects_later, files_later = run(range(100, 100 + STEPS))
    assert abs(objects_later - objects) <= 20
    assert files_later == files
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())


@pytest.fixture
def no_collector() -> Iterator[None]:
    # The first optimizer of a process imports parts of torch, and what they keep of their caller's frames is collected here.
    torch.optim.SGD(net().parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def one_life(front_end: str, level: str, optimizer_name: str) -> list[weakref.ref[Any]]:
    """Build, prepare, train with a skip, evaluate; return what must be dead when this function has returned."""
    model = net(norm="batch")
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    refs: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(optimizer)]
    if front_end == "native":
        engine = halfpeak.prepare(model, optimizer, level, clip=1.0)
        parts = engine.parts
        refs += [weakref.ref(engine), weakref.ref(engine.train_step)]
    else:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        run = amp._amp_state.run_of(optimizer)
        assert run is not None
        parts = run.parts
        refs += [weakref.ref(run)]
    refs += [weakref.ref(parts), weakref.ref(parts.pairs), weakref.ref(parts.windows[0])]
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        if front_end == "native":
            iterate_native(engine, step, factor)
        else:
            iterate_amp(model, optimizer, step, factor)
    with torch.no_grad():
        model.eval()(batch(0))
    if front_end == "native" and "Fused" in optimizer_name:  # Gradients left for a step that never comes.
        with engine.forward():
            loss = model(batch(0)).float().mean()
        engine.backward(loss)
    refs += [weakref.ref(master) for _, master in parts.pairs]
    return refs


@pytest.mark.parametrize("front_end", ["native", "amp"])
def test_two_hundred_lives_without_a_garbage_collector(front_end: str, no_collector: None) -> None:
    """No reference cycle holds a model, an optimizer, an engine or a master."""
    one_life(front_end, "O1", "SGD")
    before = global_snapshot()
    for number in range(200):
        names = list(OPTIMIZERS)
        refs = one_life(front_end, LEVELS[number % len(LEVELS)], names[number % len(names)])
        assert [ref() for ref in refs] == [None] * len(refs)
        # amp keeps the state of the last run, which scripts may read: it must not grow, nor leave casts on.
        assert function_modes() == before["function modes"]
    after = global_snapshot()
    assert {key for key in before if before[key] != after[key]} == set()


def raise_error(*_: object) -> None:
    raise ZeroDivisionError


def test_a_failed_life_is_forgotten_too(no_collector: None) -> None:
    def fail() -> weakref.ref[Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = halfpeak.prepare(model, optimizer, "O2")
        handle = model.register_forward_hook(raise_error)
        with pytest.raises(ZeroDivisionError), engine.forward():
            model(batch(0))
        handle.remove()
        return weakref.ref(model)

    assert fail()() is None


def test_removing_an_engine_leaves_a_plain_model_and_optimizer() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = [
        {name: len(v) for name, v in vars(m).items() if name.endswith("_hooks")} for m in model.modules()
    ]
    parameters = [id(p) for p in model.parameters()]
    engine = halfpeak.prepare(model, optimizer, "O5")
    iterate_native(engine, 0, 1.0)
    engine.remove()
    assert hooks == [
        {name: len(v) for name, v in vars(m).items() if name.endswith("_hooks")} for m in model.modules()
    ]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == parameters
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    halfpeak.prepare(model, optimizer, "O5")
