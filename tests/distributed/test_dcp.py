"""Engines saved by torch.distributed.checkpoint: bitwise equal between runs of one kind, to rounding between kinds."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from distributed.dcp_ranks import BY_PARAMS, cases
from distributed.launching import Seen, check_refusals, launch
from distributed.resize_ranks import KINDS, LEVELS, name_of
from halfpeak.checkpoint import convert, load
from support.states import differences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Seen:
    return launch("distributed.dcp_ranks", 2, folder)


@pytest.mark.parametrize(("level", "source", "target"), list(cases()))
def test_who_loads_goes_on_where_the_other_was(ranks: Seen, level: str, source: str, target: str) -> None:
    for seen in ranks[f"{level} {source} {target}"]:
        assert not differences(seen["saved"], seen["loaded"])
        if source == target:
            assert not differences(seen["straight"], seen["resumed"])
        else:
            close = 1e-3 if level == "O2" else 1e-2
            for a, b in zip(seen["straight"]["values"], seen["resumed"]["values"], strict=True):
                torch.testing.assert_close(a, b, atol=close, rtol=0)


@pytest.mark.parametrize(("level", "source"), [("O2", "shards"), ("O5", "copies")])
def test_a_folder_of_two_ranks_becomes_one_file_and_a_folder_again(
    ranks: Seen, folder: Path, tmp_path: Path, level: str, source: str
) -> None:
    convert(folder / f"{level} {source}", "engine", tmp_path / "a.pt")
    convert(tmp_path / "a.pt", "dcp", tmp_path / "b")
    convert(tmp_path / "b", "engine", tmp_path / "c.pt")
    seen = ranks[f"{level} {source} {source}"][0]["saved"]
    for path in (tmp_path / "a.pt", tmp_path / "c.pt"):
        state = load(path)
        rows = state["optimizers"][0]["state"]
        assert all(map(torch.equal, state["models"][0].values(), seen["values"]))
        assert all(
            torch.equal(row["exp_avg_sq"], moment)
            for (_, row), moment in zip(sorted(rows.items()), seen["moments"], strict=True)
        )


@pytest.mark.parametrize(("level", "kind"), BY_PARAMS)
def test_state_by_the_functions_of_torch_goes_on_bitwise(ranks: Seen, level: str, kind: str) -> None:
    for seen in ranks[f"by params {level} {kind}"]:
        assert not differences(seen["straight"], seen["file"])
        assert not differences(seen["straight"], seen["memory"])


@pytest.mark.parametrize("name", ["unstepped", "reordered"])
def test_moments_go_where_their_names_are(ranks: Seen, name: str) -> None:
    assert all(not differences(seen["straight"], seen["resumed"]) for seen in ranks[name])


def test_a_window_of_another_rank_is_refused(ranks: Seen) -> None:
    first, other = ranks["local window"]
    assert first == ["", ""]
    assert other[0] == ""
    assert (
        "gradients that were not reduced, of [rank, number of ranks] [0, 2], and this is [1, 2]" in other[1]
    )


def test_torch_gets_states_of_shards_by_names(ranks: Seen) -> None:
    assert all(set(map(tuple, seen)) == {("exp_avg", "exp_avg_sq", "step")} for seen in ranks["by names"])


def test_what_would_lose_something_is_refused(ranks: Seen) -> None:
    check_refusals(ranks["refusals"], 7)


def test_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    """The loaded state is bitwise equal. Later steps are so on the same kind and number of ranks, except DDP on four.

    DDP rebuilds its buckets after the first pass, and then more than two ranks add gradients in another order.
    """
    seen = launch("distributed.resize_ranks", 4, tmp_path)
    for level, source, target in product(LEVELS, KINDS, KINDS):
        one = seen[name_of(level, source, target)][0]
        assert one["loaded"]
        assert one["resumed"] or source != target or source == ("copies", 4)
        assert one["distance"] < (1e-3 if level in ("O0", "O1", "O2") else 1e-2)
