"""doctor: train briefly at each opt level from the same start, and recommend a level."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigError, ConfigTypeError, LossScaleCollapse
from halfpeak.core.levels import LEVELS, LevelName, get_level
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.suitable import SAFEST, first_choice, has_matrix_units, suitable_level
from halfpeak.diagnosis.diagnose import diagnose
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import prepare
from halfpeak.insight.checkup import Checkup, Probe
from halfpeak.insight.machine import device_name, versions
from halfpeak.insight.timing import Ratio, Timer, compare
from halfpeak.ops.foreach import gradients_of
from halfpeak.parts import random_state
from halfpeak.parts.clip import Clip

Loss = Callable[[Any, Any], Tensor]
"""From the model and a batch to the loss."""

Progress = Callable[[str, int, int], object]
"""Called with what runs, such as ``"training at O1"``, the number of finished steps or pairs, and their largest number."""

OTHER_SEEDS: Final = (1, 2)
"""The seeds of further float32 runs, which tell how much the losses of good runs differ."""

LEAST_SHARE: Final = 0.01
"""A share of the loss: a smaller difference from float32 counts as equal, however close other seeds are."""

MOST_SKIPPED: Final = 0.15
"""The largest share of skipped steps in the second half of a run."""

MOST_LOST: Final = 0.25
"""The largest share of gradient elements that underflow, or of weights that an update does not change, beyond float32's."""

MOST_REPEATED: Final = 3
"""The largest number of times that a run which overflows is repeated, with more layers in float32."""

WARM_UP: Final = 20
"""The number of steps before the first that is timed."""

ALONE: Final = "no other level trains as float32 does"
"""The reason for float32 if nothing is left to compare it with."""

WORTH: Final = 0.9
"""A level is preferred for its speed only if it surely takes less than this share of the other's time."""

BLOCK: Final = 0.02
"""Steps are timed in blocks of at least so many seconds."""

MOST_SAVED: Final = 2.0
"""Half the bits are moved and computed at most twice as fast. A larger speedup over float32 is not believed."""

MOST_SAVED_BY_UNITS: Final = 24.0
"""Units for products of 16-bit matrices are up to 16 times as fast as float32, or a little faster on the newest."""


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
    """Train briefly at each level from the same start and recommend a level; ``docs/doctor.md`` has the rule.

    Random generators are restored, and models are copies of the results of ``make_model``, so the caller's objects do
    not change; only an iterator is advanced, by ``steps`` batches.

    Args:
        make_model: returns the model, on its device, in float32.
        make_optimizer: from the model to its optimizer, or to several.
        batches: such as a data loader. The first ``steps`` batches are used, repeatedly if there are fewer.
        loss: from model and batch to the loss; with several optimizers, one loss for each, used in turn.
        levels: the levels to try.
        clip: as in :func:`halfpeak.prepare`.
        progress: see :data:`Progress`; called after each step.

    Raises:
        ConfigError: an unknown level, too few steps, or no batch.
        ConfigTypeError: the numbers of losses and optimizers differ.

    >>> x = torch.randn(8, 4)
    >>> doctor(lambda: nn.Linear(4, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), [x],
    ...     lambda model, x: model(x).float().square().mean(), steps=8, levels=["O0"]).line
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
        device = task.prepared("O0", 0, ())[0].device
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
        reference = _judged(plain, plain, spreads)
        good = {probe.level: probe for probe in probes if not probe.against}
        if reference.against or not good:
            reason = f"float32 itself does not train: {reference.against}; lower the learning rate, or see halfpeak.diagnose"
            choice = Choice("O0", reason if reference.against else ALONE)
        else:
            kept = {level: probe.keep_fp32 for level, probe in good.items()}
            choice = choose(good, device, lambda one, other: task.share(one, other, kept))
    seconds = choice.seconds
    return Checkup(
        level=choice.level,
        keep_fp32=good[choice.level].keep_fp32 if choice.level in good else (),
        reason=choice.reason,
        probes=tuple(replace(probe, seconds=seconds.get(probe.level, math.nan)) for probe in probes),
        reference=replace(reference, seconds=seconds.get("O0", math.nan)),
        spread=spreads[0],
        device=device_name(device),
        versions=versions(),
        date=datetime.now().astimezone().isoformat(" ", "minutes"),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The result of one run; ``finals`` are the mean losses over its last quarter, one per loss."""

    probe: Probe
    """Still without the comparison with float32."""
    finals: tuple[float, ...] = ()
    late_skips: float = 0.0
    culprits: tuple[str, ...] = ()
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
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine, model = self.prepared(level, seed, keep_fp32)
                notes = [str(one.message).partition(",")[0] for one in caught]
                run = self._train(engine, model, self._order(seed), keep_fp32)
                return replace(run, note=next((f": {note}" for note in notes if " is 0 in " in note), ""))
        except (LossScaleCollapse, RuntimeError, TypeError, ValueError) as error:
            if level == "O0" and not isinstance(error, LossScaleCollapse):
                raise
            probe = Probe(level=level, keep_fp32=keep_fp32)
            return _Run(probe=probe, trouble=str(error).partition("\n")[0])

    def prepared(self, level: str, seed: int, keep_fp32: tuple[str, ...]) -> tuple[Engine, nn.Module]:
        """A new model, and the engine that trains it at a level."""
        torch.manual_seed(seed)
        model = copy.deepcopy(self.make_model())
        made = self.make_optimizer(model)
        optimizers = [made] if isinstance(made, Optimizer) else list(made)
        if len(optimizers) != len(self.losses):
            raise ConfigTypeError(
                f"{len(self.losses)} losses and {len(optimizers)} optimizers; give a loss for each optimizer"
            )
        engine = prepare(
            model,
            optimizers,
            cast("LevelName", level),
            num_losses=len(optimizers),
            clip=self.clip,
            keep_fp32=keep_fp32,
            on_skip=None,
        )
        return engine, model

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
        skips: list[bool] = []
        underflow = unchanged = 0.0
        bad: tuple[Loss, Any] | None = None
        for step, batch in enumerate(batches):
            values: list[Tensor] = []
            skipped = False
            is_last = step == len(batches) - 1
            for number, (loss, optimizer) in enumerate(zip(self.losses, engine.optimizers, strict=True)):
                values.append(_backward(engine, model, loss, batch, number))
                before = _Before(engine, optimizer) if is_last else None
                stepped = engine.step(optimizers=optimizer).stepped()
                if before is not None and stepped:
                    underflow, unchanged = (
                        max(underflow, before.underflow),
                        max(unchanged, before.unchanged()),
                    )
                if not stepped:
                    skipped = True
                    bad = loss, batch
            skips.append(skipped)
            for history, value in zip(histories, values, strict=True):
                history.append(float(value))
            if self.progress is not None:
                self.progress(f"training at {level}", step + 1, len(batches))
        late = skips[len(skips) // 2 :]
        finals = tuple(statistics.fmean(history[-_quarter(len(batches)) :]) for history in histories)
        goes_wrong = sum(late) / len(late) > MOST_SKIPPED or not all(map(math.isfinite, finals))
        probe = Probe(
            level=level,
            losses=tuple(histories[0]),
            final=finals[0],
            skipped=sum(skips),
            bytes_per_parameter=engine.memory().per_parameter()["total"],
            underflow=underflow,
            unchanged=unchanged,
            keep_fp32=keep,
        )
        return _Run(
            probe=probe,
            finals=finals,
            late_skips=sum(late) / len(late),
            culprits=_culprits(engine, model, bad) if goes_wrong and bad is not None else (),
        )

    def share(self, one: str, other: str, kept: Mapping[str, tuple[str, ...]]) -> Ratio:
        """The time of a step at the second level as a share of that at the first."""
        tell = None if self.progress is None else partial(self.progress, f"timing {other} against {one}")
        first, second = (self._timer(level, kept.get(level, ())) for level in (one, other))
        return compare(first, second, WORTH, tell=tell)

    def _timer(self, level: str, keep: tuple[str, ...]) -> Timer:
        """A training at a level, of which each call takes some steps and returns the seconds of one."""
        engine, model = self.prepared(level, 0, keep)
        batches = cycle(self.batches)
        on_cpu = engine.device.type == "cpu"
        clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter

        def steps(count: int) -> float | None:
            began, skipped = clock(), torch.zeros((), device=engine.device)
            for _ in range(count):
                batch = next(batches)
                for number, (loss, optimizer) in enumerate(zip(self.losses, engine.optimizers, strict=True)):
                    _backward(engine, model, loss, batch, number)
                    skipped = skipped + engine.step(optimizers=optimizer).found_inf
            if not on_cpu:
                torch.accelerator.synchronize(engine.device)
            seconds = (clock() - began) / count
            return None if bool(skipped) else seconds

        # The first steps are slow, or are skipped while the loss scale is searched for.
        warm = [steps(1) for _ in range(WARM_UP)]
        shortest = min((seconds for seconds in warm if seconds), default=BLOCK)
        return partial(steps, max(1, math.ceil(BLOCK / shortest)))


def _backward(engine: Engine, model: nn.Module, loss: Loss, batch: Any, number: int) -> Tensor:
    """One forward and backward pass; returns the loss."""
    with engine.forward():
        value = loss(model, batch)
    engine.backward(value, loss_id=number, optimizers=engine.optimizers[number])
    return value.detach()


class _Before:
    """An optimizer's weights and gradients before a step."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        engine.unscale()
        stepped = params_of(optimizer)
        grads = gradients_of(stepped)
        pairs = [(p, g) for p, g in zip(stepped, grads, strict=True) if g is not None and not g.is_sparse]
        self._weights = [(p, p.detach().clone(), g != 0) for p, g in pairs]
        self._count = max(sum(g.numel() for _, g in pairs), 1)
        self.underflow = 1 - sum(int(moves.sum()) for *_, moves in self._weights) / self._count

    def unchanged(self) -> float:
        """The share of weights that have a nonzero gradient and that the step did not change."""
        still = sum(int(((p.detach() == was) & moves).sum()) for p, was, moves in self._weights)
        return still / self._count


def _with_layers_kept(task: _Task, level: str) -> _Run:
    """A run at a level. If layers overflow, it is repeated with these layers in float32."""
    found = task.run(level, 0)
    for _ in range(MOST_REPEATED):
        kept = tuple(dict.fromkeys((*found.probe.keep_fp32, *found.culprits)))
        if kept == found.probe.keep_fp32:
            break
        found = task.run(level, 0, kept)
    return found


def _culprits(engine: Engine, model: nn.Module, bad: tuple[Loss, Any]) -> tuple[str, ...]:
    """The layers that overflow on a batch in the forward pass or in a weight, and not in float32."""
    loss, batch = bad
    try:
        report = diagnose(engine, lambda: loss(model, batch))
    except Exception:
        return ()
    return report.keep_fp32 if report.where in ("forward", "weight") else ()


def _judged(run: _Run, plain: _Run, spreads: Sequence[float]) -> Probe:
    """The probe of a run, compared with float32; ``against`` stays empty if the run trains as well as float32."""
    above = [
        (final - reference) / spread if spread else 0.0
        for final, reference, spread in zip(run.finals, plain.finals, spreads, strict=False)
    ]
    distance = max(map(abs, above) if len(above) > 1 else above, default=math.nan)
    underflow = max(run.probe.underflow - plain.probe.underflow, 0.0)
    unchanged = max(run.probe.unchanged - plain.probe.unchanged, 0.0)
    if run.trouble:
        against = run.trouble
    elif not all(map(math.isfinite, run.finals)):
        against = f"its loss is not finite{run.note}"
    elif run.late_skips > MOST_SKIPPED:
        against = f"{run.late_skips:.0%} of its later steps are skipped{run.note}"
    elif distance > 1:
        against = f"its loss is {distance:.3g} times as far from float32's as that of another seed"
    elif underflow > MOST_LOST:
        against = f"{underflow:.0%} of its gradient elements underflow to zero"
    elif unchanged > MOST_LOST:
        against = f"{unchanged:.0%} of its weights do not move: their updates are rounded away"
    else:
        against = ""
    return replace(run.probe, distance=distance, underflow=underflow, unchanged=unchanged, against=against)


class Choice(NamedTuple):
    """The level to use, the reason, and the seconds of a step by level."""

    level: str
    reason: str
    seconds: Mapping[str, float] = MappingProxyType({})


def choose(levels: Collection[str], device: torch.device, share: Callable[[str, str], Ratio]) -> Choice:
    """Of levels that train as float32 does, the one that suits the device, unless another is surely faster.

    Args:
        levels: at least one.
        share: from two levels to the time of the second as a share of that of the first.
    """
    if set(levels) == {"O0"}:
        return Choice("O0", ALONE)
    first = first_choice(device, levels)
    tried = [level for level in SAFEST if level in {*levels, "O0"} - {first}]
    shares: dict[str, Ratio] = {}
    for level in tried:
        shares[level] = ratio = share(first, level)
        if ratio.is_wide:  # what disturbs one comparison disturbs them all
            return Choice(
                first,
                f"{_why(first, device)}; this machine is too busy to compare times ({level} takes {_shown(ratio)} of "
                f"{first}'s time): run it again when nothing else runs",
            )
    verdicts = {level: _is_faster(first, level, shares[level], device) for level in tried if level in levels}
    chosen, of_chosen = first, Ratio((1.0,), (math.nan, math.nan))
    for level in [level for level, verdict in verdicts.items() if verdict]:
        if chosen == first or _is_faster(chosen, level, share(chosen, level), device):
            chosen, of_chosen = level, shares[level]
    step = next((ratio.times[0] for ratio in shares.values()), math.nan)
    seconds = {first: step, **{level: step * ratio.median for level, ratio in shares.items()}}
    if chosen != first:
        return Choice(
            chosen,
            f"it trains as float32 does, and takes {_shown(of_chosen)} of {first}'s time here",
            seconds,
        )
    reason = _why(first, device)
    slower = [level for level, verdict in verdicts.items() if verdict is False]
    if slower:
        reason += f"; none of the others that do ({', '.join(slower)}) takes 10 % less time here"
    unknown = [
        f"{level} takes {_shown(shares[level])}" for level, verdict in verdicts.items() if verdict is None
    ]
    if unknown:
        reason += f"; whether another takes 10 % less time cannot be told: {', '.join(unknown)} of its time"
    return Choice(chosen, reason, seconds)


def _why(first: str, device: torch.device) -> str:
    """The reason for a level that is not chosen for its speed."""
    suits, reason = suitable_level(device)
    if first == suits:
        return f"{reason}, and it trains as float32 does"
    return "it is float32" if first == "O0" else "it is the closest to float32 of those that train as well"


def _is_faster(one: str, other: str, ratio: Ratio, device: torch.device) -> bool | None:
    """Whether the second level surely takes 10 % less time; None if that cannot be told."""
    saved = MOST_SAVED_BY_UNITS if has_matrix_units(device) else MOST_SAVED
    return ratio.is_below(WORTH, least=1 / saved if one == "O0" else 0.0)


def _shown(ratio: Ratio) -> str:
    if not ratio.shares:  # every block had a skipped step
        return "an unknown share"
    low, high = ratio.interval
    return f"{ratio.median:.2f} ({low:.2f} to {high:.2f})"


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
