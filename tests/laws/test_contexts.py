"""Every context manager restores what it changed when its body raises, also when it is entered twice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import halfpeak
from halfpeak import amp
from halfpeak.casting.casts import DeviceCasts, OpCasts, disable_casts
from halfpeak.integrations.engine_adapter import scale_loss
from laws.source import modules, require_none

ELSEWHERE: dict[tuple[str, str], str] = {
    ("amp/larc.py", "_without_decay"): "tests/amp",
    ("amp/init_handle.py", "scale_loss"): "tests/shim",
    ("checkpoint/archives.py", "_opened"): "tests/checkpoint",
    ("casting/float8.py", "without_float8"): "tests/casting",
    ("checkpoint/temporary.py", "temporary"): "tests/checkpoint",
    ("checkpoint/temporary.py", "temporary_folder"): "tests/checkpoint",
    ("cli/doctor.py", "_progress"): "tests/cli",
    ("cli/interrupt.py", "Interrupt"): "tests/cli",
    ("cli/progress.py", "progress"): "tests/cli",
    ("cli/script.py", "as_started"): "tests/shim",
    ("distributed/launched.py", "joined"): "tests/distributed",
    ("engine/diagnosis/diagnose.py", "computing"): "tests/engine",
    ("engine/diagnosis/diagnose.py", "_running"): "tests/engine",
    ("engine/diagnosis/replay.py", "stand_ins"): "tests/engine",
    ("engine/diagnosis/replay.py", "undisturbed"): "tests/engine",
    ("engine/diagnosis/replay.py", "_without_synchronisation"): "tests/engine",
    ("engine/diagnosis/trace.py", "watching"): "tests/engine",
    ("engine/graphs/cuda_graph.py", "_on_side_stream"): "tests/engine",
    ("engine/graphs/cuda_graph.py", "_recording"): "tests/engine",
    ("engine/graphs/cuda_graph.py", "_as_before"): "tests/engine",
    ("engine/sync.py", "synchronising"): "tests/distributed",
    ("optim/wrapper.py", "optim_context"): "tests/optim",
    ("insight/doctor.py", "_own_random_numbers"): "tests/insight",
    ("core/extras.py", "needs_extra"): "tests/core",
    ("recipes/device.py", "repeatable"): "tests/cli",
    ("recipes/device.py", "threads"): "tests/cli",
    ("runner/hook_list.py", "nested"): "tests/runner",
    ("shim/cuda_on_cpu.py", "Stream"): "tests/shim",
    ("shim/cuda_on_cpu.py", "on_cpu"): "tests/shim",
    ("shim/spawn.py", "emulating"): "tests/shim",
}
"""File and name of context managers that change no state of training, and where they are tested."""

HERE = {
    ("amp/ambient.py", "disable_casts"),
    ("amp/handle.py", "scale_loss"),
    ("engine/engine.py", "forward"),
    ("engine/engine.py", "replay"),
    ("engine/step.py", "backward"),
    ("engine/step.py", "_all_or_nothing"),
    ("integrations/engine_adapter.py", "scale_loss"),
    ("casting/casts.py", "OpCasts"),
    ("casting/casts.py", "DeviceCasts"),
    ("casting/casts.py", "casts_on"),
    ("casting/suspend.py", "disable_casts"),
    ("casting/scope.py", "restoring_scopes"),
    ("casting/scope.py", "without_casts"),
}
"""File and name of those that the cases of CONTEXTS enter."""


class Failure(Exception):
    pass


class Run:
    """A small model in the middle of an accumulation window."""

    def __init__(self, level: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.engine = self.prepare(level)
        self.micro_step()

    def prepare(self, level: str) -> halfpeak.Engine:
        return halfpeak.prepare(self.model, self.optimizer, level, accumulate=2)

    def micro_step(self) -> None:
        with self.engine.forward():
            loss = self.loss()
        self.engine.backward(loss)
        self.engine.step()

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(3, 4)).float().square().mean()

    def penalty(self) -> torch.Tensor:
        return torch.stack([parameter.float().square().sum() for parameter in self.model.parameters()]).sum()

    def seen(self) -> str:
        return repr(copy.deepcopy(self.engine.state_dict()))


class AmpRun(Run):
    """The same through ``halfpeak.amp``."""

    def prepare(self, level: str) -> halfpeak.Engine:
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)
        run = amp._amp_state.run_of(self.optimizer)
        assert run is not None
        return run.engine

    def micro_step(self) -> None:
        with amp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()


CONTEXTS: dict[str, tuple[type[Run], str, Callable[[Run], AbstractContextManager[Any]]]] = {
    "forward O1": (Run, "O1", lambda run: run.engine.forward()),
    "forward O2": (Run, "O2", lambda run: run.engine.forward()),
    "replay O1": (Run, "O1", lambda run: run.engine.replay()),
    "replay O2": (Run, "O2", lambda run: run.engine.replay()),
    "scaled": (Run, "O2", lambda run: run.engine.scaled(run.penalty())),
    "scaled in a loop of others": (
        Run,
        "O2",
        lambda run: scale_loss(run.engine, run.penalty(), delay=False),
    ),
    "amp.scale_loss O1": (AmpRun, "O1", lambda run: amp.scale_loss(run.penalty(), run.optimizer)),
    "amp.scale_loss O2": (AmpRun, "O2", lambda run: amp.scale_loss(run.penalty(), run.optimizer)),
    "amp.disable_casts O1": (AmpRun, "O1", lambda run: amp.disable_casts()),
    "OpCasts": (Run, "O1", lambda run: OpCasts(torch.float16)),
    "DeviceCasts": (Run, "O1", lambda run: DeviceCasts("cpu", torch.bfloat16)),
    "disable_casts": (Run, "O1", lambda run: disable_casts()),
}


def fail_inside(run: Run, enter: Callable[[Run], AbstractContextManager[Any]], nested: bool) -> None:
    with enter(run) as value:
        if nested:
            with pytest.raises(Failure):
                fail_inside(run, enter, nested=False)
        if isinstance(value, torch.Tensor):
            value.backward()
        raise Failure


REENTRANT = [(name, True) for name in CONTEXTS if "scale" not in name]


@pytest.mark.parametrize(("name", "nested"), [(name, False) for name in CONTEXTS] + REENTRANT)
def test_an_exception_leaves_no_trace(name: str, nested: bool) -> None:
    """The run goes on, bit for bit, like one that never entered the block."""
    kind, level, enter = CONTEXTS[name]
    run, calm = kind(level), kind(level)
    before = run.seen()
    with pytest.raises(Failure):
        fail_inside(run, enter, nested)
    assert run.seen() == before
    run.micro_step()
    calm.micro_step()
    assert run.seen() == calm.seen()


@pytest.mark.parametrize("outer", [True, False])
def test_leaving_an_inner_scope_leaves_the_outer_one_as_it_was(outer: bool) -> None:
    weight = torch.ones(2, 2)
    with OpCasts(torch.float16) if outer else disable_casts():
        before = (weight @ weight).dtype
        with disable_casts(), OpCasts(torch.bfloat16), disable_casts():
            pass
        assert (weight @ weight).dtype is before is (torch.float16 if outer else torch.float32)


def test_no_context_manager_is_left_out() -> None:
    found = {(module.where, name) for module in modules() for name in context_managers(module.tree)}
    listed = HERE | ELSEWHERE.keys()
    require_none(
        map(str, found - listed),
        "test here that its context is left as it was entered, or name in ELSEWHERE the test that does",
    )
    require_none(map(str, listed - found), "there is no such context manager: delete these rows")


def context_managers(tree: ast.Module) -> Iterator[str]:
    """The names of classes with ``__exit__`` and of generators that contextlib makes context managers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(isinstance(part, ast.FunctionDef) and part.name == "__exit__" for part in node.body):
                yield node.name
        elif isinstance(node, ast.FunctionDef) and any(
            "contextmanager" in ast.unparse(each) for each in node.decorator_list
        ):
            yield node.name
