"""The texts that report a run's level and its skipped steps: apex's, because scripts search logs for them."""

from __future__ import annotations

from dataclasses import fields

from halfpeak.core.levels import Properties, get_level


def level_table(effective: Properties) -> str:
    """The text that reports a level, its properties, and the properties after overrides.

    >>> from halfpeak.core.levels import resolve
    >>> print(level_table(resolve("O3", loss_scale=128))[:56])
    Selected optimization level O3:  Pure FP16 training.
    Def
    """
    level = get_level(effective.opt_level)
    lines = [
        f"Selected optimization level {level.name}:  {level.brief}",
        "Defaults for this optimization level are:",
        *_rows(level.properties),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *_rows(effective),
    ]
    return "\n".join(lines)


def overflow_line(loss_id: int, scale: float, *, dynamic: bool) -> str:
    """The line that reports a skipped step."""
    what = "reducing loss scale to" if dynamic else "keeps its static loss scale of"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {what} {scale}"


def option_names(properties: Properties) -> list[str]:
    """The names of apex's seven properties in print order; at O4 also the property that apex's ROCm fork adds."""
    names = [field.name for field in fields(properties)]
    if properties.opt_level != "O4":
        names.remove("patch_torch_functions_type")
    return names


def _rows(properties: Properties) -> list[str]:
    return [f"{name:22} : {getattr(properties, name)}" for name in option_names(properties)]
