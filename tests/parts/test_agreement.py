"""``FoundInfReducer`` with one rank, and the process groups that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfpeak.core.errors import ConfigError
from halfpeak.parts.found_inf import FoundInfReducer, is_first_rank, is_multi_rank


@pytest.mark.parametrize("group", ["world", "other", 3, object()])
def test_a_group_needs_torch_distributed(group: Any) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        FoundInfReducer(group)


@pytest.mark.usefixtures("one_rank")
def test_an_unknown_group() -> None:
    with pytest.raises(ConfigError, match="'world' or None"):
        FoundInfReducer("other")  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["world", "group"])
def test_one_rank_agrees_with_itself(name: str) -> None:
    reducer = FoundInfReducer("world" if name == "world" else dist.group.WORLD)
    assert not reducer.is_local
    flags = torch.tensor([0.0, 1.0])
    reducer.all_reduce_(flags)
    assert flags.tolist() == [0.0, 1.0]
    assert is_first_rank()
    assert not is_multi_rank()
