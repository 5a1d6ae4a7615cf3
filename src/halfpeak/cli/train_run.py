"""A run of ``halfpeak train``, from settings and folder over the training loop to the results."""

from __future__ import annotations

import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfpeak.checkpoint import file as checkpoint
from halfpeak.cli.interrupt import Interrupt
from halfpeak.cli.options import AUTO, Request, read_config
from halfpeak.cli.progress import progress
from halfpeak.cli.run_folder import RunFolder, folder_to_continue, new_folder, write_config
from halfpeak.cli.summary import finish
from halfpeak.cli.text import printable
from halfpeak.core.errors import CheckpointError, ConfigError, LossScaleCollapse
from halfpeak.core.extras import MissingExtraError, needs_extra
from halfpeak.distributed.launched import ALONE, Ranks, joined
from halfpeak.insight.history import History, JsonLines, Sink, TensorBoard
from halfpeak.recipes.catalog import build_config, build_recipe, choose_level, complete
from halfpeak.recipes.device import find_device, repeatable, threads
from halfpeak.recipes.loop import Loop
from halfpeak.recipes.precision import level_of
from halfpeak.recipes.settings import TrainConfig
from halfpeak.recipes.training import Training, require_checkpoint, require_same

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]
Stop = Callable[[], bool]


def run(request: Request) -> int:
    """Train as requested; a first signal stops the run after its current step. Returns the exit status.

    Raises:
        MemoryError: the device is out of memory.
    """
    with needs_extra("sklearn", "matplotlib", "tensorboard"):
        from rich.console import Console
    interrupt = Interrupt()
    try:
        with joined() as ranks:
            console = Console() if ranks.is_first else Console(quiet=True, force_terminal=False)
            finished = train(request, console, interrupt.requested, handlers=interrupt, ranks=ranks)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise MemoryError(f"{reason}. Write a smaller --batch and a larger --accumulate") from None
    return 0 if finished else interrupt.exit_status


def train(
    request: Request,
    console: Console,
    stop: Stop,
    *,
    handlers: AbstractContextManager[Any] | None = None,
    ranks: Ranks = ALONE,
) -> bool:
    """Train as requested until the last step (True), or until ``stop`` returns True after a step (False).

    Args:
        stop: called after each step on each rank; True on one rank stops all ranks.
        handlers: a context for the steps only, because ending the process before or after them loses nothing.
        ranks: the processes that train together. Rank 0 writes all files.

    Raises:
        ConfigError: the request is invalid; nothing was written.
        CheckpointError: the run to continue has no readable checkpoint.
        LossScaleCollapse: the gradients stay non-finite. History and plot are written.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    given = [{} if request.config is None else read_config(request.config), request.values]
    config, saved = build_config(*given), None
    folder = ranks.from_first(lambda: folder_to_continue(request.resume, config.output))
    if folder is not None:
        saved = _load(folder, say)
        config = build_config(saved["plan"], _length(folder), *given)
    with repeatable(config.deterministic), threads(config.threads):
        training, reason = _build(config, say, None if saved is None else saved["plan"], ranks)
        if folder is None or saved is None:
            recipe, level, again = training.config.recipe, training.config.level, request.resume == AUTO
            folder = ranks.from_first(lambda: new_folder(config.output, recipe, level, may_begin_again=again))
            resumed_at = None
        else:
            training.load_state_dict(saved)
            if request.resume == AUTO and training.step >= (training.config.steps or 0):
                say(f"the run in {folder.path} has finished all {training.step} steps")
                return True
            _resume(training, folder, saved, say)
            resumed_at = training.step
        training.config = replace(training.config, output=str(folder.path))
        sinks: list[Sink] = []
        if ranks.is_first:
            write_config(folder.config, {**training.config.values(), "output": None})
            sinks = _sinks(training.config, folder, resumed_at, say)
        history = History(sinks, every=training.config.log_every)
        finished, collapse = False, None
        try:
            with handlers or nullcontext():
                finished = _run(training, folder, history, console, stop)
        except LossScaleCollapse as error:
            collapse = error
        history.close()
        if ranks.is_first:
            finish(training, folder, console, reason)
        if collapse is not None:
            raise collapse
    if not finished:
        say(f"stopped after step {training.step} of {training.config.steps}, saved. Continue with:")
        start = "torchrun ... -m halfpeak" if ranks.has_group else _own_command()
        say(f"  {start} train --resume {shlex.quote(str(folder.path))}")
    return finished


def _own_command() -> str:
    """The command to paste: the path of ``halfpeak`` if it is not on PATH, as under ``make train``."""
    if shutil.which("halfpeak") is None and Path(sys.argv[0]).name == "halfpeak":
        return shlex.quote(sys.argv[0])
    return "halfpeak"


def _build(
    config: TrainConfig, say: Say, saved: Mapping[str, Any] | None, ranks: Ranks
) -> tuple[Training, str | None]:
    """The training for a configuration, after defaults are filled in; the reason for the level if none was given."""
    device = find_device(config.device, ranks)
    if ":" in str(device):
        torch.accelerator.set_device_index(device.index)
    config, reason = choose_level(config, device)
    if saved is not None:
        require_same(saved, config)
    recipe = build_recipe(config, device)
    config, sampler = complete(config, recipe)
    among = f", in {ranks.count} processes" if ranks.count > 1 else ""
    say(f"{config.recipe} at level {config.level} on {device}{among}" + (f": {reason}" if reason else ""))
    if device.type == "cpu" and level_of(config).policy().compute is torch.float16:
        say("note: float16 is 2 to 100 times slower than float32 on a CPU; O4 and O5 (bfloat16) are not")
    return Training(config, recipe, sampler, device, ranks), reason


def _resume(training: Training, folder: RunFolder, saved: Mapping[str, Any], say: Say) -> None:
    """Print how the environment differs from that of the saved run; refuse a run that has no steps left."""
    config = training.config
    if training.step >= (config.steps or 0):
        raise ConfigError(
            f"the run in {folder.path} has finished all {training.step} steps; to continue it, write --steps with a larger "
            "number"
        )
    now = training.environment()
    for name, before in saved["environment"].items():
        if now.get(name) != before:
            say(
                f"note: {printable(name)} was {printable(before)} and is {now.get(name)}; the run goes on, but not bit for bit"
            )
    if config.schedule != "constant" and (config.steps or 0) > (config.schedule_steps or 0):
        say(f"note: the learning rate has fallen by step {config.schedule_steps} and stays there")
    say(f"continuing {folder.path} after step {training.step}")


def _load(folder: RunFolder, say: Say) -> Mapping[str, Any]:
    """The checkpoint of the run in the folder, or the previous one if it is damaged or missing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state = checkpoint.load(folder.checkpoint, fall_back=True)
        except CheckpointError as error:
            raise type(error)(
                f"{error}. There is no earlier checkpoint to go back to; start again: halfpeak train --config "
                f"{shlex.quote(str(folder.config))}"
            ) from None
    for warning in caught:
        say(f"note: {warning.message}")
    return require_checkpoint(state, folder.checkpoint)


def _length(folder: RunFolder) -> Mapping[str, Any]:
    """``steps`` and ``epochs`` in the run's ``config.toml``: they may be newer than those in its checkpoint."""
    try:
        settings = read_config(folder.config)
    except ConfigError:
        return {}
    return {name: value for name, value in settings.items() if name in ("steps", "epochs")}


def _run(training: Training, folder: RunFolder, history: History, console: Console, stop: Stop) -> bool:
    """Take the remaining steps; False if ``stop`` ended the run before its last step."""

    ranks = training.ranks

    def save() -> None:
        state = training.state_dict()
        if ranks.is_first:
            checkpoint.save(folder.checkpoint, state)

    with progress(console, training) as reporter:
        return Loop(training, history, reporter, save=save, stop=lambda: ranks.any(stop())).run() is not None


def _sinks(config: TrainConfig, folder: RunFolder, resumed_at: int | None, say: Say) -> list[Sink]:
    """The sinks for the numbers of each step. A resumed run rewrites those after step ``resumed_at``."""
    sinks: list[Sink] = [JsonLines(folder.metrics, after=resumed_at)]
    if config.tensorboard:
        try:
            sinks.append(TensorBoard(folder.events, after=resumed_at))
        except MissingExtraError as error:
            say(f"no TensorBoard events: {error}")
    return sinks
