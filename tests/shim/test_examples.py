"""The scripts of ``examples/apex``, unedited, under ``halfpeak run --device cpu``."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from distributed.launching import run_as_torchrun
from halfpeak import shim
from halfpeak.amp.larc import LARC
from halfpeak.cli.main import main
from laws.source import ROOT
from shim.process import changes, process_state

FOLDER = ROOT / "examples" / "apex"


def run(name: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script in this process, which it must leave unchanged; return its output."""
    before = process_state()
    status = main(["run", "--device", "cpu", str(FOLDER / name), *arguments])
    seen = capsys.readouterr()
    assert status == 0, seen.err
    assert not changes(before)
    return seen.out


def losses(text: str, label: str = "loss") -> list[float]:
    return [float(number) for number in re.findall(rf"{label} ([-+.\de]+)", text)]


def falls(values: list[float], factor: float) -> bool:
    third = max(1, len(values) // 3)
    return sum(values[-third:]) < factor * sum(values[:third])


RUNS: dict[str, tuple[str, float]] = {
    "classifier.py --opt-level O0": ("loss", 0.1),
    "classifier.py": ("loss", 0.1),
    "classifier.py --opt-level O2 --keep-batchnorm-fp32 True --loss-scale 128.0": ("loss", 0.1),
    "classifier.py --opt-level O3 --sync-bn": ("loss", 0.1),
    "transformer_lamb.py": ("loss", 0.3),
    "transformer_lamb.py --opt-level O2": ("loss", 0.3),
    "transformer_lamb.py --opt-level O2 --optimizer adam": ("loss", 0.3),
    "multitask.py --opt-level O1": ("order", 0.6),
    "multitask.py": ("sum", 0.6),
    "contrastive_larc.py": ("loss", 0.1),
    "contrastive_larc.py --fp32": ("loss", 0.1),
}
"""Command -> the label of the loss that it prints, and the factor below which that must fall."""


@pytest.mark.parametrize("command", RUNS)
def test_it_runs_unedited_and_learns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    label, factor = RUNS[command]
    found = losses(run(*command.split(), capsys=capsys), label)
    assert len(found) > 3
    assert falls(found, factor), found


def test_on_two_ranks() -> None:
    commands = {
        "classifier.py --sync-bn": ("loss", 0.1),
        "multitask.py": ("maximum", 0.6),
        "contrastive_larc.py --group 2": ("loss", 0.1),
    }
    start = ["-m", "halfpeak", "run", "--device", "cpu"]
    scripts = [[str(FOLDER / name), *rest] for name, *rest in map(str.split, commands)]
    printed = run_as_torchrun(*(start + script for script in scripts))
    for text, (label, factor) in zip(printed, commands.values(), strict=True):
        assert falls(losses(text, label), factor), text


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gan_trains_with_three_scalers(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run("gan.py", "--opt-level", level, capsys=capsys)
    found = losses(text, "critic")
    assert min(found) < 1.2 < found[0]
    assert text.rstrip().splitlines()[-1].count("unskipped") == 3


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_resumed_run_prints_what_an_unbroken_one_prints(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(folder: str, epochs: int) -> list[str]:
        where = ["--folder", str(tmp_path / folder), "--opt-level", level]
        text = run("resume.py", *where, "--epochs", str(epochs), capsys=capsys)
        return [line for line in text.splitlines() if line.startswith("epoch")]

    whole = train("whole", 4)
    assert train("parts", 2) + train("parts", 4) == whole
    assert len(whole) == 24
    assert falls(losses("\n".join(whole)), 0.6)


class TestNative:
    """The same training, written with halfpeak's own API, prints the same numbers."""

    @pytest.fixture
    def script(self, request: pytest.FixtureRequest) -> ModuleType:
        """The script as a module: its model and its data."""
        shim.install()
        spec = importlib.util.spec_from_file_location("script", FOLDER / request.param)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        shim.uninstall()
        return module

    @pytest.mark.parametrize("level", list(halfpeak.LEVELS)[:4])
    @pytest.mark.parametrize("script", ["classifier.py"], indirect=True)
    def test_classifier(self, level: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
        expected = losses(run("classifier.py", "--opt-level", level, "--epochs", "2", capsys=capsys))
        torch.manual_seed(1)
        model = script.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        engine = halfpeak.prepare(model, optimizer, level)
        loader = torch.utils.data.DataLoader(script.stripes(), batch_size=20, shuffle=True)
        found: list[float] = []
        for _ in range(2):
            total = torch.zeros(())
            for pixels, labels in loader:
                with engine.forward():
                    loss = nn.functional.cross_entropy(model(pixels.float() / 128 - 1), labels)
                engine.backward(loss)
                engine.step()
                total += loss.detach()
            found.append(total.item() / len(loader))
        assert found == expected

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("script", ["gan.py"], indirect=True)
    def test_gan(self, level: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
        text = run("gan.py", "--opt-level", level, "--steps", "8", capsys=capsys)
        torch.manual_seed(12)
        generator, critic = script.build()
        of_generator, of_critic = (
            torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.5, 0.99)) for model in (generator, critic)
        )
        both = [of_generator, of_critic]
        engine = halfpeak.prepare([generator, critic], both, level, num_losses=3, op_lists="apex")
        softplus = nn.functional.softplus
        found: list[tuple[float, float]] = []
        for _ in range(8):
            with engine.forward():
                fake = generator(torch.randn(24, script.NOISE))
                on_real = softplus(-critic(script.real_curves(24))).mean()
                on_fake = softplus(critic(fake.detach())).mean()
            engine.backward(on_real, loss_id=0, optimizers=of_critic)
            engine.backward(on_fake, loss_id=1, optimizers=of_critic)
            engine.step(optimizers=of_critic)
            with engine.forward():
                fooled = softplus(-critic(fake)).mean()
            engine.backward(fooled, loss_id=2, optimizers=of_generator)
            engine.step(optimizers=of_generator)
            found.append(((on_real + on_fake).item(), fooled.item()))
        assert found == list(zip(losses(text, "critic"), losses(text, "generator"), strict=True))

    @pytest.mark.parametrize("script", ["contrastive_larc.py"], indirect=True)
    def test_contrastive(self, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
        expected = losses(run("contrastive_larc.py", "--steps", "20", capsys=capsys))
        torch.manual_seed(5)
        model = script.Embedding()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-5)
        engine = halfpeak.prepare(model, LARC(sgd, trust_coefficient=0.02, clip=False), "O1")
        random = torch.Generator().manual_seed(0)
        found: list[float] = []
        for step in range(20):
            sgd.param_groups[0]["lr"] = min((step + 1) / 10, 1 - step / 20)
            with engine.forward():
                loss = script.info_nce(model(script.two_views(random)))
            engine.backward(loss)
            if step < 5:
                for parameter in model.encoder.parameters():
                    parameter.grad = None
            engine.step()
            found.append(loss.item())
        assert found == expected
