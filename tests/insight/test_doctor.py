"""``halfpeak.doctor``: its findings on trainings with known faults, and that it changes nothing of the caller."""

from __future__ import annotations

import copy
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import accumulate, chain, count, cycle, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.cli.main import main
from halfpeak.insight.checkup import Checkup, Probe
from halfpeak.insight.doctor import choose
from halfpeak.insight.timing import LEAST_PAIRS, MOST_PAIRS, MOST_SECONDS, Ratio, compare
from support.states import same

STEPS = 16


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of steps takes the same time, whatever else the machine does."""
    put_clock(monkeypatch, repeat(0.01))


def put_clock(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
    """The doctor's clock: the seconds between each two readings."""
    read = partial(next, accumulate(seconds))
    monkeypatch.setattr("halfpeak.insight.doctor.time", SimpleNamespace(perf_counter=read, process_time=read))


class Scaled(nn.Module):
    """Two layers; the output of the first is ``size`` times as large until the second reads it."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.wide, self.last, self.size = nn.Linear(4, 8, bias=False), nn.Linear(8, 1), size
        with torch.no_grad():
            self.wide.weight.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.wide(x).float() / self.size).to(self.last.weight.dtype))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def error(model: Any, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))


def batches() -> list[Tensor]:
    return list(torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(0)))


def see(
    levels: list[str],
    make: Callable[[], nn.Module] = Scaled,
    make_optimizer: Callable[[Any], Any] = sgd,
    loss: Any = error,
) -> halfpeak.Checkup:
    return halfpeak.doctor(make, make_optimizer, batches(), loss, steps=STEPS, levels=levels)


def against(found: halfpeak.Checkup) -> dict[str, str]:
    return {probe.level: probe.against for probe in found.probes}


def test_a_plain_training_has_nothing_against_masters() -> None:
    found = see(["O0", "O2", "O5"])
    assert against(found) == {"O0": "", "O2": "", "O5": ""}
    assert found.line == f"engine = halfpeak.prepare(model, optimizer, {found.level!r})"
    assert all(probe.seconds > 0 for probe in found.probes)
    assert all(len(probe.losses) == STEPS for probe in found.probes)


def test_an_overflow_is_found_and_the_layer_kept_in_float32() -> None:
    found = see(["O1", "O5"], lambda: Scaled(1e6))
    (first, second) = found.probes
    assert first.keep_fp32 == ("wide",)
    assert against(found) == {"O1": "", "O5": ""}
    assert second.keep_fp32 == ()
    if found.level == "O1":
        assert "keep_fp32=['wide']" in found.line


def test_an_eps_that_underflows_is_named() -> None:
    found = see(["O3"], make_optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1), loss=tiny)
    assert "eps=1e-08 of Adam is 0 in torch.float16" in against(found)["O3"]
    assert (found.level, found.reason) == ("O0", "no other level trains as float32 does")


def tiny(model: Any, x: Tensor) -> Tensor:
    return 1e-5 * error(model, x)


def test_updates_that_are_rounded_away() -> None:
    found = see(["O3", "O5"], make_optimizer=lambda model: sgd(model, 1e-6))
    assert "do not move" in against(found)["O3"]
    assert against(found)["O5"] == ""


def test_gradients_that_underflow() -> None:
    found = see(
        ["O2", "O3"], make_optimizer=lambda model: sgd(model, 6e4), loss=lambda m, x: 1e-8 * error(m, x)
    )
    assert "underflow" in against(found)["O3"]


def test_a_float32_that_does_not_train_is_told() -> None:
    found = see(["O0", "O5"], make_optimizer=lambda model: sgd(model, 1e30))
    assert found.level == "O0"
    assert found.reason.startswith("float32 itself does not train: its loss is not finite")


def test_two_steps_are_timed_in_turns_and_the_order_changes() -> None:
    order = ""

    def timer(name: str) -> Callable[[], float]:
        def take() -> float:
            nonlocal order
            order += name
            return 1.0

        return take

    assert compare(timer("a"), timer("b"), 0.9).interval == (1.0, 1.0)
    assert order == "abba" * (LEAST_PAIRS // 2) + "ab"


def spread(low: float, high: float) -> Iterator[float | None]:
    return cycle([low, high, high, low])


@pytest.mark.parametrize(
    ("shares", "is_below", "pairs"),
    [
        (repeat(0.5), True, LEAST_PAIRS),
        (repeat(0.95), False, LEAST_PAIRS),
        (spread(0.5, 2.0), None, MOST_PAIRS),
        (spread(0.85, 0.95), None, MOST_PAIRS),
        (chain([76.0], repeat(0.5)), True, 14),
        (chain([None] * 5, repeat(0.5)), True, LEAST_PAIRS),
        (repeat(None), None, 0),
    ],
)
def test_the_spread_decides_whether_there_is_a_verdict(
    shares: Iterator[float | None], is_below: bool | None, pairs: int
) -> None:
    found = compare(lambda: 1.0, lambda: next(shares), 0.9)
    assert (found.is_below(0.9), len(found.shares)) == (is_below, pairs)


@pytest.mark.parametrize(
    ("low", "high", "is_below"), [(0.43, 0.89, None), (0.7, 0.8, True), (0.92, 1.3, None), (1.1, 1.3, False)]
)
def test_an_interval_that_is_wide_is_no_verdict(low: float, high: float, is_below: bool | None) -> None:
    assert Ratio((low, high) * 10, (1.0, 1.0)).is_below(0.9) is is_below


def test_a_comparison_ends_when_its_time_is_over() -> None:
    pair = MOST_SECONDS / (LEAST_PAIRS + 2)  # the clock is first read after LEAST_PAIRS
    readings = chain([0.0], (pair * number for number in count(LEAST_PAIRS)))
    shares = spread(0.5, 2.0)
    found = compare(lambda: 1.0, lambda: next(shares), 0.9, clock=lambda: next(readings))
    assert len(found.shares) == LEAST_PAIRS + 2


STEADY = Ratio((0.6,) * 20, (1.0, 0.6))
SLOWER = Ratio((1.2,) * 20, (1.0, 1.2))
BUSY = Ratio((0.5, 2.0) * 10, (1.0, 1.0))
CLOSE = Ratio((0.85, 0.95) * 10, (1.0, 0.9))
CANNOT_TELL = "whether another takes 10 % less time cannot be told"
TOO_BUSY = "this machine is too busy to compare times"


@pytest.mark.parametrize(
    ("ratio", "has_units", "level", "said"),
    [
        (STEADY, False, "O4", "takes 0.60 (0.60 to 0.60) of O0's time here"),
        (SLOWER, False, "O0", "none of the others that do (O4) takes 10 % less time here"),
        (BUSY, False, "O0", f"{TOO_BUSY} (O4 takes 1.25 (0.50 to 2.00) of O0's time): run it again when"),
        (CLOSE, False, "O0", f"{CANNOT_TELL}: O4 takes 0.90 (0.85 to 0.95) of its time"),
        (Ratio((), (1.0, 1.0)), False, "O0", f"{CANNOT_TELL}: O4 takes an unknown share of its time"),
        # More than half the time saved, with half the bits, is no speedup but a fault of the clock.
        (Ratio((0.45,) * 20, (1.0, 0.45)), False, "O0", f"{CANNOT_TELL}: O4 takes 0.45"),
        (Ratio((0.1,) * 20, (1.0, 0.1)), True, "O4", "takes 0.10 (0.10 to 0.10) of O0's time"),
        (Ratio((0.01,) * 20, (1.0, 0.01)), True, "O0", f"{CANNOT_TELL}: O4 takes 0.01"),
    ],
)
def test_another_level_is_named_only_if_it_is_surely_faster(
    ratio: Ratio, has_units: bool, level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfpeak.insight.doctor.has_matrix_units", lambda device: has_units)
    found = choose({"O0", "O4"}, torch.device("cpu"), lambda one, other: ratio)
    assert found.level == level
    assert said in found.reason


def test_one_comparison_that_a_busy_machine_disturbs_is_the_last() -> None:
    pairs: list[tuple[str, str]] = []

    def share(one: str, other: str) -> Ratio:
        pairs.append((one, other))
        return BUSY

    found = choose({"O0", "O1", "O4", "O5"}, torch.device("cpu"), share)
    assert (len(pairs), found.level, dict(found.seconds)) == (1, pairs[0][0], {})


def test_a_busy_machine_is_said_and_its_times_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    put_clock(monkeypatch, cycle([0.01, 0.01, 0.02, 0.03, 0.05, 0.02, 0.01]))
    found = see(["O0", "O2", "O5"])
    assert TOO_BUSY in found.reason
    assert not any(probe.seconds > 0 for probe in found.probes)
    assert against(found) == {"O0": "", "O2": "", "O5": ""}


def test_several_optimizers_have_a_loss_each() -> None:
    def two(model: Any) -> list[torch.optim.Optimizer]:
        return [sgd(model.wide), sgd(model.last)]

    assert against(see(["O2"], make_optimizer=two, loss=[error, error])) == {"O2": ""}
    with pytest.raises(halfpeak.ConfigTypeError, match="1 losses and 2 optimizers"):
        see(["O2"], make_optimizer=two)


def test_nothing_of_the_callers_changes() -> None:
    model = Scaled()
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    given = batches()
    kept = copy.deepcopy(given)
    halfpeak.doctor(lambda: model, sgd, given, error, steps=STEPS, levels=["O2"])
    assert torch.equal(numbers, torch.get_rng_state())
    assert same(before.values(), model.state_dict().values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same(kept, given)
    halfpeak.prepare(model, sgd(model), "O2")


@pytest.mark.parametrize(
    ("change", "said"), [({"steps": 3}, "steps=3"), ({"levels": ["O9"]}, "O9"), ({"batches": []}, "empty")]
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"batches": batches(), "loss": error, **change}
    with pytest.raises(halfpeak.ConfigError, match=said):
        halfpeak.doctor(Scaled, sgd, **arguments)


def test_the_report_in_its_forms(tmp_path: Path) -> None:
    found = see(["O0", "O3"])
    for suffix in (".html", ".json", ".png"):
        found.save(tmp_path / f"found{suffix}")
    assert json.loads((tmp_path / "found.json").read_text())["line"] == found.line
    assert "<td>O3</td>" in (tmp_path / "found.html").read_text()
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "found.html").read_text().count("training step</text>") == 1
    threads = torch.get_num_threads()
    assert found.device.endswith(f", {threads} thread{'s' * (threads > 1)}")
    assert found.versions == (
        f"halfpeak {halfpeak.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    assert datetime.fromisoformat(found.date).tzinfo is not None
    for text in (found.device, found.versions, found.date):
        assert text in " ".join(str(found).split())
        assert text in (tmp_path / "found.html").read_text()
    assert 'text-anchor="middle">loss' in (tmp_path / "found.html").read_text()
    with pytest.raises(halfpeak.ConfigError, match=r"found\.pdf"):
        found.save("found.pdf")


def test_the_report_fits_80_columns() -> None:
    kept = tuple(f"backbone.layer{i}.attention.projection" for i in range(5))
    diverged = Probe(
        level="O3", final=-1.234e-30, distance=1.2e30, skipped=100_000, seconds=123.456,
        bytes_per_parameter=18.14, underflow=1.0, unchanged=1.0, against=f"its loss is {1.2e30:.3g} times as far " * 5,
    )  # fmt: skip
    best = replace(diverged, level="O2", keep_fp32=kept, against="")
    found = Checkup(
        level="O2", keep_fp32=kept, reason=CANNOT_TELL, probes=(best, diverged), reference=best, spread=1.0,
        device="AMD EPYC 7763 64-Core Processor, 128 threads", versions="torch 2.13.0", date="2026-11-28 14:05+00:00",
    )  # fmt: skip
    assert max(map(len, str(found).splitlines())) <= 80
    code = str(found).partition("engine = ")[2].partition("\n\n")[0]
    assert " ".join(code.split()) == found.line.removeprefix("engine = ")


def test_the_axes_of_the_picture_have_labels() -> None:
    figure = see(["O0", "O5"])._figure()
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] == [
        ("training step", "loss"),
        ("time of a step (ms)", "level"),
    ]


OWN = """
import torch
from helper import SIZE

def task():
    batches = [torch.ones(2, SIZE)]
    return (
        lambda: torch.nn.Linear(SIZE, 1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batches,
        lambda model, x: model(x).float().square().mean(),
    )

def wrong():
    return 1

def never():
    raise AssertionError("it has trained")
"""


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("SIZE = 4")
    saved = tmp_path / "found.json"
    few = ["--steps", "8", "--levels", "O0,O5"]
    assert main(["doctor", f"{tmp_path / 'own.py'}:task", *few, "--save", str(saved)]) == 0
    told = capsys.readouterr()
    assert json.loads(saved.read_text())["line"] in told.out
    assert told.err.splitlines()[:2] == ["training at O0 ..."] * 2
    assert "training at O5 ..." in told.err.splitlines()
    for task, said in (
        ("own.py:none", "no function"),
        ("own.py:wrong", "must return"),
        ("no.py:task", "is neither a recipe"),
    ):
        assert main(["doctor", str(tmp_path / task), *few]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for path, said in (
        ("found.pdf", "must end in .html, .png or .json"),
        ("none/a.html", "no directory 'none'"),
        ("found.png", "pip install matplotlib"),
    ):
        assert main(["doctor", f"{tmp_path / 'own.py'}:never", "--save", path]) == 2
        assert said in capsys.readouterr().err


def test_env_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"halfpeak", "torch", "python", "cpu", "level", "backends", "packages"} <= {
        x.split()[0] for x in lines
    }
    assert len(lines) < 24
    assert torch.__version__ in lines[1]
