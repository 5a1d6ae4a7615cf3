"""The columns of a parameter's row in the table that the Triton kernels read.

The first two are the number of elements and the parameter's row of the step numbers
(:mod:`halfpeak.ops.triton.step_numbers`), the next ones addresses, where 0 stands for none.
"""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 2
"""The address of the weight that the rule updates."""

LOW: Final = 3
"""The address of the model's low weight."""

REST: Final = 4
"""The address of the remainder."""

STATES: Final = (5, 7, 9)
"""The addresses of up to three state tensors; in the column after each the address of its scales."""

CHUNKS: Final = 11
"""The first of three columns: the first full chunk, the number of them, and the partial chunk or -1."""

COLUMNS: Final = 14
"""The number of columns."""
