"""The verdict of a step and the lagged scalar, where there is one rank and one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfpeak.core.errors import ConfigError
from halfpeak.parts.lagged import Lagged
from halfpeak.parts.verdict import Verdict, is_first_rank, is_multi_rank


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("group", ["world", "other", 3, object()])
def test_a_group_needs_torch_distributed(group: Any) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Verdict(group)


@pytest.mark.usefixtures("one_rank")
def test_an_unknown_group() -> None:
    with pytest.raises(ConfigError, match="'world' or None"):
        Verdict("other")  # type: ignore[arg-type]


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_alone_a_verdict_stands(found_inf: float) -> None:
    verdict, flag = Verdict(), torch.tensor(found_inf)
    assert verdict.local
    verdict.agree_(flag)
    assert flag == found_inf
    assert is_first_rank()
    assert not is_multi_rank()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["world", "group"])
def test_one_rank_agrees_with_itself(name: str) -> None:
    verdict = Verdict("world" if name == "world" else dist.group.WORLD)
    assert not verdict.local
    flags = torch.tensor([0.0, 1.0])
    verdict.agree_(flags)
    assert flags.tolist() == [0.0, 1.0]
    assert is_first_rank()
    assert not is_multi_rank()


def test_a_lagged_scalar_on_the_cpu_does_not_lag() -> None:
    lagged = Lagged(torch.device("cpu"))
    assert lagged.value == 0.0
    for value in (3.0, -1.5, float("inf"), 0.0):
        lagged.push(torch.tensor(value))
        assert lagged.value == value
    lagged.push(torch.tensor(7, dtype=torch.int32))
    assert lagged.value == 7.0


def test_a_lagged_scalar_is_a_copy() -> None:
    lagged, scalar = Lagged(torch.device("cpu")), torch.tensor(2.0)
    lagged.push(scalar)
    scalar.fill_(9.0)
    assert lagged.value == 2.0


@pytest.mark.gpu
def test_a_lagged_scalar_arrives() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    lagged = Lagged(device)
    lagged.push(torch.tensor(5.0, device=device))
    torch.accelerator.synchronize()
    assert lagged.value == 5.0
