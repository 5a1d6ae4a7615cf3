"""Every test has fixed seeds and one thread, and must leave the process-wide settings of torch as it found them."""

from __future__ import annotations

import atexit
import gc
import os
import random
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from halfpeak.amp.session import _amp_state

torch.set_num_threads(1)

if "PYTEST_XDIST_WORKER" in os.environ:
    # After the handlers registered later. Triton would otherwise list as leaks what pytest_unconfigure leaves frozen.
    atexit.register(os._exit, 0)

if not torch.cuda.is_available():
    # Triton and torch's compiler read it when they are imported, so it is set before.
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:
    # torch reads it at the first matrix product of the process, and later tests may ask for deterministic results.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if not torch.accelerator.is_available():
    # torch.manual_seed() would queue a call, with its stack trace, for each kind of device that may come later.
    for kind in (torch.cuda, torch.mtia, torch.xpu):
        kind.manual_seed_all = int


def pytest_configure(config: pytest.Config) -> None:
    """Write yapf's grammar, which mmengine reads, into its cache before any worker reads the cache.

    yapf 0.43 creates the file before it fills it, so a second process may read an empty file (EOFError).
    """
    if not hasattr(config, "workerinput"):
        import yapf  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the collected tests, which stay alive: the garbage collector, which tests also call, then skips them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Unfreeze them; not in a worker, which would take seconds to free what ends with the process."""
    if not hasattr(config, "workerinput"):
        gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need an accelerator on a machine that has none."""
    if torch.accelerator.is_available():
        return
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=needy)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def process_left_as_found(fixed_seeds: None) -> Iterator[None]:
    before = global_torch_state()
    yield
    # Casts of amp.initialize(opt_level="O1") end with its models, which a failed test may keep alive.
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    _amp_state.__init__()
    assert global_torch_state() == before


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile with nothing compiled yet, and its counters at zero."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def global_torch_state() -> dict[str, object]:
    """Every process-wide setting of torch that mixed precision could leave changed."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }
