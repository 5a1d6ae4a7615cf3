"""A short run of the fuzzer, always the same one; ``make fuzz`` runs it for longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from fuzz import models
from fuzz.compare import Mismatch, compare
from fuzz.config import Config, Planned, draw
from fuzz.events import EVENTS, MOMENTS
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
    masters_follow = name != "weights through .data" or not config.has_masters
    return EVENTS[name].fits(config) and masters_follow


JOINING = Config(
    seed=1010012613,
    parts=(),
    iterations=4,
    held_out=True,
    events=(
        Planned(0, "before forward", "inf in the outputs", seed=614),
        Planned(2, "after step", "add a group"),
    ),
)
"""A group that joins, whose gradients an overflow has reached while nobody stepped them."""


def joining(at: int, moment: str) -> tuple[Planned, ...]:
    return (JOINING.events[0], Planned(at, moment, "add a group"))


FOUND: dict[str, Config] = {
    "a group with infinite gradients": JOINING,
    "the same, between the backward pass and the step": replace(JOINING, events=joining(2, "before step")),
    "the same, inside a window": replace(
        JOINING, iterations=9, accumulate=3, events=joining(6, "after step")
    ),
    "gradients kept after a step, and then frozen": Config(
        seed=4040005533,
        parts=(),
        level="O4",
        iterations=2,
        clip=("norm", 100.0),
        events=(
            Planned(0, "before step", "gradients kept after the step"),
            Planned(1, "before forward", "freeze through the groups", seed=316),
        ),
    ),
    "a first step that raised when its state was made, and nothing had moved": Config(
        seed=900000010,
        parts=(),
        optimizers=("Adam fused",),
        level="O5",
        iterations=2,
        events=(Planned(0, "before step", "exception in the optimizer", seed=486),),
    ),
    "a transform of a model in which a parameter has been frozen": Config(
        seed=5010000243,
        parts=("embedding",),
        iterations=1,
        events=(Planned(0, "before step", "freeze", seed=934), Planned(0, "after step", "torch.func.grad")),
    ),
    "a restart before the first step, where an optimizer has made the state of a number": Config(
        seed=6020005928,
        parts=("scalar",),
        optimizers=("Adagrad",),
        level="O3",
        iterations=3,
        accumulate=3,
        events=(Planned(2, "before step", "restart"),),
    ),
    "a skip after the turn of an optimizer all of whose parameters are frozen": Config(
        seed=7010003732,
        parts=("instance norm",),
        optimizers=("FusedNovoGrad", "Adamax"),
        level="O3",
        iterations=3,
        held_out=True,
        in_turns=True,
        events=(
            Planned(0, "after step", "freeze through the groups", seed=588),
            Planned(2, "before forward", "inf in the outputs", seed=506),
        ),
    ),
    "all weights through .data, in the window in which some of them got their masters": Config(
        seed=8010003028,
        parts=("frozen",),
        optimizers=("Adamax", "Adam fused"),
        level="O5",
        accumulate=2,
        events=(
            Planned(1, "after step", "unfreeze"),
            Planned(3, "before forward", "all weights through .data"),
        ),
    ),
    "all weights through .data, and then one of them assigned": Config(
        seed=2020005225,
        level="O5",
        events=(
            Planned(3, "before forward", "all weights through .data", 743),
            Planned(3, "before forward", "weights assigned to .data", 466),
        ),
    ),
    "masters written before the first step, and then all weights through .data": Config(
        seed=1010003687,
        heads=2,
        iterations=3,
        events=(
            Planned(0, "before forward", "masters written", 6),
            Planned(1, "after step", "all weights through .data", 279),
        ),
    ),
    "masters that were written, and then copied": Config(
        seed=8,
        events=(
            Planned(3, "before forward", "masters written"),
            Planned(3, "before forward", "go on with a deep copy"),
        ),
    ),
    "frozen through the groups, and then copied": Config(
        seed=9,
        optimizers=("SGD foreach", "Adam"),
        in_turns=True,
        events=(
            Planned(1, "after step", "freeze through the groups"),
            Planned(1, "after step", "go on with a deep copy"),
        ),
    ),
    "weights that were loaded, and then written": Config(
        seed=210001486,
        parts=(),
        level="O5",
        events=(
            Planned(0, "after step", "load_state_dict of the model"),
            Planned(1, "before forward", "weights re-initialised", seed=21),
        ),
    ),
    "weights that were loaded and written, and then saved": Config(
        seed=420000973,
        parts=(),
        iterations=6,
        events=(
            Planned(5, "after step", "load_state_dict of the model"),
            Planned(5, "after step", "weights re-initialised", seed=73),
        ),
    ),
    "numbers that torch has loaded in the dtype of weights": Config(
        seed=7,
        optimizers=("ASGD",),
        level="O3",
        events=(
            Planned(2, "before forward", "load_state_dict of the optimizers"),
            Planned(3, "before forward", "restart"),
        ),
    ),
    "an overflow after a batch that was dropped unread": Config(
        seed=330000163,
        parts=("shared",),
        optimizers=("FusedSGD",),
        events=(Planned(0, "before step", "zero_grad of the model and continue"),),
    ),
    "a group that joins between the backward pass and the step": Config(
        seed=330000127,
        clip=("norm", 0.3),
        scale=(("init", 256.0),),
        held_out=True,
        events=(Planned(2, "before step", "add a group"),),
    ),
    "a group of a fused optimizer, with gradients": Config(
        seed=330000127,
        optimizers=("FusedAdamW",),
        scale=(("init", 256.0),),
        held_out=True,
        events=(Planned(2, "before forward", "add a group"),),
    ),
    "zeros between the passes of a window, some of which the next does not reach": Config(
        seed=10000168,
        parts=("sometimes",),
        level="O0",
        accumulate=2,
        events=(Planned(3, "before forward", "zero_grad(set_to_none=False) of the optimizer", seed=633),),
    ),
    "weights written through .data after a skip that was the first step": Config(
        seed=36,
        iterations=2,
        scale=(("init", 65536.0),),
        events=(
            Planned(0, "before forward", "inf in the batch"),
            Planned(1, "before forward", "all weights through .data"),
        ),
    ),
    "statistics loaded after a restart, and then a skip": Config(
        seed=710000608,
        parts=("batch norm",),
        iterations=1,
        events=(
            Planned(0, "before forward", "restart"),
            Planned(0, "before forward", "inf in the outputs", seed=862),
            Planned(0, "before forward", "load_state_dict of the model"),
        ),
    ),
    "weights of two optimizers written through .data, one of which has stepped": Config(
        seed=710000734,
        optimizers=("Adam fused", "SGD momentum"),
        level="O5",
        iterations=1,
        in_turns=True,
        events=(Planned(0, "before forward", "all weights through .data"),),
    ),
    "a restart after the first optimizer's turn, which keeps no moments": Config(
        seed=810000502,
        optimizers=("SGD fused", "Adam fused"),
        iterations=1,
        in_turns=True,
        events=(Planned(0, "before forward", "restart"),),
    ),
    "weights of two optimizers written through .data before their first step": Config(
        seed=810003500,
        optimizers=("NAdam", "Adam"),
        iterations=3,
        accumulate=3,
        events=(Planned(1, "before forward", "all weights through .data"),),
    ),
    "weights written after a step that raised before it began": Config(
        seed=510006435,
        iterations=2,
        events=(
            Planned(0, "before step", "exception before the optimizer"),
            Planned(1, "before forward", "weights re-initialised", seed=963),
        ),
    ),
    "frozen between the backward pass and the step, and clipped": Config(
        seed=510005922,
        parts=("unused",),
        level="O1",
        heads=2,
        losses=2,
        iterations=1,
        clip=("norm", 0.3),
        events=(Planned(0, "before step", "freeze", seed=108),),
    ),
    "a step of the optimizer that was refused, and another engine's loss": Config(
        seed=1010020442,
        parts=(),
        level="O4",
        iterations=1,
        events=(
            Planned(0, "before step", "optimizer.step() instead", seed=362),
            Planned(0, "before step", "another engine's loss reaches the model", seed=867),
        ),
    ),
    "a loss that is not finite, and then a copy inside the window": Config(
        seed=1010019526,
        level="O1",
        iterations=3,
        accumulate=3,
        scale=(("recovers", True),),
        events=(
            Planned(0, "before forward", "inf in the batch", seed=312),
            Planned(1, "before step", "go on with a deep copy", seed=401),
        ),
    ),
    "weights written after a skip that was the first step of a fused optimizer": Config(
        seed=510003263,
        optimizers=("FusedLAMB",),
        iterations=1,
        events=(
            Planned(0, "before forward", "inf in the batch"),
            Planned(0, "after step", "weights assigned to .data", seed=178),
        ),
    ),
    "a closure of two losses whose scales would grow and fall in turns": Config(
        seed=10010012755,
        parts=("scalar",),
        optimizers=("Rprop",),
        level="O1",
        heads=2,
        losses=2,
        iterations=5,
        scale=(("init", 4096.0), ("interval", 1)),
        events=(Planned(4, "after step", "step with a closure", seed=615),),
    ),
    "a frozen parameter that was loaded, and is then written through the groups": Config(
        seed=9010001255,
        parts=("frozen",),
        iterations=12,
        events=(
            Planned(3, "before forward", "load_state_dict of the model", seed=301),
            Planned(11, "after step", "masters written", seed=728),
        ),
    ),
    "a restart in a window whose gradients were written while they waited scaled": Config(
        seed=60016503,
        parts=(),
        level="O4",
        iterations=6,
        accumulate=3,
        options=(("loss_scale", 16.0),),
        events=(
            Planned(4, "before step", "gradients added to"),
            Planned(5, "before backward", "restart"),
        ),
    ),
    "a copy in such a window": Config(
        seed=60027531,
        parts=(),
        level="O1",
        accumulate=2,
        events=(
            Planned(2, "before step", "gradients added to"),
            Planned(2, "after step", "go on with a deep copy"),
        ),
    ),
    "an overflow that is clipped away between the passes of a fused optimizer": Config(
        seed=12050012436,
        parts=(),
        optimizers=("FusedLAMB",),
        level="O5",
        accumulate=2,
        events=(
            Planned(2, "before step", "clip by torch's value"),
            Planned(2, "before backward", "inf in a gradient", seed=571),
        ),
    ),
    "gradients kept after a step of a fused optimizer that was skipped": Config(
        seed=90018647,
        parts=(),
        optimizers=("FusedAdagrad",),
        level="O4",
        events=(
            Planned(2, "before step", "gradients kept after the step"),
            Planned(2, "before backward", "inf in a gradient", seed=749),
        ),
    ),
    **{
        f"a group with gradients joins inside a window, and then: {name}": Config(
            seed=13010013085,
            parts=(),
            iterations=3,
            held_out=True,
            events=(Planned(1, "before step", "add a group"), Planned(1, "before step", name)),
        )
        for name in ("go on with a deep copy", "restart")
    },
    "a restart in a window in which a parameter with a gradient has been frozen": Config(
        seed=1010002902,
        parts=(),
        iterations=2,
        accumulate=3,
        events=(
            Planned(0, "before step", "freeze", seed=765),
            Planned(1, "before step", "restart"),
        ),
    ),
    "saved between forward and backward, by hand": Config(
        seed=0, level="O5", iterations=1, events=(Planned(0, "before backward", "restart"),)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once(name: str) -> None:
    compare(FOUND[name])


def test_a_bias_before_a_batch_norm_has_no_gradient() -> None:
    """In float64: what ``fuzz.explained`` says of it."""
    model = models.build(("conv and batch norm",), 1, seed=0).double()
    x, ids, target = models.batch(0)
    nn.functional.mse_loss(model(x.double(), ids)[0], target.double()).backward()
    named = dict(model.named_parameters())
    bias, weight = (
        float(torch.as_tensor(named[f"parts.0.conv.{name}"].grad).abs().max()) for name in ("bias", "weight")
    )
    assert bias < 1e-15 < 1e-3 < weight


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
