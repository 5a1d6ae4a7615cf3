"""All models of the zoo: ``make zoo``, or ``make zoo ARGS="--only llama --level O2"``."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import warnings
from itertools import chain

import torch

from zoo import libraries, nets
from zoo.measure import LIMIT, rows

LEVELS = ("O1", "O2", "O4", "O5")


def main() -> int:
    """Print a row for each model and level; return 1 if one does not pass."""
    arguments = argparse.ArgumentParser(prog="zoo", description=__doc__)
    arguments.add_argument("--only", default="", help="a part of the names of models")
    arguments.add_argument("--level", action="append", choices=LEVELS, help="levels; by default all")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    begin, passed, total, left_out = time.monotonic(), 0, 0, list[str]()
    for member in chain(nets.members(), libraries.transformers_members(1024), libraries.timm_members()):
        if given.only not in member.name:
            continue
        levels = [level for level in given.level or LEVELS if not (member.is_slow and level in ("O1", "O2"))]
        try:
            for row in rows(member, levels):
                print(row, flush=True)
                passed, total = passed + row.passes, total + 1
        except Exception as error:  # it does not run in float32
            left_out.append(f"{member.name}: {type(error).__name__}: {str(error)[:80]}")
        gc.collect()
    for line in left_out:
        print("left out", line)
    print(f"{passed} of {total} within {LIMIT:g} times autocast's error, {time.monotonic() - begin:.0f} s")
    return passed != total


if __name__ == "__main__":
    sys.exit(main())
