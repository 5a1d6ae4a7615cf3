"""``halfpeak``: runs a command, and turns its exceptions into one message and an exit status."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from typing import Final

from halfpeak import __version__
from halfpeak.core.errors import HalfpeakError, LossScaleCollapse, RankLostError
from halfpeak.core.short_repr import short_repr

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


COMMANDS: Final[Mapping[str, str]] = {
    "train": "train a real model in mixed precision, on whatever device is there",
    "doctor": "train a little at each level, and say which one to use and why",
    "run": "run a script that imports apex, unedited, on a GPU or on the CPU",
    "inspect": "say what is in a checkpoint, and execute nothing in it",
    "convert": "write a checkpoint of one library in the format of another",
    "migrate": "rewrite the names of apex, torch.cuda.amp and mmcv in code for halfpeak",
    "env": "say what a report of a fault needs: versions, devices, backends, compiler",
}
"""Every command with its description. The file of its name is imported only to run it, because most import torch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status.

    0: success. 1: the run failed. 2: the input was refused, with one message. 128 + n: stopped by signal n.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"halfpeak {__version__}, torch {metadata.version('torch')}\n")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(COMMANDS)}"
        return _fail("halfpeak", f"unknown command {short_repr(name)}; {hint}", BAD_INPUT)
    return _guarded(name, rest)


def usage() -> str:
    """The output of ``halfpeak --help``."""
    lines = [f"  {name:<10}{brief}" for name, brief in COMMANDS.items()]
    return "\n".join(
        [
            "usage: halfpeak COMMAND [OPTIONS]",
            "",
            "Mixed-precision training for PyTorch.",
            "",
            "commands:",
            *lines,
            "",
            "halfpeak COMMAND --help lists the options of a command; halfpeak --version says which halfpeak this is.",
            "",
        ]
    )


def _guarded(name: str, rest: Sequence[str]) -> int:
    title = f"halfpeak {name}"
    try:
        return import_module(f"halfpeak.cli.{name}").main(rest)
    except (LossScaleCollapse, RankLostError) as error:
        return _fail(title, str(error), FAILED)
    except HalfpeakError as error:
        if os.environ.get("RANK", "0") != "0":  # every rank has the same error, so only rank 0 prints it
            return BAD_INPUT
        return _fail(title, str(error), BAD_INPUT)
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Redirect stdout, or the interpreter's last flush would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, MemoryError) as error:
        return _fail(title, str(error), FAILED)
    except KeyboardInterrupt:
        onward = "; --resume continues from the last checkpoint" if name == "train" else ""
        return _fail(title, f"stopped at once{onward}", INTERRUPTED)


def _fail(title: str, message: str, status: int) -> int:
    sys.stderr.write(f"{title}: {message}\n")
    return status
