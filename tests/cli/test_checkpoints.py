"""``halfpeak inspect`` and ``halfpeak convert``: output, exit status and refusals."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfpeak.checkpoint import load, save
from halfpeak.checkpoint.formats import TARGETS
from halfpeak.cli.main import main
from support.damage import flip

AMP = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}}


pytestmark = pytest.mark.usefixtures("own_folder")


def script(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": AMP, "epoch": 3, **more}


def test_inspect_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    save("last.pt", script())
    size = Path("last.pt").stat().st_size
    assert main(["inspect", "last.pt"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "last.pt",
        f"  file        a torch zip file, {size / 1024:.1f} KiB, checksums right",
        "  made by     a script's dict with amp.state_dict(), of apex.amp or halfpeak.amp",
        "  progress    epoch 3",
        "  weights     model: 2 tensors, 10 float32, 40 B",
        "  loss scale  amp: 512, 7 clean updates (apex)",
        "  optimizer   optimizer: 1 group, 2 parameters, 1 step, lr 0.1; state 22 float32, 88 B",
    ]


def test_inspect_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    save("last.pt", script())
    assert main(["inspect", "--json", "last.pt"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["form"] == "apex"
    assert report["scalers"] == [{"where": "amp", "kind": "apex", "scale": 512.0, "clean": 7}]


def test_inspect_prints_a_table_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    save("last.pt", script(model={"w": torch.tensor([float("nan")])}))
    assert main(["inspect", "last.pt"]) == 0
    printed = terminal.getvalue()
    assert "╭" in printed
    assert "nan or inf in the weights in model" in printed


def test_names_in_a_file_are_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    save("last.pt", {**script(), "\x1b[31mred\n": 1})
    main(["inspect", "last.pt"])
    assert "\\x1b[31mred\\n: an int" in capsys.readouterr().out


def test_a_run_of_halfpeak_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--steps", "2", "--level", "O2", "--output", "run", "--plot", "false"]) == 0
    capsys.readouterr()
    assert main(["inspect", "run/checkpoint.pt"]) == 0
    printed = capsys.readouterr().out
    assert "  made by     a run of halfpeak train" in printed
    assert "  level       O2\n" in printed
    assert "suspicious" not in printed


def test_a_damaged_file_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    save("last.pt", script())
    flip("last.pt", 100)
    assert main(["inspect", "last.pt"]) == 1
    printed = capsys.readouterr().out
    assert "  suspicious  last.pt is damaged: the checksum of its record " in printed
    assert "  advice      do not load it; go back to the previous checkpoint" in printed


@pytest.mark.parametrize("change", ["flip", "empty"])
def test_a_folder_with_a_damaged_file_is_status_1(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    save("last.pt", script())
    assert main(["convert", "last.pt", "--to", "accelerate", "-o", "folder", "--drop", "epoch"]) == 0
    assert main(["inspect", "folder"]) == 0
    path = Path("folder/pytorch_model.bin")
    flip(path, 100) if change == "flip" else path.write_bytes(b"")
    capsys.readouterr()
    assert main(["inspect", "folder"]) == 1
    (told,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "pytorch_model.bin" in line and "suspicious" in line
    ]
    assert "pytorch_model.bin is damaged: " in told
    assert main(["inspect", "--json", "folder"]) == 1
    assert json.loads(capsys.readouterr().out)["readable"] is False


def test_convert_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    save("last.pt", script(best=0.5))
    assert main(["convert", "last.pt", "--to", "mmengine-apex", "-o", "mm.pth", "--drop", "best"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mm.pth: mmengine_apex, from apex: 2 tensors of weights, 1 optimizer, 1 loss scale",
        "  dropped   best: a float",
    ]
    found = load("mm.pth")
    assert (found["meta"], found["optimizer"]["apex_amp"]) == ({"epoch": 3, "iter": 0}, AMP)


def test_a_file_that_needs_classes_is_described_and_its_plain_parts_converted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save(script(args=argparse.Namespace(lr=0.1)), "a.pt")
    assert main(["inspect", "a.pt"]) == 0
    assert "  wants       argparse.Namespace" in capsys.readouterr().out
    assert main(["convert", "a.pt", "--to", "grad-scaler", "-o", "b.pt", "--drop", "args"]) == 0
    assert "  dropped   args: an object of argparse.Namespace" in capsys.readouterr().out
    assert "args" not in load("b.pt")


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: halfpeak {command}" in printed
    if command == "convert":
        assert all(f"  {name.replace('_', '-')} " in printed for name in TARGETS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "the following arguments are required: FILE"),
        (["inspect", "absent.pt"], "'absent.pt' cannot be opened: No such file"),
        (["inspect", "a.pt", "--jason"], "unrecognized arguments: --jason"),
        (["convert", "a.pt", "-o", "b.pt"], "the following arguments are required: --to"),
        (["convert", "a.pt", "--to", "deepspeed", "-o", "b.pt"], "form='deepspeed' must be one of engine"),
        (["convert", "a.pt", "--to", "apex", "-o", "a.pt"], "output 'a.pt' exists already"),
        (["convert", "a.pt", "--to", "mmcv", "-o", "b.pt"], "cannot hold 'best' (a float)"),
        (["convert", "a.pt", "--to", "mmcv", "-o", "b.pt", "--drop", "bset"], "drop names ['bset']"),
        (
            ["convert", "a.pt", "--to", "apex", "-o", "b.pt", "--scale", "8"],
            "this one has it in amp",
        ),
        (["convert", "a.pt", "--to", "apex", "-o", "b.pt", "--scale", "x"], "invalid float value: 'x'"),
        (["convert", "absent.pt", "--to", "apex", "-o", "b.pt"], "'absent.pt' cannot be opened"),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save("a.pt", script(best=0.5))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not Path("b.pt").exists()
