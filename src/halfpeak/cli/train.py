"""``halfpeak train``: reads the command line, and imports torch only if there is something to run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from halfpeak.cli.options import parse


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    request = parse(arguments)
    return import_module("halfpeak.cli.train_run").run(request)
