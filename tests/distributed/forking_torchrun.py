"""``torchrun -m halfpeak ...`` with forked ranks, so that modules are imported once. Arguments: those of torchrun."""

from __future__ import annotations

import importlib
import sys

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from halfpeak.cli.main import main
from support.forks import IMPORTED


def be_a_rank(*command: str) -> None:
    """Run the command; exit with its status if it fails, as torchrun requires."""
    if status := main(command[command.index("halfpeak") + 1 :]):
        sys.exit(status)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    config, _, arguments = config_from_args(parse_args(None))
    config.start_method = "fork"
    elastic_launch(config, be_a_rank)(*arguments)
