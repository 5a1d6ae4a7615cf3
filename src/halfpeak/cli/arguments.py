"""Arguments: an argparse parser that raises ConfigError for a bad command line, as for every other bad input."""

from __future__ import annotations

import argparse
from typing import NoReturn

from halfpeak.core.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """A parser that raises ConfigError where argparse would print the error and exit."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"halfpeak {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        raise ConfigError(f"{message}; {self.prog} --help lists the options")
