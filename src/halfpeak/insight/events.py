"""TensorBoard events from history rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from halfpeak.insight.extras import needs
from halfpeak.insight.history import Row


class TensorBoard:
    """Writes every number of a row under its name.

    Args:
        after: when given, what an earlier writer logged for later steps is hidden.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        with needs("tensorboard"), warnings.catch_warnings():
            # Its dependencies deprecate each other at import; nobody who trains can act on that.
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

    def write(self, rows: Sequence[Row]) -> None:
        """Add one point per number."""
        for row in rows:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
