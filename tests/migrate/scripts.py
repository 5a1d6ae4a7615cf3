"""Runs old scripts, and their migrated versions, in this process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch import Tensor

from halfpeak import shim
from halfpeak.amp.session import _amp_state
from halfpeak.migrate import Rewritten, Target, rewrite

CORPUS = Path(__file__).parent / "corpus"
SCRIPTS = sorted(path.stem for path in CORPUS.glob("*.py"))


def source(name: str) -> bytes:
    return (CORPUS / f"{name}.py").read_bytes()


@cache
def rewritten(name: str, to: Target) -> Rewritten:
    return rewrite(source(name), to)


def run(text: bytes | str, name: str, arguments: Sequence[str] = ()) -> list[Tensor]:
    """Run a script as ``halfpeak run`` does, with the old libraries; return its losses."""
    namespace = {"__name__": "__main__", "__file__": name}
    with warnings.catch_warnings(), old_libraries(), argv([name, *arguments]):
        warnings.simplefilter("ignore")  # of torch: CUDA is missing, torch.cuda.amp is deprecated
        exec(compile(text, name, "exec"), namespace)
    losses = [loss.detach().clone() for loss in namespace["losses"]]  # type: ignore[attr-defined]
    namespace.clear()
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    assert losses
    return losses


@contextmanager
def argv(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def old_libraries() -> Iterator[None]:
    for name in ("apex", "mmcv"):
        shim.install(name)
    try:
        yield
    finally:
        shim.uninstall()
