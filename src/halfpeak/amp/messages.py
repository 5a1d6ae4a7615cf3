"""What ``amp`` prints. The line of a skipped step reads as in apex, because scripts search logs for it."""

from __future__ import annotations

from dataclasses import fields

from halfpeak.amp.session import _amp_state
from halfpeak.core.errors import ConfigError
from halfpeak.core.levels import Properties, get_level
from halfpeak.state.found_inf import is_first_rank


def maybe_print(message: str, *, verbosity: int, rank0: bool = False) -> None:
    """Print if ``verbosity`` is above 0; with ``rank0``, on the first rank only."""
    if verbosity > 0 and (not rank0 or is_first_rank()):
        print(message)


def warn_or_err(message: str) -> None:
    """Raise ConfigError for an override that contradicts the level.

    Raises:
        ConfigError: unless ``amp._amp_state.hard_override`` is true; then the message is printed and the value accepted.
    """
    if not _amp_state.hard_override:
        raise ConfigError(message)
    print(f"Warning: {message}")


def print_properties(opt_level: str, defaults: Properties, effective: Properties, verbosity: int) -> None:
    """Print a level, its properties, and the properties after overrides, on the first rank."""
    level = get_level(opt_level)
    lines = [
        f"Selected optimization level {level.name}: {level.brief}",
        "Properties set by this level:",
        *_table(defaults),
        "Applying overrides (keywords that are not None).",
        "Properties in effect:",
        *_table(effective),
    ]
    maybe_print("\n".join(lines), verbosity=verbosity, rank0=True)


def overflow_line(loss_id: int, scale: float, *, dynamic: bool) -> str:
    """The line about a skipped step."""
    what = "reducing loss scale to" if dynamic else "keeps its static loss scale of"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {what} {scale}"


def _table(properties: Properties) -> list[str]:
    names = [field.name for field in fields(properties)]
    if properties.opt_level != "O4":  # the seven properties of apex, whose table scripts may search for
        names.remove("patch_torch_functions_type")
    return [f"{name:22} : {getattr(properties, name)}" for name in names]
