"""Command lines of small commands: argparse, with errors as one message like those of every other bad input."""

from __future__ import annotations

import argparse
from typing import NoReturn

from halfpeak.core.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """A parser that raises what is wrong with a command line, and leaves it to the caller to say so."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"halfpeak {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigError(f"{message}; {self.prog} --help lists the options")
