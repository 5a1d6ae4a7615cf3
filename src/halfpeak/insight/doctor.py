"""doctor: train briefly at each opt level from the same start, and recommend a level."""

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
"""Called with the name of the running level, the number of finished steps and the number of all steps."""

OTHER_SEEDS: Final = (1, 2)
"""The seeds of further float32 runs, which tell how much the losses of good runs differ."""

LEAST_SHARE: Final = 0.01
"""A share of the loss: a smaller difference from float32 counts as equal, however close other seeds are."""

MOST_SKIPPED: Final = 0.15
"""The largest share of skipped steps in the second half of a run."""

MOST_LOST: Final = 0.25
"""The largest share of vanishing gradient elements, or of weights that an update does not change, beyond float32's."""

MOST_KEPT: Final = 3
"""The largest number of layers that are tried in float32 at a level that overflows."""

CLOSE: Final = 2.0
"""Good levels within this factor of the shortest time are timed again, because other programs disturb a timing."""

ROUNDS: Final = 4
"""The number of times that close levels are timed again."""

MUCH_FASTER: Final = 0.9
"""A less safe level is chosen only if it takes less than this share of a safer level's time."""

SAFEST: Final = ("O0", "O4", "O5", "O1", "O2", "O3")
"""The levels, closest to float32 first. Of two equally fast levels, the first is chosen."""


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
    """Train briefly at each level and recommend a level, with the reason.

    ::

        float32, three seeds        how much the losses of good runs differ
        each level, the first seed  losses, skips, time per step, memory, vanishing gradients and updates
        overflow at a level         halfpeak.diagnose names the layer; run again with the layer in float32
        close levels                run again, in turn, only for the time
        choice                      the safest level that trains as well as float32, unless another takes 10 % less time

    A level trains as well as float32 if its mean loss over the last quarter of the steps exceeds float32's by no more
    than another seed's does, or 1 % if that is more; with several losses, lower ones count, too. At most 15 % of the
    second half's steps may be skipped, and at most a quarter of gradients or updates vanish beyond float32's.

    Time is that of the fastest step on this machine; on a CPU with one thread processor time, which other programs do
    not disturb. Random generators are restored, and models are copies of the results of ``make_model``, so the caller's
    objects do not change; only an iterator is advanced, by ``steps`` batches.

    Args:
        make_model: returns the model, on its device, in float32.
        make_optimizer: from the model to its optimizer, or to several.
        batches: such as a data loader. The first ``steps`` batches are used, repeatedly if there are fewer.
        loss: from model and batch to the loss; with several optimizers, one loss for each, used in turn.
        steps: the number of steps per run.
        levels: the levels to try.
        clip: as in :func:`halfpeak.prepare`.
        progress: see :data:`Progress`; called after each step.

    Raises:
        ConfigError: an unknown level, too few steps, or no batch.
        ConfigTypeError: the numbers of losses and optimizers differ.

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
        repeated = list(islice(cycle(first), steps))
        task = _Task(make_model, make_optimizer, repeated, losses, clip, progress)
        plain = task.run("O0", 0)
        others = [task.run("O0", seed) for seed in OTHER_SEEDS]
        spreads = [
            max(*(abs(other.finals[i] - final) for other in others), LEAST_SHARE * abs(final))
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
    """The result of one run; ``finals`` are the mean losses over its last quarter, one per loss."""

    probe: Probe
    """Still without the comparison with float32."""
    finals: tuple[float, ...] = ()
    late_skips: float = 0.0
    culprit: str = ""
    trouble: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Task:
    """The models, data and losses to train."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]]
    batches: Sequence[Any]
    losses: Sequence[Loss]
    clip: Clip | float | None
    progress: Progress | None

    def run(self, level: str, seed: int, keep_fp32: tuple[str, ...] = ()) -> _Run:
        """Train one run. An exception goes into the result, except at O0, where only a collapsed loss scale does."""
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
        """The batches. Other seeds shuffle them, except for the last quarter, because its losses are compared."""
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
        on_cpu = engine.device.type == "cpu"
        clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
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
            if not on_cpu:
                torch.accelerator.synchronize(engine.device)
            if not skipped:
                seconds.append(clock() - began)
            skips.append(skipped)
            for history, value in zip(histories, values, strict=True):
                history.append(float(value))
            if self.progress is not None:
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
        """The share of weights that have a nonzero gradient and that the step did not change."""
        still = sum(int(((p.detach() == was) & moves).sum()) for p, was, moves in self._weights)
        return still / self._count


def _with_layers_kept(task: _Task, level: str) -> _Run:
    """A run at a level. If layers overflow, it is repeated with these layers in float32."""
    found = task.run(level, 0)
    while found.culprit and found.culprit not in (kept := found.probe.keep_fp32) and len(kept) < MOST_KEPT:
        found = task.run(level, 0, (*kept, found.culprit))
    return found


def _culprit(engine: Engine, model: nn.Module, bad: tuple[Loss, Any]) -> str:
    """The layer that overflows on a batch in the forward pass or in a weight; empty if there is none."""
    loss, batch = bad
    try:
        report = diagnose(engine, lambda: loss(model, batch))
    except Exception:
        return ""
    return report.module if report.reason == "overflow" and report.where in ("forward", "weight") else ""


def _judged(run: _Run, plain: _Run, spreads: Sequence[float]) -> Probe:
    """The probe of a run, compared with float32; ``against`` stays empty if the run trains as well as float32."""
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
    others = sorted(probe.level for probe in good if probe.level != chosen.level)
    among = f"; none of the others that do ({', '.join(others)}) is 10 % faster" if others else ""
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


def _quarter(steps: int) -> int:
    return max(steps // 4, 2)
