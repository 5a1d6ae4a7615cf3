"""doctor: short runs at each level from the same start, and which level they speak for."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ConfigTypeError, LossScaleCollapse
from halfpeak.core.levels import LEVELS, LevelName, get_level
from halfpeak.core.optimizer_state import params_of
from halfpeak.engine.diagnosis.diagnose import diagnose
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import prepare
from halfpeak.insight.checkup import Checkup, Probe
from halfpeak.ops.foreach import gradients_of
from halfpeak.state import random_state
from halfpeak.state.clip import Clip

Loss = Callable[[Any, Any], Tensor]
"""From the model and a batch to the loss."""

Progress = Callable[[str, int, int], object]
"""Told what runs, how many of its steps are done, and of how many."""

OTHER_SEEDS: Final = (1, 2)
"""Of the float32 runs that say how far apart two good runs are."""

LEAST_SHARE: Final = 0.01
"""Of the loss: what is nearer to float32's is the same, however near other seeds are."""

MOST_SKIPPED: Final = 0.15
"""Share of skips in the second half of a run that a level may have."""

MOST_LOST: Final = 0.25
"""Share of gradient elements that vanish, or of weights that an update leaves as they are, beyond float32's own."""

MOST_KEPT: Final = 3
"""Layers that are tried in float32 at a level that overflows."""

CLOSE: Final = 2.0
"""Good levels that take no more than so many times the shortest time are timed again: other work disturbs a run."""

ROUNDS: Final = 4
"""How often."""

MUCH_FASTER: Final = 0.9
"""A level takes another's place where it takes less than this share of its time."""

SAFEST: Final = ("O0", "O4", "O5", "O1", "O2", "O3")
"""The levels, the one that is nearest to float32 first; of two that are equally fast the first is taken."""


def doctor(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]],
    batches: Iterable[Any],
    loss: Loss | Sequence[Loss],
    *,
    steps: int = 50,
    levels: Sequence[str] = tuple(LEVELS),
    clip: Clip | float | None = None,
    progress: Progress | None = None,
) -> Checkup:
    """Train a little at each level and say which one to use, and why.

    ::

        float32, from three seeds   how far apart the losses of good runs are
        each level, from the first  losses, skips, time per step, memory, gradients and updates that vanish
        overflow at a level         halfpeak.diagnose names the layer; again with it in float32
        close levels                again, in turn, for the time alone
        choice                      of the levels that train as float32 does, one that no other beats by 10 % in time

    A level trains as float32 does where, over the last quarter of its steps, its mean loss is no more above float32's than that
    from another seed differs from it, or than 1 %; of several losses, neither above nor below. It must skip at most 15 % of
    the steps of its second half, and no more than a quarter of gradient elements or updates may vanish.

    Time is what this machine took for its fastest step; processor time on a CPU with one thread, which other programs do not
    disturb. Nothing of the caller's changes: random generators are put back, and models are copies of what ``make_model``
    returns. An iterator is read for ``steps`` batches, though.

    Args:
        make_model: returns the model, on its device, in float32.
        make_optimizer: from the model to its optimizer, or to several.
        batches: such as a data loader; its first ``steps`` are used, again and again where there are fewer.
        loss: from model and batch to the loss; with several optimizers one for each, taken in turn.
        steps: per run.
        levels: that are tried.
        clip: as in :func:`halfpeak.prepare`.
        progress: told after each step what runs, how many of its steps are done, and of how many.

    Raises:
        ConfigError: an unknown level, too few steps, or no batch.
        ConfigTypeError: not as many losses as optimizers.

    Example:
        >>> import torch, halfpeak
        >>> x = torch.randn(8, 4)
        >>> found = halfpeak.doctor(
        ...     lambda: torch.nn.Linear(4, 1),
        ...     lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ...     [(x, x.sum(1, keepdim=True))],
        ...     lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1]),
        ...     steps=8,
        ...     levels=["O0"],
        ... )
        >>> found.line
        "engine = halfpeak.prepare(model, optimizer, 'O0')"
    """
    for level in levels:
        get_level(level)
    if steps < 8:
        raise ConfigError(f"steps={steps!r} is too few to tell; write steps=50")
    losses = [loss] if callable(loss) else list(loss)
    with _own_random_numbers():
        first = list(islice(batches, steps))
        if not first:
            raise ConfigError(
                "batches is empty; an iterator can be read once, so write a list or a data loader"
            )
        task = _Task(
            make_model, make_optimizer, list(islice(cycle(first), steps)), losses, clip, progress or _silent
        )
        plain = task.run("O0", 0)
        others = [task.run("O0", seed) for seed in OTHER_SEEDS]
        spreads = [
            max(
                *(abs(other.finals[i] - final) for other in others),
                LEAST_SHARE * abs(final),
            )
            for i, final in enumerate(plain.finals)
        ]
        probes = [
            _judged(plain if level == "O0" else _with_layers_kept(task, level), plain, spreads)
            for level in dict.fromkeys(levels)
        ]
        probes = _timed_again(task, probes)
    return _choose(probes, _judged(plain, plain, spreads), spreads)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What one run was; ``finals`` are the mean losses of its last quarter, one per loss."""

    probe: Probe
    """Not compared with float32's yet."""
    finals: tuple[float, ...] = ()
    late_skips: float = 0.0
    culprit: str = ""
    trouble: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Task:
    """What is trained."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]]
    batches: Sequence[Any]
    losses: Sequence[Loss]
    clip: Clip | float | None
    progress: Progress

    def run(self, level: str, seed: int, keep_fp32: tuple[str, ...] = ()) -> _Run:
        """Train; what a level cannot do is told in the result, what float32 cannot is raised."""
        torch.manual_seed(seed)
        model = copy.deepcopy(self.make_model())
        made = self.make_optimizer(model)
        optimizers = [made] if isinstance(made, Optimizer) else list(made)
        if len(optimizers) != len(self.losses):
            raise ConfigTypeError(
                f"{len(self.losses)} losses and {len(optimizers)} optimizers; give a loss for each optimizer"
            )
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine = prepare(
                    model,
                    optimizers,
                    cast("LevelName", level),
                    num_losses=len(optimizers),
                    clip=self.clip,
                    keep_fp32=keep_fp32,
                    on_skip=None,
                )
                notes = [str(one.message).partition(",")[0] for one in caught]
                run = self._train(engine, model, self._order(seed), keep_fp32)
                return replace(run, note=next((f": {note}" for note in notes if " is 0 in " in note), ""))
        except (LossScaleCollapse, RuntimeError, TypeError, ValueError) as error:
            if level == "O0" and not isinstance(error, LossScaleCollapse):
                raise
            probe = Probe(level=level, keep_fp32=keep_fp32)
            return _Run(probe=probe, trouble=str(error).partition("\n")[0])

    def _order(self, seed: int) -> list[Any]:
        """The batches; from another seed in another order, but for the last quarter, over which losses are compared."""
        last = len(self.batches) - _quarter(len(self.batches))
        numbers = list(range(last))
        if seed:
            numbers = torch.randperm(last, generator=torch.Generator().manual_seed(seed)).tolist()
        return [*(self.batches[number] for number in numbers), *self.batches[last:]]

    def _train(self, engine: Engine, model: nn.Module, batches: Sequence[Any], keep: tuple[str, ...]) -> _Run:
        level = engine.config.properties.opt_level or "O0"
        histories: list[list[float]] = [[] for _ in self.losses]
        seconds: list[float] = []
        skips: list[bool] = []
        vanished = unmoved = 0.0
        bad: tuple[Loss, Any] | None = None
        clock = _clock(engine.device)
        for step, batch in enumerate(batches):
            began = clock()
            values: list[Tensor] = []
            skipped = False
            is_last = step == len(batches) - 1
            for number, (loss, optimizer) in enumerate(zip(self.losses, engine.optimizers, strict=True)):
                with engine.forward():
                    value = loss(model, batch)
                engine.backward(value, loss_id=number, optimizers=optimizer)
                before = _Before(engine, optimizer) if is_last else None
                result = engine.step(optimizers=optimizer)
                stepped = result.stepped()
                if before is not None and stepped:
                    vanished, unmoved = max(vanished, before.vanished), max(unmoved, before.unmoved())
                if not stepped:
                    skipped = True
                    bad = loss, batch
                values.append(value.detach())
            _wait_for(engine.device)
            if not skipped:
                seconds.append(clock() - began)
            skips.append(skipped)
            for history, value in zip(histories, values, strict=True):
                history.append(float(value))
            self.progress(level, step + 1, len(batches))
        late = skips[len(skips) // 2 :]
        finals = tuple(statistics.fmean(history[-_quarter(len(batches)) :]) for history in histories)
        goes_wrong = sum(late) / len(late) > MOST_SKIPPED or not all(map(math.isfinite, finals))
        probe = Probe(
            level=level,
            losses=tuple(histories[0]),
            final=finals[0],
            skipped=sum(skips),
            seconds=min(seconds, default=math.nan),
            bytes_per_parameter=engine.memory().per_parameter()["total"],
            vanished=vanished,
            unmoved=unmoved,
            keep_fp32=keep,
        )
        return _Run(
            probe=probe,
            finals=finals,
            late_skips=sum(late) / len(late),
            culprit=_culprit(engine, model, bad) if goes_wrong and bad is not None else "",
        )


class _Before:
    """An optimizer's weights and gradients before a step."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        engine.unscale()
        stepped = params_of(optimizer)
        grads = gradients_of(stepped)
        pairs = [(p, g) for p, g in zip(stepped, grads, strict=True) if g is not None and not g.is_sparse]
        self._weights = [(p, p.detach().clone(), g != 0) for p, g in pairs]
        self._count = max(sum(g.numel() for _, g in pairs), 1)
        self.vanished = 1 - sum(int(moves.sum()) for *_, moves in self._weights) / self._count

    def unmoved(self) -> float:
        """The share of weights that have a gradient, and that the step has left where they were."""
        still = sum(int(((p.detach() == was) & moves).sum()) for p, was, moves in self._weights)
        return still / self._count


def _with_layers_kept(task: _Task, level: str) -> _Run:
    """A run at a level; where it overflows, again with the layers in float32 that are to blame."""
    found = task.run(level, 0)
    while found.culprit and found.culprit not in (kept := found.probe.keep_fp32) and len(kept) < MOST_KEPT:
        found = task.run(level, 0, (*kept, found.culprit))
    return found


def _culprit(engine: Engine, model: nn.Module, bad: tuple[Loss, Any]) -> str:
    """The layer that overflows on a batch and that float32 would help; empty if there is none."""
    loss, batch = bad
    try:
        report = diagnose(engine, lambda: loss(model, batch))
    except Exception:
        return ""
    return report.module if report.reason == "overflow" and report.where in ("forward", "weight") else ""


def _judged(run: _Run, plain: _Run, spreads: Sequence[float]) -> Probe:
    """What speaks against a level; nothing, where it trains as float32 does."""
    above = [
        (final - reference) / spread if spread else 0.0
        for final, reference, spread in zip(run.finals, plain.finals, spreads, strict=False)
    ]
    distance = max(map(abs, above) if len(above) > 1 else above, default=math.nan)
    vanished = max(run.probe.vanished - plain.probe.vanished, 0.0)
    unmoved = max(run.probe.unmoved - plain.probe.unmoved, 0.0)
    if run.trouble:
        against = run.trouble
    elif not all(map(math.isfinite, run.finals)):
        against = f"its loss is not finite{run.note}"
    elif run.late_skips > MOST_SKIPPED:
        against = f"{run.late_skips:.0%} of its later steps are skipped{run.note}"
    elif distance > 1:
        against = f"its loss is {distance:.1f} times as far from float32's as that of another seed"
    elif vanished > MOST_LOST:
        against = f"{vanished:.0%} of its gradient elements vanish"
    elif unmoved > MOST_LOST:
        against = f"{unmoved:.0%} of its weights do not move: their updates are rounded away"
    else:
        against = ""
    return replace(run.probe, distance=distance, vanished=vanished, unmoved=unmoved, against=against)


def _timed_again(task: _Task, probes: Sequence[Probe]) -> list[Probe]:
    shortest = min((probe.seconds for probe in probes if not probe.against), default=0.0)
    close = [probe for probe in probes if not probe.against and probe.seconds <= CLOSE * shortest]
    seconds = {probe.level: probe.seconds for probe in probes}
    for _ in range(ROUNDS if len(close) > 1 else 0):
        for probe in close:
            again = task.run(probe.level, 0, probe.keep_fp32).probe.seconds
            seconds[probe.level] = min(seconds[probe.level], again)
    return [replace(probe, seconds=seconds[probe.level]) for probe in probes]


def _choose(probes: Sequence[Probe], plain: Probe, spreads: Sequence[float]) -> Checkup:
    good = sorted((p for p in probes if not p.against), key=lambda probe: SAFEST.index(probe.level))
    chosen, reason = plain, "no other level trains as float32 does"
    if plain.against:
        reason = f"float32 itself does not train: {plain.against}. See halfpeak.diagnose, and lower the learning rate"
    elif good:
        fastest = min(probe.seconds for probe in good)
        chosen = next(probe for probe in good if fastest >= MUCH_FASTER * probe.seconds)
        reason = _reason(chosen, good, plain)
    return Checkup(
        level=chosen.level,
        keep_fp32=chosen.keep_fp32,
        reason=reason,
        probes=tuple(probes),
        reference=plain,
        spread=spreads[0],
    )


def _reason(chosen: Probe, good: Sequence[Probe], plain: Probe) -> str:
    if chosen.level == "O0":
        return "it is float32, and no level that trains as well takes 10 % less time here"
    times = plain.seconds / chosen.seconds
    rest = [probe.level for probe in good if probe.level != chosen.level]
    among = f"; so do {', '.join(rest)}, which are not 10 % faster" if rest else ""
    return f"it trains as float32 does, at {times:.2f} times its speed here{among}"


@contextmanager
def _own_random_numbers() -> Generator[None]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [
        torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())
    ]  # fmt: skip
    before = random_state.capture(devices)
    try:
        yield
    finally:
        random_state.restore(before)


def _clock(device: torch.device) -> Callable[[], float]:
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _quarter(steps: int) -> int:
    return max(steps // 4, 2)


def _silent(level: str, step: int, steps: int) -> None:
    pass
