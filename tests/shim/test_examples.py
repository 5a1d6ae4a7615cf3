"""The scripts of ``examples/apex``, unedited, under ``halfpeak run --device cpu``."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
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


def losses(text: str, label: str = r"[Ll]oss") -> list[float]:
    return [float(number) for number in re.findall(rf"{label}:? ([-+.\de]+)", text)]


def falls(values: list[float], factor: float) -> bool:
    third = max(1, len(values) // 3)
    return sum(values[-third:]) < factor * sum(values[:third])


RUNS: dict[str, tuple[list[str], float]] = {
    "imagenet.py O0": (["--opt-level", "O0"], 0.8),
    "imagenet.py O1": ([], 0.8),
    "imagenet.py O2": (["--opt-level", "O2", "--keep-batchnorm-fp32", "True", "--loss-scale", "128.0"], 0.8),
    "imagenet.py O3": (["--opt-level", "O3", "--sync_bn", "--deterministic"], 0.9),
    "bert_finetune.py O1": (["--fp16"], 0.5),
    "bert_finetune.py O2": (["--fp16", "--fp16_opt_level", "O2"], 0.5),
    "bert_finetune.py AdamW": (["--fp16", "--fp16_opt_level", "O2", "--optimizer", "adamw"], 0.5),
    "uniter_pretrain.py O1": (["--opt_level", "O1"], 0.5),
    "uniter_pretrain.py O2": ([], 0.5),
    "swav_larc.py fp32": ([], 0.9),
    "swav_larc.py fp16": (["--use_fp16", "--sync_bn", "apex"], 0.9),
}
"""Script and level -> arguments, and the factor below which the loss must fall."""


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_unedited_and_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, factor = RUNS[name]
    text = run(name.split()[0], *arguments, capsys=capsys)
    label = "itm" if name.startswith("uniter") else "[Ll]oss"
    found = losses(re.sub(r"loss scale \S+", "", text), label)
    assert len(found) > 3
    assert falls(found, factor), found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gan_trains_with_three_scalers(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run("dcgan.py", "--opt_level", level, capsys=capsys)
    found = losses(text, "Loss_D")
    assert min(found) < 1.2 < found[0]
    assert text.rstrip().splitlines()[-1].count("unskipped") == 3


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_resumed_run_prints_what_an_unbroken_one_prints(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(folder: str, epochs: int) -> list[str]:
        where = ["--output", str(tmp_path / folder), "--amp-opt-level", level]
        text = run("swin_resume.py", *where, "--epochs", str(epochs), capsys=capsys)
        return re.findall(r"\[(\d+)/\d+\](\[\d+\]  loss \S+  grad_norm \S+)", text)

    whole = train("whole", 4)
    assert train("parts", 2) + train("parts", 4) == whole
    assert len(whole) == 32
    assert falls([float(line.split()[2]) for _, line in whole], 0.3)


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
    @pytest.mark.parametrize("script", ["imagenet.py"], indirect=True)
    def test_classifier(self, level: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
        expected = losses(run("imagenet.py", "--opt-level", level, "--epochs", "2", capsys=capsys))
        torch.manual_seed(0)
        model = script.build_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.025, momentum=0.9, weight_decay=1e-4)
        engine = halfpeak.prepare(model, optimizer, level)
        loader = torch.utils.data.DataLoader(script.SyntheticImages(), batch_size=16, shuffle=True)
        mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).view(1, 3, 1, 1)
        std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).view(1, 3, 1, 1)
        found: list[float] = []
        for epoch in range(2):
            for step, (images, targets) in enumerate(loader, start=1):
                for group in optimizer.param_groups:
                    group["lr"] = 0.025 * (float(1 + step) / 8 if epoch == 0 else 1.0)
                with engine.forward():
                    loss = nn.functional.cross_entropy(model((images.float() - mean) / std), targets)
                engine.backward(loss)
                engine.step()
                if step % 4 == 0:
                    found.append(loss.item())
        assert found == expected

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("script", ["dcgan.py"], indirect=True)
    def test_gan(self, level: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
        text = run("dcgan.py", "--opt_level", level, "--niter", "8", capsys=capsys)
        torch.manual_seed(2809)
        generator = script.Generator().apply(script.weights_init)
        discriminator = script.Discriminator().apply(script.weights_init)
        options: dict[str, Any] = {"lr": 0.002, "betas": (0.5, 0.999)}
        optimizer_d = torch.optim.Adam(discriminator.parameters(), **options)
        optimizer_g = torch.optim.Adam(generator.parameters(), **options)
        engine = halfpeak.prepare([discriminator, generator], [optimizer_d, optimizer_g], level, num_losses=3)
        real, fake = torch.ones(16), torch.zeros(16)
        criterion = nn.BCEWithLogitsLoss()
        found: list[tuple[float, float]] = []
        for _ in range(8):
            with engine.forward():
                loss_real = criterion(discriminator(script.real_images(16)), real)
                images = generator(torch.randn(16, 8, 1, 1))
                loss_fake = criterion(discriminator(images.detach()), fake)
            engine.backward(loss_real, loss_id=0, optimizers=optimizer_d)
            engine.backward(loss_fake, loss_id=1, optimizers=optimizer_d)
            engine.step(optimizers=optimizer_d)
            with engine.forward():
                loss_g = criterion(discriminator(images), real)
            engine.backward(loss_g, loss_id=2, optimizers=optimizer_g)
            engine.step(optimizers=optimizer_g)
            found.append(((loss_real + loss_fake).item(), loss_g.item()))
        assert found == list(zip(losses(text, "Loss_D"), losses(text, "Loss_G"), strict=True))

    @pytest.mark.parametrize("script", ["swav_larc.py"], indirect=True)
    def test_self_supervised(self, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
        expected = losses(run("swav_larc.py", "--use_fp16", "--epochs", "2", capsys=capsys))
        args = script.parser.parse_args(["--epochs", "2"])
        args.world_size = 1
        torch.manual_seed(31)
        model = script.MultiPrototypes(16, 12)
        optimizer = LARC(
            torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9, weight_decay=1e-6),
            trust_coefficient=0.05,
            clip=False,
        )
        engine = halfpeak.prepare(model, optimizer, "O1")
        generator = torch.Generator().manual_seed(0)
        found: list[float] = []
        for step in range(24):
            for group in optimizer.param_groups:
                group["lr"] = cosine(step, 24)
            with torch.no_grad():
                model.prototypes.weight.copy_(nn.functional.normalize(model.prototypes.weight, dim=1))
            with engine.forward():
                output = model(script.views(args, generator))[1]
                loss = swapped(output, args, script) / 2
            engine.backward(loss)
            if step < 4:
                model.prototypes.weight.grad = None
            engine.step()
            found.append(loss.item())
        assert [sum_in_order(found[:12]), sum_in_order(found[12:])] == expected


def cosine(step: int, steps: int) -> float:
    return 0.01 + 0.5 * (0.8 - 0.01) * (1 + math.cos(math.pi * step / steps))


def swapped(output: Tensor, args: Any, script: Any) -> Tensor:
    loss = torch.zeros(())
    for crop in range(2):
        with torch.no_grad():
            codes = script.distributed_sinkhorn(output[32 * crop : 32 * (crop + 1)].detach().float(), args)
        x = output[32 * (1 - crop) : 32 * (2 - crop)] / args.temperature
        loss = loss - torch.mean(torch.sum(codes * nn.functional.log_softmax(x, dim=1), dim=1))
    return loss


def sum_in_order(values: list[float]) -> float:
    average = 0.0
    for value in values:
        average += value / 12
    return average
