"""``halfpeak.doctor``: its findings on trainings with known faults, and that it changes nothing of the caller."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.cli.main import main
from support.states import same

STEPS = 16


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
    good = {probe.level: probe.seconds for probe in found.probes}
    assert min(good.values()) >= 0.9 * good[found.level]
    assert all(len(probe.losses) == STEPS for probe in found.probes)


def test_an_overflow_is_found_and_the_layer_kept_in_float32() -> None:
    found = see(["O1", "O5"], lambda: Scaled(1e6))
    (first, second) = found.probes
    assert first.keep_fp32 == ("wide",)
    assert against(found) == {"O1": "", "O5": ""}
    assert second.keep_fp32 == ()
    if found.level == "O1":
        assert "keep_fp32=['wide']" in found.line


def test_an_eps_that_vanishes_is_named() -> None:
    found = see(["O3"], make_optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1), loss=tiny)
    assert "eps=1e-08 of Adam is 0 in torch.float16" in against(found)["O3"]
    assert (found.level, found.reason) == ("O0", "no other level trains as float32 does")


def tiny(model: Any, x: Tensor) -> Tensor:
    return 1e-5 * error(model, x)


def test_updates_that_are_rounded_away() -> None:
    found = see(["O3", "O5"], make_optimizer=lambda model: sgd(model, 1e-6))
    assert "do not move" in against(found)["O3"]
    assert against(found)["O5"] == ""


def test_gradients_that_vanish() -> None:
    found = see(
        ["O2", "O3"], make_optimizer=lambda model: sgd(model, 6e4), loss=lambda m, x: 1e-8 * error(m, x)
    )
    assert "vanish" in against(found)["O3"]


def test_a_float32_that_does_not_train_is_told() -> None:
    found = see(["O0", "O5"], make_optimizer=lambda model: sgd(model, 1e30))
    assert found.level == "O0"
    assert found.reason.startswith("float32 itself does not train: its loss is not finite")


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
    assert max(map(len, str(found).splitlines())) <= 80
    with pytest.raises(halfpeak.ConfigError, match=r"found\.pdf"):
        found.save("found.pdf")


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
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("SIZE = 4")
    saved = tmp_path / "found.json"
    few = ["--steps", "8", "--levels", "O0,O5"]
    assert main(["doctor", f"{tmp_path / 'own.py'}:task", *few, "--save", str(saved)]) == 0
    assert json.loads(saved.read_text())["line"] in capsys.readouterr().out
    for task, said in (
        ("own.py:none", "no function"),
        ("own.py:wrong", "must return"),
        ("no.py:task", "is neither a recipe"),
    ):
        assert main(["doctor", str(tmp_path / task), *few]) == 2
        assert said in capsys.readouterr().err


def test_env_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"halfpeak", "torch", "python", "cpu", "level", "backends", "packages"} <= {
        x.split()[0] for x in lines
    }
    assert len(lines) < 24
    assert torch.__version__ in lines[1]
