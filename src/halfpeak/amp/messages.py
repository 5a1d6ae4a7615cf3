"""Messages of ``amp``: printing by verbosity and rank, and raising or warning about contradictions."""

from __future__ import annotations

from halfpeak.amp.session import _amp_state
from halfpeak.core.errors import ConfigError
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
