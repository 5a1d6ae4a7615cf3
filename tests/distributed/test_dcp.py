"""Engines saved by torch.distributed.checkpoint: bitwise equal between runs of one kind, to rounding between kinds."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

import halfpeak
from distributed.dcp_ranks import BY_PARAMS, COMPACT, cases
from distributed.launching import Seen, check_refusals, launch
from distributed.resize_ranks import KINDS, name_of
from distributed.sharded_ranks import net
from halfpeak.checkpoint import convert, load
from halfpeak.fused import FusedAdamW, FusedSGD
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
def test_a_folder_of_two_ranks_becomes_one_file(
    ranks: Seen, folder: Path, tmp_path: Path, level: str, source: str
) -> None:
    dcp_to_torch_save(folder / f"{level} {source}", tmp_path / "all.pt")
    convert(tmp_path / "all.pt", "engine", tmp_path / "a.pt")
    seen = ranks[f"{level} {source} {source}"][0]["saved"]
    state = load(tmp_path / "a.pt")
    rows = state["optimizers"][0]["state"]
    (model,) = state["models"]
    assert all(
        torch.equal(model[name], value)
        for name, value in zip(net().state_dict(), seen["values"], strict=True)
    )
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


@pytest.mark.parametrize("number", range(len(COMPACT)))
def test_a_fresh_engine_gets_moments_and_remainders_in_their_formats(ranks: Seen, number: int) -> None:
    for seen in ranks[f"compact {number}"]:
        assert not differences(*seen["loaded"])
        assert not differences(*seen["end"])


def test_torch_gets_states_of_shards_by_names(ranks: Seen) -> None:
    assert all(set(map(tuple, seen)) == {("exp_avg", "exp_avg_sq", "step")} for seen in ranks["by names"])


def test_what_would_lose_something_is_refused(ranks: Seen) -> None:
    check_refusals(ranks["refusals"], 9)


# One process that is a group.


def by_torch(engine: halfpeak.Engine) -> dict[str, Any]:
    model, optimizer = get_state_dict(engine.model, engine.state_dict_optimizers())
    return {"model": model, "optimizer": optimizer, "loop": engine.loop_state_dict()}


def convolution(order: torch.memory_format = torch.contiguous_format, **moments: Any) -> halfpeak.Engine:
    model = nn.Conv2d(32, 4, 3).to(memory_format=order)  # type: ignore[call-overload]
    return halfpeak.prepare(model, FusedAdamW(model.parameters(), **moments), "O5")


FORMS: dict[str, dict[str, Any]] = {
    "8 bits": {"moments": "int8"},
    "8 bits, channels last": {"moments": "int8", "order": torch.channels_last},
    "bfloat16": {"moments": torch.bfloat16},
    "float32": {},
}


@pytest.mark.parametrize(
    ("saved", "loaded"), [each for each in product(FORMS, FORMS) if "8 bits" in "".join(each)]
)
@pytest.mark.parametrize("way", ["engine", "torch"])
@pytest.mark.usefixtures("one_rank")
def test_8_bit_moments_are_not_read_as_other_numbers(
    way: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    """torch copies a checkpoint from tensor to tensor, whatever their numbers stand for."""
    from_, to = convolution(**FORMS[saved]), convolution(**FORMS[loaded])
    dcp.save({"engine": from_} if way == "engine" else by_torch(from_), checkpoint_id=tmp_path)
    state = {"engine": to} if way == "engine" else by_torch(to)
    if saved == loaded:
        dcp.load(state, checkpoint_id=tmp_path)
    else:
        error = f"Missing key in checkpoint|{'saved with' if way == 'engine' else 'Missing key'}"
        with pytest.raises((dcp.CheckpointException, halfpeak.StateError), match=error):
            dcp.load(state, checkpoint_id=tmp_path)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.usefixtures("one_rank")
def test_a_momentum_that_is_not_there_yet_begins_with_the_whole_gradient(make: Any) -> None:
    """With dampening the first gradient enters it whole, and later ones in part."""

    def engine() -> halfpeak.Engine:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        return halfpeak.prepare(model, make(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5), "O2")

    def train(one: halfpeak.Engine, layers: int) -> None:
        for layer in list(one.model)[:layers]:  # type: ignore[call-overload]
            with one.forward():
                loss = layer(torch.ones(1, 2, dtype=torch.float16)).float().square().mean()
            one.backward(loss)
        one.step()

    straight, resumed = engine(), engine()
    train(straight, 1)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for one in (straight, resumed):
        train(one, 2)
        train(one, 2)
    assert not differences(straight.state_dict(), resumed.state_dict())


def test_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    """The loaded state is bitwise equal; later steps are so on the same number of ranks."""
    seen = launch("distributed.resize_ranks", 4, tmp_path)
    for source, target in product(KINDS, KINDS):
        one = seen[name_of(source, target)][0]
        assert one["loaded"]
        assert one["resumed"] or source != target
        assert one["distance"] < 1e-3
