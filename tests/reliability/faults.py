"""Raise an exception at a chosen line event of the library, for the exhaustive fault tests."""

from __future__ import annotations

import ast
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import halfpeak

ROOT = str(Path(halfpeak.__file__).parent)
TORCH_OPTIM = str(Path(torch.optim.__file__).parent)
FUSED = str(Path(ROOT) / "fused" / "base.py")
BATCH_NORM = torch.nn.modules.batchnorm.__file__
EVERYBODYS = {"wrapper", "zero_grad"}
"""Functions of torch.optim outside an optimizer's own step: ``wrapper`` calls the step hooks around it."""


class Point(NamedTuple):
    """A line that is about to run: its file below the package, its number, and how often it has run before."""

    file: str
    line: int
    hit: int


class Injected(RuntimeError):
    """An ordinary exception."""


class InjectedInterrupt(KeyboardInterrupt):
    """Ctrl-C."""


class InjectedMemoryError(MemoryError):
    """No memory."""


KINDS: tuple[type[BaseException], ...] = (Injected, InjectedInterrupt, InjectedMemoryError)


def record(action: Callable[[], object]) -> list[Point]:
    """Run ``action`` and list every line event of library code, in order."""
    tracer = _Tracer(None, Injected)
    tracer.run(action)
    return tracer.points


def inject(
    action: Callable[[], object], ordinal: int, kind: type[BaseException]
) -> tuple[Point | None, bool]:
    """Run ``action`` with an exception of class ``kind`` at line event ``ordinal``.

    Returns:
        Where that was, and whether the exception came out of ``action``.
    """
    tracer = _Tracer(ordinal, kind)
    try:
        tracer.run(action)
    except kind:
        return tracer.raised_at, True
    return tracer.raised_at, False


class _Tracer:
    def __init__(self, ordinal: int | None, kind: type[BaseException]) -> None:
        self.points: list[Point] = []
        self.raised_at: Point | None = None
        self._ordinal = ordinal
        self._kind = kind
        self._hits: dict[tuple[str, int], int] = {}

    def run(self, action: Callable[[], object]) -> None:
        before = sys.gettrace()
        # A garbage collection runs finalizers, at a moment that depends on what was tried before.
        gc.disable()
        sys.settrace(self._on_call)
        try:
            action()
        finally:
            sys.settrace(before)
            gc.enable()

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        # Not None, because a generator that is resumed elsewhere would then keep its former trace function.
        return self._on_nothing if _is_half_done(frame) else self._on_line

    def _on_nothing(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_nothing

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or self.raised_at is not None or _leaves_with(frame):
            return self._on_line
        where = (frame.f_code.co_filename[len(ROOT) + 1 :], frame.f_lineno)
        hit = self._hits[where] = self._hits.get(where, -1) + 1
        point = Point(*where, hit)
        self.points.append(point)
        if len(self.points) - 1 == self._ordinal:
            self.raised_at = point
            raise self._kind(f"injected at {point}")
        return self._on_line


def _is_half_done(frame: FrameType) -> bool:
    """Whether an operation of an optimizer's step or of a batch norm is running, or a fused optimizer is writing.

    torch leaves these half done when interrupted, with or without halfpeak: some parameters are moved and others not,
    or the number of batches is counted and the mean is not. Library lines run in them if a casting scope is open.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code is not _Tracer.run.__code__:
        code = caller.f_code
        if (code.co_filename, code.co_name) == (FUSED, "_run"):
            return True
        if code.co_filename.startswith(TORCH_OPTIM) and code.co_name not in EVERYBODYS:
            return True
        if code.co_filename == BATCH_NORM:
            return True
        caller = caller.f_back
    return False


def _leaves_with(frame: FrameType) -> bool:
    """Whether this line event only reports that a ``with`` block is being left.

    Python reports the line of the ``with`` again before it calls ``__exit__``. A tracer that raises there makes Python
    forget ``__exit__``, which no exception of a program and no signal can do: no library code runs between the two.
    """
    code = frame.f_code
    return frame.f_lineno in _with_lines(code.co_filename) and frame.f_lasti > _first_offset(
        code, frame.f_lineno
    )


@functools.cache
def _with_lines(filename: str) -> frozenset[int]:
    tree = ast.parse(Path(filename).read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    return frozenset(
        line
        for block in blocks
        for line in [block.lineno, *(item.context_expr.lineno for item in block.items)]
    )


@functools.cache
def _first_offset(code: CodeType, line: int) -> int:
    return min(start for start, _, at in code.co_lines() if at == line)
