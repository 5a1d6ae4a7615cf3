"""A stand-in for a CUDA graph on the CPU: it records operations and launches, and replays them on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfpeak.engine import cuda_graph as engine_capture
from halfpeak.engine.step import Step
from halfpeak.ops.triton import kernels


class Graph(TorchDispatchMode):
    """Records operations and, unlike a CUDA graph, runs them, too. It keeps every tensor, so memory stays in place.

    Raises:
        AssertionError: an operation waits for the device, so a CUDA graph cannot record it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "a graph cannot read a value"
        result = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.notes.append(again)
        return result

    def replay(self) -> None:
        """Run all recorded operations again."""
        with torch.no_grad():
            for again in self.notes:
                again()


def everything_of(run: Step) -> list[Tensor]:
    """Every tensor that a step writes."""
    groups = [group for optimizer in run.parts.optimizers for group in optimizer.param_groups]
    found = [tensor for group in groups for tensor in group["params"]]
    found += [tensor for model in run.parts.models for tensor in (*model.parameters(), *model.buffers())]
    rows = [row for optimizer in run.parts.optimizers for row in optimizer.state.values()]
    found += [value for row in rows for value in row.values() if isinstance(value, Tensor)]
    return [*found, *engine_capture._static_state(run)]


def emulate_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let ``engine.capture`` work on the CPU, with kernels in the interpreter."""
    capture, module = "halfpeak.engine.cuda_graph", kernels()
    recording: list[Graph] = []

    @contextmanager
    def aside(device: torch.device) -> Generator[None]:
        yield

    @contextmanager
    def record(device: torch.device) -> Generator[Graph]:
        graph = Graph()
        recording.append(graph)
        with graph:
            yield graph
        recording.pop()

    def noted(name: str) -> Any:
        launch = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> None:
            # The interpreter runs operations on tensors, which the graph must not record.
            with torch.utils._python_dispatch._disable_current_modes():
                launch(*args, **kwargs)
            for graph in recording:
                graph.notes.append(lambda: launch(*args, **kwargs))

        return run

    for name in ("measure", "control", "update", "norm", "lamb_trust_update"):
        patch.setattr(module, name, noted(name))
    original = engine_capture._record

    def undone(run: Step, *args: Any) -> Any:
        tensors = everything_of(run)
        values = [tensor.detach().clone() for tensor in tensors]
        captured = original(run, *args)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                # A CUDA graph writes nothing while it records. A write through .data leaves the version counter.
                tensor.data.copy_(value)
        return captured

    # The host does not read values of a device, so operations, which a graph replays, do what depends on them.
    for name in ("parts.batch_norm", "parts.loss_scaler", "engine.step"):
        patch.setattr(f"halfpeak.{name}.host_values", lambda *_: None)
    patch.setattr(f"{capture}._record", undone)
    patch.setattr(f"{capture}._on_side_stream", aside)
    patch.setattr(f"{capture}._recording", record)
    patch.setattr(f"{capture}._require_device", lambda device: None)
    patch.setattr("torch.accelerator.synchronize", lambda *_: None)
