"""Every context manager restores what it changed when its body raises, also when it is entered twice."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from halfpeak import amp
from halfpeak.casting.casts import DeviceCasts, OpCasts, disable_casts
from laws.drivers import Case
from laws.source import modules, require_none

ELSEWHERE: dict[tuple[str, str], str] = {
    ("amp/larc.py", "_without_decay"): "tests/amp",
    ("checkpoint/read.py", "open_regular"): "tests/checkpoint",
    ("checkpoint/read.py", "refusing"): "tests/checkpoint",
    ("casting/float8.py", "without_float8"): "tests/casting",
    ("checkpoint/temporary.py", "temporary"): "tests/checkpoint",
    ("checkpoint/temporary.py", "replacing"): "tests/migrate",
    ("checkpoint/temporary.py", "temporary_folder"): "tests/checkpoint",
    ("cli/doctor.py", "_progress"): "tests/cli",
    ("cli/interrupt.py", "Interrupt"): "tests/cli",
    ("cli/progress.py", "progress"): "tests/cli",
    ("cli/script.py", "as_started"): "tests/shim",
    ("distributed/launched.py", "joined"): "tests/distributed",
    ("distributed/optimizer_state.py", "left_out"): "tests/integrations",
    ("diagnosis/subject.py", "computing"): "tests/engine",
    ("diagnosis/subject.py", "_without_casts"): "tests/engine",
    ("diagnosis/subject.py", "_converted"): "tests/engine",
    ("diagnosis/replay.py", "stand_ins"): "tests/engine",
    ("diagnosis/replay.py", "undisturbed"): "tests/engine",
    ("diagnosis/replay.py", "_without_synchronisation"): "tests/engine",
    ("diagnosis/trace.py", "watching"): "tests/engine",
    ("engine/cuda_graph.py", "_on_side_stream"): "tests/engine",
    ("engine/cuda_graph.py", "_recording"): "tests/engine",
    ("engine/cuda_graph.py", "_as_before"): "tests/engine",
    ("parts/replicas.py", "synchronising"): "tests/distributed",
    ("parts/step_hooks.py", "passing_found_inf"): "tests/engine",
    ("optim/wrapper.py", "optim_context"): "tests/optim",
    ("optim/wrapper.py", "_reducing"): "tests/distributed",
    ("optim/amp_wrapper.py", "optim_context"): "tests/optim",
    ("optim/amp_wrapper.py", "_autocast"): "tests/optim",
    ("optim/apex_wrapper.py", "optim_context"): "tests/optim",
    ("integrations/engine_adapter.py", "scaled"): "tests/integrations",
    ("insight/doctor.py", "_own_random_numbers"): "tests/insight",
    ("integrations/accelerate.py", "trigger_sync_in_backward"): "tests/integrations",
    ("core/extras.py", "needs_extra"): "tests/core",
    ("recipes/device.py", "repeatable"): "tests/cli",
    ("recipes/device.py", "threads"): "tests/cli",
    ("runner/hook.py", "nested"): "tests/runner",
    ("shim/cuda_on_cpu.py", "Stream"): "tests/shim",
    ("shim/cuda_on_cpu.py", "on_cpu"): "tests/shim",
    ("shim/spawn.py", "emulating"): "tests/shim",
}
"""File and name of context managers that change no state of training, and where they are tested."""

HERE = {
    ("amp/ambient.py", "disable_casts"),
    ("amp/handle.py", "scale_loss"),
    ("engine/engine.py", "forward"),
    ("engine/engine.py", "scaled"),
    ("parts/parts.py", "replay"),
    ("engine/step.py", "dropping_window_on_error"),
    ("parts/scaled_pass.py", "ScaledPass"),
    ("casting/casts.py", "OpCasts"),
    ("casting/casts.py", "DeviceCasts"),
    ("casting/casts.py", "casts_on"),
    ("casting/suspend.py", "disable_casts"),
    ("casting/scope.py", "without_casts"),
}
"""File and name of those that the cases of CONTEXTS enter."""


class Failure(Exception):
    pass


def begun(driver: str, level: str) -> Any:
    """A run in the middle of an accumulation window."""
    run: Any = Case(driver=driver, level=level, optimizer="sgd", every=2).run()
    run.train(0)
    return run


def seen(run: Any) -> str:
    return repr((run.values(), run.progress(), [parameter.grad for parameter in run.net.parameters()]))


def penalty(run: Any) -> torch.Tensor:
    return torch.stack([parameter.float().square().sum() for parameter in run.net.parameters()]).sum()


CONTEXTS: dict[str, tuple[str, str, Callable[[Any], AbstractContextManager[Any]]]] = {
    "forward O1": ("native", "O1", lambda run: run.engine.forward()),
    "forward O2": ("native", "O2", lambda run: run.engine.forward()),
    "replay O1": ("native", "O1", lambda run: run.engine.parts.replay()),
    "replay O2": ("native", "O2", lambda run: run.engine.parts.replay()),
    "scaled": ("native", "O2", lambda run: run.engine.scaled(penalty(run))),
    "amp.scale_loss O1": ("amp", "O1", lambda run: amp.scale_loss(penalty(run), run.optimizer)),
    "amp.scale_loss O2": ("amp", "O2", lambda run: amp.scale_loss(penalty(run), run.optimizer)),
    "amp.disable_casts O1": ("amp", "O1", lambda run: amp.disable_casts()),
    "OpCasts": ("native", "O1", lambda run: OpCasts(torch.float16)),
    "DeviceCasts": ("native", "O1", lambda run: DeviceCasts("cpu", torch.bfloat16)),
    "disable_casts": ("native", "O1", lambda run: disable_casts()),
}


def fail_inside(run: Any, enter: Callable[[Any], AbstractContextManager[Any]], nested: bool) -> None:
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
    driver, level, enter = CONTEXTS[name]
    run, calm = begun(driver, level), begun(driver, level)
    before = seen(run)
    with pytest.raises(Failure):
        fail_inside(run, enter, nested)
    assert seen(run) == before
    for one in (run, calm):
        one.train(1)
    assert seen(run) == seen(calm)


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
