"""``halfpeak doctor``: trains briefly at each opt level and recommends one."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfpeak.cli.arguments import Arguments
from halfpeak.cli.text import console
from halfpeak.core.errors import ConfigError
from halfpeak.core.levels import LEVELS
from halfpeak.insight.checkup import require_writable
from halfpeak.insight.doctor import Progress, doctor
from halfpeak.recipes.base import Batch, score
from halfpeak.recipes.catalog import build_config, build_recipe, complete
from halfpeak.recipes.device import find_device
from halfpeak.recipes.optimizers import build_optimizer
from halfpeak.recipes.settings import RECIPES

_DESCRIPTION = """Train a little at each level from the same start, and say which one to use here and why.

TASK is a recipe of halfpeak train, or FILE.py:FUNCTION: a function without arguments that returns what
halfpeak.doctor takes first: make_model, make_optimizer, batches, loss."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Arguments("doctor", _DESCRIPTION)
    parser.add_argument("task", metavar="TASK", help=f"{', '.join(RECIPES)}, or FILE.py:FUNCTION")
    parser.add_argument("--steps", type=int, default=50, metavar="INT", help="of each run (default: 50)")
    parser.add_argument("--levels", default=",".join(LEVELS), metavar="O0,O2", help="to try (default: all)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="of a recipe (default: auto)")
    parser.add_argument("--save", action="append", default=[], metavar="PATH", help=".html, .png or .json")
    given = parser.parse_args(arguments)
    paths = list(map(require_writable, given.save))
    task = _recipe(given.task, given.device, given.steps) if given.task in RECIPES else _own(given.task)
    with _progress() as progress:
        found = doctor(*task, steps=given.steps, levels=given.levels.split(","), progress=progress)
    sys.stdout.write(f"{found}\n")
    for path in paths:
        found.save(path)
    return 0


def _recipe(name: str, device: str, steps: int) -> tuple[Any, ...]:
    """A recipe as the arguments of :func:`halfpeak.doctor`."""
    place = find_device(device)
    config = build_config({"recipe": name, "steps": max(steps, 1), "level": "O0"})
    recipe = build_recipe(config, place)
    config, sampler = complete(config, recipe)

    def make_optimizer(model: nn.Module) -> Any:
        return build_optimizer(config, model, steps_low=False)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return score(model(batch.inputs), batch.targets).loss

    batches = (recipe.batch(sampler.indices(step)) for step in range(steps))
    return lambda: recipe.model().to(place), make_optimizer, batches, loss


def _own(task: str) -> tuple[Any, ...]:
    """The arguments of :func:`halfpeak.doctor` that the function in a user's file returns.

    Raises:
        ConfigError: there is no such file or function, or the function does not return a tuple of four.
    """
    file, _, function = task.rpartition(":")
    if not file or not Path(file).is_file():
        raise ConfigError(
            f"{task!r} is neither a recipe ({', '.join(RECIPES)}) nor FILE.py:FUNCTION with an existing file; write a "
            "recipe, or train.py:task for the function task in the file train.py"
        )
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        make = runpy.run_path(file, run_name="halfpeak.doctor").get(function)
        if not callable(make):
            raise ConfigError(f"{file} has no function {function!r}; write {file}:NAME with one that it has")
        made = make()
    finally:
        sys.path.pop(0)
    if not isinstance(made, tuple) or len(made) != 4:
        raise ConfigError(f"{task} must return (make_model, make_optimizer, batches, loss), not {made!r:.80}")
    return made


@contextmanager
def _progress() -> Generator[Progress]:
    """Progress on stderr: bars if it is a terminal and rich is installed; else a line when a run begins."""
    terminal = console(sys.stderr)
    if terminal is None:

        def tell(what: str, done: int, most: int) -> None:
            if done == 1:
                sys.stderr.write(f"{what} ...\n")

        yield tell
        return
    from rich.progress import Progress as Bar

    with Bar(console=terminal, transient=True) as bar:
        shown: dict[str, Any] = {}

        def update(what: str, done: int, most: int) -> None:
            if done == 1 or what not in shown:
                shown[what] = bar.add_task(what, total=most)
            bar.update(shown[what], completed=done)

        yield update
