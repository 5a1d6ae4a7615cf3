"""``halfpeak train``: plan, folder, training, loop and results put together."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfpeak.checkpoint import file as checkpoint
from halfpeak.cli import ranks
from halfpeak.cli.config_file import read_config, write_config
from halfpeak.cli.interrupt import Interrupt
from halfpeak.cli.options import Request, parse
from halfpeak.cli.progress import progress
from halfpeak.cli.run_folder import RunFolder, existing_folder, new_folder
from halfpeak.cli.summary import finish
from halfpeak.cli.train_runner import RunnerJob, Settled
from halfpeak.core.errors import CheckpointError, ConfigError, LossScaleCollapse
from halfpeak.insight.events import TensorBoard
from halfpeak.insight.extras import MissingExtraError, needs
from halfpeak.insight.history import History, JsonLines, Sink
from halfpeak.insight.suitable import slow_float16
from halfpeak.recipes.catalog import draft, find_recipe, measure, settle
from halfpeak.recipes.device import environment, find_device, repeatable, threads
from halfpeak.recipes.driver import properties
from halfpeak.recipes.loop import Loop
from halfpeak.recipes.plan import Plan
from halfpeak.recipes.runner_job import check_ranks
from halfpeak.recipes.training import Training, require_checkpoint, require_same
from halfpeak.recipes.wrapper_driver import drive

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]
Stop = Callable[[], bool]


class Origin(NamedTuple):
    """A run to continue: its folder, and its checkpoint."""

    folder: RunFolder
    state: Mapping[str, Any]


class Start(NamedTuple):
    """A training that is ready to go on, and where it writes."""

    training: Training
    folder: RunFolder
    reason: str | None
    after: int | None


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    request = parse(arguments)
    with needs("cli"):
        from rich.console import Console
    with Interrupt() as interrupt:
        finished = train(request, Console(quiet=not ranks.is_first()), interrupt.requested)
    return 0 if finished else interrupt.exit_status


def train(request: Request, console: Console, stop: Stop) -> bool:
    """Train as requested until the last step, or until ``stop`` says so after a step.

    Returns:
        Whether the last step was reached.

    Raises:
        ConfigError: the request makes no sense; nothing was written.
        CheckpointError: the run to continue has no readable checkpoint.
        LossScaleCollapse: the gradients stay non-finite. History and picture are written.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    given = [{} if request.config is None else read_config(request.config), request.values]
    plan, origin = draft(*given), None
    if request.resume is not None:
        origin = _origin(existing_folder(request.resume, plan.output), say)
        plan = draft(origin.state["plan"], _length(origin.folder), *given)
    check_ranks(plan, ranks.count())
    with repeatable(plan.deterministic), threads(plan.threads):
        if plan.runner is not None:
            with ranks.processes(plan.device):
                return _run_runner(plan, origin, console, say, stop)
        start = _begin(plan, say) if origin is None else _resume(plan, origin, say)
        return _run(start, console, say, stop)


def _begin(plan: Plan, say: Say) -> Start:
    training, reason = _build(plan, say)
    folder = new_folder(plan.output, training.plan.recipe, training.plan.level)
    return Start(training, folder, reason, None)


def _resume(plan: Plan, origin: Origin, say: Say) -> Start:
    folder, state = origin
    training, reason = _build(plan, say, saved=state["plan"])
    training.load_state_dict(state)
    plan = training.plan
    if training.step >= (plan.steps or 0):
        raise ConfigError(
            f"the run in {folder.path} is over: it took its {training.step} steps. Write --steps with a larger number to "
            "go on"
        )
    now = environment(training.device)
    for name, before in state["environment"].items():
        if now.get(name) != before:
            say(f"note: {name} was {before} and is {now.get(name)}; the run goes on, but not bit for bit")
    if plan.schedule != "constant" and (plan.steps or 0) > (plan.schedule_steps or 0):
        say(f"note: the learning rate has fallen by step {plan.schedule_steps} and stays there")
    say(f"continuing {folder.path} after step {training.step}")
    return Start(training, folder, reason, training.step)


def _build(plan: Plan, say: Say, *, saved: Mapping[str, Any] | None = None) -> tuple[Training, str | None]:
    """The training of a plan, and the reason for its level where nobody asked for one."""
    plan, recipe, order, device, _, reason = _settle(plan, say, saved)
    return Training(plan, recipe, order, device, drive), reason


def _settle(plan: Plan, say: Say, saved: Mapping[str, Any] | None) -> Settled:
    """Decide what the plan leaves open."""
    device = find_device(plan.device)
    if ":" in plan.device:
        torch.accelerator.set_device_index(device.index)
    plan, reason = settle(plan, device)
    if saved is not None:
        require_same(saved, plan)
    recipe = find_recipe(plan.recipe).build(plan, device)
    epochs = plan.epochs
    plan, order = measure(plan, recipe)
    say(f"{plan.recipe} at level {plan.level} on {device}" + (f": {reason}" if reason else ""))
    slow = slow_float16(device, uses_float16=properties(plan).policy().compute is torch.float16)
    if slow is not None:
        say(f"note: {slow}")
    return Settled(plan, recipe, order, device, epochs, reason)


def _origin(folder: RunFolder, say: Say) -> Origin:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state = checkpoint.load(folder.checkpoint, fall_back=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. There is no earlier checkpoint to go back to; start again: halfpeak train --config "
                f"{shlex.quote(str(folder.config))}"
            ) from None
    for warning in caught:
        say(f"note: {warning.message}")
    # A runner keeps in meta what the loop keeps at the top.
    meta = state.get("meta")
    return Origin(folder, require_checkpoint(meta if isinstance(meta, dict) else state, folder.checkpoint))


def _length(folder: RunFolder) -> Mapping[str, Any]:
    """The length that the run was last given: its checkpoint may be from before it was made longer."""
    try:
        settings = read_config(folder.config)
    except ConfigError:
        return {}
    return {name: value for name, value in settings.items() if name in ("steps", "epochs")}


def _run(start: Start, console: Console, say: Say, stop: Stop) -> bool:
    training, folder = start.training, start.folder
    training.plan = replace(training.plan, output=str(folder.path))
    write_config(folder.config, {**training.plan.values(), "output": None})
    history = History(_sinks(training.plan, folder, start.after, say), every=training.plan.log_every)

    def save() -> None:
        checkpoint.save(folder.checkpoint, training.state_dict())

    try:
        with progress(console, training) as reporter:
            finished = Loop(training, history, reporter, save=save, stop=stop).run() is not None
    except LossScaleCollapse:
        history.close()
        finish(training, folder, console, start.reason)
        raise
    history.close()
    finish(training, folder, console, start.reason)
    if not finished:
        path = shlex.quote(str(folder.path))
        say(f"stopped after step {training.step} of {training.plan.steps}, saved. Continue with:")
        say(f"  halfpeak train --resume {path}")
    return finished


def _run_runner(plan: Plan, origin: Origin | None, console: Console, say: Say, stop: Stop) -> bool:
    settled = _settle(plan, say, None if origin is None else origin.state["plan"])
    plan, is_first = settled.plan, ranks.is_first()
    folder = _shared_folder(settled) if origin is None else origin.folder
    job = RunnerJob(settled, folder, say)
    if origin is not None:
        job.resume(origin.state)
        say(f"continuing {folder.path} after step {job.step}")
    sinks: list[Sink] = []
    if is_first:
        write_config(folder.config, {**job.kept.values(), "output": None})
        sinks = _sinks(plan, folder, None if origin is None else job.step, say)

    def close() -> None:
        if is_first:
            finish(job, folder, console, settled.reason)

    try:
        with progress(console, job, lines=False) as reporter:
            finished = job.run(sinks, stop, reporter)
    except LossScaleCollapse:
        close()
        raise
    close()
    if not finished:
        say(f"stopped after step {job.step} of {plan.steps}, saved. Continue with:")
        say(f"  halfpeak train --resume {shlex.quote(str(folder.path))}")
    return finished


def _shared_folder(settled: Settled) -> RunFolder:
    """A new folder, which the first process makes for all."""
    plan = settled.plan
    path = str(new_folder(plan.output, plan.recipe, plan.level).path) if ranks.is_first() else ""
    return RunFolder(Path(ranks.from_first(path, settled.device)))


def _sinks(plan: Plan, folder: RunFolder, after: int | None, say: Say) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(folder.metrics, after=after)]
    if plan.tensorboard:
        try:
            sinks.append(TensorBoard(folder.events, after=after))
        except MissingExtraError as error:
            say(f"no TensorBoard events: {error}")
    return sinks
