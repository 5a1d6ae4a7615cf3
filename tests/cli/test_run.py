"""``halfpeak run`` of a script that fails for want of CUDA or of an old library: the message names the option that helps."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from halfpeak.cli.main import main

pytestmark = pytest.mark.usefixtures("own_folder")

FOR_CUDA = {
    "cuda": "import torch\nmodel = torch.nn.Linear(2, 2).cuda()\n",
    "device": "import torch\nx = torch.ones(2, device='cuda')\n",
    "set_device": "import torch\ntorch.cuda.set_device(0)\n",
    "assert": "import torch\nassert torch.cuda.is_available()\n",
    "wrapped": "import torch\ntry:\n    torch.ones(1).cuda()\nexcept AssertionError:\n    raise ValueError('sorry')\n",
    "exit": "import sys\nsys.exit('this script needs a GPU')\n",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these scripts fail only where there is no CUDA")
@pytest.mark.parametrize("name", FOR_CUDA)
def test_a_script_that_needs_cuda(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(FOR_CUDA[name])
    assert advice_for(["script.py"], capsys) == [
        "halfpeak run: this machine has no CUDA device; write --device cpu to run the script with the CPU in its place"
    ]
    if name != "exit":
        Path("script.py").write_text(FOR_CUDA[name])
        assert main(["run", "--device", "cpu", "script.py"]) == 0


FOR_MMCV = {
    "import": "import mmcv\n",
    "from": "from apex import amp\nfrom mmcv.runner import Hook\n",
    "asked": "try:\n    import mmcv\nexcept ImportError:\n    raise ImportError('install mmcv')\n",
}


@pytest.mark.parametrize("name", FOR_MMCV)
def test_a_script_that_needs_mmcv(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(FOR_MMCV[name])
    assert advice_for(["script.py"], capsys) == [
        "halfpeak run: mmcv is not installed; write --shim apex --shim mmcv to run the script with halfpeak in its place"
    ]
    assert main(["run", "--shim", "apex", "--shim", "mmcv", "script.py"]) == 0


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("1 / 0\n", []),
        ("import nothere\n", []),
        ("import mmcv.nothere\n", ["--shim", "mmcv"]),
        ("import sys\nsys.exit('enough')\n", []),
        ("raise ValueError('cuda')\n", ["--device", "cpu"]),
    ],
)
def test_other_errors_bring_no_advice(
    text: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script.py").write_text(text)
    assert advice_for([*options, "script.py"], capsys) == []


def advice_for(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a script that fails; return the lines of ``halfpeak run`` after its first."""
    with suppress(SystemExit):
        assert main(["run", *arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines[1:] if line.startswith("halfpeak run: ")]
