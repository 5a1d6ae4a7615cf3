"""Diagnosis: the result of halfpeak.diagnose as a value, a table, a page with pictures, and JSON."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from halfpeak.checkpoint.temporary import write_text
from halfpeak.core.finite_json import finite_json
from halfpeak.diagnosis.trace import Summary

Where = Literal["input", "weight", "forward", "loss", "backward"]
"""The part of a training step in which a tensor first was not finite."""

Reason = Literal["overflow", "nan", "inf"]
"""``"overflow"`` if float32 is finite there; else the value in float32."""

IN_WORDS: Final[dict[str, str]] = {
    "input": "the input",
    "weight": "a weight",
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
}


@dataclass(frozen=True)
class Frame:
    """One call of a module.

    Attributes:
        module: qualified name; empty for the model itself.
        kind: name of its class.
        call: how many calls of this module came before.
        tensors: a summary of each input, weight, buffer, output and gradient, by name.
        is_cause: whether the report names this call.
    """

    module: str
    kind: str
    call: int
    tensors: Mapping[str, Summary]
    is_cause: bool = False


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of :func:`halfpeak.diagnose`. ``print`` shows a table.

    Attributes:
        where: ``"input"``, ``"weight"``, ``"forward"``, ``"loss"`` or ``"backward"``; None if everything is finite.
        module: qualified name of the first module at fault, in order of execution; empty for the model or outside of it.
        tensor: the non-finite tensor, such as ``"output[0]"``, ``"input[1]"``, ``"weight"``, ``"grad_input[0]"``,
            ``"weight.grad"``; ``"child.input[0]"`` if the module itself computed the input of its child.
        reason: ``"overflow"`` if float32 is finite there; else ``"nan"`` or ``"inf"``, which float32 gives as well.
        value: largest magnitude in float32.
        suggestion: what to write.
        largest_scale: for an overflow in the backward pass, the largest power of two that fits as the loss scale; None
            if there is none, or for anything else.
        keep_fp32: for an overflow, modules with which in float32 nothing overflows any more in this batch; empty if there
            are none, or for anything else.
        frames: the call at fault and the calls around it.
    """

    where: Where | None = None
    module: str = ""
    tensor: str = ""
    reason: Reason | None = None
    value: float = 0.0
    suggestion: str = ""
    largest_scale: float | None = None
    keep_fp32: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()

    def __str__(self) -> str:
        rows = [("module", "tensor", "dtype", "smallest", "largest", "zeros")]
        marks = [" "]
        for frame in self.frames:
            name = f"{frame.module or '(model)'} {frame.kind}" + (f" #{frame.call + 1}" if frame.call else "")
            for tensor, summary in frame.tensors.items():
                cause = frame.is_cause and not summary.is_finite
                marks.append(">" if cause else " ")
                rows.append((name, tensor, summary.dtype, *_numbers(summary)))
                name = ""
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [self._headline(), ""]
        for mark, row in zip(marks, rows, strict=True):
            left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
            lines.append(f"{mark} {'  '.join([*left, *right])}".rstrip())
        if self.suggestion:
            lines += ["", textwrap.fill(self.suggestion, 100, break_long_words=False, break_on_hyphens=False)]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write a page with pictures to ``path``, and the same as JSON beside it, with the suffix ``.json``.

        The page needs no other file and no network.
        """
        path = Path(path)
        write_text(path.with_suffix(".json"), self.to_json())
        write_text(path, self.to_html())

    def to_json(self) -> str:
        """All fields. Non-finite numbers become null, because JSON has none."""
        return finite_json(asdict(self), indent=1)

    def to_html(self) -> str:
        """The page that :meth:`save` writes."""
        data = self.to_json().replace("</", "<\\/")
        return _PAGE.format(
            title=html.escape(self._headline()),
            suggestion=html.escape(self.suggestion),
            picture=_picture(self.frames),
            table=html.escape(str(self)),
            data=data,
        )

    def _headline(self) -> str:
        if self.where is None:
            return "halfpeak.diagnose: loss and gradients are finite"
        name = f"'{self.module}'" if self.module else "the model itself or around it"
        text = f"halfpeak.diagnose: {self.reason} in {IN_WORDS[self.where]}"
        text += ", where all outputs are finite" if self.where == "loss" else f", at {name}, {self.tensor}"
        return text + (f" (float32: {self.value:.4g})" if self.reason == "overflow" else "")


def _numbers(summary: Summary) -> tuple[str, str, str]:
    held = [n for n, has in (("nan", summary.nan), ("inf", summary.posinf), ("-inf", summary.neginf)) if has]
    largest = " ".join(held) or f"{summary.largest:.2e}"
    return f"{summary.smallest:.2e}", largest, f"{100 * summary.zeros:.0f} %"


# The picture: a bar per tensor from its smallest to its largest magnitude, in the range of its dtype.

LEFT, RIGHT, ROW, WIDTH = 320, 40, 18, 1000
LOWEST, HIGHEST = -12.0, 12.0


def _picture(frames: tuple[Frame, ...]) -> str:
    rows = [(frame, name, summary) for frame in frames for name, summary in frame.tensors.items()]
    height = ROW * (len(rows) + 2)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Magnitudes">']
    for exponent in range(int(LOWEST), int(HIGHEST) + 1, 3):
        x = _x(exponent)
        parts.append(f'<line class="grid" x1="{x}" y1="0" x2="{x}" y2="{height - ROW}"/>')
        parts.append(f'<text class="axis" x="{x}" y="{height - 4}">1e{exponent}</text>')
    before: Frame | None = None
    for index, (frame, name, summary) in enumerate(rows):
        y = ROW * index + 4
        label = f"{frame.module or '(model)'}" if frame is not before else ""
        before = frame
        limits = torch.finfo(getattr(torch, summary.dtype))
        start, end = _x(math.log10(limits.tiny)), _x(math.log10(limits.max))
        parts.append(f'<rect class="range" x="{start}" y="{y}" width="{end - start}" height="{ROW - 6}"/>')
        if summary.largest > 0:
            low, high = _x(math.log10(summary.smallest)), _x(math.log10(summary.largest))
            kind = "bar" if summary.is_finite else "bar bad"
            parts.append(
                f'<rect class="{kind}" x="{low}" y="{y}" width="{max(2.0, high - low)}" height="{ROW - 6}"/>'
            )
        if not summary.is_finite:
            parts.append(
                f'<text class="bad" x="{WIDTH - RIGHT + 4}" y="{y + 10}">{_numbers(summary)[1]}</text>'
            )
        strong = ' class="cause"' if frame.is_cause else ""
        parts.append(f'<text{strong} x="0" y="{y + 10}">{html.escape(label)}</text>')
        parts.append(f'<text x="200" y="{y + 10}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _x(exponent: float) -> float:
    share = (min(max(exponent, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; color: #1d2329; }}
h1 {{ font-size: 1.2rem; }} pre {{ font-size: 12px; overflow-x: auto; background: #f5f6f8; padding: 1rem; }}
.advice {{ border-left: 4px solid #2f6fb0; padding: .4rem 1rem; background: #f0f5fb; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #1d2329; }} svg .axis {{ text-anchor: middle; fill: #8a8f98; }}
svg .cause, svg .bad {{ fill: #c8372d; font-weight: bold; }} svg .grid {{ stroke: #e6e8eb; }}
svg .range {{ fill: #eef0f3; }} svg .bar {{ fill: #2f6fb0; }} svg .bar.bad {{ fill: #c8372d; }}
</style></head><body>
<h1>{title}</h1>
<p class="advice">{suggestion}</p>
<p>Smallest to largest finite magnitude of each tensor; grey is what its dtype holds.</p>
{picture}
<pre>{table}</pre>
<script type="application/json" id="diagnosis">{data}</script>
</body></html>
"""
