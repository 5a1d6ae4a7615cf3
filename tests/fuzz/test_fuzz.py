"""A short run of the fuzzer, always the same one; ``make fuzz`` runs it for longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from fuzz import models
from fuzz.compare import Mismatch, compare
from fuzz.config import Config, Planned, draw
from fuzz.events import EVENTS, MOMENTS
from fuzz.explained import GAIN_AND_NORM
from fuzz.shrink import script, shrink

CHUNKS = 4
TRIES = 80


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_orders_of_calls_change_nothing_that_they_should_not(chunk: int) -> None:
    """One run for each event of the table, which happens among other events."""
    for number, name in list(enumerate(EVENTS))[chunk::CHUNKS]:
        config = next(config for config in drawn(name, number * TRIES) if can_happen(config, name))
        try:
            compare(config)
        except Mismatch as error:
            pytest.fail(f"{error}\n{script(shrink(config))}")


def drawn(name: str, start: int) -> Iterator[Config]:
    return (draw(seed, MOMENTS, name) for seed in range(start, start + TRIES))


def can_happen(config: Config, name: str) -> bool:
    return EVENTS[name].fits(config)


FOUND: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "a group with infinite gradients": (
        {"seed": 1010012613, "parts": (), "held_out": True},
        [(0, "before forward", "inf in the outputs", 614), (2, "after step", "add a group")],
    ),
    "the same, between the backward pass and the step": (
        {"seed": 1010012613, "parts": (), "held_out": True},
        [(0, "before forward", "inf in the outputs", 614), (2, "before step", "add a group")],
    ),
    "the same, inside a window": (
        {"seed": 1010012613, "parts": (), "iterations": 9, "accumulate": 3, "held_out": True},
        [(0, "before forward", "inf in the outputs", 614), (6, "after step", "add a group")],
    ),
    "a first step that raised when its state was made, and nothing had moved": (
        {"seed": 900000010, "parts": (), "optimizers": ("Adam fused",), "level": "O5", "iterations": 2},
        [(0, "before step", "exception in the optimizer", 486)],
    ),
    "a transform of a model in which a parameter has been frozen": (
        {"seed": 5010000243, "parts": ("embedding",), "iterations": 1},
        [(0, "before step", "freeze", 934), (0, "after step", "torch.func.grad")],
    ),
    "a restart before the first step, where an optimizer has made the state of a number": (
        {
            "seed": 6020005928,
            "parts": ("scalar",),
            "optimizers": ("Adagrad",),
            "level": "O3",
            "iterations": 3,
            "accumulate": 3,
        },
        [(2, "before step", "restart")],
    ),
    "a skip after the turn of an optimizer all of whose parameters are frozen": (
        {
            "seed": 7010003732,
            "parts": ("instance norm",),
            "optimizers": ("FusedNovoGrad", "Adamax"),
            "level": "O3",
            "iterations": 3,
            "held_out": True,
            "in_turns": True,
        },
        [
            (0, "after step", "freeze through the groups", 588),
            (2, "before forward", "inf in the outputs", 506),
        ],
    ),
    "weights that were loaded, and then written": (
        {"seed": 210001486, "parts": (), "level": "O5"},
        [
            (0, "after step", "load_state_dict of the model"),
            (1, "before forward", "weights re-initialised", 21),
        ],
    ),
    "weights that were loaded and written, and then saved": (
        {"seed": 420000973, "parts": (), "iterations": 6},
        [(5, "after step", "load_state_dict of the model"), (5, "after step", "weights re-initialised", 73)],
    ),
    "numbers that torch has loaded in the dtype of weights": (
        {"seed": 7, "optimizers": ("ASGD",), "level": "O3"},
        [(2, "before forward", "load_state_dict of the optimizers"), (3, "before forward", "restart")],
    ),
    "an overflow after a batch that was dropped unread": (
        {"seed": 330000163, "parts": ("shared",), "optimizers": ("FusedSGD",)},
        [(0, "before step", "zero_grad of the model and continue")],
    ),
    "a group that joins between the backward pass and the step": (
        {"seed": 330000127, "clip": ("norm", 0.3), "scale": (("init", 256.0),), "held_out": True},
        [(2, "before step", "add a group")],
    ),
    "a group that joins inside of a window, which is aborted then": (
        {
            "seed": 970000193,
            "parts": (),
            "iterations": 5,
            "accumulate": 2,
            "clip": ("norm", 0.3),
            "scale": (("init", 1.0),),
            "held_out": True,
        },
        [(2, "before step", "add a group", 895), (2, "after step", "abort", 52)],
    ),
    "a group of a fused optimizer, with gradients": (
        {"seed": 330000127, "optimizers": ("FusedAdamW",), "scale": (("init", 256.0),), "held_out": True},
        [(2, "before forward", "add a group")],
    ),
    "zeros between the passes of a window, some of which the next does not reach": (
        {"seed": 10000168, "parts": ("sometimes",), "level": "O0", "accumulate": 2},
        [(3, "before forward", "zero_grad(set_to_none=False) of the optimizer", 633)],
    ),
    "statistics loaded after a restart, and then a skip": (
        {"seed": 710000608, "parts": ("batch norm",), "iterations": 1},
        [
            (0, "before forward", "restart"),
            (0, "before forward", "inf in the outputs", 862),
            (0, "before forward", "load_state_dict of the model"),
        ],
    ),
    "a restart after the first optimizer's turn, which keeps no moments": (
        {"seed": 810000502, "optimizers": ("SGD fused", "Adam fused"), "iterations": 1, "in_turns": True},
        [(0, "before forward", "restart")],
    ),
    "weights written after a step that raised before it began": (
        {"seed": 510006435, "iterations": 2},
        [
            (0, "before step", "exception before the optimizer"),
            (1, "before forward", "weights re-initialised", 963),
        ],
    ),
    "frozen between the backward pass and the step, and clipped": (
        {
            "seed": 510005922,
            "parts": ("unused",),
            "level": "O1",
            "heads": 2,
            "losses": 2,
            "iterations": 1,
            "clip": ("norm", 0.3),
        },
        [(0, "before step", "freeze", 108)],
    ),
    "a step of the optimizer that was refused, and another engine's loss": (
        {"seed": 1010020442, "parts": (), "level": "O4", "iterations": 1},
        [
            (0, "before step", "optimizer.step() instead", 362),
            (0, "before step", "another engine's loss reaches the model", 867),
        ],
    ),
    "a closure of two losses whose scales would grow and fall in turns": (
        {
            "seed": 10010012755,
            "parts": ("scalar",),
            "optimizers": ("Rprop",),
            "level": "O1",
            "heads": 2,
            "losses": 2,
            "iterations": 5,
            "scale": (("init", 4096.0), ("interval", 1)),
        },
        [(4, "after step", "step with a closure", 615)],
    ),
    "a frozen parameter that was loaded, and is then written through the groups": (
        {"seed": 9010001255, "parts": ("frozen",), "iterations": 12},
        [
            (3, "before forward", "load_state_dict of the model", 301),
            (11, "after step", "masters written", 728),
        ],
    ),
    "a restart in a window whose gradients were written while they waited scaled": (
        {
            "seed": 60016503,
            "parts": (),
            "level": "O4",
            "iterations": 6,
            "accumulate": 3,
            "options": (("loss_scale", 16.0),),
        },
        [(4, "before step", "gradients added to"), (5, "before backward", "restart")],
    ),
    "an overflow that is clipped away between the passes of a fused optimizer": (
        {"seed": 12050012436, "parts": (), "optimizers": ("FusedLAMB",), "level": "O5", "accumulate": 2},
        [(2, "before step", "clip by torch's value"), (2, "before backward", "inf in a gradient", 571)],
    ),
    "a group with gradients joins inside a window, and then: restart": (
        {"seed": 13010013085, "parts": (), "iterations": 3, "held_out": True},
        [(1, "before step", "add a group"), (1, "before step", "restart")],
    ),
    "a restart where Adagrad keeps moments of a frozen parameter that it has never stepped": (
        {
            "seed": 16010009394,
            "parts": ("frozen",),
            "optimizers": ("Adagrad",),
            "level": "O5",
            "iterations": 2,
        },
        [(0, "before forward", "restart"), (1, "after step", "masters written")],
    ),
    "a group joins an optimizer whose gradients the pass of another one leaves alone": (
        {
            "seed": 77020,
            "parts": ("layer norm",),
            "optimizers": ("Adam fused", "FusedAdamW"),
            "level": "O1",
            "iterations": 2,
            "held_out": True,
            "in_turns": True,
        },
        [
            (1, "before forward", "another engine's loss reaches the model", 692),
            (1, "before backward", "add a group"),
        ],
    ),
    "unfrozen layers are written before the first pass of their optimizer, by hand": (
        {
            "seed": 14930,
            "parts": ("frozen",),
            "optimizers": ("Adadelta", "Adamax"),
            "iterations": 2,
            "in_turns": True,
        },
        [(1, "before forward", "unfreeze"), (1, "after step", "masters written")],
    ),
    "a restart after the first step of NAdam raised, by hand": (
        {"seed": 19992, "parts": (), "optimizers": ("NAdam",), "accumulate": 3},
        [(2, "before forward", "exception in the optimizer", 783), (3, "before backward", "restart")],
    ),
    "a closure that a static scale cannot help, and then a skip": (
        {
            "seed": 503414,
            "parts": ("instance norm", "tied", "tied"),
            "optimizers": ("SGD foreach",),
            "iterations": 3,
            "scale": (("patience", 3),),
            "options": (("loss_scale", 1.0),),
        },
        [(1, "after step", "step with a closure", 47)],
    ),
    "a restart in a window in which a parameter with a gradient has been frozen": (
        {"seed": 1010002902, "parts": (), "iterations": 2, "accumulate": 3},
        [(0, "before step", "freeze", 765), (1, "before step", "restart")],
    ),
    "saved between forward and backward, by hand": (
        {"seed": 0, "level": "O5", "iterations": 1},
        [(0, "before backward", "restart")],
    ),
    "weights written before a pass that is dropped, then masters, by hand": (
        {"seed": 18510002384, "parts": (), "level": "O5", "iterations": 3},
        [
            (1, "before forward", "weights by copy_", 528),
            (1, "before backward", "abort and continue", 472),
            (2, "before forward", "masters written", 208),
        ],
    ),
}
"""Runs that failed once: arguments of :class:`Config`, and of :class:`Planned` for each event."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once(name: str) -> None:
    config, events = FOUND[name]
    compare(Config(**config, events=tuple(Planned(*event) for event in events)))


@pytest.mark.parametrize("norm", ["conv and batch norm", "group norm"])
def test_what_a_norm_takes_away_has_no_gradient(norm: str) -> None:
    """``fuzz.explained`` relies on this. In float64; the rest of the gain's gradient comes from the norm's ``eps``."""
    assert ("scalar", norm) in GAIN_AND_NORM
    model = models.build(("scalar", norm), 1, seed=0).double()
    x, ids, target = models.batch(0)
    nn.functional.mse_loss(model(x.double(), ids)[0], target.double()).backward()
    sizes = {
        name: float(p.grad.abs().max())
        for name, p in model.named_parameters()
        if p.grad is not None and p.numel()
    }
    assert sizes["parts.0.gain"] < 1e-4 < 1e-1 < sizes["parts.1.norm.weight"]
    assert sizes.get("parts.1.conv.bias", 0.0) < 1e-15


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
