"""Records the results of mmcv 1.7.2 in mmcv.json, for the tests to compare with.

mmcv 1.x cannot be an ordinary test dependency: it has no wheels and wants torchvision and OpenCV. ``make oracle`` builds it
apart, in ``.oracle/mmcv``, and checks the record::

    python tests/runner/oracle/record.py .oracle/mmcv
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from runner.oracle import cases  # noqa: E402


def import_mmcv(folder: str, torch_version: str | None) -> Any:
    sys.path.insert(0, folder)
    sys.modules["torchvision"] = types.ModuleType("torchvision")  # mmcv needs it only for its model zoo
    warnings.simplefilter("ignore")
    import mmcv.utils

    if torch_version is not None:  # decides which of its two fp16 hooks mmcv defines
        mmcv.utils.TORCH_VERSION = torch_version
    import mmcv.runner

    assert mmcv.__version__ == "1.7.2"
    return mmcv.runner


def scaler_histories(runner: Any) -> list[dict[str, Any]]:
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for options in cases.SCALERS:
        flags = [rng.random() < 0.2 for _ in range(40)]
        scaler, scales = runner.LossScaler(**options), []
        for flag in flags:
            scaler.update_scale(flag)
            scales.append(float(scaler.loss_scale))
        state = {**scaler.state_dict(), "cur_scale": float(scaler.cur_scale)}
        found.append({"options": options, "overflows": flags, "scales": scales, "state": state})
    return found


def divisors(runner: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for every, total, start in cases.WINDOWS:
        hook = runner.GradientCumulativeOptimizerHook(cumulative_iters=every)
        loop = cases.Loop(cases.make_model(), max_iters=total, iteration=start)
        hook._init(loop)
        row: list[Any] = []
        while loop.iter < total:
            row.append(
                (hook._get_loss_factor(loop), hook.every_n_iters(loop, every) or hook.is_last_iter(loop))
            )
            loop.iter += 1
        found.append({"window": [every, total, start], "factors": row})
    return found


def runs(runner: Any, rows: dict[str, Any], decorator: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, options, overflows) in rows.items():
        model = cases.make_model(decorator)
        found[name] = cases.train(getattr(runner, kind)(**options), model, overflows=overflows)
    return found


def record(folder: str) -> dict[str, Any]:
    """Everything that mmcv.json holds, from the mmcv in a folder."""
    torch.set_num_threads(1)
    runner = import_mmcv(folder, None)
    legacy = subprocess.run(
        [sys.executable, __file__, folder, "legacy"], capture_output=True, text=True, check=True
    )
    return {
        "scalers": scaler_histories(runner),
        "divisors": divisors(runner),
        "runs": runs(runner, cases.RUNS),
        "fp16 runs": json.loads(legacy.stdout),
    }


def main(folder: str, *legacy: str) -> None:
    if legacy:
        torch.set_num_threads(1)
        runner = import_mmcv(folder, "1.5.0")
        print(json.dumps(runs(runner, cases.FP16_RUNS, runner.auto_fp16)))
        return
    (HERE / "mmcv.json").write_text(json.dumps(record(folder), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
