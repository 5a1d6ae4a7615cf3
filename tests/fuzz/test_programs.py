"""A short run of the programs, always the same one; ``make fuzz-programs`` runs them for longer."""

from __future__ import annotations

import pytest

from fuzz.programs import run_one

CHUNKS, EACH = 4, 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_of_calls(chunk: int) -> None:
    for number in range(chunk * EACH, (chunk + 1) * EACH):
        found = run_one(number)
        assert found is None, f"program {number}\n{found}"
