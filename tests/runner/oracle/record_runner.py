"""Records the results of mmcv 1.7.2's runners in runner.json, as record.py does for its optimizer hooks::

python tests/runner/oracle/record_runner.py .oracle/mmcv
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from runner.oracle import runner_cases  # noqa: E402
from runner.oracle.record import import_mmcv  # noqa: E402


def record(folder: str) -> dict[str, Any]:
    """Everything that runner.json holds, from the mmcv in a folder."""
    mmcv = import_mmcv(folder, None)
    time.sleep = lambda seconds: None  # mmcv waits between epochs
    return runner_cases.everything(mmcv)


def main(folder: str) -> None:
    (HERE / "runner.json").write_text(json.dumps(record(folder), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
