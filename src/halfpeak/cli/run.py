"""``halfpeak run``: runs an unedited script that imports apex, mmcv or mmengine, on the CPU if asked."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

from halfpeak import __version__
from halfpeak.cli.script import Program
from halfpeak.core.errors import ConfigError
from halfpeak.shim.installing import SHIMS
from halfpeak.shim.spawn import emulating

USAGE: Final = f"""\
usage: halfpeak run [--device cpu] [--shim NAME]... SCRIPT [ARGUMENTS...]
       halfpeak run [--device cpu] [--shim NAME]... -m MODULE [ARGUMENTS...]
       torchrun --nproc-per-node N -m halfpeak run ...

Run a script as python would, with an importable apex. A real apex goes first: only what it lacks is added.

  --device cpu   the CPU plays one CUDA device: .cuda(), device="cuda", torch.cuda, nccl
  --shim NAME    what to install, one of {", ".join(SHIMS)}; may be repeated (default: apex)
"""

_CUDA: Final = re.compile(r"cuda|nccl|nvidia|\bgpus?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    """The parsed command line."""

    program: Program
    shims: tuple[str, ...]
    cpu: bool


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the script's exit status.

    Raises:
        ConfigError: the command line is wrong, or the script does not exist.
        SystemExit: the script raised it.
    """
    request = parse(arguments)
    if request is None:
        sys.stdout.write(USAGE)
        return 0
    with emulating(request.shims, cpu=request.cpu), request.program.as_started():
        request.program.check()
        _say(_emulated(request))
        return request.program.run(lambda error: _say(advice(error, request)))


def advice(error: BaseException, request: Request) -> str:
    """The options with which a failed script may run; empty if nothing points to any.

    >>> missing = ModuleNotFoundError("No module named 'mmcv'", name="mmcv")
    >>> advice(missing, Request(Program("train.py", False), ("apex",), True))
    'mmcv is not installed; write --shim apex --shim mmcv to run the script with halfpeak in its place'
    """
    chain = _chain(error)
    for missing in (one.name or "" for one in chain if isinstance(one, ModuleNotFoundError)):
        shim = missing.partition(".")[0]
        if shim in SHIMS and shim not in request.shims and missing in SHIMS[shim].modules:
            options = " ".join(f"--shim {one}" for one in (*request.shims, shim))
            return f"{missing} is not installed; write {options} to run the script with halfpeak in its place"
    asks_for_cuda = any(_CUDA.search(_last_words(one)) for one in chain)
    if asks_for_cuda and not request.cpu and not torch.cuda.is_available():
        return (
            "this machine has no CUDA device; write --device cpu to run the script with the CPU in its place"
        )
    return ""


def parse(arguments: Sequence[str]) -> Request | None:
    """Read the options before the script; the arguments after it belong to the script. None: print the help.

    Raises:
        ConfigError: an option or a value is unknown, or no script is named.

    >>> parse(["--device", "cpu", "train.py", "--device", "cuda"])
    Request(program=Program(target='train.py', ... arguments=('--device', 'cuda')), shims=('apex',), cpu=True)
    """
    rest = list(arguments)
    shims: list[str] = []
    cpu = False
    while rest and rest[0].startswith("-"):
        option, separator, value = rest.pop(0).partition("=")
        if option in ("-h", "--help"):
            return None
        if option not in ("-m", "--device", "--shim"):
            raise ConfigError(f"unknown option {option!r}; options of the script come after its name")
        if not separator:
            if not rest:
                raise ConfigError(f"{option} needs a value; halfpeak run --help lists the options")
            value = rest.pop(0)
        if option == "-m":
            return Request(Program(value, True, tuple(rest)), tuple(shims) or ("apex",), cpu)
        if option == "--device":
            if value != "cpu":
                raise ConfigError(
                    f"--device {value!r}: --device accepts only cpu; write --device cpu, or leave it out to run the script "
                    "on the device that it names"
                )
            cpu = True
        elif value not in SHIMS:
            raise ConfigError(f"there is no shim {value!r}; write one of {', '.join(SHIMS)}")
        else:
            shims.append(value)
    if not rest:
        raise ConfigError("no script was named; write halfpeak run SCRIPT [ARGUMENTS]")
    return Request(Program(rest[0], False, tuple(rest[1:])), tuple(shims) or ("apex",), cpu)


def _say(line: str) -> None:
    if line and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"halfpeak run: {line}\n")


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception and those in whose handling it was raised."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _last_words(error: BaseException) -> str:
    """The message of an exception, and the line that raised it."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{error}\n{lines[-1] if lines else ''}"


def _emulated(request: Request) -> str:
    parts = [f"halfpeak {__version__} {' and '.join(map(_role, request.shims))}"]
    if request.cpu:
        parts.append("the CPU plays one CUDA device (.cuda(), device='cuda', torch.cuda, nccl)")
    return "; ".join(parts)


def _role(name: str) -> str:
    found = find_spec(name)
    is_real = found is not None and found.origin != SHIMS[name].table
    return f"completes the installed {name}" if is_real else f"replaces {name} (not installed)"
