"""init_dist from a launcher's environment, and the distributed helpers in a process without a group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from halfpeak.core.errors import ConfigError
from halfpeak.runner import distributed
from halfpeak.runner.distributed import (
    allreduce_grads,
    allreduce_params,
    broadcast_tensors,
    get_dist_info,
    init_dist,
    master_only,
)

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODELIST": "node[07-08]"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls that would start processes or a process group, with the environment at that moment."""
    calls: list[dict[str, Any]] = []
    for name in (*LAUNCHED, *(name for name in os.environ if name.startswith(("SLURM_", "OMPI_")))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def start(**kwargs: Any) -> None:
        calls.append({**kwargs, **{name: os.environ.get(name) for name in LAUNCHED}})

    monkeypatch.setattr(torch.distributed, "init_process_group", start)
    monkeypatch.setattr(distributed.mp, "set_start_method", lambda method: calls.append({"method": method}))
    monkeypatch.setattr(distributed.mp, "get_start_method", lambda allow_none: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return calls


def set_environment(**values: str) -> None:
    os.environ.update(values)


def test_pytorch(started: list[dict[str, Any]]) -> None:
    set_environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="here", MASTER_PORT="1234")
    init_dist("pytorch", timeout=None)
    assert started == [
        {"method": "spawn"},
        {
            "backend": "gloo", "timeout": None, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "here",
            "MASTER_PORT": "1234",
        },
    ]  # fmt: skip


def test_mpi(started: list[dict[str, Any]]) -> None:
    set_environment(OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_RANK="0")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        init_dist("mpi")
    assert started == []
    set_environment(MASTER_ADDR="here")
    init_dist("mpi", backend="mpi")
    found = started[-1]
    assert (found["backend"], found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == (
        "mpi",
        "2",
        "4",
        "29500",
    )


def test_a_device_is_selected_by_the_names_of_torch_cuda(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in mmcv, so that a script, or a test of one, may replace them where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: started.append({"device": index}))
    set_environment(RANK="5", LOCAL_RANK="3")
    init_dist("pytorch")
    assert [call.get("device", call.get("backend")) for call in started[1:]] == [1, "nccl"]


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, {}, ("node07", "29500")),
        ({"SLURM_JOB_ID": "1234567"}, {}, ("node07", "30067")),
        ({"MASTER_PORT": "11"}, {}, ("node07", "11")),
        ({"MASTER_PORT": "11", "MASTER_ADDR": "here"}, {"port": 12}, ("here", "12")),
    ],
)
def test_slurm(
    started: list[dict[str, Any]],
    environment: dict[str, str],
    options: dict[str, Any],
    expected: tuple[str, str],
) -> None:
    set_environment(**SLURM, **environment)
    init_dist("slurm", **options)
    found = started[-1]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == expected
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "8", "1")
    assert "port" not in found


@pytest.mark.parametrize(
    ("launcher", "environment", "says"),
    [
        ("ssh", {}, "'pytorch', 'mpi', 'slurm'"),
        ("pytorch", {}, "variable RANK, which is not set; start the script with torchrun"),
        ("pytorch", {"RANK": "first"}, "RANK, which is 'first'"),
        ("mpi", {}, "OMPI_COMM_WORLD_RANK.*mpirun"),
        ("slurm", {}, "SLURM_PROCID.*srun"),
        ("slurm", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "SLURM_NODELIST"),
    ],
)
def test_what_a_launcher_did_not_set(
    started: list[dict[str, Any]], launcher: str, environment: dict[str, str], says: str
) -> None:
    set_environment(**environment)
    before = dict(os.environ)
    with pytest.raises(ValueError, match=says):
        init_dist(launcher)
    assert started == []
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node07", "node07"),
        ("node07,other", "node07"),
        ("node[07,09-12],other[1-2]", "node07"),
        ("rack[1-2]node[03-04]-ib", "rack1node03-ib"),
        ("[localhost]", "localhost"),
    ],
)
def test_the_first_host_of_a_list_where_there_is_no_scontrol(
    started: list[dict[str, Any]], nodes: str, first: str
) -> None:
    set_environment(**{**SLURM, "SLURM_NODELIST": nodes})
    init_dist("slurm")
    assert started[-1]["MASTER_ADDR"] == first


def test_scontrol_is_asked_for_the_first_host(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command that users' tests expect."""
    asked: list[str] = []
    monkeypatch.setattr("subprocess.getoutput", lambda command: asked.append(command) or "127.0.0.1")
    set_environment(**{**SLURM, "SLURM_NODELIST": "[0]"})
    init_dist("slurm")
    assert asked == ["scontrol show hostname [0] | head -n1"]
    assert started[-1]["MASTER_ADDR"] == "127.0.0.1"
    del os.environ["MASTER_ADDR"]
    set_environment(SLURM_NODELIST="a; rm b")
    with pytest.raises(ConfigError, match="is no list of hosts"):
        init_dist("slurm")


def test_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    version = weight._version, weight.grad._version
    allreduce_grads([weight])
    allreduce_params([weight])
    broadcast_tensors([weight])
    assert (weight._version, weight.grad._version) == version
    assert get_dist_info() == (0, 1)


def test_master_only(monkeypatch: pytest.MonkeyPatch) -> None:
    @master_only
    def double(x: int, *, more: int = 0) -> int:
        """Twice."""
        return 2 * x + more

    assert (double(2, more=1), double.__doc__) == (5, "Twice.")
    monkeypatch.setattr(distributed, "get_dist_info", lambda: (1, 2))
    assert double(2) is None


@pytest.mark.parametrize("size", [0, -2, "25", True, None, float("nan")])
@pytest.mark.parametrize("function", [allreduce_grads, allreduce_params])
def test_bucket_sizes(function: Callable[..., None], size: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_size_mb"):
        function([], bucket_size_mb=size)
