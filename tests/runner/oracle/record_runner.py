"""Records what the runners of mmcv 1.7.2 do into runner.json, as record.py does for its optimizer hooks::

python tests/runner/oracle/record_runner.py DIR
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from runner.oracle import runner_cases  # noqa: E402
from runner.oracle.record import import_mmcv  # noqa: E402


def main(folder: str) -> None:
    mmcv = import_mmcv(folder, None)
    time.sleep = lambda seconds: None  # mmcv waits between epochs
    (HERE / "runner.json").write_text(json.dumps(runner_cases.everything(mmcv), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
