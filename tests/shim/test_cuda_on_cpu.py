"""``on_cpu``: a script that asks for CUDA gets the CPU, and torch is unchanged afterwards."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfpeak.shim.cuda_on_cpu import on_cpu
from shim.process import changes, process_state
from support.no_driver import be_built_for_cuda

X = torch.ones(2, 3)


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def built_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both builds of torch behave alike in the scope."""
    if request.param == "cuda":
        be_built_for_cuda(monkeypatch)


MOVES: dict[str, Callable[[], Tensor]] = {
    "cuda()": lambda: X.cuda(),
    "cuda(0)": lambda: X.cuda(0, non_blocking=True),
    "cuda(device)": lambda: X.cuda(device="cuda:1"),
    "to(str)": lambda: X.to("cuda"),
    "to(str, dtype)": lambda: X.to("cuda:0", torch.float32, non_blocking=True),
    "to(device)": lambda: X.to(torch.device("cuda", 1)),
    "to(device=)": lambda: X.to(device="cuda"),
    "to(int)": lambda: X.to(0),
    "to(tensor)": lambda: X.to(X),
    "to(dtype)": lambda: X.to(torch.float32),
    "pin_memory": lambda: X.pin_memory(),
    "type": lambda: X.type("torch.cuda.FloatTensor"),
    "type(class)": lambda: X.type(torch.cuda.FloatTensor),
    "constructor": lambda: torch.cuda.FloatTensor([[1, 1, 1], [1, 1, 1]]),
    "ones": lambda: torch.ones(2, 3, device="cuda"),
    "full": lambda: torch.full((2, 3), 1.0, device=torch.device("cuda:0")),
    "tensor": lambda: torch.tensor([[1.0] * 3] * 2, device=0),
    "as_tensor": lambda: torch.as_tensor(X, device="cuda"),
    "ones_like": lambda: torch.ones_like(X, device="cuda"),
    "new_ones": lambda: X.new_ones(2, 3, device="cuda"),
    "parameter": lambda: nn.Parameter(X).cuda().detach(),
}


@pytest.mark.parametrize("name", MOVES)
def test_tensors_stay_on_the_cpu(name: str) -> None:
    with on_cpu():
        moved = MOVES[name]()
    assert moved.device.type == "cpu"
    assert torch.equal(moved, X)
    assert not moved.is_cuda


@pytest.mark.parametrize("name", ["cuda", "cuda(0)", "to(str)", "to(int)", "to(device=)", "made"])
def test_modules_keep_their_parameters(name: str) -> None:
    moves: dict[str, Callable[[nn.Module], nn.Module]] = {
        "cuda": lambda model: model.cuda(),
        "cuda(0)": lambda model: model.cuda(0),
        "to(str)": lambda model: model.to("cuda", torch.float64),
        "to(int)": lambda model: model.to(0),
        "to(device=)": lambda model: model.to(device=torch.device("cuda")),
        "made": lambda model: nn.Linear(2, 2, device="cuda"),
    }
    model = nn.Linear(2, 2)
    parameter = model.weight
    with on_cpu():
        moved: Any = moves[name](model)
    assert moved.weight.device.type == "cpu"
    assert (moved.weight is parameter) == (name != "made")


def test_the_one_device() -> None:
    with on_cpu():
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert "cpu" in torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_properties(0).total_memory > 0
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed_all(1)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert torch.cuda.max_memory_allocated() / 2**20 == 0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.device(0):
            start.record()
            end.record()
            end.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.Stream() as other:
            other.record_event(end)
        assert start.elapsed_time(end) >= 0
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.start()
        assert torch.cuda.cudart().cudaProfilerStop() == 0
        with torch.autograd.profiler.emit_nvtx():
            torch.ones(1)
        X.record_stream(stream)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_steps(fused: bool) -> None:
    with on_cpu():
        model = nn.Linear(3, 2).cuda()
        optimizer = torch.optim.Adam(
            model.parameters(), fused=fused
        )  # asks the accelerator whether a graph is captured
        before = model.weight.clone()
        model(X.cuda()).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)


def test_there_is_no_accelerator_beside_the_device_and_nothing_to_wait_for() -> None:
    with on_cpu():
        assert torch.accelerator.current_accelerator() is None
        assert torch.accelerator.current_accelerator(check_available=True) is None
        assert not torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 0
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().synchronize()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0, "cpu"])
def test_generators(device: Any) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    with on_cpu():
        generator = torch.Generator(device=device).manual_seed(7)
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        assert not isinstance(7, torch.Generator)
        assert torch.equal(torch.rand(3, generator=generator, device="cuda"), expected)
    assert isinstance(generator, torch.Generator)
    with on_cpu():
        assert torch.Generator().device.type == torch.Generator(device).device.type == "cpu"


def test_pinned_batches_of_workers() -> None:
    loader: Any = torch.utils.data.DataLoader([*range(4)], 2, num_workers=1, pin_memory=True)
    with on_cpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")
        assert [batch.cuda(non_blocking=True).tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_default_devices() -> None:
    with on_cpu():
        torch.set_default_device("cuda")
        assert torch.ones(1).device.type == "cpu"
        torch.set_default_device(None)
        with torch.device("cuda"):
            assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize(
    "where",
    [None, "cuda:0", torch.device("cuda"), lambda storage, place: storage.cuda(), {"cuda:0": "cuda:1"}],
)
def test_checkpoints_are_loaded_to_the_cpu(where: Any) -> None:
    file = io.BytesIO()
    torch.save({"x": X}, file)
    file.seek(0)
    with on_cpu():
        assert torch.equal(torch.load(file, map_location=where, weights_only=True)["x"], X)


def test_wrappers_call_the_module() -> None:
    model = nn.Linear(3, 2)
    with on_cpu():
        parallel = nn.DataParallel(model, device_ids=[0, 1]).cuda()
        assert torch.equal(parallel(X.cuda()), model(X))
        assert list(parallel.state_dict()) == ["module.weight", "module.bias"]


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float16), (torch.bfloat16, torch.bfloat16)])
def test_autocast_and_its_scaler(dtype: torch.dtype | None, expected: torch.dtype) -> None:
    model = nn.Linear(3, 2)
    with on_cpu():
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cuda", dtype=dtype):
            out = model(X)
        assert out.dtype is expected
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.autocast("cpu"):
            assert model(X).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_process_groups(backend: str | None, tmp_path: Any) -> None:
    place: dict[str, Any] = {"init_method": f"file://{tmp_path}/start", "rank": 0, "world_size": 1}
    with on_cpu():
        dist.init_process_group(backend, **place)
        try:
            assert dist.get_backend() == ("gloo" if backend else "undefined")
            group = dist.new_group([0], backend="nccl")
            x = torch.ones(1).cuda()
            dist.all_reduce(x, group=group)
            model = nn.Linear(1, 1).cuda()
            parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
            parallel(x).sum().backward()
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_afterwards_as_it_was(fails: bool) -> None:
    before = process_state()
    try:
        with on_cpu():
            assert changes(before)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert not changes(before)
