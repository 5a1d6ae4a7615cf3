"""Ranks of ``test_programs.py``: random programs of calls under ``DistributedDataParallel``."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from fuzz.programs import run_one

COUNT = 60


def see(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What differs in each program; empty texts where nothing does."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return {str(number): run_one(7_000_000 + number, ranks=ranks) or "" for number in range(COUNT)}
