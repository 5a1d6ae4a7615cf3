"""Front ends and layouts (gloo): equal to one process to rounding, bitwise between ranks, same steps skipped."""

from __future__ import annotations

import pytest

from distributed.launching import Seen, launch
from distributed.matrix_ranks import STEPS, Cell, cells, name_of

CLOSE = {"O2": 3e-3, "O5": 5e-3}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    return {
        ranks: launch("distributed.matrix_ranks", ranks, tmp_path_factory.mktemp("ranks")) for ranks in (2, 4)
    }


@pytest.mark.parametrize(
    ("count", "cell"),
    [(count, cell) for count in (2, 4) for cell in cells(count)],
    ids=lambda one: name_of(one) if isinstance(one, Cell) else f"{one} ranks",
)
def test_ranks_are_one_process(ranks: dict[int, Seen], count: int, cell: Cell) -> None:
    for seen in ranks[count][name_of(cell)]:
        assert seen["distance"] < CLOSE[cell.level]
        assert seen["same"]
        assert seen["moved"] == seen["alone"] == [step != 1 for step in range(STEPS)]
