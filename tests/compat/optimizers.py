"""The table of docs/optimizers.md: optimizers of torch and others at all levels. ``python -m compat.optimizers`` writes it."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
import torchao.optim
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

import halfpeak
from halfpeak.core.state_checks import copied
from laws.source import ROOT
from support.nets import LEVELS
from support.states import differences

PAGE = ROOT / "docs" / "optimizers.md"
BEGIN, END = "<!-- begin table -->\n", "<!-- end -->\n"

Make = Callable[..., Any]

RATES: dict[Any, dict[str, float]] = {
    torch.optim: {
        "ASGD": 0.1, "Adadelta": 1.0, "Adafactor": 2e-2, "Adagrad": 5e-2, "Adam": 1e-2, "AdamW": 1e-2, "Adamax": 1e-2,
        "Muon": 2e-2, "NAdam": 1e-2, "RAdam": 1e-2, "RMSprop": 1e-3, "Rprop": 1e-3, "SGD": 0.1,
    },
    torchao.optim: {"AdamW8bit": 1e-2, "AdamW4bit": 1e-2},
    schedulefree: {"AdamWScheduleFree": 1e-2, "RAdamScheduleFree": 1e-2, "SGDScheduleFree": 0.5},
    pytorch_optimizer: {
        "ADOPT": 1e-2, "Adan": 1e-2, "AdEMAMix": 1e-2, "CAME": 1e-3, "Lion": 3e-3, "MARS": 1e-2, "Prodigy": 1.0,
        "ScalableShampoo": 1e-2, "Shampoo": 5e-2, "SOAP": 1e-2, "StableAdamW": 1e-2,
    },
}  # fmt: skip
"""Learning rates at which each optimizer learns the task in float32."""

ROWS: dict[str, Make] = {
    f"{package.__name__}.{name}": partial(getattr(package, name), lr=rate)
    for package, rates in RATES.items()
    for name, rate in rates.items()
}

STEPS = 16
CLOSE = 0.1
"""The largest excess over the final float32 loss, relative to it, that counts as equal training."""


class Run:
    """A model and an optimizer that train at a level."""

    def __init__(self, make: Make, level: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
        takes_eps = "eps" in inspect.signature(make).parameters and make.func is not torch.optim.Adafactor  # type: ignore[attr-defined]
        # prepare warns to set this, because 1e-8 is zero in float16.
        options = {"eps": 1e-4} if level == "O3" and takes_eps else {}
        self.optimizer: Optimizer = make(self.model.parameters(), **options)
        self.engine = halfpeak.prepare(self.model, self.optimizer, level, on_skip=None)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[attr-defined]

    def train(self, numbers: Sequence[int], *, factor: float = 1.0) -> list[float]:
        losses: list[float] = []
        for number in numbers:
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number % 4))
            with self.engine.forward():
                loss = mse_loss(self.model(x).float(), x.roll(1, 1).tanh())
            self.engine.backward(loss * factor)
            self.engine.step()
            losses.append(loss.item())
        return losses

    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()
        return [
            copied(self.model.state_dict(), "weights"),
            readable(copied(state["state"], "moments")),
            copied(state["param_groups"], "groups"),
        ]


def readable(state: Any) -> Any:
    """A state whose quantised moments are dequantised."""
    if isinstance(state, dict):
        return {key: readable(value) for key, value in state.items()}
    return state.dequantize() if hasattr(state, "codes") else state


def outcome(make: Make, level: str, fp32_loss: float) -> str:
    """``yes`` if it trains as in float32, a skip changes nothing and a resume is exact; else a list of the failures."""
    run, file = Run(make, level), io.BytesIO()
    run.train(range(5))
    torch.save(run.engine.state_dict(), file)
    losses = run.train(range(5, STEPS))
    loss = sum(losses[-4:])
    if not math.isfinite(loss):
        return "NaN"
    found: list[str] = []
    resumed = Run(make, level)
    file.seek(0)
    try:
        resumed.engine.load_state_dict(torch.load(file, weights_only=False))
        if losses != resumed.train(range(5, STEPS)) or differences(run.values(), resumed.values()):
            found.append("a resume differs")
    except halfpeak.StateError:
        found.append("no resume")
    if loss > fp32_loss * (1 + CLOSE):
        found.append("worse")
    before = run.values()
    run.train([0], factor=math.inf)
    if differences(before, run.values()) and "no resume" not in found:
        found.append("a skip moves it")
    return "; ".join(found) or "yes"


def row(name: str) -> str:
    # Otherwise torchao compiles the code of quantised moments, which takes minutes.
    with torch.compiler.set_stance("force_eager"), redirect_stdout(io.StringIO()):
        fp32 = sum(Run(ROWS[name], "O0").train(range(STEPS))[-4:])
        cells = [outcome(ROWS[name], level, fp32) for level in LEVELS]
    return f"| `{name}` | {' | '.join(cells)} |\n"


def table_of(text: str) -> list[str]:
    """The generated lines of the page, with the heading of the table."""
    return text.partition(BEGIN)[2].partition(END)[0].splitlines(keepends=True)


def main() -> None:
    heading = (
        f"| optimizer | {' | '.join(f'`{level}`' for level in LEVELS)} |\n| --- |{' --- |' * len(LEVELS)}\n"
    )
    text = PAGE.read_text(encoding="utf-8")
    start, rest = text.partition(BEGIN)[0], text.partition(END)[2]
    lines = []
    for name in ROWS:
        lines.append(row(name))
        print(lines[-1], end="", flush=True)
    PAGE.write_text(start + BEGIN + heading + "".join(lines) + END + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
