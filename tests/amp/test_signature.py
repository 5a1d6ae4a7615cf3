"""What a type checker knows of ``amp.initialize``: each overload takes the arguments of the function itself."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import get_overloads, get_type_hints

import pytest

from halfpeak import amp
from halfpeak.amp.frontend import Options

SCRIPT = """
import torch
from halfpeak import amp

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp.initialize(model, optimizer, True, "O2", keep_batchnorm_fp32="True", loss_scale="dynamic", norms="all")
amp.initialize([model], [optimizer], opt_level="O2")[0][0].weight
amp.initialize(model, optimizer, opt_lvel="O2")
"""


def test_every_overload_takes_every_argument() -> None:
    own = inspect.signature(amp.initialize).parameters
    overloads = get_overloads(amp.initialize)
    assert len(overloads) == 6
    for one in overloads:
        *named, rest = inspect.signature(one).parameters.values()
        assert (rest.kind, rest.annotation) == (inspect.Parameter.VAR_KEYWORD, "Unpack[Options]")
        assert [*(p.name for p in named), *get_type_hints(Options)] == list(own)
        assert all(p.default in (own[p.name].default, p.empty) for p in named)


def test_a_misspelt_keyword_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(Path(amp.__file__).parents[2])]})
    )
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [(one["rule"], one["range"]["start"]["line"] + 1) for one in found] == [
        ("reportCallIssue", len(SCRIPT.splitlines()))
    ]
